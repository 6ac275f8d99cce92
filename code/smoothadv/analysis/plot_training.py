"""plot_training: loss and accuracy by epoch, from training logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.logs import Logs
from smoothadv.analysis.style import add_grid, add_legend, looks, mark_every, new_figure
from smoothadv.settings import setting


@ANALYSES.register("plot_training")
@dataclass(frozen=True)
class TrainingPlot:
    """training curves from log.txt: loss and accuracy by epoch, training solid and test dashed, as PNG and PDF"""

    kinds: ClassVar[tuple[str, ...]] = ("training",)
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __call__(self, logs: Logs) -> Figure:
        figure, panels = new_figure(panels=2)
        for axes, quantity in zip(panels, ("loss", "accuracy")):
            for position, (log, look) in enumerate(zip(logs.training, looks(len(logs.training)))):
                factor = 100 if quantity == "accuracy" else 1
                marks = mark_every(len(log.table), position, len(logs.training))
                for split, style in (("train", "-"), ("test", "--")):
                    axes.plot(
                        log.table.epoch + 1,
                        factor * log.table[f"{split}_{quantity}"],
                        label=f"{_label(log.name, len(logs.training))}{'training' if split == 'train' else split}",
                        linestyle=style,
                        markevery=marks,
                        **look,
                    )
            axes.set_xlabel("epoch")
            axes.set_ylabel(f"{quantity} under noise" + (" (%)" if quantity == "accuracy" else ""))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            add_grid(axes)
        panels[0].set_ylim(0, 1.05 * panels[0].dataLim.ymax)
        panels[1].set_ylim(0, 100)
        add_legend(figure, panels[0], inside=False)
        if self.title:
            figure.suptitle(self.title)
        return figure


def _label(name: str, count: int) -> str:
    return "" if count == 1 else f"{name.removesuffix('/log.txt').removesuffix('.txt')}, "
