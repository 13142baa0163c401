"""The objects that the entry points in pyproject.toml name.

Every process that reads a job with these kinds imports this module, so it imports nothing heavy.
"""

from typing import Literal

from pydantic import Field

from volley.base import Spec
from volley.objectives import ObjectiveBase
from volley.plugins import ObjectivePlugin, ReaderPlugin, RecipePlugin, ScorerPlugin
from volley.scoring import RewardValues

from .top_gap import advantages


class PalindromeScorer(Spec):
    """Passes a sample that is a palindrome of at least ``shortest`` letters and begins with the row's ``letter``."""

    kind: Literal["palindrome"] = "palindrome"
    values: RewardValues = RewardValues()
    shortest: int = Field(3, ge=1, description="minimum number of letters")


class TopGap(ObjectiveBase):
    """Advantages of the group's best reward, all given to the best sample and multiplied by ``share``."""

    kind: Literal["top_gap"] = "top_gap"
    share: float = Field(1.0, gt=0, le=1)


PALINDROME = ScorerPlugin(PalindromeScorer, "volley_example_plugin.palindrome:Palindrome")
TOP_GAP = ObjectivePlugin(TopGap, advantages)
RIDDLES = RecipePlugin("volley_example_plugin.riddles")
BLOCKS = ReaderPlugin("volley_example_plugin.blocks:read")
