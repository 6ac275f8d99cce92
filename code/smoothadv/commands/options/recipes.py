"""Recipes: files of training options under a name. What the command line says wins."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from smoothadv.commands.runner import Parser
from smoothadv.errors import UserError

_FOLDER = Path(__file__).parents[2] / "recipes"
RELEASED = "released-behaviour"
# A recipe says how to train: neither on what, nor where.
_NEVER = (
    *("--recipe", "--released-behaviour", "--data-dir", "--device", "--seed", "--resume", "--overwrite", "--debug"),
    *("--help", "-h", "--version", "--plugin"),
)


def recipe_names() -> list[str]:
    """The recipes that come with the package, for --recipe."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt") if path.stem != RELEASED)


def recipe_words(name: str) -> list[str]:
    """The options in a recipe, by its name or the path of a file; UserError where there is none."""
    path = _FOLDER / f"{name}.txt"
    path = path if path.is_file() else Path(name)
    try:
        return shlex.split(path.read_text(), comments=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--recipe: '{name}' is neither one of {', '.join(recipe_names())} nor a file of options ({error})"
        ) from error


def with_recipe(
    parser: Parser, options: argparse.Namespace, name: str, readable: Callable[[argparse.Namespace], set[str]]
) -> argparse.Namespace:
    """The options with what a recipe says and the command line does not.

    Settings of components, whose destinations are their flags, are taken only where ``readable(options)`` has them: a
    recipe may serve several objectives and attacks. A usage error where the recipe holds anything but training options.
    """
    words = recipe_words(name)
    with parser.reading(f"recipe {name}"):
        for word in words:
            if word.partition("=")[0] in _NEVER:
                parser.error(f"{word.partition('=')[0]} is no part of a recipe")
        recipe = vars(parser.parse_args([options.dataset, options.arch, str(options.outdir), *words]))
    # What is read depends on the objective and the attack, which the recipe may name.
    for is_setting in (False, True):
        known = readable(options)
        added = {}
        for field, value in recipe.items():
            present = getattr(options, field, None)
            # A switch that was not given is its default, False; another option is None or not there.
            is_missing = present is None or (present is False and parser.get_default(field) is False)
            if field.startswith("--") == is_setting and is_missing and (not is_setting or field in known):
                added[field] = value
        options = argparse.Namespace(**{**vars(options), **added})
    return options
