"""k chosen per prompt from its own solve rate, compared with k = 8 for all prompts.

    python -m benchmarks.reproductions.adaptive [--seeds 1] [--steps 200] [--at-most 4]

After arXiv 2503.19595, section 3.1: the signal of max@k is densest if k is near 1/p. The solve rate p of a prompt comes
from its earlier visits, so both methods train on only 400 prompts here, each visited eight times in 200 steps.
"""

from benchmarks.reproductions import countdown
from benchmarks.reproductions.runs import Options
from benchmarks.reproductions.study import Study
from services.recording.display import Display

PROMPTS = 400
SUBSET = "few.jsonl"


def inputs(wanted: Options, display: Display) -> None:
    """Make the inputs of countdown, and a file with its first `PROMPTS` prompts."""
    countdown.inputs(wanted, display)
    subset = countdown.task(wanted) / "data" / SUBSET
    if not subset.exists():
        lines = subset.with_name("train.jsonl").read_text().splitlines(keepends=True)
        subset.write_text("".join(lines[:PROMPTS]))


STUDY = Study("adaptive", inputs=inputs, prompts=SUBSET)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
