"""From logs to numbers, tables and figures. Reads records, never
imports torch.

An analysis is a frozen dataclass derived from ``Analysis`` and registered in ``ANALYSES``; its
settings become options of ``analyze NAME``, and its docstring is the help text. It maps ``Logs``,
such as those of ``reading.read_logs``, to a ``Table``, a figure or a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from smoothadv.analysis.figure_style import Figure
from smoothadv.analysis.logs import Logs
from smoothadv.analysis.table_formats import Table
from smoothadv.base.registry import Registry, discover
from smoothadv.base.settings import Checked


class Analysis(Checked, ABC):
    """Makes a table, a figure or a page from logs."""

    makes: ClassVar[str] = "table"
    """What a call returns: "table" for a ``Table``, "figure" for a matplotlib Figure, "page" for
    the text of HTML.
    """
    kinds: ClassVar[tuple[str, ...]] = ("certification",)
    """The kinds of logs that it reads: "certification", "prediction", "training"."""
    pairs_examples: ClassVar[bool] = False
    """Whether it compares logs on the examples that are in both, so that others do not matter."""

    @abstractmethod
    def __call__(self, logs: Logs) -> Table | Figure | str:
        """The result for these logs; UserError where they are not the logs that it needs."""


ANALYSES: Registry[type[Analysis]] = Registry("analysis")

discover(__name__, __path__)
