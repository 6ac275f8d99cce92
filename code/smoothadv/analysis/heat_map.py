"""heat_map: the best logs over two hyper-parameters, like certified accuracy over sigma and
epsilon.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import FIELDS, Value, display
from smoothadv.analysis.figure_style import SYMBOLS, Axes, Figure, Titled, add_title
from smoothadv.analysis.logs import Log, Logs, group_by
from smoothadv.analysis.radii import AtRadii, Radius, refuse_contradictions
from smoothadv.analysis.selection import Choosing, hyper_parameter, refuse_several
from smoothadv.base.errors import UserError
from smoothadv.base.settings import one_of, setting
from smoothadv.statistics.accuracy import average_certified_radius

_CERTIFIED, _CLEAN, _AVERAGE = MEASURES = (
    "certified_accuracy",
    "clean_accuracy",
    "average_certified_radius",
)
_COLOURS = "cividis"  # perceptually uniform, of rising lightness: legible also when printed grey
# Of a scale, where the contrast of either to the colour is at least 4.5 (WCAG 2.1).
_BLACK_FROM = 0.467
# In inches; texts are of _POINTS points.
_CELL_WIDTH, _CELL_HEIGHT = 0.6, 0.44
_SMALLEST_PANEL = 1.7, 1.3
_CHARACTER, _LINE = 0.09, 0.2
_BAR = 0.18
_BESIDE_PANELS, _AROUND_PANEL, _BELOW_PANELS = 1.6, 0.5, 0.5
_NARROWEST, _WIDEST = 4.0, 8.6
_POINTS = 10
_MOST_PANELS_BESIDE, _MOST_PANELS = 3, 12
_Cells: TypeAlias = dict[tuple[Value, Value], list[Log]]


@ANALYSES.register("heat_map")
@dataclass(frozen=True)
class HeatMap(Titled, Choosing, AtRadii, Analysis):
    """the best log for each pair of values of two hyper-parameters, a panel per radius, written as
    PNG and PDF
    """

    makes: ClassVar[str] = "figure"
    rows: str = setting("sigma", parse=hyper_parameter, help="hyper-parameter of the rows")
    columns: str = setting("epsilon", parse=hyper_parameter, help="hyper-parameter of the columns")
    measure: str = setting(
        _CERTIFIED,
        parse=one_of(MEASURES),
        help=f"what a cell shows of its best log, one of {', '.join(MEASURES)}",
    )

    def __post_init__(self) -> None:
        refuse_contradictions(
            {
                f"--rows and --columns are both {self.rows}: a map needs two hyper-parameters": (
                    self.rows == self.columns
                ),
                f"--radii is for --measure {_CERTIFIED}: leave it out, {self.measure} is one "
                "number": bool(self.radii) and self.measure != _CERTIFIED,
                f"--norm is for radii: leave it out, {_CLEAN} has none": (
                    self.norm != "l2" and self.measure == _CLEAN
                ),
                f"--high-probability is for accuracies: leave it out, {_AVERAGE} is none": (
                    self.high_probability is not None and self.measure == _AVERAGE
                ),
            }
        )

    def __call__(self, logs: Logs) -> Figure:
        part = self.taking_part(logs.certification)
        refuse_several(part, "a heat map", "images", "procedure")
        # A log that belongs to several groups counts once.
        once = {log.path.resolve(): log for log in part}.values()
        cells = group_by(once, lambda log: (log.value(self.rows), log.value(self.columns)))
        if cells.keys() <= {(None, None)}:
            raise UserError(
                f"no log states its {self.rows} or its {self.columns}: there is nothing to draw "
                "over them"
            )
        is_certified = self.measure == _CERTIFIED  # else of clean accuracy, or of no radius
        radii = self.chosen_radii(part, _MOST_PANELS) if is_certified else [Radius.of(0.0)]
        rows, columns = map(_ascending, zip(*cells))
        values = np.full((len(radii), len(rows), len(columns)), np.nan)
        for (row, column), group in cells.items():
            best = [100 * self.accuracies(log, radii, models=len(group)) for log in group]
            if self.measure == _AVERAGE:
                averages = [average_certified_radius(log.table) for log in group]
                best = [self.certified_by(log, [one]) for log, one in zip(group, averages)]
            values[:, rows.index(row), columns.index(column)] = np.max(best, axis=0)
        return self._draw(cells, values, radii, rows, columns)

    def _draw(
        self,
        cells: _Cells,
        values: np.ndarray,
        radii: Sequence[Radius],
        *sides: Sequence[Value],
    ) -> Figure:
        rows, columns = (
            [display(name, value, side) for value in side]
            for name, side in zip((self.rows, self.columns), sides)
        )
        figure, panels, beside = _panels(rows, columns, len(radii))
        for position, (panel, shares, radius) in enumerate(zip(panels, values, radii)):
            mesh = self._draw_panel(panel, shares, float(np.nanmax(values)) or 1.0)
            panel.set_xticks(
                np.arange(len(columns)) + 0.5,
                columns,
                parse_math=False,
                rotation=_rotation(columns),
            )
            at_left = position % beside == 0
            texts = rows if at_left else [""] * len(rows)
            panel.set_yticks(np.arange(len(rows)) + 0.5, texts, parse_math=False)
            panel.set_ylabel(_symbol(self.rows) if at_left else "")
            panel.set_xlabel(_symbol(self.columns) if position + beside >= len(panels) else "")
            if self.measure == _CERTIFIED:
                panel.set_title(f"{self.norm_symbol} radius {radius.text}", fontsize=_POINTS + 1)
        width, height = figure.get_size_inches()
        bar = figure.colorbar(
            mesh, ax=panels, fraction=2 * _BAR / width, pad=_BAR / width, aspect=height / _BAR
        )
        quantity = f"{self.measure.replace('_', ' ')} (%)"
        if self.measure == _AVERAGE:
            on_grid = any(log.is_on_grid for group in cells.values() for log in group)
            quantity = f"average certified\nradius ({self.norm_symbol})" + " on the grid" * on_grid
        bar.set_label(quantity, fontsize=_POINTS + 1)
        bar.ax.tick_params(labelsize=_POINTS)
        self._add_note(figure, max(map(len, cells.values())), len(cells), sides)
        add_title(figure.suptitle, self.title)
        return figure

    def _draw_panel(self, panel: Axes, values: np.ndarray, largest: float) -> Any:
        """Coloured cells with their ``values`` [rows, columns] inside; those without a log (nan)
        are hatched.
        """
        from matplotlib.patches import Rectangle

        mesh = panel.pcolormesh(
            np.ma.masked_invalid(values),
            cmap=_COLOURS,
            vmin=0,
            vmax=largest,
            edgecolors="white",
            linewidth=0.8,
        )
        hatched = {"facecolor": "white", "edgecolor": "0.75", "hatch": "////", "linewidth": 0}
        for (row, column), value in np.ndenumerate(values):
            if math.isnan(value):
                panel.add_patch(Rectangle((column, row), 1, 1, **hatched))
                continue
            panel.text(
                column + 0.5,
                row + 0.5,
                f"{value:#.3g}" if self.measure == _AVERAGE else f"{value:.1f}",
                ha="center",
                va="center",
                color="black" if value > _BLACK_FROM * largest else "white",
                fontsize=_POINTS,
            )
        panel.invert_yaxis()
        panel.tick_params(length=0, labelsize=_POINTS)
        panel.spines[:].set_visible(False)
        return mesh

    def _add_note(
        self, figure: Figure, most: int, cells: int, sides: Sequence[Sequence[Value]]
    ) -> None:
        """A note below the panels: from how many logs a cell is selected, and how to read special
        cells.
        """
        notes = ["one log per cell" if most == 1 else f"best of up to {most} logs per cell"]
        if self.high_probability is not None:
            notes.append(self.heading.partition(", ")[2])
        if cells < math.prod(map(len, sides)):
            notes.append("hatched: no log")
        names = zip((self.rows, self.columns), sides)
        notes += [f"–: no {_symbol(name)} stated" for name, values in names if None in values]
        unbroken = "; ".join(words.replace(" ", "\u00a0") for words in notes)
        lines = textwrap.wrap(unbroken, int(figure.get_figwidth() / _CHARACTER))
        height = figure.get_figheight() + _LINE * (len(lines) + (2 if self.title else 0))
        figure.set_figheight(height)
        figure.supxlabel("\n".join(lines).replace("\u00a0", " "), fontsize=_POINTS, color="0.35")


def _symbol(name: str) -> str:
    """A hyper-parameter as the papers write it."""
    return SYMBOLS.get(name, FIELDS[name])


def _ascending(values: Iterable[Value]) -> list[Value]:
    """Each value once, numbers or texts ascending, None first."""
    return sorted(set(values), key=lambda value: (value is not None, 0 if value is None else value))


def _panels(
    rows: Sequence[str], columns: Sequence[str], count: int
) -> tuple[Figure, list[Axes], int]:
    """A figure large enough for the texts in and around the cells, its ``count`` panels, and their
    number in a row.
    """
    from matplotlib.figure import Figure

    width = max(len(columns) * _CELL_WIDTH, _SMALLEST_PANEL[0]) + 0.15
    height = max(len(rows) * _CELL_HEIGHT, _SMALLEST_PANEL[1]) + _AROUND_PANEL
    height += max(map(len, columns)) * _CHARACTER if _rotation(columns) else 0
    beside_panels = _BESIDE_PANELS + max(map(len, rows)) * _CHARACTER
    fitting = min(_MOST_PANELS_BESIDE, max(1, int((_WIDEST - beside_panels) / width)))
    lines = math.ceil(count / fitting)
    beside = math.ceil(count / lines)
    size = (max(_NARROWEST, beside_panels + beside * width), _BELOW_PANELS + lines * height)
    figure = Figure(figsize=size, layout="constrained")
    panels = [figure.add_subplot(lines, beside, position + 1) for position in range(count)]
    return figure, panels, beside


def _rotation(labels: Sequence[str]) -> int:
    """Labels wider than their cells stand upright."""
    return 90 if max(map(len, labels)) * _CHARACTER > _CELL_WIDTH else 0
