"""What the benchmark of the broadcast finds, printed and kept."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.objectives.report import print_table

UPDATE_EVERY = 2.0  # seconds, of the stall share


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; seconds.

    Attributes:
        way: ``object store`` or ``weight group`` to engines that serve them at the end, ``to the door`` to no engine.
        gather: of gathering alone; ``blocked``: until the learner can go on; ``serial``: with each bucket packed and
            stored before the next is gathered.
        total: from the first gather until the last receiver has them.
        stall: the longest an engine stood still, generating nothing; ``stall_cpu``: the CPU time it took for it, which
            other work on the machine does not stretch.
        reload: save, then reload in place; ``restart`` is save, then a new engine.
        copy: of the same bytes in memory, for each receiver one after the other.
        private_mb: most memory of its own the publisher took beyond what it had.
    """

    size: str
    receivers: int
    way: str
    mb: float
    gather: float
    blocked: float
    serial: float
    total: float
    stall: float
    stall_cpu: float
    reload: float
    restart: float
    copy: float
    private_mb: float


@dataclass(frozen=True, slots=True)
class Share:
    """How long an engine stood still while it generated.

    Attributes:
        share: of the time.
        median: of the single stalls, seconds.
        load: processes that wanted a CPU, the machine's average over the last minute.
    """

    share: float
    median: float
    load: float


def report(rows: list[Row], shares: dict[str, Share]) -> None:
    """The table and the targets."""
    print_table(
        [
            "size", "receivers", "way", "MB", "gather ms", "blocked ms", "one by one ms", "total ms", "stall ms",
            "CPU ms", "reload s", "new engine s", "reload / ours", "new engine / ours", "ours / copy", "private MB",
        ],
        [cells(row) for row in rows],
    )  # fmt: skip
    for way, share in shares.items():
        print(
            f"an update every {UPDATE_EVERY:g} s, {way}: generation stalled {share.share:.2%} of the time (target 2%), "
            f"{1e3 * share.median:.1f} ms in the median; load average {share.load:.1f}"
        )


def cells(row: Row) -> list[str | int]:
    """A line of the table."""
    times = (f"{1e3 * seconds:.1f}" for seconds in (row.gather, row.blocked, row.serial, row.total))
    engines = bool(row.stall)
    return [
        row.size,
        row.receivers,
        row.way,
        f"{row.mb:.0f}",
        *times,
        f"{1e3 * row.stall:.1f}" if engines else "-",
        f"{1e3 * row.stall_cpu:.1f}" if engines else "-",
        f"{row.reload:.2f}",
        f"{row.restart:.1f}" if engines else "-",
        f"{row.reload / row.total:.1f}x",
        f"{row.restart / row.total:.0f}x" if engines else "-",
        f"{row.total / row.copy:.1f}x",
        f"{row.private_mb:.0f}",
    ]


def keep(path: Path, size: str, rows: list[Row], shares: dict[str, Share]) -> None:
    """Write them to ``path`` in place of what it has of ``size``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[size] = {
        "rows": [asdict(row) for row in rows],
        "stall_share": {way: asdict(share) for way, share in shares.items()},
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
