"""``regex``: matches the sample with a trusted pattern, in a child process because patterns may backtrack forever."""

import re
from collections.abc import Sequence
from typing import Any

from reward_servers.scorers.base import infra_error, one_line, passed_or, row_error
from reward_servers.scorers.child import Child
from reward_servers.scorers.loop_thread import LoopThread
from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import RegexScorer

MAX_TEXT = 100_000
MAX_PATTERN = 10_000  # characters


def matches(sample: str, row: dict[str, Any]) -> float:
    """Return 1.0 if ``row['pattern']`` matches, else 0.0. Runs in the child process."""
    pattern = re.compile(row["pattern"])
    found = pattern.fullmatch(sample.strip()) if row["whole"] else pattern.search(sample)
    return float(found is not None)


class Regex:
    """Passes samples that match. If matching takes too long, the sample's status is timeout."""

    def __init__(self, spec: RegexScorer) -> None:
        self._spec = spec
        self._child: Child | None = None
        self._thread = LoopThread()

    @staticmethod
    def check(spec: RegexScorer) -> None:
        """Raise JobError if the job's pattern does not compile."""
        if spec.pattern is not None:
            _compile(spec.pattern)

    @staticmethod
    def check_row(spec: RegexScorer, prompt: Prompt) -> None:
        """Raise JobError if the row must supply the pattern and has no valid one."""
        if spec.pattern is None:
            pattern = prompt.reference.get(spec.field)
            if not isinstance(pattern, str):
                raise row_error(prompt, f"the regex scorer needs a pattern in the string field {spec.field!r}")
            try:
                _compile(pattern)
            except JobError as problem:
                raise row_error(prompt, str(problem)) from problem

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        pattern = self._spec.pattern or prompt.reference[self._spec.field]
        return [self._judge(text, {"pattern": pattern, "whole": self._spec.whole}) for text in texts]

    def _judge(self, text: str, row: dict[str, Any]) -> Verdict:
        if len(text) > MAX_TEXT:
            return passed_or(VerdictStatus.WRONG_ANSWER, self._spec.values, detail=f"longer than {MAX_TEXT} characters")
        try:
            answer = self._thread.run(self._ask({"sample": text, "row": row}))
        except TimeoutError:
            self.close()
            return passed_or(VerdictStatus.TIMEOUT, self._spec.values, detail="matching the pattern took too long")
        except (OSError, EOFError, ValueError) as problem:
            self.close()
            return infra_error(str(problem))
        if "error" in answer:
            return infra_error(answer["error"])
        status = VerdictStatus.PASSED if answer["results"][0]["reward"] > 0 else VerdictStatus.WRONG_ANSWER
        return passed_or(status, self._spec.values, answer=text.strip())

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = await Child.start(f"{__name__}:matches", "sample", self._spec.timeout_s)
        return await self._child.call(request, self._spec.timeout_s)

    def close(self) -> None:
        if self._child is not None:
            self._thread.run(self._kill(self._child))
            self._child = None
        self._thread.close()

    @staticmethod
    async def _kill(child: Child) -> None:
        child.kill()


def _compile(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN:
        problem = f"has {len(pattern)} characters, and may have {MAX_PATTERN}"
        raise JobError(f"the pattern that begins {pattern[:40]!r} {problem}: write a shorter one, or use exact")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as problem:
        raise JobError(f"pattern {one_line(pattern)!r} does not compile: {problem}") from problem
