"""Registers the command ``sweep`` and the grids that come with it."""

from smoothadv.base.registry import COMMANDS, LISTS, Addition

COMMANDS.register("sweep")(
    Addition("smoothadv.sweep.command:main", "train, certify and attack grids of models")
)
LISTS.register("grids")(Addition("smoothadv.sweep.grid:shipped_grids"))
