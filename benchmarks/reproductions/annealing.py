"""Annealing k from 8 to 1, compared with k = 8 throughout and with the mean.

    python -m benchmarks.reproductions.annealing [--seeds 2] [--steps 250] [--at-most 4]

After arXiv 2505.15201, figure 4: annealing should reach the mean's pass@1 and keep more of pass@k. The runs it is
compared with are those of `steady`; missing ones are made here.
"""

from benchmarks.reproductions import steady
from benchmarks.reproductions.countdown import OBJECTIVES, inputs, warm_up
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study

STAGES = ((0.4, 4), (0.6, 2), (0.8, 1))  # (share of the steps from which it applies, k)


def annealed(wanted: Options, seed: int) -> Planned:
    """A run that starts with max@8 and whose k falls to 1."""
    stages = [{"at": round(share * wanted.steps), "set": {"k": k}} for share, k in STAGES]
    return steady.planned(wanted, "annealed", seed, objective=OBJECTIVES["max@8"], schedule={"stages": stages})


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """The mean, k = 8, and k from 8 to 1."""
    shared = steady.runs(wanted)
    falling = [annealed(wanted, seed) for seed in range(1, wanted.seeds + 1)]
    return {"mean": shared["mean"], "k = 8": shared["max@8"], "k from 8 to 1": falling}


STUDY = Study("annealing", inputs, warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=2, steps=250)
