"""Sets each cell of the tables that scripts/paper_tables.sh made beside the value that the paper
prints.

    python scripts/paper_verdicts.py OUTDIR TABLE...

OUTDIR holds TABLE.csv for each TABLE, like table2_cifar10. The printed values, in percent and with
the digits of the paper, are in scripts/paper_values/tableN.csv; docs/replication.md says where they
are from. Where the best of several models is printed, the column models says of how many released
logs. notes.csv explains known differences.

Writes verdicts.md and verdicts.csv to OUTDIR and prints how many cells have which verdict.

    python scripts/paper_verdicts.py OUTDIR objectives_cifar10

sets the models of scripts/grids/objectives-cifar10.toml beside the published rows of
scripts/paper_values/objectives_cifar10.csv, which were recomputed from the logs of all 10,000 test
images in the repositories that the column source names. OUTDIR holds objectives_cifar10.csv, which
is made by

    python code/analyze.py summary logs/objectives-cifar10 --label-by training sigma \\
        --radii 0 0.25 0.5 0.75 1 1.25 1.5 1.75 2 2.25 2.5 -o OUTDIR/objectives_cifar10.csv

Writes objectives_cifar10_beside.md and .csv. Models that are trained again differ by their random
numbers, so there are differences and no verdicts: where two repositories have a row, these show how
much to expect.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

VALUES = Path(__file__).parent / "paper_values"
EQUAL, ROUNDING, DIFFERS, NO_LOGS, NOT_PRINTED = VERDICTS = (
    "equal",
    "differs by rounding",
    "differs",
    "not comparable: no logs",
    "not comparable: no printed value",
)
MEANINGS = {
    EQUAL: "less than half a unit of the last printed digit apart",
    ROUNDING: "less than a unit apart: the printed value is ours, rounded up or down (≈)",
    DIFFERS: "a unit or more apart (**≠**)",
    NO_LOGS: "logs of the row, or some of those from which its best model is chosen, are not there",
    NOT_PRINTED: "the paper prints no such value, or it is not at hand",
}
SOURCES = (
    "The printed values of Tables 1 to 5 are the paper's. Those of Tables 6 to 15 are of the LaTeX "
    "that was released with the logs, under analysis/latex and analysis/latex_new."
)
MARKS = {ROUNDING: " ≈", DIFFERS: " **≠**"}
CLEAN_ACCURACY_OF = {14: 1, 15: 2}
"""Tables of the paper that repeat another one with the clean accuracies of its models."""
NEAR = 0.005  # to the paper, the epsilons 127/256 and 255/256 are 0.5 and 1

ACR = "average_certified_radius"
Row = dict[str, str]


@dataclass(frozen=True)
class Place:
    """Which row: a group, or several like "A|B" for the best of them, and the hyper-parameters of a
    model.
    """

    group: str
    sigma: float | None = None
    epsilon: float | None = None

    @classmethod
    def of(cls, row: Row) -> Place:
        return cls(
            row["group"],
            *(float(row[name]) if row.get(name) else None for name in ("sigma", "epsilon")),
        )

    def holds(self, other: Place) -> bool:
        """Whether ``other`` is this row, or one of those of which it is the best."""
        pairs = ((self.sigma, other.sigma), (self.epsilon, other.epsilon))
        near = (
            one is other if None in (one, other) else abs(one - other) < NEAR
            for one, other in pairs
        )
        return other.group in self.group.split("|") and all(near)

    def __str__(self) -> str:
        known = {"sigma": self.sigma, "epsilon": self.epsilon}
        parameters = [f"{name} = {value:g}" for name, value in known.items() if value is not None]
        return ", ".join([self.group.replace("|", " or "), *parameters])


@dataclass(frozen=True)
class Cell:
    """A cell of the paper's ``table``; in percent, "" and None where there is no printed value and
    none of ours.
    """

    table: int
    quantity: str
    place: Place
    radius: str
    printed: str
    ours: Fraction | None

    @property
    def verdict(self) -> str:
        if self.ours is None:
            return NO_LOGS
        if not self.printed:
            return NOT_PRINTED
        units = abs(self.ours - Fraction(self.printed)) * 10 ** len(self.printed.partition(".")[2])
        return EQUAL if units < Fraction(1, 2) else ROUNDING if units < 1 else DIFFERS

    @property
    def text(self) -> str:
        """Ours with a digit more than what is printed, and that in parentheses."""
        digits = 1 + len(self.printed.partition(".")[2])
        ours = "–" if self.ours is None else f"{float(self.ours):.{digits}f}"
        return f"{ours} ({self.printed or '–'}){MARKS.get(self.verdict, '')}"

    @property
    def note(self) -> str:
        """What notes.csv says of this cell; an empty field there stands for anything."""
        if self.verdict != DIFFERS:
            return ""
        facts = {
            "table": str(self.table),
            "quantity": self.quantity,
            "group": self.place.group,
            "radius": self.radius,
        }
        notes = [
            row
            for row in read(VALUES / "notes.csv")
            if all(row[name] in ("", facts[name]) for name in facts)
        ]
        return " ".join(row["note"] for row in notes)


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def radii_of(row: Row) -> list[str]:
    return [column for column in row if re.match(r"\d", column)]


def our_cells(path: Path) -> list[tuple[Place, float, Row]]:
    """Place, radius and quantities of a CSV's cells: a row each, or a row per log with a column per
    radius.
    """
    cells = []
    for row in read(path):
        if "radius" in row:
            cells.append((Place.of(row), float(row["radius"]), row))
        cells += [
            (Place.of(row), float(radius), {"certified_accuracy": row[radius]})
            for radius in radii_of(row)
        ]
    return cells


def compared(table: int, path: Path | None) -> list[Cell]:
    """The cells of the paper's table of this number, then those of ours, from the CSV ``path``,
    that it has not.
    """
    printed = read(VALUES / f"table{table}.csv")
    ours = our_cells(path) if path else []
    rows = [(Place.of(row), row) for row in printed]
    alone = {
        quantity: [
            place for place, row in rows if row["quantity"] == quantity and "|" not in place.group
        ]
        for quantity in dict.fromkeys(row["quantity"] for row in printed)
    }
    for place in dict.fromkeys(place for place, _, _ in ours):
        for quantity, places in alone.items():
            if not any(known.holds(place) for known in places):
                rows.append((place, {"quantity": quantity}))
    return [
        Cell(
            table,
            row["quantity"],
            place,
            radius,
            row.get(radius, ""),
            value_at(ours, place, row, radius),
        )
        for place, row in rows
        for radius in radii_of(printed[0])
    ]


def value_at(
    cells: Sequence[tuple[Place, float, Row]], place: Place, row: Row, radius: str
) -> Fraction | None:
    """Our value in percent for a cell of the printed ``row``; of several groups, that of the best
    certified accuracy.

    None if it is not there, or was chosen from fewer models than the printed one.
    """
    there = [
        ours
        for at, where, ours in cells
        if place.holds(at) and abs(where - float(Fraction(radius))) < 1e-6
    ]
    models = sum(int(ours.get("models", 0)) for ours in there)
    if not there or models < int(row.get("models") or 0):
        return None
    best = max(there, key=lambda ours: float(ours["certified_accuracy"]))
    return 100 * Fraction(best[row["quantity"]])


def grid(cells: Sequence[Cell]) -> list[str]:
    """Lines of markdown: the cells of one table as it is printed."""
    radii = list(dict.fromkeys(cell.radius for cell in cells))
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(f"{cell.place}: {cell.quantity.replace('_', ' ')}", []).append(cell)
    lines = [["ours (printed), %", *radii], ["---", *["---:"] * len(radii)]]
    lines += [[name, *(cell.text for cell in row)] for name, row in rows.items()]
    return [f"| {' | '.join(line)} |" for line in lines]


def page(cells: Sequence[Cell], numbers: Sequence[int]) -> str:
    """All verdicts in markdown: how many there are of each, the cells that differ, and every
    table.
    """
    lines = ["# The paper's tables and ours", "", "Verdicts on cells:", ""]
    lines += [f"- {verdict}: {MEANINGS[verdict]}" for verdict in VERDICTS]
    lines += ["", SOURCES]
    lines += ["", f"| Table | {' | '.join(VERDICTS)} |", f"|---|{'---:|' * len(VERDICTS)}"]
    for number in numbers:
        counts = Counter(cell.verdict for cell in cells if cell.table == number)
        lines.append(f"| {number} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
    lines += [
        "",
        "## Cells that differ",
        "",
        *(describe(cell) for cell in cells if cell.verdict == DIFFERS),
    ]
    for number in numbers:
        lines += [
            "",
            f"## Table {number}",
            "",
            *grid([cell for cell in cells if cell.table == number]),
        ]
    return "\n".join(lines) + "\n"


def describe(cell: Cell) -> str:
    note = f": {cell.note}" if cell.note else ""
    return (
        f"- Table {cell.table}, {cell.place}, {cell.quantity.replace('_', ' ')} at {cell.radius}: "
        f"{cell.text}{note}"
    )


def beside(name: str, folder: Path) -> None:
    """Set the rows of ``folder``/NAME.csv beside those of ``paper_values``/NAME.csv, as models of
    other trainings.
    """
    published, ours = read(VALUES / f"{name}.csv"), read(folder / f"{name}.csv")
    quantities = [ACR, *radii_of(published[0])]
    lines = [["ours (published, difference)", "images", "average radius", *quantities[1:]]]
    lines.append(["---", *["---:"] * (1 + len(quantities))])
    rows: list[list[object]] = [
        ["training", "sigma", "source", "images", "quantity", "published", "ours", "difference"]
    ]
    for row in published:
        place = [row["training"], row["sigma"], row["source"]]
        for mine in [mine for mine in ours if is_training(mine, row)] or [{}]:
            cells = []
            for quantity in quantities:
                known, digits = float(row[quantity]), 3 if quantity == ACR else 1
                if quantity not in mine:
                    cells.append(f"– ({known:.{digits}f})")
                    continue
                value = float((1 if quantity == ACR else 100) * Fraction(mine[quantity]))
                cells.append(
                    f"{value:.{digits}f} ({known:.{digits}f}, {value - known:+.{digits}f})"
                )
                rows.append(
                    [
                        *place,
                        mine["examples"],
                        quantity,
                        known,
                        round(value, 4),
                        round(value - known, 4),
                    ]
                )
            lines.append([", ".join(place), mine.get("examples", "–"), *cells])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (folder / f"{name}_beside.md").write_text(text + "\n", encoding="utf-8")
    with (folder / f"{name}_beside.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    apart = [float(str(row[-1])) for row in rows if row[4] == ACR]
    span = f", average radius {min(apart):+.3f} to {max(apart):+.3f} apart" if apart else ""
    print(f"{len(published)} published rows, {len(apart)} comparisons with models of ours{span}")


def is_training(ours: Row, published: Row) -> bool:
    """Whether a log is of a published training at its noise."""
    return ours["training"] == published["training"] and float(ours["sigma"]) == float(
        published["sigma"]
    )


def main(folder: Path, tables: Sequence[str]) -> None:
    if "objectives_cifar10" in tables:
        beside("objectives_cifar10", folder)
        return
    paths = {
        int(match[1]): folder / f"{name}.csv"
        for name in tables
        if (match := re.match(r"table(\d+)_", name))
    }
    numbers = sorted(int(path.stem.removeprefix("table")) for path in VALUES.glob("table*.csv"))
    cells = [
        cell
        for number in numbers
        for cell in compared(number, paths.get(CLEAN_ACCURACY_OF.get(number, number)))
    ]
    (folder / "verdicts.md").write_text(page(cells, numbers), encoding="utf-8")
    with (folder / "verdicts.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "table",
                "quantity",
                "group",
                "sigma",
                "epsilon",
                "radius",
                "printed",
                "ours",
                "verdict",
                "note",
            ]
        )
        for cell in cells:
            place, ours = cell.place, "" if cell.ours is None else float(cell.ours)
            start = [
                cell.table,
                cell.quantity,
                place.group,
                place.sigma,
                place.epsilon,
                cell.radius,
                cell.printed,
            ]
            writer.writerow([*start, ours, cell.verdict, cell.note])
    counts = Counter(cell.verdict for cell in cells)
    print(
        f"{len(cells)} cells: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    )


if __name__ == "__main__":
    if len(sys.argv) < 3 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python scripts/paper_verdicts.py OUTDIR TABLE...; OUTDIR holds TABLE.csv")
    main(Path(sys.argv[1]), sys.argv[2:])
