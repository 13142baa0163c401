"""The results of the broadcast benchmark: how they are printed and saved."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.objectives.report import print_table

UPDATE_EVERY = 2.0  # seconds between updates while the stall share is measured


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; seconds.

    Attributes:
        way: ``object store`` or ``weight group`` if engines received and loaded the weights; ``fetch only`` if the
            receivers had no engine.
        gather: gathering the shards alone.
        blocked: until the learner can continue.
        serial: publishing if each bucket is stored before the next one is gathered.
        total: from the first gather until the last receiver has the weights.
        stall: the longest time for which an engine generated nothing.
        stall_cpu: the CPU time that engine used meanwhile, which other load on the machine does not inflate.
        reload: save, then reload in place.
        restart: save, then start a new engine.
        copy: copying the same bytes in memory, for one receiver after the other.
        private_mb: peak growth of the publisher's private memory.
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
    """How much weight updates stall an engine that generates.

    Attributes:
        share: share of the time in which the engine was stalled.
        median: length of a stall, seconds.
        load: the machine's load average over the last minute.
    """

    share: float
    median: float
    load: float


def report(rows: list[Row], shares: dict[str, Share]) -> None:
    """Print the table and the stall shares with their target."""
    print_table(
        [
            "size", "receivers", "transport", "MB", "gather ms", "blocked ms", "serial ms", "total ms", "stall ms",
            "CPU ms", "reload s", "new engine s", "reload / total", "new engine / total", "total / copy", "private MB",
        ],
        [cells(row) for row in rows],
    )  # fmt: skip
    for way, share in shares.items():
        print(
            f"an update every {UPDATE_EVERY:g} s, {way}: generation stalled {share.share:.2%} of the time (target 2%), "
            f"median stall {1e3 * share.median:.1f} ms; load average {share.load:.1f}"
        )


def cells(row: Row) -> list[str | int]:
    """The cells of one table row."""
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
    """Save the results of ``size`` in the JSON file ``path``; those of other sizes are kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[size] = {
        "rows": [asdict(row) for row in rows],
        "stall_share": {way: asdict(share) for way, share in shares.items()},
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
