"""The reward worker: a Ray actor that owns one scorer and scores one group at a time."""

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reward_servers.scorers import build_scorer
from reward_servers.scorers.base import Place, Scorer
from volley.processes import redirect_output
from volley.records import Group, Prompt, Scores
from volley.scoring import ScorerSpec

log = logging.getLogger("volley.reward")


class RewardWorker:
    """Scores groups. Calls are independent, so a failed one can be retried on another worker."""

    def __init__(self, name: str, spec: ScorerSpec, place: Place, log_path: Path, import_path: Sequence[str]) -> None:
        self._name = name
        _start_logging(log_path)
        sys.path += [path for path in import_path if path and path not in sys.path]
        self._scorer: Scorer = build_scorer(spec, place)
        log.info("%s ready, scorer %s, pid %d", name, spec.kind, os.getpid())

    def ready(self) -> tuple[int, str]:
        """Return the process id and a description of the sandbox ("" if the scorer runs no programs)."""
        report = getattr(self._scorer, "report", None)
        return os.getpid(), str(report or "")

    def score(self, group: Group, prompt: Prompt) -> Scores:
        """Return one verdict per sample of ``group``."""
        began = time.perf_counter()
        verdicts = self._scorer.score(prompt, group.texts)
        return Scores.pack(verdicts, seconds=time.perf_counter() - began, worker=self._name)

    def close(self) -> None:
        """Stop the processes that the scorer started."""
        self._scorer.close()


def _start_logging(path: Path) -> None:
    """Send all output and logs of this process to ``path``; if the worker dies, the pool quotes the last lines."""
    redirect_output(path)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
