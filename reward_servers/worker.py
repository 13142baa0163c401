"""The reward worker: a Ray actor that owns one scorer and judges one group at a time."""

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reward_servers.scorers import build_scorer
from reward_servers.scorers.base import Scorer
from volley.records import Group, Prompt, Scores
from volley.scoring import ScorerSpec

log = logging.getLogger("volley.reward")


class RewardWorker:
    """Scores groups. Keeps no state between calls that matters: any call may be made again elsewhere."""

    def __init__(self, name: str, spec: ScorerSpec, log_path: Path, import_path: Sequence[str]) -> None:
        self._name = name
        _log_to(log_path)
        sys.path += [path for path in import_path if path and path not in sys.path]
        self._scorer: Scorer = build_scorer(spec)
        log.info("%s ready, scorer %s, pid %d", name, spec.kind, os.getpid())

    def ready(self) -> tuple[int, str]:
        """The worker's process id and what isolates its sandbox, once it can score; empty where it runs no programs."""
        report = getattr(self._scorer, "report", None)
        return os.getpid(), str(report or "")

    def score(self, group: Group, prompt: Prompt) -> Scores:
        """One verdict per sample of ``group``."""
        began = time.perf_counter()
        verdicts = self._scorer.score(prompt, group.texts)
        return Scores.pack(verdicts, seconds=time.perf_counter() - began, worker=self._name)

    def close(self) -> None:
        """End the processes the scorer started."""
        self._scorer.close()


def _log_to(path: Path) -> None:
    """Send everything this process prints or logs to ``path``: a dead worker's last lines are read there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
