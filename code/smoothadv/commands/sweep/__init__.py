"""The command ``sweep``: command.py reads its options and acts on them, planning.py makes jobs of a grid, costs.py
estimates what they will take, and report.py writes the page about them.
"""

from __future__ import annotations

from smoothadv.commands.sweep.command import main

__all__ = ["main"]
