"""plot: certified accuracy against the l2 radius, a curve per log."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from matplotlib.figure import Figure

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.logs import CertificationLog
from smoothadv.analysis.quantities import accuracy_curve
from smoothadv.settings import setting

# Distinct in colour, in line style and, printed grey, in lightness (Wong, 2011).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")


@ANALYSES.register("plot")
@dataclass(frozen=True)
class CertifiedAccuracyPlot:
    """certified-accuracy curves, written as PNG and PDF"""

    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __call__(self, logs: list[CertificationLog]) -> Figure:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for log, colour, style in zip(logs, cycle(_COLOURS), cycle(_STYLES)):
            radii, accuracies = accuracy_curve(log.table)
            # "pre": between two radii holds the accuracy of the larger one.
            axes.step(
                radii, 100 * accuracies, where="pre", color=colour, linestyle=style, linewidth=1.8, label=log.name
            )
        axes.set_xlabel("l2 radius (images in [0, 1])")
        axes.set_ylabel("certified accuracy (%)")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 100)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        if self.title:
            axes.set_title(self.title)
        return figure
