"""How a job says which scorer judges its samples: one union, discriminated on ``kind``."""

from typing import Annotated, Literal

from pydantic import Field

from volley.base import Spec


class RewardValues(Spec):
    """The two rewards of a scorer that only tells right from wrong."""

    passed: float = 1.0
    failed: float = 0.0


class CountdownScorer(Spec):
    """Is the sample an expression in ``+ - *`` that uses each of the row's ``numbers`` once and equals ``target``?"""

    kind: Literal["countdown"] = "countdown"
    values: RewardValues = RewardValues()


class ExactScorer(Spec):
    """Does the sample, white space trimmed, equal the row's ``answer``?"""

    kind: Literal["exact"] = "exact"
    values: RewardValues = RewardValues()
    field: str = Field("answer", description="the row's field that holds the expected text")


class PythonScorer(Spec):
    """A trusted function of the user's own: ``package.module:function(sample, row) -> float``."""

    kind: Literal["python"] = "python"
    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="package.module:function")
    timeout_s: float = Field(10.0, gt=0, description="seconds one sample may take")


ScorerSpec = Annotated[CountdownScorer | ExactScorer | PythonScorer, Field(discriminator="kind")]
