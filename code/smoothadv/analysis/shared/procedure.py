"""Which certification procedure made a log, and what its radii are therefore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smoothadv.analysis.shared.hyper_parameters import Parameters
from smoothadv.certification import PROCEDURES, Procedure
from smoothadv.certification.exact import Exact
from smoothadv.certification.on_grid import GRID_COLUMNS, LABEL_AWARE
from smoothadv.records import COUNT_COLUMNS

if TYPE_CHECKING:
    import pandas as pd


def procedure_of(parameters: Parameters) -> type[Procedure] | None:
    """The procedure that a log's manifest names; ``Exact`` for logs that name none, such as the released ones.

    None where the manifest names a procedure that is not registered here.
    """
    method = parameters.settings.get("method")
    if method is None:
        return Exact
    return PROCEDURES[method] if isinstance(method, str) and method in PROCEDURES else None


def is_on_grid(table: pd.DataFrame, parameters: Parameters) -> bool:
    """Whether the radii are the largest of a grid that were certified, and not the largest that could have been."""
    procedure = procedure_of(parameters)
    return (procedure is not None and procedure.on_grid) or set(GRID_COLUMNS) <= set(table.columns)


def radii_follow_from_counts(table: pd.DataFrame, parameters: Parameters) -> bool:
    """Whether ``bounds.certified_radius`` of the counts in each row must give its radius."""
    procedure = procedure_of(parameters)
    has_counts = set(COUNT_COLUMNS) <= set(table.columns)
    return has_counts and procedure is not None and procedure.fixed_sample and not is_on_grid(table, parameters)


def is_label_aware(table: pd.DataFrame) -> bool:
    """Whether images were skipped because the class selected was not the true one: benchmarks only."""
    return LABEL_AWARE in table
