"""``python``: a trusted function of the user's own, called in a child process so that a hang can be ended."""

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from reward_servers.scorers.base import infra_error, one_line, row_error
from reward_servers.scorers.child import Child
from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import PythonScorer

RewardFunction = Callable[[str, dict[str, Any]], Any]


def load_function(target: str) -> RewardFunction:
    """The function that ``package.module:function`` names. Raises JobError."""
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:
        raise JobError(
            f"scorer target {target!r}: module {module_name!r} does not import ({type(problem).__name__}: {problem}); "
            "put it beside the job file, or install it"
        ) from problem
    function = getattr(module, name, None)
    if not callable(function):
        raise JobError(f"scorer target {target!r}: {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


class PythonFunction:
    """Calls ``function(sample, row)``. An exception or a time-out is an infra error: that code is not the sample's."""

    def __init__(self, spec: PythonScorer) -> None:
        self._spec = spec
        self._child: Child | None = None

    @staticmethod
    def check(spec: PythonScorer) -> None:
        """Raises JobError where the target does not import."""
        load_function(spec.target)

    @staticmethod
    def check_row(spec: PythonScorer, prompt: Prompt) -> None:
        """Raises JobError where the row can not reach the child process."""
        try:
            json.dumps(dict(prompt.reference))
        except (TypeError, ValueError) as problem:
            raise row_error(prompt, f"the python scorer hands the row over as JSON: {problem}") from problem

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        row = {**prompt.reference, "id": prompt.id, "prompt": prompt.text}
        return [self._judge(text, row) for text in texts]

    def _judge(self, text: str, row: dict[str, Any]) -> Verdict:
        try:
            if self._child is None:
                self._child = Child(self._spec.target)
            answer = self._child.call({"sample": text, "row": row}, self._spec.timeout_s)
        except (TimeoutError, OSError, EOFError, ValueError) as problem:
            self.close()  # what is left on a broken pipe must never reach the next sample
            return infra_error(f"{self._spec.target}: {problem}")
        if "error" in answer:
            return infra_error(f"{self._spec.target} raised {answer['error']}")
        reward = float(answer["reward"])
        status = VerdictStatus.PASSED if reward > 0 else VerdictStatus.WRONG_ANSWER
        return Verdict(status, reward, answer=answer.get("answer"), detail=one_line(answer.get("detail", "")))

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
