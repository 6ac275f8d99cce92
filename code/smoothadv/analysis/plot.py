"""plot: certified accuracy against the radius, or images against their bound of p_A, a curve per log."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.probabilities import with_bounds
from smoothadv.analysis.shared.figure_style import Figure, draw_steps, finished, looks, mark_radii, new_figure
from smoothadv.analysis.shared.log_statistics import accuracy_curve, survival_curve
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.analysis.shared.radii import Bands, Norm
from smoothadv.analysis.shared.selection import one_of
from smoothadv.settings import setting

_RADIUS, _P_A = "radius", "p_A"


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
        lines = []
        for position, ((log, corners, shares), look) in enumerate(zip(curves, looks(len(curves)))):
            marks = mark_radii(corners, end, position, len(curves))
            lines.append(draw_steps(axes, corners, shares, label=log.label.shown, markevery=marks, **look))
            if self.confidence is not None:
                # To the right end: where no image counts, a band may have a width too.
                low, high = self.ends(np.append(shares, 0.0), len(log.table))
                whole, band = np.append(corners, end or 1.0), {"color": look["color"], "alpha": 0.18, "linewidth": 0}
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
