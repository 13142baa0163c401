"""``exact``: compares the sample with the row's expected text, ignoring white space at both ends."""

from collections.abc import Sequence

from reward_servers.scorers.base import passed_or, row_error
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import ExactScorer


class Exact:
    """Passes samples that equal the expected text after stripping white space at both ends."""

    def __init__(self, spec: ExactScorer) -> None:
        self._spec = spec

    @staticmethod
    def check(spec: ExactScorer) -> None:
        """Accept every ``exact`` scorer."""

    @staticmethod
    def check_row(spec: ExactScorer, prompt: Prompt) -> None:
        """Raise JobError if the row has no expected text."""
        if not isinstance(prompt.reference.get(spec.field), str):
            raise row_error(prompt, f"the exact scorer needs the expected text in a string field {spec.field!r}")

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        expected = str(prompt.reference[self._spec.field]).strip()
        return [self._judge(text.strip(), expected) for text in texts]

    def _judge(self, answer: str, expected: str) -> Verdict:
        if not answer:
            return passed_or(VerdictStatus.NO_ANSWER, self._spec.values, detail="the sample is empty")
        status = VerdictStatus.PASSED if answer == expected else VerdictStatus.WRONG_ANSWER
        return passed_or(status, self._spec.values, answer=answer)

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""
