"""Annealing k from 8 to 1, compared with k = 8 throughout and with the mean.

    python -m benchmarks.reproductions.annealing [--seeds 2] [--steps 250] [--at-most 4]

After arXiv 2505.15201, figure 4: annealing should reach the mean's pass@1 and keep more of pass@k. The runs it is
compared with are those of `steady`; missing ones are made here. k falls at fixed steps, whatever ``--steps`` says.
"""

from benchmarks.reproductions.study import Study

STUDY = Study("annealing")

if __name__ == "__main__":
    STUDY.conduct(__doc__)
