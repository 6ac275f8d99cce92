"""Recipes: named files of training options. Options on the command line override them."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import read_regular
from smoothadv.cli.runner import Parser

_FOLDER = Path(__file__).parents[2] / "recipes"
RELEASED = "released-behaviour"
# A recipe says how to train, not on which data or in which place.
_NEVER = "--recipe --released-behaviour --data-dir --device --seed --resume --overwrite".split()
_NEVER += ["--debug", "--plugin", "--help", "-h", "--version"]
# What the command line may choose, and the options of recipes that then have no meaning.
_REPLACED = {
    ("--lr-schedule", "one-cycle"): {"--lr-step-size", "--lr-factor"},
    ("--optimizer", "adamw"): {"--momentum", "--lr"},
}


def recipe_names() -> list[str]:
    """The recipes that come with the package, for --recipe."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt") if path.stem != RELEASED)


def recipe_words(name: str) -> list[str]:
    """The words in a recipe, given its name or the path of a file; UserError if there is no such
    file.
    """
    path = _FOLDER / f"{name}.txt"
    path = path if path.is_file() else Path(name)
    try:
        return shlex.split(read_regular(path).decode(), comments=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--recipe: '{name}' is neither one of {', '.join(recipe_names())} nor a file of "
            f"options ({error})"
        ) from error


def with_recipe(
    parser: Parser,
    options: argparse.Namespace,
    name: str,
    readable: Callable[[argparse.Namespace], set[str]],
) -> argparse.Namespace:
    """The options, with those of a recipe added where the command line does not give them.

    Of the settings, whose destinations are their flags, only those in ``readable(options)`` are
    added, since a recipe may serve several objectives and attacks. A usage error where it has
    options of other commands.
    """
    words = recipe_words(name)
    # A denoiser is not attacked.
    if "--warmup" in words and "--warmup" not in parser._option_string_actions:
        place = words.index("--warmup")
        del words[place : place + 2]
    with parser.reading(f"recipe {name}"):
        for word in words:
            if word.partition("=")[0] in _NEVER:
                parser.error(f"{word.partition('=')[0]} is no part of a recipe")
        recipe = vars(
            parser.parse_args([options.dataset, options.arch, str(options.outdir), *words])
        )
    # A setting that is not on the command line has no attribute; another option is None or False.
    given = {
        name: value
        for name, value in vars(options).items()
        if name.startswith("--") or (value is not None and value is not False)
    }
    known = readable(argparse.Namespace(**{**recipe, **given}))
    settings = [flag for flag in recipe if flag.startswith("--")]
    if settings and not known.intersection(settings):
        warn(f"nothing reads {', '.join(settings)} of the recipe {name} here: is --attack missing?")
    for (flag, value), replaced in _REPLACED.items():
        if given.get(flag) == value:
            known -= replaced
    taken = {
        name: value for name, value in recipe.items() if not name.startswith("--") or name in known
    }
    return argparse.Namespace(**{**vars(options), **taken, **given})
