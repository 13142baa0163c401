import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.data.decontaminate import Contaminated, find_contaminated, problem_text, words_of
from volley.records import Prompt

TEXTS = st.lists(st.lists(st.sampled_from("abcd"), max_size=12).map(" ".join), min_size=1, max_size=5)


def slow(training: list[str], evaluation: list[str], n: int, threshold: float) -> list[tuple[int, float, bool]]:
    """The definition, with sets of tuples instead of hashes."""

    def grams(text: str) -> set[tuple[str, ...]]:
        words = words_of(text)
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    found = []
    for number, text in enumerate(training):
        if words_of(text) and any(words_of(text) == words_of(other) for other in evaluation):
            found.append((number, 1.0, True))
            continue
        shares = [len(grams(text) & grams(other)) / len(grams(other)) for other in evaluation if grams(other)]
        if shares and max(shares) >= threshold:
            found.append((number, max(shares), False))
    return found


@given(TEXTS, TEXTS, st.integers(1, 4), st.floats(0.1, 1))
@settings(deadline=None)
def test_agrees_with_the_definition(training: list[str], evaluation: list[str], n: int, threshold: float) -> None:
    names = [str(number) for number in range(len(evaluation))]
    found = find_contaminated(training, evaluation, names, ngram=n, threshold=threshold)
    assert [(each.index, each.overlap, each.exact) for each in found] == slow(training, evaluation, n, threshold)


def test_case_punctuation_spacing_and_compatibility_forms_do_not_hide_a_match() -> None:
    evaluation = ["How many primes lie below twenty?", "Add 2 and 3."]
    training = ["HOW many primes\nlie below twenty !", "Something else entirely", "add ２ and 3"]
    assert find_contaminated(training, evaluation, ["e1", "e2"]) == [
        Contaminated(0, "e1", 1.0, True),
        Contaminated(2, "e2", 1.0, True),
    ]


def test_an_evaluation_problem_inside_a_longer_text_is_found() -> None:
    problem = "a farmer has seventeen sheep and all but nine of them run away how many are left"
    (found,) = find_contaminated([f"Solve this. {problem} Explain yourself.", problem[:30]], [problem], ["e"])
    assert (found.index, found.overlap, found.exact) == (0, 1.0, False)


def test_only_the_problem_statement_is_compared() -> None:
    assert problem_text(Prompt("a", "Statement. Put it in a box.", {"problem": "Statement."})) == "Statement."
    assert problem_text(Prompt("a", "only a prompt")) == "only a prompt"


def test_options_out_of_range_are_rejected() -> None:
    for options in ({"ngram": 0}, {"threshold": 0.0}, {"threshold": 1.5}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            find_contaminated(["a"], ["a"], ["e"], **options)


def test_twenty_thousand_prompts_take_seconds() -> None:
    texts = [" ".join(f"w{(row * 7919 + word * 31) % 50_021}" for word in range(60)) for row in range(20_000)]
    begun = time.process_time()
    found = find_contaminated(texts, texts[:500], [str(row) for row in range(500)])
    assert [each.index for each in found if each.exact] == list(range(500))
    assert time.process_time() - begun < 20
