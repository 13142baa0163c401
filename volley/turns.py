"""Further turns: a sample that did not pass is shown why, and goes on."""

from pydantic import Field

from volley.base import Spec


class TurnsSpec(Spec):
    """Turns of one sample. Scoring sees the last one; the objective's n and k count samples, not turns."""

    most: int = Field(2, ge=2, le=64, description="turns of a sample at most; one that passed has no other")
    show: str = Field(
        min_length=1,
        description="Jinja text put behind a turn that did not pass: the row's fields, `verdict` (status, detail, "
        "failing_test, stdout, stderr, answer) and `turn`; for chat models with the template's own tokens",
    )
    most_shown: int = Field(512, ge=1, description="tokens of a shown text; what is over is cut from its middle")

    def room(self, max_tokens: int) -> int:
        """Tokens that may follow a prompt, over all turns of at most ``max_tokens``."""
        return self.most * max_tokens + (self.most - 1) * self.most_shown
