"""The analyses as functions of logs, like ``smoothadv.table``, and which logs an analysis reads."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import FIELDS
from smoothadv.analysis.logs import Logs, comparison_warnings, condition, restrict
from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.table_formats import Table
from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import (
    Checked,
    positive_int,
    positive_noise_level,
    probability,
    setting,
    settings_of,
    takes,
)

_STATED = "for logs that do not state it, or state it wrongly"
_RETURNS = {
    "table": "a DataFrame, in which accuracies are fractions",
    "figure": "a matplotlib Figure",
    "page": "the text of the HTML page",
}


@dataclass(frozen=True, kw_only=True)
class LogsSpec(Checked):
    """Which logs an analysis reads."""

    logs: tuple[str, ...] = setting(
        parse=str,
        flag="logs",
        metavar="LOG",
        group="logs",
        keyword=False,
        help="files, folders (searched throughout) or globs; NAME=LOG puts them into the group "
        "NAME",
    )
    where: tuple[str, ...] = setting(
        (),
        parse=condition,
        metavar="FIELD=VALUE",
        group="logs",
        help=f"use only logs with these hyper-parameters ({', '.join(FIELDS)})",
    )
    sigma: float | None = setting(
        None, parse=positive_noise_level, metavar="S", group="logs", help=f"sigma, {_STATED}"
    )
    n: int | None = setting(
        None, parse=positive_int, flag="--N", group="logs", help=f"N, {_STATED}"
    )
    alpha: float | None = setting(
        None, parse=probability, metavar="A", group="logs", help=f"alpha, {_STATED}"
    )
    dimension: int | None = setting(
        None,
        parse=positive_int,
        metavar="D",
        group="logs",
        help=f"number of coordinates of an image, for l_inf radii, {_STATED}",
    )

    def read(self, analysis: type[Analysis]) -> Logs:
        """The logs that an analysis needs, with warnings about differences between them; UserError
        where there are none.
        """
        names = {"sigma": self.sigma, "N": self.n, "alpha": self.alpha, "dimension": self.dimension}
        logs = restrict(read_logs(self.logs, analysis.kinds, names, warn), self.where)
        for note in comparison_warnings(logs, analysis.pairs_examples):
            warn(note)
        return logs


def paths(given: tuple[Any, ...]) -> tuple[str, ...]:
    """Files, folders and globs that were given one by one, as a list, or as a dict from NAME to one
    or several, which stand for NAME=LOG.
    """
    several = len(given) == 1 and not isinstance(given[0], (str, os.PathLike))
    logs: Any = given[0] if several else given
    groups = logs if isinstance(logs, Mapping) else {"": logs}
    found = list[str]()
    for name, those in groups.items():
        if hasattr(those, "iloc"):
            raise UserError("logs: found a DataFrame, expected files: certify(log=...) writes one")
        try:
            listed = [those] if isinstance(those, (str, os.PathLike)) else those
            found += [f"{name}={os.fspath(log)}" if name else os.fspath(log) for log in listed]
        except TypeError:
            raise UserError(f"logs: found {those!r:.200}, expected strings or paths") from None
    return tuple(found)


@cache
def function_of(name: str) -> Callable[..., Any]:
    """The analysis ``name`` of ANALYSES as a function of logs."""
    component = ANALYSES[name]

    def analysis(*logs: Any, **keywords: Any) -> Any:
        own = {one.field for one in settings_of(component)} & keywords.keys()
        analyse = component(**{field: keywords.pop(field) for field in own})
        made: Any = analyse(LogsSpec(logs=paths(logs), **keywords).read(component))
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
