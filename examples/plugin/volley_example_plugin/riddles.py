"""The recipe: turns rows of a published data set into the fields that a scorer reads.

Volley looks up the names in capitals and ``problems``.
"""

from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import Dropped, Fields, place, text
from volley.data import RecipeOptions

SCORER = "palindrome"
TAGS = ("letter",)
TEMPLATE = "{{ problem }}\n\nAnswer with one palindrome.\n"


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row; rows without a riddle are dropped and counted under that reason."""
    riddle = text(row, "riddle").strip()
    if not riddle:
        raise Dropped("no riddle")
    yield {"id": place(row), "problem": riddle, "letter": text(row, "starts_with")}
