"""The command ``sweep``: trains, certifies and attacks the models of a grid."""

from smoothadv.commands.sweep.command import main

__all__ = ["main"]
