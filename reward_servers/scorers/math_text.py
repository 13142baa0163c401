"""Final answers in text: finding them, writing them one way, and reading exact rationals. No backtracking anywhere."""

from fractions import Fraction

MAX_ANSWER = 300
MAX_EXPONENT = 200
_PHRASES = ("final answer is", "final answer:", "answer is:", "answer:")
_ZERO_WIDTH = "\0\u200b\u200c\u200d\u2060\ufeff\u00ad"
_BIDIRECTIONAL = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
_INVISIBLE = frozenset(_ZERO_WIDTH + _BIDIRECTIONAL)
_DROPPED = (
    "\\left", "\\right", "\\displaystyle", "\\,", "\\!", "\\;", "\\:", "\\ ", "~", "$",
    "^{\\circ}", "^\\circ", "\\%", "%",
)  # fmt: skip
_RENAMED = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cdot", "*"), ("\\times", "*"), ("{,}", ""), ("\u2212", "-"),
    ("\\lbrace", "\\{"), ("\\rbrace", "\\}"), ("\\le ", "\\leq "), ("\\ge ", "\\geq "),
)  # fmt: skip
_WRAPPERS = ("\\text", "\\mathrm", "\\textbf", "\\mathbf", "\\mbox", "\\boxed")


def final_answer(text: str, how: str) -> str | None:
    """The sample's final answer, after its last ``</think>``; None where there is none that can be read.

    A box counts before the phrase: a text that offers both must not be able to choose. Answers longer than
    ``MAX_ANSWER`` characters or with invisible characters are no answers.
    """
    tail = text.rpartition("</think>")[2]
    found = _last_boxed(tail) if how in ("boxed", "either") else None
    if found is None and how in ("final_answer", "either") and "\\boxed" not in tail:
        found = _after_phrase(tail)
    if found is None:
        return None
    found = found.strip()
    return found if 0 < len(found) <= MAX_ANSWER and not _INVISIBLE.intersection(found) else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    at = start + len("\\boxed{")
    return balanced(text, at)


def balanced(text: str, at: int) -> str | None:
    """What stands between the brace before ``at`` and the one that closes it; None where none does in time."""
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


def normal(answer: str) -> str:
    """One way of writing what differs in spacing and markup only."""
    text = answer.strip()
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
    """The exact value of a ``normal`` number: integers, decimals, fractions, powers of ten; None for anything else."""
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
            if not (power.lstrip("+-").isdigit() and power.isascii() and len(power) <= 4):
                return None
            exponent = int(power)
            break
    whole, _, digits = _thousands(mantissa).partition(".")
    if abs(exponent) > MAX_EXPONENT or not (whole + digits).isdigit() or not (whole + digits).isascii():
        return None
    return Fraction(int(whole + digits)) * Fraction(10) ** (exponent - len(digits))


def _thousands(text: str) -> str:
    """``1,234,567`` without its commas; anything else as it is."""
    groups = text.partition(".")[0].split(",")
    if len(groups) > 1 and 1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]):
        return text.replace(",", "")
    return text


def too_costly(text: str) -> str | None:
    """Why evaluating ``text`` could take for ever: powers of powers, large factorials, sums; None where it is fine."""
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
    """Is the power at ``text[at]`` one to a power, or more than a small one of a power?"""
    base, exponent = _base(text[:at]), _exponent(text[at + 1 :])
    small = exponent.strip("{()} ")
    return "^" in exponent or ("^" in base and (len(small) > 1 or ")^" in base or "}^" in base))


def _base(text: str) -> str:
    """The brackets or braces that ``text`` ends with, or nothing."""
    depth = 0
    for at in range(len(text.rstrip()) - 1, -1, -1):
        depth += (text[at] in "})") - (text[at] in "{(")
        if depth <= 0:
            return text[at:]
    return text


def _exponent(text: str) -> str:
    """What stands behind a ``^``: its brackets or braces with all in them, or what comes before the next operator."""
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
