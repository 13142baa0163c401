"""A whole run whose actor and learner take turns on one GPU; the engine opens the learner's weights in its memory."""

from collections.abc import Iterator

from benchmarks.gpu.jobs import mean, run_job
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.whole_run import figures


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    folder = run_job(
        setting,
        "turns",
        gpus=(0.5, 0.5) if setting.cuda else (0, 0),
        placement="colocated",
        broadcast={"transport": "shared_memory"},
    )
    yield from figures("turns", folder, setting, "one device, in turns")
    seconds = mean(folder.read("metrics"), "seconds_hand_over")
    yield Row("turns", "handing the device over, per step", f"{seconds:.2f} s")
