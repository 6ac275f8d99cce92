"""Recipes: named files of training options. Options on the command line override them."""

import shlex
from collections.abc import Callable, Collection
from pathlib import Path

from smoothadv.base.errors import UsageError, UserError, warn
from smoothadv.cli.runner import Options, Parser, reading

_FOLDER = Path(__file__).parents[2] / "recipes"
RELEASED_RECIPE = "released-behaviour"
DENOISING_RECIPE = "denoiser"
"""The recipe of denoisers where neither a recipe nor an optimizer is named: with the learning rate
of classifiers, they diverge."""
# A recipe says how to train, not on which data or in which place.
_NEVER = (
    "--recipe --released-behaviour --data-dir --device --seed --resume --overwrite --debug "
    "--plugin --help -h --version"
).split()
# What the command line may choose, and the options of recipes that then have no meaning, unless the
# recipe has chosen the same; and what those have chosen that choose nothing.
_REPLACED = {
    ("--lr-schedule", "step"): {"--lr-rise", "--lr-end"},
    ("--lr-schedule", "one-cycle"): {"--lr-step-size", "--lr-factor", "--lr-rise", "--lr-end"},
    ("--lr-schedule", "cosine"): {"--lr-step-size", "--lr-factor"},
    ("--optimizer", "adamw"): {"--momentum", "--lr"},
    ("--optimizer", "sgd"): {"--layer-decay", "--lr"},
}
_USUAL = {"--lr-schedule": "step", "--optimizer": "sgd"}


def recipe_names() -> list[str]:
    """The recipes that come with the package, for --recipe."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt") if path.stem != RELEASED_RECIPE)


def recipe_words(name: str) -> list[str]:
    """The words in a recipe, given its name or the path of a file; UserError if there is no such
    file.
    """
    path = _FOLDER / f"{name}.txt"
    path = path if path.is_file() else Path(name)
    try:
        return shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--recipe: '{name}' is neither one of {', '.join(recipe_names())} nor a file of "
            f"options ({error})"
        ) from error


def added_by_recipe(
    parser: Parser,
    options: Options,
    name: str,
    readable: Callable[[Options], set[str]],
    general: Collection[str],
) -> Options:
    """The options of a recipe that the command line does not give.

    Only those in ``readable(options)`` are among them, since a recipe may serve several objectives
    and attacks; a warning where none of its options is but the ``general`` ones. A usage error
    where it has options of other commands.
    """
    words = recipe_words(name)
    # A denoiser is not attacked.
    if "--warmup" in words and "--warmup" not in parser._option_string_actions:
        place = words.index("--warmup")
        del words[place : place + 2]
    with reading(f"recipe {name}"):
        for word in words:
            if word.partition("=")[0] in _NEVER:
                raise UsageError(f"{word.partition('=')[0]} is no part of a recipe")
        places = (str(options[name]) for name in ("dataset", "arch", "outdir"))
        recipe = vars(parser.parse_args([*places, *words]))
    known = readable({**recipe, **options})
    settings = [flag for flag in recipe if flag.startswith("--") and flag not in general]
    if settings and not known.intersection(settings):
        warn(f"nothing reads {', '.join(settings)} of the recipe {name} here: is --attack missing?")
    for (flag, value), replaced in _REPLACED.items():
        if options.get(flag) == value != recipe.get(flag, _USUAL[flag]):
            known -= replaced
    return {flag: recipe[flag] for flag in recipe if flag in known - options.keys()}
