"""A whole run with the actor and the learner on one GPU."""

import time
from collections.abc import Iterator

from benchmarks.gpu.jobs import mean, run_job, shape, speed
from benchmarks.gpu.setting import Row, Setting
from services.store.folder import RunFolder

SPEED = "samples_per_second"  # the file in which `versus_trl` finds this section's figure


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    begun = time.time()
    folder = run_job(setting, "one-device", gpus=(0.4, 0.6) if setting.cuda else (0, 0))
    rows = folder.read("metrics")
    (setting.folder / SPEED).write_text(str(speed(rows)))
    yield from figures("whole run", folder, setting, "one device")
    first = rows[0]
    yield Row("whole run", "from `volley run` to the first trained step", f"{first['time'] - begun:.1f} s")
    yield Row(
        "whole run",
        "log-probs of the engine against the learner's, tokens of the first step",
        f"apart by {first['logprob_mismatch_mean']:.2g} in the mean, {first['logprob_mismatch_max']:.2g} at most",
    )


def figures(section: str, folder: RunFolder, setting: Setting, where: str) -> Iterator[Row]:
    """The speed of a run, and where its steps' time goes."""
    rows, sizes = folder.read("metrics"), shape(setting)
    yield Row(
        section,
        f"{sizes['prompts']} prompts x {sizes['n']} samples of up to {sizes['tokens']} tokens, on {where}",
        f"{speed(rows):.1f} samples/s; of a step's {mean(rows, 'seconds_step'):.3f} s, it waits for samples "
        f"{mean(rows, 'seconds_wait'):.3f} s and learns {mean(rows, 'seconds_learn'):.3f} s",
    )
    yield Row(
        section,
        f"{rows[-1]['weight_bytes'] / 2**20:.0f} MiB of weights to the actor, {rows[-1]['weight_group_share']:.0%} "
        "of them by the weight group",
        f"sent in {mean(rows, 'seconds_broadcast'):.3f} s, the engine stalled "
        f"{mean(rows, 'seconds_stalled_max'):.3f} s",
    )
