"""Recipes: files of training options under a name. What the command line says wins."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from smoothadv.commands.runner import Parser
from smoothadv.errors import UserError

_FOLDER = Path(__file__).parent.parent / "recipes"
RELEASED = "released-behaviour"
# What a recipe is about; where data and results are, is not.
_NEVER = {"dataset", "arch", "outdir", "recipe", "released_behaviour", "data_dir", "device", "existing", "debug"}


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


def apply_recipe(parser: Parser, options: argparse.Namespace, name: str, readable: set[str]) -> None:
    """Give ``options`` what a recipe says and the command line does not.

    Settings of components, whose destinations are their flags, only where they are in ``readable``: a recipe may
    serve several objectives and attacks. A usage error where the recipe holds something else than training options.
    """
    positional = [options.dataset, options.arch, str(options.outdir)]
    with parser.reading(f"recipe {name}"):
        recipe = vars(parser.parse_args([*positional, *recipe_words(name)]))
        for field, value in recipe.items():
            is_said = value != parser.get_default(field) or field.startswith("--")
            if not is_said or field in _NEVER | {"seed"}:
                if is_said and field not in ("dataset", "arch", "outdir"):
                    parser.error(f"--{field.replace('_', '-')} is no part of a recipe")
                continue
            if field.startswith("--") and field not in readable:
                continue
            if getattr(options, field, parser.get_default(field)) == parser.get_default(field):
                setattr(options, field, value)
