"""The recipe: rows of a published layout to what a scorer reads. The names in capitals are part of the contract."""

from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import Dropped, Fields, place, text
from volley.data import RecipeOptions

SCORER = "palindrome"
TAGS = ("letter",)
TEMPLATE = "{{ problem }}\n\nAnswer with one palindrome.\n"


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """One problem a row; rows without a riddle are dropped, and counted under that reason."""
    riddle = text(row, "riddle").strip()
    if not riddle:
        raise Dropped("no riddle")
    yield {"id": place(row), "problem": riddle, "letter": text(row, "starts_with")}
