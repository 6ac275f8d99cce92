"""Registers conformal sets: the command ``sets``, its analysis and its function."""

from smoothadv.base.registry import ANALYSES, COMMANDS, FUNCTIONS, Addition

COMMANDS.register("sets")(
    Addition(
        "smoothadv.sets.command:main",
        "conformal sets of classes that hold the label under attack, by noisy passes",
    )
)
ANALYSES.register("sets")(Addition("smoothadv.sets.table:SetsTable"))
FUNCTIONS.register("conformal_sets")(Addition("smoothadv.sets.scoring:conformal_sets"))
