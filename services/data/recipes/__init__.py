"""The recipes by name. Each module reads one published layout; docs/data.md lists them."""

import importlib
from typing import cast, get_args

from services.data.recipes.base import Recipe
from volley.data import RecipeName
from volley.plugins import DATA, RecipePlugin, plugin_of, resolved

NAMES: tuple[str, ...] = get_args(RecipeName)


def recipe_of(name: RecipeName) -> Recipe:
    """Return the recipe called ``name``, built in or from a plug-in. Raises `JobError` if it does not load."""
    if name not in NAMES:
        return cast(Recipe, resolved(plugin_of(DATA, name, RecipePlugin).module))
    return cast(Recipe, importlib.import_module(f"{__name__}.{name}"))
