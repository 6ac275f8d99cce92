"""How tables are written: percent and marks for people, full precision for programs, and any text
as itself.
"""

import csv
import io
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smoothadv.analysis.radii import Radius
from smoothadv.analysis.table_formats import (
    FORMATS,
    Annotated,
    Column,
    Markup,
    Table,
    display_cells,
)

PLAIN = Markup(lambda text: f"<{text}>", lambda text: f"^{text} ", lambda text: text)
KINDS = ["text", "count", "fraction", "percent", "difference", "number", "signed"]
# What the name of a log can hold, but for what is shown as an escape.
texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]), min_size=1, max_size=12
)


def column(kind: str, compared: bool = False) -> Column:
    return Column("key", "title", kind, compared)


@pytest.mark.parametrize(
    ("value", "kind", "decimals", "text"),
    [
        *(
            (0.12345, kind, 1, text)
            for kind, text in zip(KINDS[2:], ["12.3", "12.3", "+12.3", "0.123", "+0.123"])
        ),
        (0.12345, "percent", 2, "12.35"),
        (1.0, "percent", 0, "100"),
        (-0.05, "difference", 0, "-5"),
        (-2.0, "signed", 0, "-2.000"),
        (-0.0004, "difference", 1, "+0.0"),
        (-0.0004, "signed", 1, "+0.000"),
        (-0.0, "number", 1, "0.000"),
        (0.0, "probability", 1, "<0.001"),
        (0.001, "probability", 1, "0.001"),
        (12345, "count", 1, "12,345"),
        ("0", "text", 1, "0"),
        (None, "percent", 1, "–"),
        (None, "text", 1, "–"),
        (0.0, "percent", 1, "0.0"),
        (Annotated(0.5, raised=0.75), "percent", 1, "^75.0 50.0"),
        (Annotated(0.5, raised=0.0), "percent", 1, "^0.0 50.0"),
        (Annotated(0.5, interval=(0.25, 0.75)), "percent", 1, "50.0 (25.0–75.0)"),
        (Annotated(0.5, interval=(0.0, 0.0)), "percent", 0, "50 (0–0)"),
        (Annotated(0.5, kind="signed"), "difference", 1, "+0.500"),
    ],
)
def test_value_is_shown_by_its_kind(value, kind, decimals, text):
    assert display_cells(Table([column(kind)], [[value]]), decimals, PLAIN) == [[text]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 0.4], [True, False]),
        ([0.5004, 0.4996, 0.499], [True, True, False]),
        ([0.5, None, 0.4], [True, False, False]),
        ([0.5], [False]),
        ([0.5, None], [False, False]),
        ([0.0, 0.0], [False, False]),
        ([0.0004, 0.0001], [False, False]),
        ([None, None], [False, False]),
        ([Annotated(0.4, raised=0.9), Annotated(0.5, raised=0.1)], [False, True]),
        ([Annotated(0.4, interval=(0, 1)), 0.4], [True, True]),
    ],
)
def test_best_as_printed_is_bold_where_there_is_another(values, expected):
    table = Table([column("percent", compared=True)], [[value] for value in values])
    assert [cell.startswith("<") for (cell,) in display_cells(table, 1, PLAIN)] == expected


def cells_of(line: str) -> list[str]:
    """The cells of a line of a pipe table, whose pipes have a backslash before them where they are
    text.
    """
    parts = re.split(r"(?<!\\)\|", line)
    assert parts[0] == parts[-1] == ""
    return [part.strip().replace("\\|", "|") for part in parts[1:-1]]


@given(texts.filter(lambda text: "\\" not in text), st.floats(0, 1))
@example("a|b", 0.5)
def test_markdown_cell_or_title_holds_any_text(text, share):
    """compare puts the names of logs into titles."""
    lines = FORMATS["markdown"](
        Table([Column("key", text, "text"), column("percent")], [[text, share]])
    ).splitlines()
    assert [cells_of(lines[0])[0], *cells_of(lines[2])] == [
        text.strip(),
        text.strip(),
        f"{100 * share:.1f}",
    ]
    assert len({len(line) for line in lines}) == 1, "padded to equal width"


def latex_reads(text: str) -> str:
    """What a line of escaped LaTeX prints, as far as special characters go; fails on one that is
    not escaped.
    """
    words = {
        "textbackslash": "\\",
        "textasciitilde": "~",
        "textasciicircum": "^",
        "textless": "<",
        "textgreater": ">",
    }
    words["textbar"] = "|"
    printed = ""
    for word, escaped, other in re.findall(r"\\(text[a-z]+)\{\}|\\(.)|(.)", text, re.DOTALL):
        assert other not in [*"&%$#_{}~^\\<>|"], text
        printed += words[word] if word else escaped or other
    return printed


@given(texts)
@example(r"50% of $x_1^2$ & {a}\~#<b>|c")
def test_latex_prints_any_text_as_it_is(text):
    table = Table([Column("key", text, "text")], [[text]])
    lines = FORMATS["latex"](table).splitlines()
    expected = text.replace("–", "--")
    assert [latex_reads(lines[index].removesuffix(r" \\")) for index in (2, 4)] == [expected] * 2


numbers = (
    st.none() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(st.tuples(texts, numbers), max_size=6))
def test_csv_and_json_lose_nothing(rows):
    table = Table([Column("name", "n", "text"), Column("value", "v", "number")], rows)
    header, *lines = csv.reader(io.StringIO(FORMATS["csv"](table)))
    assert header == ["name", "value"]
    assert [(name, float(text) if text else None) for name, text in lines] == rows
    assert [tuple(record.values()) for record in json.loads(FORMATS["json"](table))] == rows


@pytest.mark.parametrize(
    ("text", "key", "title"),
    [
        *(
            (text, text, title)
            for text, title in zip(["0.25", "1", "0.125", "0"], ["0.25", "1.00", "0.125", "0.00"])
        ),
        ("2/255", "0.00784314", "2/255"),
        ("1e-3", "0.001", "0.001"),
    ],
)
def test_radius_heads_its_column_as_it_was_written(text, key, title):
    assert (Radius.parse(text).column().key, Radius.parse(text).column().title) == (key, title)


def test_different_radii_head_different_columns():
    """Otherwise JSON keeps one of the two."""
    first, second = Radius.parse("0.25").column(), Radius.parse("0.2500001").column()
    assert first.key != second.key and first.title != second.title
