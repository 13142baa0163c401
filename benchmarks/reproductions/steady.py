"""The trade-off at a smaller learning rate with more prompts per step: how much of it is left?

    python -m benchmarks.reproductions.steady [--seeds 1] [--steps 250] [--at-most 4]

This is `trade_off` with 32 prompts per step instead of 16, so twice the samples, and two fifths of its learning rate.
"""

from benchmarks.reproductions import trade_off
from benchmarks.reproductions.study import Study

STUDY = Study("steady", draw=trade_off.draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
