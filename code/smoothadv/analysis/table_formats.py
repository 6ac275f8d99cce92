"""Tables and how they are written: markdown, LaTeX, CSV, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smoothadv.base.errors import escape
from smoothadv.base.registry import Registry

CellValue = str | int | float | None


@dataclass(frozen=True)
class Annotated:
    """A number for people: with another one raised before it, with its interval, or of another kind
    than its column.
    """

    value: float
    raised: float | None = None
    interval: tuple[float, float] | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Label:
    """The name of a log, the ``value`` that CSV and JSON have; people see ``text``, and on a page
    ``full`` as well.
    """

    value: str
    text: str
    full: str


Cell = CellValue | Annotated | Label


@dataclass(frozen=True)
class Column:
    """A column: ``key`` names it in CSV and JSON, ``title`` in markdown, LaTeX and HTML.

    ``kind`` is "text", "count", "fraction" (percent for people, as the title then says), "percent"
    (the same where the whole table is in percent), "difference" (of fractions), "number",
    "probability" or "signed" (a number with its sign). The largest value of a column that is to be
    ``compared`` stands out in bold. ``ends`` name further columns of CSV and JSON: the ends of
    the intervals that its cells have.
    """

    key: str
    title: str
    kind: str
    compared: bool = False
    ends: tuple[str, ...] = ()


def columns_of(kind: str, **titles: str) -> list[Column]:
    """Columns of one kind: the ``titles`` by their keys."""
    return [Column(key, title, kind) for key, title in titles.items()]


def columns_of_ends(kind: str, confidence: float) -> list[Column]:
    """The two columns of the ends of intervals, like "95% low"."""
    level = f"{100 * confidence:g}%"
    return columns_of(kind, low=f"{level} low", high=f"{level} high")


@dataclass(frozen=True)
class Table:
    """``rows`` hold one value per column, of full precision; accuracies are fractions, None is a
    missing value.

    Markdown, LaTeX and HTML show ``for_people`` instead where a layout for people differs from one
    for programs.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    for_people: Table | None = None

    @property
    def keys(self) -> list[str]:
        """The names of the columns that CSV and JSON have."""
        return [key for column in self.columns for key in (column.key, *column.ends)]

    def plain_rows(self) -> list[list[CellValue]]:
        """The rows as CSV and JSON have them."""
        return [
            [
                value
                for column, cell in zip(self.columns, row)
                for value in (plain(cell), *(getattr(cell, "interval", ()) if column.ends else ()))
            ]
            for row in self.rows
        ]

    def frame(self, dtype: type | None = None) -> Any:
        """The rows as a DataFrame."""
        import pandas as pd  # help texts do not wait for it

        return pd.DataFrame(self.plain_rows(), columns=self.keys, dtype=dtype)

    def select(self, places: Sequence[int]) -> Table:
        """The columns at these places."""
        return Table(
            [self.columns[place] for place in places],
            [[row[place] for place in places] for row in self.rows],
        )


def plain(cell: Cell) -> CellValue:
    """The number that is annotated, the name of a label, or the value itself."""
    return cell.value if isinstance(cell, Annotated | Label) else cell


@dataclass(frozen=True)
class Markup:
    """How a format writes bold text, a raised number, and its special characters."""

    bold: Callable[[str], str]
    raise_: Callable[[str], str]
    escape: Callable[[str], str]


FORMATS: Registry[Callable[..., str]] = Registry("format")
_WORDS = {
    "\\": "backslash",
    "~": "asciitilde",
    "^": "asciicircum",
    "<": "less",
    ">": "greater",
    "|": "bar",
}
_LATEX = str.maketrans(
    {character: rf"\text{word}{{}}" for character, word in _WORDS.items()}
    | {one: f"\\{one}" for one in "&%$#_{}"}
)


def _number(value: float, kind: str, decimals: int) -> str:
    if kind == "probability" and value < 0.001:
        return "<0.001"
    sign = "+" if kind in ("difference", "signed") else ""
    # No negative zero is left once 0.0 is added to a rounded number.
    if kind in ("fraction", "percent", "difference"):
        return f"{round(100 * value, decimals) + 0.0:{sign}.{decimals}f}"
    return f"{round(value, 3) + 0.0:{sign}.3f}"


def _display(value: Cell, kind: str, decimals: int, markup: Markup) -> str:
    """A value as a person reads it: fractions in percent."""
    if value is None:
        return "–"
    if isinstance(value, Annotated):
        kind = value.kind or kind
        text = _display(value.value, kind, decimals, markup)
        if value.interval:
            text += f" ({'–'.join(_number(end, kind, decimals) for end in value.interval)})"
        if value.raised is not None:
            text = markup.raise_(_number(value.raised, kind, decimals)) + text
        return text
    if isinstance(value, Label):
        return markup.escape(escape(value.text, None))
    if kind in ("text", "count"):
        return markup.escape(f"{value:,}" if isinstance(value, int) else escape(str(value), None))
    return markup.escape(_number(float(value), kind, decimals))


def display_cells(table: Table, decimals: int, markup: Markup) -> list[list[str]]:
    """All cells as text; the best value of a compared column is bold if there is more than one
    value.
    """
    kinds = [column.kind for column in table.columns]
    cells = [
        [_display(value, kind, decimals, markup) for value, kind in zip(row, kinds)]
        for row in table.rows
    ]
    for index, column in enumerate(table.columns):
        values: list[Any] = [plain(row[index]) for row in table.rows]
        if column.compared and len(values) - values.count(None) > 1:
            # Compared as printed: bold must not claim a difference that nobody sees.
            printed = [float(_number(value or 0.0, column.kind, decimals)) for value in values]
            for row, number in zip(cells, printed):
                if number == max(printed) > 0:
                    row[index] = markup.bold(row[index])
    return cells


def titles(table: Table) -> list[str]:
    """Column titles for people."""
    return [
        escape(column.title, None) + (" (%)" if column.kind in ("fraction", "difference") else "")
        for column in table.columns
    ]


def without_equal(table: Table, markup: Markup, kept: str = "") -> tuple[str, Table]:
    """What all of several rows have in common in columns of texts and counts, like "n 100,000;
    sigma 0.5", and the table without these columns; the column ``kept`` stays.
    """
    places = range(len(table.columns))
    equal = [
        place
        for place in places
        if table.columns[place].kind in ("text", "count")
        and table.columns[place].key != kept
        and len({row[place] for row in table.rows}) == 1 < len(table.rows)
    ]
    common = table.select(equal)
    cells = zip(titles(common), *display_cells(common, 1, markup)[:1])
    said = "; ".join(f"{markup.escape(title)} {cell}" for title, cell in cells)
    return said, table.select([place for place in places if place not in equal])


MARKDOWN = Markup(
    lambda text: f"**{text}**", lambda text: f"({text}) ", lambda text: text.replace("|", "\\|")
)


@FORMATS.register("markdown")
def markdown(table: Table, decimals: int = 1) -> str:
    """A pipe table, with columns of equal width so that its source is legible too."""
    table = table.for_people or table
    cells = [
        [MARKDOWN.escape(title) for title in titles(table)],
        *display_cells(table, decimals, MARKDOWN),
    ]
    widths = [max(len(row[index]) for row in cells) for index in range(len(table.columns))]
    align = [str.ljust if column.kind == "text" else str.rjust for column in table.columns]
    lines = [
        "| " + " | ".join(pad(text, width) for pad, text, width in zip(align, row, widths)) + " |"
        for row in cells
    ]
    rule = "|".join(
        "-" * (width + 2) if column.kind == "text" else "-" * (width + 1) + ":"
        for column, width in zip(table.columns, widths)
    )
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


@FORMATS.register("latex")
def latex(table: Table, decimals: int = 1) -> str:
    """A tabular with the rules of booktabs."""
    table = table.for_people or table
    markup = Markup(
        lambda text: rf"\textbf{{{text}}}",
        lambda text: rf"$^{{({text})}}$",
        lambda text: text.translate(_LATEX),
    )
    alignment = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    rows = [" & ".join(cells) + r" \\" for cells in display_cells(table, decimals, markup)]
    lines = [
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(map(markup.escape, titles(table))) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines).replace("–", "--") + "\n"


@FORMATS.register("csv")
def comma_separated(table: Table, decimals: int = 1) -> str:
    """A header and a line per row; fractions of full precision, whatever ``decimals``."""
    return table.frame(object).to_csv(index=False, lineterminator="\n")


@FORMATS.register("json")
def json_records(table: Table, decimals: int = 1) -> str:
    """A list of objects, one per row; fractions of full precision, whatever ``decimals``."""
    return json.dumps([dict(zip(table.keys, row)) for row in table.plain_rows()], indent=2) + "\n"
