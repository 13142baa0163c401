"""Further turns: a sample that did not pass observes why, and continues."""

from typing import ClassVar

from pydantic import Field

from volley.base import Spec


class TurnsSpec(Spec):
    """Turns of a sample. Only the last one is scored; the objective's n and k count samples, not turns."""

    renamed_keys: ClassVar[dict[str, str]] = {"most": "max_count", "most_shown": "max_observation_tokens"}
    deprecated_keys: ClassVar[dict[str, str]] = {"show": "observation"}

    max_count: int = Field(2, ge=2, le=64, description="limit on turns per sample; a sample that passes has ended")
    observation: str = Field(
        min_length=1,
        description="Jinja appended to a turn that did not pass, over the row's fields, `verdict` (status, detail, "
        "failing_test, stdout, stderr, answer) and `turn`; chat models need their template's tokens in it",
    )
    max_observation_tokens: int = Field(512, ge=1, description="longer observations lose their middle")

    def room(self, max_tokens: int) -> int:
        """Most tokens that may follow a prompt, if each turn has at most ``max_tokens``."""
        return self.max_count * max_tokens + (self.max_count - 1) * self.max_observation_tokens
