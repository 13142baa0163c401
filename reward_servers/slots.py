"""The HTTP front's scoring threads: one per slot, each with sandboxes of its own, behind one bounded queue."""

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
UNSTEADY = frozenset({VerdictStatus.TIMEOUT, VerdictStatus.MEMORY_LIMIT})  # never answered from memory


class Full(Exception):
    """The queue has no room for a whole request."""


class GivenUp(Exception):
    """Nobody waits for the verdicts any more."""


@dataclass(frozen=True, slots=True)
class Job:
    """The responses to one prompt, and where their verdicts go."""

    spec: ScorerSpec
    prompt: Prompt
    texts: tuple[str, ...]
    key: str
    done: "Future[list[Verdict]]" = field(default_factory=Future)
    given_up: threading.Event = field(default_factory=threading.Event)  # nobody waits for the verdicts any more


class Slots:
    """``count`` threads that score jobs in order of arrival."""

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
        """Start the threads. Raises VolleyError where the host can not isolate as asked."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if not self._started.acquire(timeout=bound_s):
                raise VolleyError(f"a reward slot did not start within {bound_s:.0f} s")
        if self.failures:
            raise VolleyError(self.failures[0])

    @property
    def ready(self) -> bool:
        """Every slot runs and its sandbox is what it was proved to be."""
        alive = all(thread.is_alive() for thread in self._threads)
        return alive and all(report is not None and report.ready for report in self.reports)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return self._queue.qsize()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs or none. Raises Full."""
        with self._lock:
            if self._queue.qsize() + len(jobs) > max(self._room, len(jobs) if self._queue.empty() else 0):
                raise Full
            for job in jobs:
                self._queue.put_nowait(job)

    def give_up(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these: those in the queue free their places, one that runs ends with its response."""
        for job in jobs:
            job.given_up.set()
            job.done.cancel()
        with self._lock:
            for held in self._drained():
                if held is None or not held.given_up.is_set():
                    self._queue.put_nowait(held)

    def stop(self) -> None:
        """End the threads and their sandboxes, within a bound; what is being scored is cut off: nobody waits for it."""
        self._stopping.set()
        with self._lock:
            for held in self._drained():
                if held is not None:
                    held.done.cancel()
            for _ in self._threads:
                self._queue.put_nowait(None)
        for bench in self._benches:
            bench.end()
        deadline = time.monotonic() + STOP_GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _drained(self) -> list[Job | None]:
        """Everything the queue held, which is empty now."""
        held: list[Job | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                held.append(self._queue.get_nowait())
        return held

    # A sandbox ends with the thread that made it, so each thread builds and uses its own.
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
        """Score what is not remembered. A failure of ours is an infra error of each sample."""
        keys = [hashlib.sha256(f"{job.key}\0{text}".encode("utf-8", "surrogatepass")).hexdigest() for text in job.texts]
        known = {key: verdict for key in keys if (verdict := self._recall(key)) is not None}
        missing = {key: text for key, text in zip(keys, job.texts, strict=True) if key not in known}
        if missing:
            wanted = _WhileWanted(list(missing.values()), (job.given_up, self._stopping))
            try:
                fresh = bench.scorer(job.spec).score(job.prompt, wanted)
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


class _WhileWanted(Sequence[str]):
    """Responses, handed out one by one until one of ``ends`` is set. Raises GivenUp from then on."""

    def __init__(self, texts: list[str], ends: Sequence[threading.Event]) -> None:
        self._texts, self._ends = texts, ends

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, at: Any) -> Any:
        if any(end.is_set() for end in self._ends):
            raise GivenUp
        return self._texts[at]


class _Bench:
    """One thread's sandboxes: for programs from the start, for symbolic maths from its first use."""

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
        """From any thread: what runs is killed."""
        for sandbox in (self._programs, self._maths):
            if sandbox is not None:
                sandbox.end()

    def close(self) -> None:
        for sandbox in (self._programs, self._maths):
            if sandbox is not None:
                sandbox.close()
