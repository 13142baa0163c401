"""``python``: calls a trusted function of the user in a child process, which is killed if it hangs.

samples ── kept results ──┬─> known
                          └─> calls ── a turn within the limits ── child ──┬─> results, which are kept
                               ^─── wait, twice as long each time ─────────┘ failure: retried, else infra error
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import random
from collections.abc import Sequence
from typing import Any

from reward_servers.scorers.base import ALONE, Place, infra_error, one_line, row_error
from reward_servers.scorers.cache import ResultCache
from reward_servers.scorers.child import Child, NotImported
from reward_servers.scorers.functions import load_function, takes_group
from reward_servers.scorers.limits import Limits
from reward_servers.scorers.loop_thread import LoopThread
from volley.base import replaced
from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import PythonScorer

log = logging.getLogger("volley.reward")

MAX_LOGGED = 20  # different errors of one function whose tracebacks are logged
MAX_WAIT_S = 60.0  # before a retry
KILL_AFTER_S = 5.0  # how much later than its time-out an async function that blocks its process is killed
Result = dict[str, Any]


class PythonFunction:
    """Calls the function per sample or per group. What fails is an infra error: it is not the sample's fault.

    Attributes:
        last_traceback: of the newest call that raised; "" before the first.
    """

    def __init__(self, spec: PythonScorer, place: Place = ALONE) -> None:
        definition = {"kind": spec.kind, "target": spec.target, "takes": spec.takes}
        self._definition = json.dumps(definition, sort_keys=True)
        folder = None if place.folder is None else place.folder / _digest(self._definition)[:16]
        self._spec, self._folder, self._group_s = spec, folder, place.group_s
        self._limits = Limits(folder, spec.max_concurrent, spec.max_per_s)
        self._cache: ResultCache | None = None
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._beginning: asyncio.Task[None] | None = None
        self._at_once = False
        self._one_at_a_time = asyncio.Lock()
        self._thread = LoopThread()
        self._logged: set[str] = set()
        self.last_traceback = ""
        if place is not ALONE:
            self._thread.run(self._begin())

    @staticmethod
    def check(spec: PythonScorer) -> None:
        """Raise JobError if the target cannot be imported, or not be called as the scorer would."""
        load_function(spec.target)

    @staticmethod
    def attempt(spec: PythonScorer, prompt: Prompt, text: str) -> Verdict:
        """Call the function once, in a child process as when a run scores.

        Raises:
            JobError: it gave no reward; the message has its traceback.
        """
        scorer = PythonFunction(replaced(spec, retries=0, cache=0))
        try:
            group = takes_group(load_function(spec.target), spec.takes)
            verdict = scorer.score(prompt, [text, text] if group else [text])[0]
        finally:
            scorer.close()
        if verdict.reward is None:
            what = "an empty answer" if not text else f"the answer {one_line(text, 60)!r}"
            traceback = f"\n{scorer.last_traceback}" if scorer.last_traceback else ""
            raise JobError(f"scorer: called with prompt {prompt.id} and {what}: {verdict.detail}{traceback}".rstrip())
        return verdict

    @staticmethod
    def check_row(spec: PythonScorer, prompt: Prompt) -> None:
        """Raise JobError if the row cannot be sent to the child process as JSON."""
        try:
            json.dumps(dict(prompt.reference))
        except (TypeError, ValueError) as problem:
            raise row_error(prompt, f"the python scorer sends the row to your function as JSON: {problem}") from problem

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        row = {**prompt.reference, "id": prompt.id, "prompt": prompt.text}
        results = self._thread.run(self._score(row, list(texts)))
        return [self._verdict(result) for result in results]

    async def _score(self, row: dict[str, Any], texts: list[str]) -> list[Result]:
        """One result per text, within the group's time."""
        try:
            child = await self._ready()
        except NotImported as failed:
            self._log(failed.answer)
            return [failed.answer] * len(texts)
        except (OSError, EOFError, ValueError) as problem:
            return [{"error": str(problem)}] * len(texts)
        group = child.about["group"]
        requests = [{"samples": texts, "row": row}] if group else [{"sample": text, "row": row} for text in texts]
        kept = self._spec.cache > 0
        keys = [self._key(request, child) if kept else f"{index}" for index, request in enumerate(requests)]
        found = self._kept(keys) if kept else {}
        asked = {key: request for key, request in zip(keys, requests, strict=True) if key not in found}
        fresh = await self._finished(
            {key: asyncio.create_task(self._call_with_retries(request)) for key, request in asked.items()}
        )
        if self._cache is not None:
            self._cache.put({key: results for key, results in fresh.items() if not _failed(results)})
        found |= fresh
        return [result for key in keys for result in _spread(found[key], len(texts) if group else 1)]

    async def _finished(self, calls: dict[str, asyncio.Task[list[Result]]]) -> dict[str, list[Result]]:
        """The results of the calls; one that is not finished when the group's time is over has failed."""
        if calls:
            _, late = await asyncio.wait(calls.values(), timeout=self._group_s)
            if late:
                for task in late:
                    task.cancel()
                await asyncio.wait(late)
                self._kill(self._child)  # whatever it still does would be in the way of the next group
        problem = (
            f"was not done with the group within {self._group_s or 0:g} s: raise reward_workers.group_deadline_s, "
            "lower timeout_s or retries, or allow more calls at once"
        )
        return {key: [{"error": problem}] if task.cancelled() else task.result() for key, task in calls.items()}

    async def _call_with_retries(self, request: dict[str, Any]) -> list[Result]:
        wait = self._spec.retry_wait_s
        for _ in range(self._spec.retries):
            answer = await self._call(request)
            if not _failed(answer):
                return answer
            asked = max((result.get("retry_after") or 0.0 for result in answer), default=0.0)
            await asyncio.sleep(min(MAX_WAIT_S, max(asked, wait * (1 + random.random()))))
            wait = min(2 * wait, MAX_WAIT_S)
        return await self._call(request)

    async def _call(self, request: dict[str, Any]) -> list[Result]:
        spec, child = self._spec, None
        try:
            async with contextlib.nullcontext() if self._at_once else self._one_at_a_time, self._limits.turn():
                child = await self._ready()
                answer = await child.call(request, spec.timeout_s + (KILL_AFTER_S if self._at_once else 0.0))
        except TimeoutError:
            self._kill(child)  # a late answer must never be read as that of the next sample
            blocks = ", and it blocks the other samples: use await, or asyncio.to_thread" if self._at_once else ""
            return [{"error": f"gave no answer within {spec.timeout_s:g} s{blocks}"}]
        except NotImported as failed:
            return [failed.answer]
        except (OSError, EOFError, ValueError) as problem:
            self._kill(child)
            return [{"error": str(problem)}]
        if "error" in answer:
            self._log(answer)
            return [answer]
        return list(answer["results"])

    async def _begin(self) -> None:
        """Let the child import the function before the first sample comes, in the background."""

        async def begin() -> None:
            # After a failure, the first call starts it again, and tells.
            with contextlib.suppress(NotImported, OSError, EOFError, ValueError):
                await self._ready()

        self._beginning = asyncio.create_task(begin())

    async def _ready(self) -> Child:
        """Return the child, starting it first if none runs."""
        async with self._starting:
            if self._child is None:
                spec = self._spec
                self._child = await Child.start(spec.target, spec.takes or "", spec.timeout_s)
                self._at_once = bool(self._child.about["async"])
            return self._child

    def _kill(self, child: Child | None) -> None:
        """Kill ``child``, unless another call has replaced it already."""
        if child is not None and child is self._child:
            self._child.kill()
            self._child = None

    def _key(self, request: dict[str, Any], child: Child) -> str:
        content = json.dumps(request, sort_keys=True)
        return _digest("\0".join((self._definition, str(child.about["source"]), content)))

    def _kept(self, keys: Sequence[str]) -> dict[str, list[Result]]:
        if self._cache is None and self._folder is not None:
            self._cache = ResultCache(self._folder / "results.sqlite", self._spec.cache)
        if self._cache is None:
            return {}
        return {key: results for key in keys if (results := self._cache.get(key)) is not None}

    def _verdict(self, result: Result) -> Verdict:
        if "error" in result:
            return infra_error(f"{self._spec.target} {result['error']}", mistake=result.get("mistake", ""))
        reward = float(result["reward"])
        status = VerdictStatus.PASSED if reward > 0 else VerdictStatus.WRONG_ANSWER
        detail = one_line(result.get("detail", ""))
        return Verdict(status, reward, answer=result.get("answer"), detail=detail, rank=result.get("rank"))

    def _log(self, answer: Result) -> None:
        """Log the traceback of an error that has not been logged yet, up to `MAX_LOGGED` of them."""
        error, traceback = answer["error"], answer.get("traceback", "")
        self.last_traceback = traceback
        if error not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(error)
            left = "" if self._spec.retries else "; what it should have scored leaves its group"
            log.error("%s %s%s\n%s", self._spec.target, error, left, traceback)

    def close(self) -> None:
        if self._beginning is not None or self._child is not None or self._cache is not None:
            self._thread.run(self._close())
        self._thread.close()

    async def _close(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
            self._beginning = None
        self._kill(self._child)
        if self._cache is not None:
            self._cache.close()


def _failed(results: Sequence[Result]) -> bool:
    return any("error" in result for result in results)


def _spread(results: list[Result], count: int) -> list[Result]:
    """The result of each of a call's samples; if the call failed as a whole, all of them have its error."""
    return results * count if len(results) == 1 and "error" in results[0] else results


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
