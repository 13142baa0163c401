"""Scoring threads of the reward server: one per slot, each with its own sandboxes, fed by one bounded queue."""

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from reward_servers.sandbox.health import Sandbox, SandboxReport
from reward_servers.sandbox.slot import SlotEnded
from reward_servers.scorers import build_scorer
from reward_servers.scorers.base import Scorer, infra_error
from reward_servers.scorers.code import Code
from reward_servers.scorers.math import PACKAGES, WARM_UP, Math
from volley.errors import VolleyError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import CodeScorer, MathScorer, SandboxLimits, SandboxSpec, ScorerSpec

log = logging.getLogger(__name__)

CACHED = 4096
STOP_GRACE_S = 10.0
UNSTEADY = frozenset({VerdictStatus.TIMEOUT, VerdictStatus.MEMORY_LIMIT})  # depend on the host's load: never cached


class Full(Exception):
    """The queue cannot hold all jobs of the request."""


class GivenUp(Exception):
    """The job was cancelled because its client disconnected or the server is shutting down."""


@dataclass(frozen=True, slots=True)
class Job:
    """The responses to one prompt, and the future that receives their verdicts."""

    spec: ScorerSpec
    prompt: Prompt
    texts: tuple[str, ...]
    key: str
    done: "Future[list[Verdict]]" = field(default_factory=Future)
    given_up: threading.Event = field(default_factory=threading.Event)  # set when the verdicts are no longer needed


class Slots:
    """Runs ``count`` threads that score jobs in order of arrival."""

    def __init__(self, count: int, sandbox: SandboxSpec, *, room: int = 64) -> None:
        self._spec = sandbox
        self._room = room * count
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Verdict] = OrderedDict()
        self.reports: list[SandboxReport | None] = [None] * count
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._benches = [_Bench(sandbox) for _ in range(count)]
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(count)]
        self._started = threading.Semaphore(0)
        self._stopping = threading.Event()

    def start(self, bound_s: float = 120.0) -> None:
        """Start the threads. Raises VolleyError if the host cannot provide the requested isolation."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if not self._started.acquire(timeout=bound_s):
                raise VolleyError(f"a reward slot did not start within {bound_s:.0f} s")
        if self.failures:
            raise VolleyError(self.failures[0])

    @property
    def ready(self) -> bool:
        """True if every slot runs and its sandbox passed its last probes."""
        alive = all(thread.is_alive() for thread in self._threads)
        return alive and all(report is not None and report.ready for report in self.reports)

    @property
    def waiting(self) -> int:
        """Number of jobs in the queue."""
        return self._queue.qsize()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs, or none and raise Full. An empty queue accepts any request."""
        with self._lock:
            if self._queue.qsize() + len(jobs) > max(self._room, len(jobs) if self._queue.empty() else 0):
                raise Full
            for job in jobs:
                self._queue.put_nowait(job)

    def give_up(self, jobs: Sequence[Job]) -> None:
        """Cancel jobs: queued ones are removed, a running one stops after its current response."""
        for job in jobs:
            job.given_up.set()
            job.done.cancel()
        with self._lock:
            for job_or_end in self._drained():
                if job_or_end is None or not job_or_end.given_up.is_set():
                    self._queue.put_nowait(job_or_end)

    def stop(self) -> None:
        """Stop the threads and their sandboxes within ``STOP_GRACE_S``, aborting jobs that are being scored."""
        self._stopping.set()
        with self._lock:
            for job in self._drained():
                if job is not None:
                    job.done.cancel()
            for _ in self._threads:
                self._queue.put_nowait(None)
        for bench in self._benches:
            bench.end()
        deadline = time.monotonic() + STOP_GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _drained(self) -> list[Job | None]:
        """Empty the queue and return its contents; None entries stop a thread each."""
        drained: list[Job | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                drained.append(self._queue.get_nowait())
        return drained

    # A sandbox ends with the thread that created it, so each thread builds its own.
    def _serve(self, index: int) -> None:
        bench = self._benches[index]
        try:
            self.reports[index] = bench.sandbox().report
        except VolleyError as problem:
            self.failures.append(str(problem))
            return
        finally:
            self._started.release()
        while (job := self._queue.get()) is not None:
            if job.done.set_running_or_notify_cancel():
                try:
                    job.done.set_result(self._score(bench, job))
                except GivenUp as end:
                    job.done.set_exception(end)
                self.reports[index] = bench.sandbox().report
        bench.close()

    def _score(self, bench: "_Bench", job: Job) -> list[Verdict]:
        """Score the responses that are not cached. If the scorer itself fails, each of them is an infra error."""
        keys = [hashlib.sha256(f"{job.key}\0{text}".encode("utf-8", "surrogatepass")).hexdigest() for text in job.texts]
        known = {key: verdict for key in keys if (verdict := self._recall(key)) is not None}
        missing = {key: text for key, text in zip(keys, job.texts, strict=True) if key not in known}
        if missing:
            texts = _UntilCancelled(list(missing.values()), (job.given_up, self._stopping))
            try:
                fresh = bench.scorer(job.spec).score(job.prompt, texts)
            except GivenUp:
                raise
            except SlotEnded:
                raise GivenUp from None
            except Exception as problem:
                log.exception("scoring failed")
                fresh = [infra_error(f"{type(problem).__name__}: {problem}")] * len(missing)
            for key, verdict in zip(missing, fresh, strict=True):
                known[key] = verdict
                self._remember(key, verdict)
        verdicts = [known[key] for key in keys]
        with self._lock:
            self.counts.update(verdict.status.value for verdict in verdicts)
            self.counts["cached"] += len(verdicts) - len(missing)
        return verdicts

    def _recall(self, key: str) -> Verdict | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _remember(self, key: str, verdict: Verdict) -> None:
        if verdict.status.bears_reward and verdict.status not in UNSTEADY:
            with self._lock:
                self._cache[key] = verdict
                if len(self._cache) > CACHED:
                    self._cache.popitem(last=False)


class _UntilCancelled(Sequence[str]):
    """A sequence of responses that raises GivenUp on access once any of ``ends`` is set."""

    def __init__(self, texts: list[str], ends: Sequence[threading.Event]) -> None:
        self._texts, self._ends = texts, ends

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, at: Any) -> Any:
        if any(end.is_set() for end in self._ends):
            raise GivenUp
        return self._texts[at]


class _Bench:
    """The sandboxes of one thread: one for programs, and one for symbolic maths that starts on first use."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._programs: Sandbox | None = None
        self._maths: Sandbox | None = None

    def sandbox(self) -> Sandbox:
        if self._programs is None:
            self._programs = Sandbox(self._spec)
        return self._programs

    def scorer(self, spec: ScorerSpec) -> Scorer:
        if isinstance(spec, CodeScorer):
            return Code(spec, self.sandbox())
        if isinstance(spec, MathScorer):
            if self._maths is None:
                limits = SandboxLimits(memory_mb=1024)
                update: dict[str, Any] = {"packages": (*PACKAGES, *self._spec.packages), "limits": limits}
                self._maths = Sandbox(self._spec.model_copy(update=update), warm_up=WARM_UP)
            return Math(spec, self._maths)
        return build_scorer(spec)

    def end(self) -> None:
        """Kill whatever runs in the sandboxes. May be called from any thread."""
        for sandbox in (self._programs, self._maths):
            if sandbox is not None:
                sandbox.end()

    def close(self) -> None:
        for sandbox in (self._programs, self._maths):
            if sandbox is not None:
                sandbox.close()
