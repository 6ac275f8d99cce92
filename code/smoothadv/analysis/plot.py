"""plot: certified accuracy against the radius, a curve per log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.shared.figure_style import draw_steps, finished, looks, mark_every, new_figure
from smoothadv.analysis.shared.log_statistics import accuracy_curve, bootstrap_interval
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.analysis.shared.radii import Norm
from smoothadv.settings import probability, setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("plot")
@dataclass(frozen=True)
class CertifiedAccuracyPlot(Norm, Analysis):
    """certified-accuracy curves, one per log, written as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")
    confidence: float | None = setting(
        None, parse=probability, help="LEVEL of bootstrap bands over examples, like 0.95 (default: no bands)"
    )

    def __post_init__(self) -> None:
        if self.confidence is not None and self.high_probability is not None:
            raise ValueError("--confidence and --high-probability are of different kinds of chance: give one of them")

    def __call__(self, logs: Logs) -> Figure:
        figure, (axes,) = new_figure()
        largest, lines = 0.0, []
        for position, (log, look) in enumerate(zip(logs.certification, looks(len(logs.certification)))):
            radii, accuracies = self._curve(log)
            largest = max(largest, radii[-1])
            marks = mark_every(len(radii), position, len(logs.certification))
            lines.append(draw_steps(axes, radii, accuracies, label=log.label.shown, markevery=marks, **look))
            if self.confidence is not None:
                low, high = bootstrap_interval(accuracies, len(log.table), self.confidence)
                axes.fill_between(
                    radii, 100 * low, 100 * high, step="pre", color=look["color"], alpha=0.18, linewidth=0
                )
        return finished(figure, lines, (self.axis_title, "certified accuracy (%)"), 1.04 * largest, self.title)

    def _curve(self, log: Log) -> tuple[np.ndarray, np.ndarray]:
        radii, accuracies = accuracy_curve(log.table)
        if self.high_probability is not None:
            accuracies = self.accuracies_at_lengths(log, radii)
            accuracies[-1] = 0.0
        return self.certified_by(log, radii), accuracies
