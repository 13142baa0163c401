"""``python``: calls a trusted function of the user in a child process, which is killed if it hangs."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from reward_servers.scorers.base import infra_error, one_line, row_error
from reward_servers.scorers.child import Child
from volley.errors import JobError
from volley.imports import function_named
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import PythonScorer

log = logging.getLogger("volley.reward")

MAX_LOGGED = 20  # different errors of one function whose tracebacks are logged
RewardFunction = Callable[[str, dict[str, Any]], Any]


def load_function(target: str) -> RewardFunction:
    """Import the function named by ``package.module:function``. Raises JobError."""
    return function_named(target, "scorer target")


class PythonFunction:
    """Calls ``function(sample, row)``. An exception or a timeout is an infra error: it is not the sample's fault.

    Attributes:
        last_traceback: of the newest call that raised; "" before the first.
    """

    def __init__(self, spec: PythonScorer) -> None:
        self._spec = spec
        self._child: Child | None = None
        self._logged: set[str] = set()
        self.last_traceback = ""

    @staticmethod
    def check(spec: PythonScorer) -> None:
        """Raise JobError if the target cannot be imported."""
        load_function(spec.target)

    @staticmethod
    def attempt(spec: PythonScorer, prompt: Prompt, text: str) -> Verdict:
        """Call the function once, in a child process as when a run scores.

        Raises:
            JobError: it gave no reward; the message has its traceback.
        """
        scorer = PythonFunction(spec)
        try:
            verdict = scorer.score(prompt, [text])[0]
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
        return [self._judge(text, row) for text in texts]

    def _judge(self, text: str, row: dict[str, Any]) -> Verdict:
        try:
            if self._child is None:
                self._child = Child(self._spec.target)
            answer = self._child.call({"sample": text, "row": row}, self._spec.timeout_s)
        except (TimeoutError, OSError, EOFError, ValueError) as problem:
            self.close()  # a late answer must never be read as that of the next sample
            return infra_error(f"{self._spec.target}: {problem}")
        if "error" in answer:
            self._log(answer["error"], answer.get("traceback", ""))
            return infra_error(f"{self._spec.target} raised {answer['error']}")
        reward = float(answer["reward"])
        status = VerdictStatus.PASSED if reward > 0 else VerdictStatus.WRONG_ANSWER
        detail = one_line(answer.get("detail", ""))
        return Verdict(status, reward, answer=answer.get("answer"), detail=detail, rank=answer.get("rank"))

    def _log(self, error: str, traceback: str) -> None:
        """Log the traceback of an error that has not been logged yet, up to `MAX_LOGGED` of them."""
        self.last_traceback = traceback
        if error not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(error)
            log.error("%s raised; the sample leaves its group\n%s", self._spec.target, traceback or error)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
