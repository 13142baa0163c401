# ruff: noqa: E501 - one line holds several pairs
"""Pairs of answers with the verdict they must get: (gold, answer, right?)."""

_NUMBERS = [
    ("1/2", "0.5"), ("\\frac{1}{2}", "\\frac{2}{4}"), ("\\frac{1}{2}", "\\dfrac12"), ("0.25", "\\tfrac{1}{4}"), ("3", "3.0"),
    ("3", "3.000"), ("-\\frac{3}{4}", "-0.75"), ("-\\frac{3}{4}", "\\frac{-3}{4}"), ("1000", "1,000"), ("1000000", "1,000,000"),
    ("1234.5", "1,234.5"), ("10", "10.0"), ("0", "0.0"), ("0", "-0"), ("7", "+7"), ("\\frac{7}{3}", "7/3"), ("12", "x=12"),
    ("12", "n = 12"), ("5", "5\\%"), ("50", "50\\%"), ("90", "90^\\circ"), ("90", "90^{\\circ}"), ("42", "$42$"), ("42", "42."),
    ("42", "\\text{42}"), ("42", "\\mathrm{42}"), ("42", " 42 "), ("1.5", "\\frac{3}{2}"), ("3/8", "0.375"),
    ("100", "10^2"), ("6\\times 10^3", "6000"), ("6000", "6\\cdot 10^3"), ("0.001", "10^{-3}"), ("8", "2^3"), ("-5", "-5.0"),
    ("1/3", "\\frac{1}{3}"), ("\\frac{22}{7}", "22/7"), ("2", "\\sqrt{4}"), ("4", "2+2"), ("1e3", "1000"), ("\u22125", "-5"),
]  # fmt: skip
_SYMBOLS = [
    ("x^2+2x+1", "(x+1)^2"), ("x^2-1", "(x-1)(x+1)"), ("2\\sqrt{2}", "\\sqrt{8}"), ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("a+b", "b+a"), ("ab", "ba"), ("2x", "x+x"), ("5", "\\approx 5"), ("5", "x\\approx 5"), ("17", "{17}"), ("17", "17\\quad"), ("17", "\\Large 17"), ("2\\pi", "2\u03c0"),
    ("5", "5^{\\text{th}}"), ("3", "\\lfloor 3.5\\rfloor"), ("6", "2\\cdot3"), ("2x", "2\\cdot x"), ("2x", "\\frac{4x}{2}"), ("\\pi", "\\pi"), ("2\\pi", "\\pi + \\pi"),
    ("\\frac{\\pi}{2}", "0.5\\pi"), ("3\\sqrt{5}", "\\sqrt{45}"), ("\\sin^2 x + \\cos^2 x", "1"), ("e^{2}", "e \\cdot e"),
    ("x^3", "x \\cdot x^2"), ("\\frac{x}{y}", "x/y"), ("5x+5", "5(x+1)"), ("\\log 1", "0"), ("\\frac{a}{b}+\\frac{c}{b}", "\\frac{a+c}{b}"),
    ("1+i", "i+1"), ("2^{10}", "1024"), ("|x|", "\\left|x\\right|"), ("y=2x+1", "y = 2x + 1"), ("\\sqrt{x}", "x^{1/2}"),
]  # fmt: skip
_STRUCTURES = [
    ("(1,2)", "(1, 2)"), ("(1,2)", "\\left(1,2\\right)"), ("(1,2)", "(1.0,2)"), ("(\\frac{1}{2},3)", "(0.5,3)"), ("[0,1)", "[0, 1)"),
    ("[0,1]", "\\left[0,1\\right]"), ("\\{1,2\\}", "\\{2,1\\}"), ("\\{1,2,3\\}", "\\{3,1,2\\}"), ("(-\\infty,2)", "(-\\infty, 2)"),
    ("\\{0.5\\}", "\\{\\frac{1}{2}\\}"), ("(0,\\pi)", "(0, \\pi)"), ("(1,2,3)", "( 1 , 2 , 3 )"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("(3,\\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"), ("[1,2]\\cup[3,4]", "[1,2] \\cup [3,4]"),
]  # fmt: skip
_UNITS = [
    ("5", "5\\text{ cm}"), ("5", "5 \\text{ meters}"), ("12", "12\\text{ inches}"), ("3.5", "3.5\\text{ hours}"), ("20", "\\$20"),
    ("7", "7\\text{ units}"),
]  # fmt: skip
_DIFFERENT = [
    ("1/2", "0.51"), ("3", "4"), ("3", "-3"), ("3", "4=3"), ("3", "3=3"), ("3", "3=4"), ("3", "2+1=3"), ("(1,2)", "1,2"), ("1,2", "(1,2)"),
    ("(1,2)", "(2,1)"), ("[0,1)", "[0,1]"), ("[0,1)", "(0,1)"), ("(0,1)", "0,1"), ("\\{1,2\\}", "\\{1,2,3\\}"), ("x^2", "x^3"),
    ("x+1", "x-1"), ("\\sqrt{2}", "1.41"), ("\\pi", "3.14"), ("\\frac{1}{3}", "0.33"), ("1000", "1,00"), ("12", "1 2 3"),
    ("2\\pi", "\\pi"), ("a+b", "a-b"), ("2^{10}", "1023"), ("\\frac{a}{b}", "\\frac{b}{a}"), ("0", "1"), ("1", "0"), ("100", "1000"),
    ("12", "7"), ("x=3", "x=4"), ("5", "five"), ("10", "1/0"), ("\\infty", "-\\infty"), ("\\sin x", "\\cos x"), ("e", "2.718"),
    ("7", "7,8"), ("7", "7 or 8"), ("7", "{7,8}"), ("(3,4)", "(3,4,5)"), ("1", "\\text{one}"), ("3", "(10^9)!"), ("3", "9^{9^{9^9}}"),
    ("3", "\\sum_{n=1}^{10^9} n"), ("3", "\\binom{100000}{50000}"), ("3", "1" * 200), ("3", "__import__('os')"), ("3", "\\input{x}"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"), ("-1", "1"), ("0.5", "5"), ("4", "\\sqrt{4}"),
]  # fmt: skip


def _generated() -> list[tuple[str, str, bool]]:
    """Many fractions and decimals, for which the exact comparison must agree with arithmetic."""
    pairs = []
    for top in range(1, 15):
        for bottom in (2, 4, 5, 8):
            value = top / bottom
            pairs.append((f"\\frac{{{top}}}{{{bottom}}}", repr(value), True))
            pairs.append((f"{3 * top}/{3 * bottom}", f"\\frac{{{top}}}{{{bottom + 1}}}", False))
            pairs.append((repr(value), f"{2 * top}/{2 * bottom}", True))
    return pairs


PAIRS: list[tuple[str, str, bool]] = [
    *((gold, answer, True) for gold, answer in (*_NUMBERS, *_SYMBOLS, *_STRUCTURES, *_UNITS)),
    *((gold, answer, False) for gold, answer in _DIFFERENT),
    *_generated(),
]
