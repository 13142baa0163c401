"""Annealing k from 8 to 1, against k = 8 throughout and against the mean.

    python -m benchmarks.reproductions.annealing [--seeds 2] [--steps 250] [--at-most 4]

After arXiv 2505.15201, figure 4: pass@1 of the mean, with more of pass@k kept. The two it is compared with are runs of
`steady`, made here where they are missing.
"""

from benchmarks.reproductions import steady
from benchmarks.reproductions.countdown import OBJECTIVES, inputs, warm_up
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study

STAGES = ((0.4, 4), (0.6, 2), (0.8, 1))  # from this share of the steps on, this k


def annealed(wanted: Options, seed: int) -> Planned:
    """max@8 whose k falls to 1."""
    stages = [{"at": round(share * wanted.steps), "set": {"k": k}} for share, k in STAGES]
    return steady.one(wanted, "annealed", seed, objective=OBJECTIVES["max@8"], schedule={"stages": stages})


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """The mean, k = 8, and k from 8 to 1."""
    shared = steady.runs(wanted)
    falling = [annealed(wanted, seed) for seed in range(1, wanted.seeds + 1)]
    return {"mean": shared["mean"], "k = 8": shared["max@8"], "k from 8 to 1": falling}


STUDY = Study("annealing", inputs, warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=2, steps=250)
