"""Recipes by name. Each module reads one published layout; docs/data.md lists the layouts."""

import importlib
from typing import cast, get_args

from services.data.recipes.base import Recipe
from volley.data import RecipeName

NAMES: tuple[str, ...] = get_args(RecipeName)


def recipe_of(name: RecipeName) -> Recipe:
    """The recipe called ``name``."""
    return cast(Recipe, importlib.import_module(f"{__name__}.{name}"))
