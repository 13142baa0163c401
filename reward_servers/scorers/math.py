"""``math``: compares the sample's final answer with the row's, by cheap exact checks first and symbolically last.

extract -> equal text -> exact rationals -> rules on form -> cost limit -> math-verify in the sandbox
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from reward_servers.sandbox.health import Sandbox, SandboxReport
from reward_servers.sandbox.judge import Case, ProgramResult
from reward_servers.scorers.base import one_line, passed_or, row_error
from reward_servers.scorers.math_text import (
    final_answer,
    has_foreign_notation,
    normal,
    rational,
    too_costly,
    without_markup,
)
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import MathScorer

CHECK = Path(__file__).with_name("math_check.py").read_bytes()
PACKAGES = ("math_verify", "latex2sympy2_extended", "sympy", "mpmath", "antlr4")
WALL_FACTOR = 2.5  # host load must not turn a correct answer into a timeout
WARM_UP = r"""
import logging
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
samples = (r"x^2+\frac{1}{2}", r"(1,\sqrt{2})", r"[0,1)\cup(2,\infty)", r"\{1,2\}", r"x\leq 3", r"\sin{x}+\pi",
           r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"3\cdot 10^{2}", r"\binom{4}{2}", r"x=\pm 1", r"5\text{ cm}")
parsed = [parse(f"${text}$", parsing_timeout=None) for text in samples]
for one in parsed:
    for other in parsed:
        verify(one, other, timeout_seconds=None)
"""
MAX_EXPECTED = 1000  # characters of an expected answer
_BRACKETS = ("(", "[", "\\{", "\\langle")
_RELATIONS = frozenset("<>\\")  # an interval may be written as inequalities, or as a named set
_EQUAL, _DIFFERENT = b"equal", b"different"


class _Expected(NamedTuple):
    raw: str
    text: str
    value: Fraction | None


class _Finding(NamedTuple):
    """The result of a comparison; ``run`` is set if it ran in the sandbox."""

    status: VerdictStatus
    detail: str
    run: ProgramResult | None = None


class Math:
    """Passes answers that are mathematically equal to the expected one; all of these count as one answer in maj@k."""

    def __init__(self, spec: MathScorer, sandbox: Sandbox | None = None) -> None:
        self._spec = spec
        packaged = spec.sandbox.model_copy(update={"packages": (*PACKAGES, *spec.sandbox.packages)})
        self._sandbox = sandbox or Sandbox(packaged, warm_up=WARM_UP)
        self._owned = sandbox is None
        self._limits = spec.sandbox.limits.model_copy(
            update={"cpu_s": spec.timeout_s, "wall_limit_s": WALL_FACTOR * spec.timeout_s}
        )

    @staticmethod
    def check(spec: MathScorer) -> None:
        """Accept every spec: the worker checks its own host."""

    @staticmethod
    def check_row(spec: MathScorer, prompt: Prompt) -> None:
        """Raise JobError if the row has no expected answer, or none that answers could be compared with."""
        expected = prompt.reference.get(spec.field)
        if not isinstance(expected, str | int | float) or isinstance(expected, bool) or not str(expected).strip():
            raise row_error(
                prompt, f"the math scorer needs the expected answer in {spec.field!r}, as a string or number"
            )
        if len(_boxed_or_all(str(expected))) > MAX_EXPECTED:
            problem = f"the expected answer in {spec.field!r} has more than {MAX_EXPECTED} characters"
            raise row_error(prompt, f"{problem}: write the final answer alone, or put it into \\boxed{{}}")

    @property
    def report(self) -> SandboxReport:
        """The report of the sandbox that symbolic comparisons run in."""
        return self._sandbox.report

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        raw = _boxed_or_all(str(prompt.reference[self._spec.field]))
        gold = _Expected(raw, normal(raw), rational(normal(raw)))
        known: dict[str | None, Verdict] = {}
        answers = [final_answer(text, self._spec.extract) for text in texts]
        for answer in answers:
            if answer not in known:
                known[answer] = self._judge(answer, gold)
        return [known[answer] for answer in answers]

    def _judge(self, answer: str | None, gold: _Expected) -> Verdict:
        if answer is None:
            return passed_or(VerdictStatus.NO_ANSWER, self._spec.values, detail="no final answer")
        text = normal(answer)
        value = rational(text)
        found = self._compare(answer, text, value, gold)
        if not found.status.bears_reward:
            return Verdict(found.status, None, detail=one_line(found.detail))
        canonical = gold if found.status is VerdictStatus.PASSED else _Expected(answer, text, value)
        name = str(canonical.value) if canonical.value is not None else canonical.text
        verdict = passed_or(found.status, self._spec.values, answer=name, detail=one_line(found.detail))
        if found.run is None:
            return verdict
        run = found.run
        return replace(
            verdict, cpu_ms=round(run.cpu_ms, 1), wall_ms=round(run.wall_ms, 1), peak_mb=round(run.peak_mb, 1)
        )

    def _compare(self, answer: str, text: str, value: Fraction | None, gold: _Expected) -> _Finding:
        passed, wrong = VerdictStatus.PASSED, VerdictStatus.WRONG_ANSWER
        if text == gold.text:
            return _Finding(passed, "equal text")
        if value is not None and gold.value is not None:
            return _Finding(passed if value == gold.value else wrong, "compared as exact numbers")
        said = text if "=" in gold.text else _right_hand_side(text.replace("\\approx", "="))
        if said is None or (_opening(said) != _opening(gold.text) and not _RELATIONS.intersection(said)):
            return _Finding(wrong, "a different kind of answer")
        if has_foreign_notation(text if "\\approx" not in text else said, gold.text):
            return _Finding(wrong, "a different kind of answer")
        if said == gold.text or (gold.value is not None and rational(said) == gold.value):
            return _Finding(passed, "equal, apart from its variable")
        costly = too_costly(text)
        if costly is not None:
            return _Finding(wrong, f"not evaluated: {costly}")
        return self._symbolic(answer, gold.raw)

    def _symbolic(self, answer: str, gold: str) -> _Finding:
        request = json.dumps({"gold": gold.strip("$"), "answer": without_markup(answer)}).encode()
        result = self._sandbox.judge(CHECK, [Case(request, _check_equal)], self._limits)
        if result.status is VerdictStatus.RUNTIME_ERROR:
            return _Finding(VerdictStatus.WRONG_ANSWER, f"the comparison failed: {result.detail}", result)
        return _Finding(result.status, result.detail or "symbolically equal", result)

    def close(self) -> None:
        if self._owned:
            self._sandbox.close()


def _boxed_or_all(expected: str) -> str:
    return final_answer(expected, "boxed") or expected


def _check_equal(stdout: bytes) -> str | None:
    return None if stdout.strip() == _EQUAL else "symbolically different"


def _right_hand_side(text: str) -> str | None:
    """Return 3 for ``x=3`` and ``=3``, and a text without ``=`` unchanged; None for ``4=3`` and chained equations."""
    left, equals, right = text.partition("=")
    if not equals:
        return text
    names_one_variable = not left or (left.lstrip("\\").isalpha() and (len(left) == 1 or left.startswith("\\")))
    return right if names_one_variable and "=" not in right else None


def _opening(text: str) -> str:
    """Return the opening bracket of a tuple, an interval or a set; "" for a plain list or a number in brackets."""
    if "," not in text:
        return ""
    return next((bracket for bracket in _BRACKETS if text.startswith(bracket)), "")
