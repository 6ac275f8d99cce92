"""From logs to numbers, tables and figures. Reads records, never
imports torch.

An analysis is a frozen dataclass derived from ``Analysis`` and registered in ``ANALYSES``; its
settings become options of ``analyze NAME``, and its docstring is the help text. It maps ``Logs``,
such as those of ``reading.read_logs``, to a ``Table``, a figure or a page. ``function_of`` makes it
a function of logs, like ``smoothadv.table``.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from smoothadv.analysis.figure_style import Figure
from smoothadv.analysis.logs import Logs
from smoothadv.analysis.reading import LogsSpec, paths
from smoothadv.analysis.table_formats import Table
from smoothadv.base.registry import Registry, discover
from smoothadv.base.settings import Checked, settings_of, takes


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
_RETURNS = {
    "table": "a DataFrame, in which accuracies are fractions",
    "figure": "a matplotlib Figure",
    "page": "the text of the HTML page",
}


@cache
def function_of(name: str) -> Callable[..., Any]:
    """The analysis ``name`` of ANALYSES as a function of logs."""
    component = ANALYSES[name]

    def analysis(*logs: Any, **keywords: Any) -> Any:
        own = {one.field for one in settings_of(component)} & keywords.keys()
        analyse = component(**{field: keywords.pop(field) for field in own})
        asked = LogsSpec(logs=paths(logs), **keywords)
        made: Any = analyse(asked.read(component.kinds, component.pairs_examples))
        return made.frame() if isinstance(made, Table) else made

    analysis.__name__ = analysis.__qualname__ = name
    analysis.__module__ = "smoothadv"
    analysis.__doc__ = "\n\n".join(
        (
            inspect.cleandoc(component.__doc__ or name),
            "``logs`` are files, folders (searched throughout) or globs, as strings or paths;\n"
            "NAME=LOG puts them into the group NAME, and so does a dict {NAME: LOG}.",
            f"Returns {_RETURNS[component.makes]}. UserError where logs or keywords do not fit.",
        )
    )
    return takes(component, LogsSpec)(analysis)


discover(__name__, __path__)
