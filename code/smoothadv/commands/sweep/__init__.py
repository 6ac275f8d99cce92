"""The command ``sweep``: trains, certifies and attacks the models of a grid.

``command`` reads its options and acts on them. ``planning`` makes jobs of a grid, and ``reading`` asks the commands of
these jobs what their options mean. ``costs`` estimates how long the jobs take.
"""

from smoothadv.commands.sweep.command import main

__all__ = ["main"]
