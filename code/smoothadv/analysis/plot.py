"""plot: certified accuracy against the radius, or images against their bound of p_A, a curve per log; plot_envelope:
the upper envelope of each group, as in the paper's Figures 1, 2, 4, 5 and 6."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.probabilities import with_bounds
from smoothadv.analysis.shared.figure_style import Figure, draw_steps, finished, looks, new_figure
from smoothadv.analysis.shared.log_statistics import accuracy_curve, survival_curve
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.analysis.shared.radii import Bands, Norm, round_numbers
from smoothadv.analysis.shared.selection import Choosing, grouping, groups_of, one_of
from smoothadv.errors import UserError
from smoothadv.settings import setting

_RADIUS, _P_A = "radius", "p_A"
_POINTS = 1500


@ANALYSES.register("plot")
@dataclass(frozen=True)
class CertifiedAccuracyPlot(Bands, Norm, Analysis):
    """certified-accuracy curves, or the distribution of the bounds of p_A, a curve per log, written as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")
    of: str = setting(
        _RADIUS,
        parse=one_of((_RADIUS, _P_A)),
        help=f"what to draw images by: {_RADIUS}, or {_P_A}, its lower confidence bound (default: {_RADIUS})",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == _P_A and (self.norm != "l2" or self.high_probability is not None):
            raise ValueError(f"--of {_P_A} draws no radii: leave out --norm and --high-probability")

    def __call__(self, logs: Logs) -> Figure:
        curves = self._curves(logs.certification)
        labels, end = (self.axis_title, "certified accuracy (%)"), 1.04 * max(corners[-1] for _, corners, _ in curves)
        figure, (axes,) = new_figure()
        if self.of == _P_A:
            labels, end = ("lower confidence bound of $p_A$", "images of at least this bound (%)"), 1.0
            axes.axvline(0.5, color="0.7", linewidth=1, linestyle=":", label="")
        shown = [(log.label.shown, corners, shares) for log, corners, shares in curves]
        lines = draw_steps(axes, shown, looks(len(curves)), end)
        for (log, corners, shares), line in zip(curves, lines if self.confidence is not None else []):
            # To the right end: where no image counts, a band may have a width too.
            low, high = self.ends(np.append(shares, 0.0), len(log.table))
            whole, band = np.append(corners, end or 1.0), {"color": line.get_color(), "alpha": 0.18, "linewidth": 0}
            axes.fill_between(whole, 100 * low, 100 * high, step="pre", label=log.label.shown, **band)
        return finished(figure, lines, labels, end, self.title)

    def _curves(self, logs: Sequence[Log]) -> list[tuple[Log, np.ndarray, np.ndarray]]:
        """The corners of each log's steps, and the shares of its images there."""
        if self.of == _P_A:
            return [(log, *survival_curve(bounds[bounds > 0], len(bounds))) for log, bounds in with_bounds(logs)]
        curves = []
        for log in logs:
            radii, shares = accuracy_curve(log.table)
            if self.high_probability is not None:
                shares = np.append(self.accuracies_at_lengths(log, radii[:-1]), 0.0)
            curves.append((log, self.certified_by(log, radii), shares))
        return curves


@ANALYSES.register("plot_envelope")
@dataclass(frozen=True)
class EnvelopePlot(Choosing, Norm, Analysis):
    """the best certified accuracy of each group and image set, with a dashed baseline, written as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    group_by: list[str] | None = grouping("the curves, like sigma")
    baseline: str | None = setting(
        None,
        parse=str,
        help="group to draw dashed: in the colours of the others with --split-baseline, else as one curve",
    )
    split_baseline: bool = setting(False, help="let --group-by split the baseline too, for one curve per sigma")
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __post_init__(self) -> None:
        if self.split_baseline and not self.baseline:
            raise ValueError("--split-baseline needs --baseline NAME: there is no baseline to split")

    def __call__(self, logs: Logs) -> Figure:
        part = self.taking_part(logs.certification)
        baseline = [log for log in part if log.group == self.baseline] if self.baseline else []
        if self.baseline and not baseline:
            known = ", ".join(dict.fromkeys(log.group for log in part))
            raise UserError(f"no group is called '{self.baseline}'; there are {known}")
        others = [log for log in part if log not in baseline]
        if not others:
            raise UserError("there is nothing but the baseline to draw")
        by = self.group_by or []
        solid = groups_of(others, by, name_group=bool(baseline))
        dashed = groups_of(baseline, by if self.split_baseline else [], name_group=True)
        lines = looks(len(solid) + (0 if self.split_baseline else len(dashed)))
        if self.split_baseline:
            like = {_key(group, by): look for group, look in zip(solid.values(), lines)}
            lines += [like.get(_key(group, by), {"color": "0.45", "linewidth": 1.6}) for group in dashed.values()]
        lines = [look | {"linestyle": "-" if place < len(solid) else "--"} for place, look in enumerate(lines)]
        curves = [(name, *self.envelope_curve(group)) for name, group in [*solid.items(), *dashed.items()]]
        largest = max(radii[-1] for _, radii, _ in curves)
        figure, (axes,) = new_figure()
        drawn = draw_steps(axes, curves, lines, largest)
        return finished(figure, drawn, (self.axis_title, "certified accuracy (%)"), 1.04 * largest, self.title)

    def envelope_curve(self, group: Sequence[Log]) -> tuple[np.ndarray, np.ndarray]:
        """A fine grid of radii, with round ones and the largest one of each log, and the largest accuracy of the logs
        there."""
        ends = np.concatenate([self.certified_by(log, [log.table.radius.max()]) for log in group])
        fine = [np.linspace(0, ends.max(), _POINTS), round_numbers(ends.max())]
        grid = np.unique(np.concatenate([*fine, ends, np.nextafter(ends, np.inf)]))
        best = np.max([self.accuracies(log, grid, models=len(group)) for log in group], axis=0)
        return grid, best


def _key(group: Sequence[Log], by: Sequence[str]) -> tuple[object, ...]:
    return group[0].procedure, *(group[0].parameters.get(name) for name in by)
