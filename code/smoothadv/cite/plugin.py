"""Registers the command ``cite``."""

from smoothadv.base.registry import COMMANDS, Addition

COMMANDS.register("cite")(
    Addition("smoothadv.cite.command:main", "print the BibTeX entries of what made logs")
)
