"""The figures: certified accuracy by radius, of each log (plot) or as the upper envelope of each
group (plot_envelope, as in the paper's Figures 1, 2, 4, 5 and 6) beside accuracy under attack
(plot_empirical, as in its Figure 3); training curves (plot_training); and the best logs over two
hyper-parameters, like certified accuracy over sigma and epsilon (heat_map).
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import Value, display
from smoothadv.analysis.figure_style import (
    SYMBOLS,
    Axes,
    Figure,
    Titled,
    add_legend,
    add_title,
    draw_steps,
    finished,
    line_styles,
    mark_every,
    new_figure,
)
from smoothadv.analysis.logs import (
    Choosing,
    Log,
    Logs,
    group_by,
    grouping,
    groups_of,
    hyper_parameter,
    refuse_several,
)
from smoothadv.analysis.radii import (
    AtRadii,
    Bands,
    Norm,
    Radius,
    round_numbers,
)
from smoothadv.analysis.tables import empirical_curve, with_bounds
from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import SettingError, one_of, probability, refuse_any, setting
from smoothadv.statistics.accuracy import (
    accuracy,
    accuracy_curve,
    average_certified_radius,
    survival_curve,
)

_RADIUS, _P_A = "radius", "p_A"
_POINTS = 1500
_BESIDE = 0.005


@ANALYSES.register("plot")
@dataclass(frozen=True)
class CertifiedAccuracyPlot(Titled, Bands, Norm, Analysis):
    """certified-accuracy curves, or the distribution of the bounds of p_A, a curve per log, written
    as PNG and PDF
    """

    of: str = setting(
        _RADIUS,
        parse=one_of((_RADIUS, _P_A)),
        help=f"what to draw images by: {_RADIUS}, or {_P_A}, its lower confidence bound",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == _P_A and (self.norm != "l2" or self.high_probability is not None):
            raise SettingError(
                f"--of {_P_A} draws no radii: leave out --norm and --high-probability"
            )

    def __call__(self, logs: Logs) -> Figure:
        figure, (axes,) = new_figure()
        if self.of == _P_A:
            curves = [
                (log, *survival_curve(bounds[bounds > 0], len(bounds)))
                for log, bounds in with_bounds(logs.certification)
            ]
            labels = ("lower confidence bound of $p_A$", "images of at least this bound (%)")
            end = 1.0
            axes.axvline(0.5, color="0.7", linewidth=1, linestyle=":", label="")
        else:
            curves = [(log, *self._curve(log)) for log in logs.certification]
            labels = (self.axis_title, "certified accuracy (%)")
            end = 1.04 * max(corners[-1] for _, corners, _ in curves)
        # Where each log is a named group, by the names of the groups.
        by_group = len({log.group for log, *_ in curves if log.group_is_named}) == len(curves)
        steps = [
            (replace(log, title=log.group * by_group).label.text, corners, shares)
            for log, corners, shares in curves
        ]
        lines = draw_steps(axes, steps, line_styles(len(curves)))
        for (log, corners, shares), line in zip(curves, lines if self.confidence else []):
            # To the right end: where no image counts, a band may have a width too.
            low, high = self.ends(np.append(shares, 0.0), len(log.table))
            axes.fill_between(
                np.append(corners, end or 1.0),
                100 * low,
                100 * high,
                color=line.get_color(),
                alpha=0.18,
                linewidth=0,
                step="pre",
                label=line.get_label(),
            )
        return finished(figure, lines, labels, end, self.title)

    def _curve(self, log: Log) -> tuple[np.ndarray, np.ndarray]:
        """The corners of the log's steps, and the shares of its images there."""
        lengths, shares = accuracy_curve(log.table)
        radii = self.certified_by(log, lengths)
        if self.high_probability is not None:
            shares = np.append(self.accuracies(log, radii[:-1]), 0.0)
        return radii, shares


@ANALYSES.register("plot_envelope")
@dataclass(frozen=True)
class EnvelopePlot(Titled, Choosing, Norm, Analysis):
    """the best certified accuracy of each group and image set, with a dashed baseline, written as
    PNG and PDF
    """

    group_by: Sequence[str] = grouping("the curves, like sigma")
    baseline: str | None = setting(
        None,
        parse=str,
        help="group to draw dashed: in the colours of the others with --split-baseline, else as "
        "one curve",
    )
    split_baseline: bool = setting(
        False, help="let --group-by split the baseline too, for one curve per sigma"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_baseline and not self.baseline:
            raise SettingError(
                "--split-baseline needs --baseline NAME: there is no baseline to split"
            )

    def __call__(self, logs: Logs) -> Figure:
        part = self.taking_part(logs.certification)
        baseline = [log for log in part if log.group == self.baseline]
        others = [log for log in part if log.group != self.baseline]
        known = ", ".join(dict.fromkeys(log.group for log in part))
        refuse_any(
            {
                f"no group is called '{self.baseline}'; there are {known}": (
                    self.baseline and not baseline
                ),
                "there is nothing but the baseline to draw": not others,
            }
        )
        by = self.group_by
        solid = groups_of(others, by, name_group=bool(baseline))
        dashed = groups_of(baseline, by if self.split_baseline else (), name_group=True)
        styles = line_styles(len(solid) + len(dashed))
        if self.split_baseline:
            like = {_key(group, by): style for group, style in zip(solid.values(), styles)}
            other = {"color": "0.45", "linewidth": 1.6}
            styles[len(solid) :] = [like.get(_key(group, by), other) for group in dashed.values()]
        ends = ["-"] * len(solid) + ["--"] * len(dashed)
        styles = [style | {"linestyle": end} for style, end in zip(styles, ends)]
        curves = [
            (name, *self.envelope_curve(group)) for name, group in [*solid.items(), *dashed.items()]
        ]
        largest = max(radii[-1] for _, radii, _ in curves)
        figure, (axes,) = new_figure()
        lines = draw_steps(axes, curves, styles)
        return finished(
            figure, lines, (self.axis_title, "certified accuracy (%)"), 1.04 * largest, self.title
        )

    def envelope_curve(self, group: Sequence[Log]) -> tuple[np.ndarray, np.ndarray]:
        """A fine grid of radii, with round ones and the largest one of each log, and the largest
        accuracy of the logs there."""
        ends = np.concatenate([self.certified_by(log, [log.table.radius.max()]) for log in group])
        fine = [np.linspace(0, ends.max(), _POINTS), round_numbers(ends.max())]
        grid = np.unique(np.concatenate([*fine, ends, np.nextafter(ends, np.inf)]))
        best = np.max([self.accuracies(log, grid, models=len(group)) for log in group], axis=0)
        return grid, best


def _key(group: Sequence[Log], by: Sequence[str]) -> tuple[object, ...]:
    return group[0].procedure, *(group[0].value(name) for name in by)


@ANALYSES.register("plot_empirical")
@dataclass(frozen=True)
class EmpiricalPlot(Titled, Choosing, Analysis):
    """accuracy under attack of each group (dashed) and the envelope of certification logs of the
    same images (solid), as PNG and PDF"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")
    group_by: Sequence[str] = grouping("the dashed curves: num_noise_vec, N or gradient")
    confidence: float | None = setting(
        None,
        parse=probability,
        help="LEVEL of intervals over images, as vertical bars, like 0.95 (default: none)",
    )

    def __call__(self, logs: Logs) -> Figure:
        if not logs.prediction:
            raise UserError(
                "plot_empirical needs prediction logs, made by predict under attack; there are "
                "only others"
            )
        predictions, certification = map(self.taking_part, (logs.prediction, logs.certification))
        sets = {log.images for log in predictions}
        if any(log.images in sets for log in certification):
            refuse_several(predictions, "accuracy under attack beside certified accuracy", "images")
        if others := ", ".join(str(log.path) for log in certification if log.images not in sets):
            warn(f"not drawn, since they are not about the images that were attacked: {others}")
        certification = [log for log in certification if log.images in sets]
        certified = groups_of(certification, [])
        groups = [{log.group for log in logs} for logs in (certification, predictions)]
        named = len(certified) > 1 or bool(groups[0] - groups[1] - {""})
        attacked = groups_of(predictions, self.group_by, name_group=named)
        figure, (axes,) = new_figure()
        styles = line_styles(len(certified) + len(attacked))
        curves = {name: empirical_curve(group) for name, group in attacked.items()}
        largest = max(max(curve) for curve in curves.values())
        solid = [
            (f"{name}, " * named + "certified", *EnvelopePlot().envelope_curve(group))
            for name, group in certified.items()
        ]
        plain = {"marker": "", "markevery": None, "linewidth": 2.2}
        drawn = draw_steps(axes, solid, [{**style, **plain} for style in styles])
        colours = {name: style["color"] for name, style in zip(certified, styles)} if named else {}
        for position, (name, curve) in enumerate(curves.items()):
            own = styles[len(certified) + position]
            style = own | {
                "linestyle": "--",
                "linewidth": 1.2,
                "color": colours.get(name, own["color"]),
                "markevery": mark_every(len(curve), position, len(curves)),
            }
            shares = [100 * accuracy(best.log.table) for best in curve.values()]
            label = name if self.group_by else f"{name}, under attack".removeprefix("all, ")
            drawn += axes.plot(list(curve), shares, label=label, **style)
            if self.confidence is not None:
                ends = [best.interval(self.confidence) for best in curve.values()]
                # Side by side, where one curve's bars would cover another's.
                shift = _BESIDE * largest * (position - (len(curves) - 1) / 2)
                lower, upper = 100 * np.transpose(ends)
                axes.vlines(shift + np.array([*curve]), lower, upper, style["color"], label=label)
        return finished(
            figure,
            drawn,
            (r"$\ell_2$ radius (images in [0, 1])", "accuracy (%)"),
            1.02 * largest,
            self.title,
        )


@ANALYSES.register("plot_training")
@dataclass(frozen=True)
class TrainingPlot(Titled, Analysis):
    """training curves from log.txt: loss and accuracy by epoch, training solid and test dashed, as
    PNG and PDF
    """

    kinds: ClassVar[tuple[str, ...]] = ("training",)

    def __call__(self, logs: Logs) -> Figure:
        from matplotlib.ticker import MaxNLocator

        figure, panels = new_figure(panels=2)
        count = len(logs.training)
        quantities = zip(panels, ("loss", "accuracy"), (1, 100), ("", " (%)"))
        for axes, quantity, scale, unit in quantities:
            for position, (log, style) in enumerate(zip(logs.training, line_styles(count))):
                name = log.name.removesuffix("/log.txt").removesuffix(".txt")
                for split, word, line in (("train", "training", "-"), ("test", "test", "--")):
                    # Not every epoch need have been evaluated.
                    values = scale * log.table[f"{split}_{quantity}"].dropna()
                    axes.plot(
                        log.table.epoch[values.index] + 1,
                        values,
                        label=f"{name}, " * (count > 1) + word,
                        linestyle=line,
                        markevery=mark_every(len(values), position, count),
                        **style,
                    )
            axes.set(xlabel="epoch", ylabel=f"{quantity} under noise{unit}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylim(0, 1.05 * panels[0].dataLim.ymax)
        panels[1].set_ylim(0, 100)
        # Both panels show the same curves.
        add_legend(figure, panels[0], panels[0].get_lines(), inside=False)
        add_title(panels[0].set_title, self.title)
        return figure


_CERTIFIED, _CLEAN, _AVERAGE = MEASURES = (
    "certified_accuracy",
    "clean_accuracy",
    "average_certified_radius",
)
_COLOURS = "cividis"  # perceptually uniform, of rising lightness: legible also when printed grey
# Of a scale, where the contrast of either to the colour is at least 4.5 (WCAG 2.1).
_BLACK_FROM = 0.467
# In inches; texts are of _FONT_SIZE points.
_CELL_WIDTH, _CELL_HEIGHT = 0.6, 0.44
_SMALLEST_PANEL = 1.7, 1.3
_CHARACTER, _LINE = 0.09, 0.2
_BAR = 0.18
_BESIDE_PANELS, _AROUND_PANEL, _BELOW_PANELS = 1.6, 0.5, 0.5
_NARROWEST, _WIDEST = 4.0, 8.6
_FONT_SIZE = 10
_MOST_PANELS_BESIDE, _MOST_PANELS = 3, 12


@ANALYSES.register("heat_map")
@dataclass(frozen=True)
class HeatMap(Titled, Choosing, AtRadii, Analysis):
    """the best log for each pair of values of two hyper-parameters, a panel per radius, written as
    PNG and PDF
    """

    rows: str = setting("sigma", parse=hyper_parameter, help="hyper-parameter of the rows")
    columns: str = setting("epsilon", parse=hyper_parameter, help="hyper-parameter of the columns")
    measure: str = setting(
        _CERTIFIED,
        parse=one_of(MEASURES),
        help=f"what a cell shows of its best log, one of {', '.join(MEASURES)}",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_any(
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
            },
            SettingError,
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
        radii = [Radius(0)]  # of clean accuracy, or of no radius
        if self.measure == _CERTIFIED:
            radii = self.chosen_radii(part, _MOST_PANELS)
        rows, columns = map(_ascending, zip(*cells))
        values = np.full((len(radii), len(rows), len(columns)), np.nan)
        for (row, column), group in cells.items():
            best = [100 * self.accuracies(log, radii, models=len(group)) for log in group]
            if self.measure == _AVERAGE:
                best = [
                    self.certified_by(log, [average_certified_radius(log.table)]) for log in group
                ]
            values[:, rows.index(row), columns.index(column)] = np.max(best, axis=0)
        return self._draw(cells, values, radii, rows, columns)

    def _draw(
        self,
        cells: dict[tuple[Value, Value], list[Log]],
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
            panel.set(
                ylabel=SYMBOLS[self.rows] if at_left else "",
                xlabel=SYMBOLS[self.columns] if position + beside >= len(panels) else "",
            )
            if self.measure == _CERTIFIED:
                panel.set_title(f"{self.norm_symbol} radius {radius.text}", fontsize=_FONT_SIZE + 1)
        width, height = figure.get_size_inches()
        bar = figure.colorbar(
            mesh, ax=panels, fraction=2 * _BAR / width, pad=_BAR / width, aspect=height / _BAR
        )
        quantity = f"{self.measure.replace('_', ' ')} (%)"
        if self.measure == _AVERAGE:
            on_grid = any(log.is_on_grid for group in cells.values() for log in group)
            quantity = f"average certified\nradius ({self.norm_symbol})" + " on the grid" * on_grid
        bar.set_label(quantity, fontsize=_FONT_SIZE + 1)
        bar.ax.tick_params(labelsize=_FONT_SIZE)
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
            else:
                panel.text(
                    column + 0.5,
                    row + 0.5,
                    f"{value:#.3g}" if self.measure == _AVERAGE else f"{value:.1f}",
                    ha="center",
                    va="center",
                    color="black" if value > _BLACK_FROM * largest else "white",
                    fontsize=_FONT_SIZE,
                )
        panel.invert_yaxis()
        panel.tick_params(length=0, labelsize=_FONT_SIZE)
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
        notes += [f"–: no {SYMBOLS[name]} stated" for name, values in names if None in values]
        unbroken = "; ".join(words.replace(" ", "\u00a0") for words in notes)
        lines = textwrap.wrap(unbroken, int(figure.get_figwidth() / _CHARACTER))
        figure.set_figheight(
            figure.get_figheight() + _LINE * (len(lines) + (2 if self.title else 0))
        )
        figure.supxlabel("\n".join(lines).replace("\u00a0", " "), fontsize=_FONT_SIZE, color="0.35")


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
