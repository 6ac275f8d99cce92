"""Tables and how they are written: markdown, LaTeX, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smoothadv.registry import Registry

Value = str | int | float


@dataclass(frozen=True)
class Column:
    """A column: ``key`` names it in CSV and JSON, ``title`` in markdown and LaTeX.

    ``kind`` is "text", "count", "fraction" (percent in markdown and LaTeX) or "radius". The largest
    value of a column that is to be ``compared`` stands out in bold.
    """

    key: str
    title: str
    kind: str
    compared: bool = False


@dataclass(frozen=True)
class Table:
    """``rows`` hold one value per column, full precision, accuracies as fractions."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]


FORMATS: Registry[Callable[[Table], str]] = Registry("format")


def radius_column(radius: float) -> Column:
    """The certified accuracy at a radius."""
    return Column(
        f"{radius:g}", f"{radius:.2f}" if round(radius, 2) == radius else f"{radius:g}", "fraction", compared=True
    )


def _display(value: Value, kind: str) -> str:
    """A value as a person reads it: fractions in percent with one decimal."""
    if kind == "fraction":
        return f"{100 * value:.1f}"
    return f"{value:.3f}" if kind == "radius" else str(value)


def _cells(table: Table, bold: Callable[[str], str], escape: Callable[[str], str]) -> list[list[str]]:
    """All cells as text; the best of a compared column bold, if there is anything to compare it with."""
    shown = [[_display(value, column.kind) for value, column in zip(row, table.columns)] for row in table.rows]
    cells = [[escape(text) for text in row] for row in shown]
    for index, column in enumerate(table.columns):
        if column.compared and len(table.rows) > 1:
            best = max(float(row[index]) for row in shown)
            for row, shown_row in zip(cells, shown):
                if float(shown_row[index]) == best > 0:
                    row[index] = bold(row[index])
    return cells


@FORMATS.register("markdown")
def markdown(table: Table) -> str:
    """A pipe table, columns padded to equal width so that the source is legible too."""
    titles = [
        column.title + (" (%)" if column.kind == "fraction" and not column.compared else "") for column in table.columns
    ]
    cells = [titles, *_cells(table, lambda text: f"**{text}**", lambda text: text.replace("|", "\\|"))]
    widths = [max(len(row[index]) for row in cells) for index in range(len(titles))]
    align = [str.ljust if column.kind == "text" else str.rjust for column in table.columns]
    lines = [
        "| " + " | ".join(pad(text, width) for pad, text, width in zip(align, row, widths)) + " |" for row in cells
    ]
    rule = "|".join(
        "-" * (width + 2) if column.kind == "text" else "-" * (width + 1) + ":"
        for column, width in zip(table.columns, widths)
    )
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


@FORMATS.register("latex")
def latex(table: Table) -> str:
    """A booktabs tabular."""
    alignment = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    titles = [_latex_escape(column.title) for column in table.columns]
    rows = _cells(table, lambda text: rf"\textbf{{{text}}}", _latex_escape)
    body = [" & ".join(row) + r" \\" for row in rows]
    return (
        "\n".join(
            [
                rf"\begin{{tabular}}{{{alignment}}}",
                r"\toprule",
                " & ".join(titles) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )
        + "\n"
    )


def _latex_escape(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{character: "\\" + character for character in "&%$#_{}"},
    }
    return "".join(special.get(character, character) for character in text)


@FORMATS.register("csv")
def comma_separated(table: Table) -> str:
    """A header and a line per row; fractions, full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows(table.rows)
    return text.getvalue()


@FORMATS.register("json")
def json_records(table: Table) -> str:
    """A list of objects, one per row."""
    keys = [column.key for column in table.columns]
    return json.dumps([dict(zip(keys, row)) for row in table.rows], indent=2) + "\n"
