"""The scorer. Only reward workers import it, so it may need packages that the rest of a run does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reward_servers.scorers.base import passed_or, row_error
from volley.records import Prompt, Verdict, VerdictStatus

if TYPE_CHECKING:
    from . import PalindromeScorer


class Palindrome:
    """Compares letters only and ignores case."""

    def __init__(self, spec: PalindromeScorer) -> None:
        self._spec = spec

    @staticmethod
    def check_row(spec: PalindromeScorer, prompt: Prompt) -> None:
        """Reject rows without a letter; called for every row before a run starts."""
        letter = prompt.reference.get("letter")
        if not (isinstance(letter, str) and len(letter) == 1 and letter.isalpha()):
            raise row_error(prompt, "the palindrome scorer needs one letter in the field 'letter'")

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        return [self._judge(str(prompt.reference["letter"]).lower(), text) for text in texts]

    def _judge(self, letter: str, text: str) -> Verdict:
        letters = [each for each in text.lower() if each.isalpha()]
        if not letters:
            return passed_or(VerdictStatus.NO_ANSWER, self._spec.values, detail="no letters")
        right = len(letters) >= self._spec.shortest and letters[0] == letter and letters == letters[::-1]
        status = VerdictStatus.PASSED if right else VerdictStatus.WRONG_ANSWER
        return passed_or(status, self._spec.values, answer="".join(letters))

    def close(self) -> None:
        """Nothing to close."""
