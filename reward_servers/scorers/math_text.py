"""Finds final answers in text, normalises them and parses exact rationals, without any backtracking."""

import re
from fractions import Fraction

MAX_ANSWER = 300
MAX_EXPONENT = 200
_PHRASES = ("final answer is", "final answer:", "answer is:", "answer:")
_ZERO_WIDTH = "\0\u200b\u200c\u200d\u2060\ufeff\u00ad"
_BIDIRECTIONAL = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
_INVISIBLE = frozenset(_ZERO_WIDTH + _BIDIRECTIONAL)
_DROPPED = ("\\displaystyle", "\\,", "\\!", "\\;", "\\:", "\\ ", "~", "$", "\\%", "%")
_MARKUP = re.compile(r"(?<!\\)\$|\\\$\s*$|\\Large(?![A-Za-z])|\^\{?\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\}?")
_DEGREE = re.compile(r"\^\{\s*\\(?:circ|degree)\s*\}|\^?\\(?:circ|degree)(?![A-Za-z])|\u00b0")
_LAST_DEGREE = re.compile(r"\u00b0(?:\s*[CF]\b)?(?![^A-Za-z]*\d)")
_RENAMED = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("{,}", ""), ("\u2212", "-"), ("\u221e", "\\infty "),
    ("\\lbrace", "\\{"), ("\\rbrace", "\\}"), ("\\le ", "\\leq "), ("\\ge ", "\\geq "),
)  # fmt: skip
# LaTeX commands that may appear in an expression. math-verify ignores unknown commands, so they are rejected.
_EXPRESSION = frozenset({
    "frac", "sqrt", "pi", "times", "div", "pm", "mp", "log", "ln", "lg", "exp", "sin", "cos", "tan", "cot",
    "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "max", "min", "gcd", "lcm", "binom", "dbinom",
    "tbinom", "cfrac", "sum", "prod", "int", "lim", "begin", "end", "overline", "bar", "hat", "vec", "lfloor",
    "rfloor", "lceil", "rceil", "lvert", "rvert", "langle", "rangle", "quad", "qquad", "operatorname",
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta",
    "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega", ",", ";", " ", "!", ":", "$", "%", "&",
})  # fmt: skip
# Commands and characters of statements about sets and inequalities, allowed only if the expected answer is one.
_STATEMENT = frozenset({
    "leq", "geq", "le", "ge", "lt", "gt", "neq", "ne", "in", "notin", "cup", "cap", "setminus", "mathbb", "mathcal",
    "emptyset", "varnothing", "land", "wedge", "lor", "vee", "mid", "infty", "{", "}",
})  # fmt: skip
_ORDER = frozenset("<>")
_NO_BEGINNING = frozenset("*/^,;:)]}")
_BEYOND_ASCII = frozenset("\u03c0\u221a\u00b7\u00d7\u00f7\u2212")  # pi root times divided minus
# Allowed only if the expected answer has them too: marks, subscripts other than a logarithm's base, transposes.
_MARKS = frozenset("?'\"`#@\u00b0")
_SUBSCRIPT, _RAISED = re.compile(r"(?<!\\log)_"), re.compile(r"\^\{?([T*])")
_SIZED, _TIMES = re.compile(r"\\(?:left|right)(?![A-Za-z])"), re.compile(r"\\(?:cdot|times)(?![A-Za-z])")
_POWER = re.compile(r"[+-]?[0-9]{1,4}")
_COMMAND = re.compile(r"\\([A-Za-z]+|[^A-Za-z0-9])")
_WRAPPERS = ("\\text", "\\mathrm", "\\textbf", "\\mathbf", "\\mbox", "\\boxed")


def final_answer(text: str, how: str) -> str | None:
    """Return the final answer after the last ``</think>``, or None.

    A ``\\boxed`` answer takes precedence over a phrase, so that a sample cannot offer two answers. An answer that is
    longer than ``MAX_ANSWER`` characters or contains invisible characters is ignored.
    """
    tail = text.rpartition("</think>")[2]
    found = _last_boxed(tail) if how in ("boxed", "either") else None
    if found is None and how in ("final_answer", "either") and "\\boxed" not in tail:
        found = _after_phrase(tail)
    if found is None:
        return None
    found = found.strip()
    return found if 0 < len(found) <= MAX_ANSWER and not _INVISIBLE.intersection(found) else None


def has_foreign_notation(answer: str, gold: str) -> bool:
    """Return whether ``answer`` uses notation that does not fit an answer like ``gold``; both must be ``normal``.

    The symbolic parser ignores what it does not know, so it would read "17 or some other" and "17 is about 42" as 17.
    An interval or a set may be written as a statement about its members.
    """
    (commands, characters), (known, _) = _notation(answer), _notation(gold)
    statement = bool(known & _STATEMENT) or bool(_ORDER.intersection(gold)) or gold[:1] in ("(", "[")
    allowed = _EXPRESSION | known | (_STATEMENT if statement else frozenset())
    if "begin" in commands:
        allowed |= {"\\"}  # between the rows of a matrix
    elif "&" in answer:
        return True
    if not commands <= allowed or not characters <= _BEYOND_ASCII | set(gold):
        return True
    if (_ORDER.intersection(answer) and not statement) or not _marks(answer) <= _marks(gold):
        return True
    return answer.count("|") % 2 == 1 or answer[:1] in _NO_BEGINNING or (_lists(answer) and not _lists(gold))


def _notation(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the LaTeX commands in ``text`` and its non-ASCII characters."""
    return frozenset(_COMMAND.findall(text)), frozenset(ch for ch in text if not ch.isascii())


def _marks(text: str) -> set[str]:
    """Return what ``text`` contains that the symbolic parser ignores or drops, such as a prime or a subscript."""
    return {*_MARKS.intersection(text), *_SUBSCRIPT.findall(text), *_RAISED.findall(text)}


def _lists(text: str) -> bool:
    """Return whether ``text`` lists several values; ``\\pm`` stands for two."""
    depth = 0
    for ch in text:
        depth += (ch in "([{") - (ch in ")]}")
        if depth == 0 and ch in ",;":
            return True
    return "\\pm" in text or "\\mp" in text


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    at = start + len("\\boxed{")
    return balanced(text, at)


def balanced(text: str, at: int) -> str | None:
    """Return the text from ``at``, just after an opening brace, to its closing one.

    None if that is more than ``MAX_ANSWER`` characters away or missing.
    """
    depth = 1
    for end in range(at, min(len(text), at + MAX_ANSWER + 1)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[at:end]
    return None


def _after_phrase(text: str) -> str | None:
    lower = text.lower()
    ends = [lower.rfind(phrase) + len(phrase) for phrase in _PHRASES if phrase in lower]
    if not ends:
        return None
    line = text[max(ends) :].lstrip(" :").split("\n", 1)[0][: MAX_ANSWER + 50]
    return line.split(". ", 1)[0].rstrip(". ").replace("**", "")


def without_markup(answer: str) -> str:
    """Return ``answer`` without dollar signs, ordinal endings and degrees; a degree that a number follows stays."""
    return _LAST_DEGREE.sub("", _DEGREE.sub("\u00b0", _MARKUP.sub("", answer)))


def normal(answer: str) -> str:
    """Return ``answer`` without spacing and markup, so that answers that differ only in those are equal."""
    text = _TIMES.sub("*", _SIZED.sub("", without_markup(answer).strip()))
    for old, new in _RENAMED:
        text = text.replace(old, new)
    for word in _DROPPED:
        text = text.replace(word, "")
    for wrapper in _WRAPPERS:
        text = _unwrap(text, wrapper + "{")
    return "".join(text.split()).rstrip(".")


def _unwrap(text: str, opening: str) -> str:
    while (start := text.find(opening)) >= 0:
        inner = balanced(text, start + len(opening))
        if inner is None:
            break
        text = text[:start] + inner + text[start + len(opening) + len(inner) + 1 :]
    return text


def rational(text: str) -> Fraction | None:
    """Return the exact value of a ``normal`` integer, decimal, fraction or power of ten; None for anything else."""
    sign = 1
    if text[:1] in ("+", "-"):
        sign, text = (-1 if text[0] == "-" else 1), text[1:]
    value = _fraction(text) if text.startswith("\\frac") else _quotient(text)
    return None if value is None else sign * value


def _fraction(text: str) -> Fraction | None:
    rest = text[len("\\frac") :]
    parts = []
    for _ in range(2):
        if rest[:1] == "{":
            inner = balanced(rest, 1)
            if inner is None:
                return None
            parts.append(inner)
            rest = rest[len(inner) + 2 :]
        else:
            parts.append(rest[:1])
            rest = rest[1:]
    top, bottom = rational(parts[0]), rational(parts[1])
    return top / bottom if not rest and top is not None and bottom else None


def _quotient(text: str) -> Fraction | None:
    top, slash, bottom = text.partition("/")
    if not slash:
        return _decimal(top)
    one, other = _decimal(top), _decimal(bottom)
    return one / other if one is not None and other else None


def _decimal(text: str) -> Fraction | None:
    mantissa, exponent = text, 0
    for mark in ("*10^", "e", "E"):
        if mark in text:
            mantissa, _, power = text.partition(mark)
            power = power.strip("{}")
            if not _POWER.fullmatch(power):
                return None
            exponent = int(power)
            break
    whole, _, digits = _thousands(mantissa).partition(".")
    if abs(exponent) > MAX_EXPONENT or not (whole + digits).isdigit() or not (whole + digits).isascii():
        return None
    return Fraction(int(whole + digits)) * Fraction(10) ** (exponent - len(digits))


def _thousands(text: str) -> str:
    """Remove the commas of a number such as ``1,234,567``; return anything else unchanged."""
    groups = text.partition(".")[0].split(",")
    if len(groups) > 1 and 1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]):
        return text.replace(",", "")
    return text


def too_costly(text: str) -> str | None:
    """Return why evaluating ``text`` could take too long, such as a power of a power or a sum; None if it is cheap."""
    run = power_depth = deepest = depth = 0
    for at, ch in enumerate(text):
        run = run + 1 if ch.isdigit() else 0
        depth += (ch == "{") - (ch == "}")
        deepest = max(deepest, depth)
        power_depth += ch == "^" or text.startswith("**", at)
        if run > 60:
            return "a number of more than 60 digits"
    if deepest > 12 or power_depth > 12:
        return "nested too deeply"
    if any(word in text for word in ("\\sum", "\\prod", "\\int", "\\lim")):
        return "a sum, product, integral or limit"
    return _costly_operand(text)


def _costly_operand(text: str) -> str | None:
    for at, ch in enumerate(text):
        before, after = text[:at].rstrip(" )}"), text[at + 1 : at + 12].lstrip("{( *-")
        if ch == "!" and ((before[-3:].isdigit() and len(before[-3:]) == 3) or before.endswith("!") or "^" in text):
            return "a large factorial"
        if ch == "^" and ((after[:4].isdigit() and len(after[:4]) == 4) or _tower(text, at)):
            return "a large power"
    return "a large binomial" if "\\binom" in text and any(part.isdigit() for part in _runs(text, 4)) else None


def _tower(text: str, at: int) -> bool:
    """Return whether the ``^`` at ``text[at]`` has a power as its exponent, or as its base with a large exponent."""
    base, exponent = _base(text[:at]), _exponent(text[at + 1 :])
    small = exponent.strip("{()} ")
    return "^" in exponent or ("^" in base and (len(small) > 1 or ")^" in base or "}^" in base))


def _base(text: str) -> str:
    """Return the base that ``text`` ends with: a group in brackets or braces with its contents, or one character."""
    depth = 0
    for at in range(len(text.rstrip()) - 1, -1, -1):
        depth += (text[at] in "})") - (text[at] in "{(")
        if depth <= 0:
            return text[at:]
    return text


def _exponent(text: str) -> str:
    """Return the exponent at the start of ``text``: a group in brackets or braces, or the text up to an operator."""
    text = text.lstrip(" ")
    depth = 0
    for at, ch in enumerate(text):
        if depth == 0 and at and ch in " +-*/=,;<>|&\\":
            return text[:at]
        depth += (ch in "{(") - (ch in "})")
        if depth < 0 or (depth == 0 and ch in "})" and text[at + 1 : at + 2] != "^"):
            return text[: at + 1]
    return text


def _runs(text: str, length: int) -> list[str]:
    return [text[at : at + length] for at in range(len(text) - length + 1)]
