"""Which certification procedure made a log, and what its radii are therefore."""

from collections.abc import Sequence

from smoothadv.analysis.shared.hyper_parameters import Parameters
from smoothadv.records.logs import CLASS, numbered
from smoothadv.records.readers import DataFrame
from smoothadv.statistics import PROCEDURES, Procedure
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.on_grid import GRID_COLUMNS, LABEL_AWARE
from smoothadv.statistics.top_k import RIVALS
from smoothadv.statistics.two_sided import RIVAL


def procedure_of(table: DataFrame, parameters: Parameters) -> type[Procedure] | None:
    """The procedure that a log's manifest names; ``Exact`` for logs that name none, such as the
    released ones.

    None where the manifest names a procedure that is not registered here, and of a log with rivals
    but no manifest.
    """
    method = parameters.settings.get("method")
    if method is None:
        return None if RIVAL in table or numbered(table.columns, RIVALS) else Exact
    return PROCEDURES[method] if isinstance(method, str) and method in PROCEDURES else None


def with_method(table: DataFrame, parameters: Parameters) -> Parameters:
    """The parameters with the name of the procedure as ``method``, where it is known."""
    method, source = parameters.settings.get("method"), "manifest"
    if (
        method is None
        and procedure_of(table, parameters) is Exact
        and not is_on_grid(table, parameters)
    ):
        method, source = "exact", "assumed"
    return parameters.replaced("method", method, source) if isinstance(method, str) else parameters


def is_on_grid(table: DataFrame, parameters: Parameters) -> bool:
    """Whether the radii are the largest of a grid that were certified, and not the largest that
    could have been.
    """
    procedure = procedure_of(table, parameters)
    return (procedure is not None and procedure.on_grid) or set(GRID_COLUMNS) <= set(table.columns)


def radii_follow_from_counts(table: DataFrame, parameters: Parameters) -> bool:
    """Whether ``Procedure.radius_from`` the counts in each row must give its radius."""
    procedure = procedure_of(table, parameters)
    if procedure is None or not procedure.fixed_sample or is_on_grid(table, parameters):
        return False
    try:
        counts = procedure.counts(parameters.settings)
    except (KeyError, TypeError, ValueError):
        return True  # who computes them will see which setting is missing
    # Of a set with some of its columns, who computes them will see which are missing.
    return set(counts) <= set(table.columns) or (RIVALS + "1" in counts and RIVALS + "1" in table)


def top_k_of(table: DataFrame, parameters: Parameters) -> int:
    """The k of a log of top-k certificates or predictions, by its manifest or else its columns; 0
    of other logs.
    """
    k = parameters.settings.get("top_k")
    return (
        k
        if type(k) is int and k > 0
        else len(numbered(table.columns, RIVALS) or numbered(table.columns, CLASS))
    )


def procedure_names(logs: Sequence[tuple[DataFrame, Parameters]]) -> list[str]:
    """What people call the procedure of each log; "" if all have one name.

    Those that state p_A alone share a name, and so do those that also bound the rivals: on a grid
    or not, they prove the same of the same votes. Label-aware and top-k certificates have names of
    their own: accuracies under two names differ even where the classifier is one.
    """
    names = [_name(table, parameters) for table, parameters in logs]
    return names if len(set(names)) > 1 else [""] * len(names)


def prediction_names(
    predictions: Sequence[tuple[DataFrame, Parameters]],
    certificates: Sequence[tuple[DataFrame, Parameters]],
) -> list[str]:
    """ "top-3" or the like for each prediction log; "" if one k is that of all of them and of the
    certificates.
    """
    sizes = [max(1, top_k_of(*log)) for log in [*predictions, *certificates]]
    return [f"top-{k}" if len(set(sizes)) > 1 else "" for k in sizes[: len(predictions)]]


def _name(table: DataFrame, parameters: Parameters) -> str:
    procedure, settings = procedure_of(table, parameters), parameters.settings
    is_one_sided = procedure is not None and procedure.one_sided
    if k := top_k_of(table, parameters):
        return f"top-{k}"
    words = [
        "one-sided"
        if is_one_sided
        else "two-sided"
        if RIVAL in table
        else str(settings.get("method"))
    ]
    if LABEL_AWARE in table:
        words.append("label-aware")
    return ", ".join(words)
