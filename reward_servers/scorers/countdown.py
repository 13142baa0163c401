"""``countdown``: checks that an expression in ``+ - *`` uses each given number once and equals the target.

The grammar has no unary signs, so that every number of a correct answer is a given one:

    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = digits | "(" sum ")"
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reward_servers.scorers.base import passed_or, row_error
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import CountdownScorer

MAX_LENGTH = 256  # characters of an expression, without white space
MAX_DEPTH = 16  # nested parentheses
MAX_DIGITS = 6


class ParseError(ValueError):
    """The text is not an expression of the grammar."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression.

    Attributes:
        value: its value.
        numbers: the numbers in it, in order of appearance.
        canonical: normal form, equal for expressions that differ only in order, spacing and redundant parentheses.
    """

    value: int
    numbers: tuple[int, ...]
    canonical: str


def parse(text: str) -> Expression:
    """Parse one expression in time linear in the length of ``text``. Raises ParseError."""
    compact = "".join(text.split())
    if not compact or len(compact) > MAX_LENGTH:
        raise ParseError("empty" if not compact else f"longer than {MAX_LENGTH} characters")
    parser = _Parser(compact)
    terms = parser.sum(0)
    if parser.at < len(compact):
        raise ParseError(f"unexpected {compact[parser.at]!r}")
    return Expression(sum(term.value for term in terms), tuple(parser.numbers), _write_sum(terms))


@dataclass(frozen=True, slots=True)
class _Term:
    """A signed product within a flattened sum."""

    sign: int
    magnitude: int  # value without ``sign``; may itself be negative
    factors: tuple[str, ...]

    @property
    def text(self) -> str:
        return "*".join(sorted(self.factors))

    @property
    def value(self) -> int:
        return self.sign * self.magnitude


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.numbers: list[int] = []

    def _peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def sum(self, depth: int) -> list[_Term]:
        terms = self._product(1, depth)
        while (op := self._peek()) in ("+", "-"):
            self.at += 1
            terms += self._product(1 if op == "+" else -1, depth)
        return terms

    def _product(self, sign: int, depth: int) -> list[_Term]:
        factors = [self._factor(depth)]
        while self._peek() == "*":
            self.at += 1
            factors.append(self._factor(depth))
        if len(factors) == 1:  # a lone parenthesis merges into the enclosing sum
            return [_Term(sign * term.sign, term.magnitude, term.factors) for term in factors[0]]
        value = prod(sum(term.value for term in factor) for factor in factors)
        return [_Term(sign, value, tuple(part for factor in factors for part in _write_factor(factor)))]

    def _factor(self, depth: int) -> list[_Term]:
        if self._peek() == "(":
            if depth >= MAX_DEPTH:
                raise ParseError(f"parentheses nested deeper than {MAX_DEPTH}")
            self.at += 1
            terms = self.sum(depth + 1)
            if self._peek() != ")":
                raise ParseError("a parenthesis is not closed")
            self.at += 1
            return terms
        start = self.at
        while (ch := self._peek()) and ch in "0123456789":
            self.at += 1
        digits = self.text[start : self.at]
        if not digits or len(digits) > MAX_DIGITS:
            raise ParseError(f"expected a number of 1 to {MAX_DIGITS} digits at {self.text[start : start + 8]!r}")
        self.numbers.append(int(digits))
        return [_Term(1, int(digits), (str(int(digits)),))]


def _write_sum(terms: list[_Term]) -> str:
    plus = sorted(term.text for term in terms if term.sign > 0)
    minus = sorted(term.text for term in terms if term.sign < 0)
    return "+".join(plus) + "".join(f"-{text}" for text in minus)


def _write_factor(terms: list[_Term]) -> tuple[str, ...]:
    """Return the factors of the enclosing product: a parenthesised product is flattened, a sum stays one factor."""
    if len(terms) == 1:
        return terms[0].factors
    return (f"({_write_sum(terms)})",)


class Countdown:
    """Passes expressions that use exactly the row's ``numbers`` and equal its ``target``."""

    def __init__(self, spec: CountdownScorer) -> None:
        self._spec = spec

    @staticmethod
    def check(spec: CountdownScorer) -> None:
        """Accept every ``countdown`` scorer."""

    @staticmethod
    def check_row(spec: CountdownScorer, prompt: Prompt) -> None:
        """Raise JobError if the row has no valid ``numbers`` or ``target``."""
        numbers, target = prompt.reference.get("numbers"), prompt.reference.get("target")
        if not (isinstance(numbers, list | tuple) and numbers and all(_is_int(number) for number in numbers)):
            problem = 'the countdown scorer needs a list of integers, such as "numbers": [3, 5, 2, 7]'
            raise row_error(prompt, problem, "numbers")
        if not _is_int(target):
            raise row_error(prompt, 'the countdown scorer needs an integer, such as "target": 24', "target")

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        allowed, target = Counter(prompt.reference["numbers"]), prompt.reference["target"]
        return [self._judge(text, allowed, target) for text in texts]

    def _judge(self, text: str, allowed: Counter[int], target: int) -> Verdict:
        values = self._spec.values
        try:
            expression = parse(text)
        except ParseError as problem:
            return passed_or(VerdictStatus.NO_ANSWER, values, detail=str(problem))
        if Counter(expression.numbers) != allowed:
            status, detail = VerdictStatus.WRONG_ANSWER, "does not use each number once"
        elif expression.value != target:
            status, detail = VerdictStatus.WRONG_ANSWER, f"equals {expression.value}, not {target}"
        else:
            status, detail = VerdictStatus.PASSED, ""
        return passed_or(status, values, answer=expression.canonical, detail=detail)

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
