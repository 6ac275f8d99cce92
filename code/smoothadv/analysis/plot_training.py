"""plot_training: loss and accuracy by epoch, from training logs."""

from dataclasses import dataclass
from typing import Any, ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.shared.figure_style import (
    Axes,
    Figure,
    Line2D,
    add_grid,
    add_legend,
    add_title,
    looks,
    mark_every,
    new_figure,
)
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.settings import setting


@ANALYSES.register("plot_training")
@dataclass(frozen=True)
class TrainingPlot(Analysis):
    """training curves from log.txt: loss and accuracy by epoch, training solid and test dashed, as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    kinds: ClassVar[tuple[str, ...]] = ("training",)
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __call__(self, logs: Logs) -> Figure:
        figure, panels = new_figure(panels=2)
        entries = [
            self._draw(axes, quantity, log, look, position, len(logs.training))
            for axes, quantity in zip(panels, ("loss", "accuracy"))
            for position, (log, look) in enumerate(zip(logs.training, looks(len(logs.training))))
        ]
        panels[0].set_ylim(0, 1.05 * panels[0].dataLim.ymax)
        panels[1].set_ylim(0, 100)
        # Both panels show the same curves.
        lines = [line for pair in entries[: len(logs.training)] for line in pair]
        add_legend(figure, panels[0], lines, inside=False)
        add_title(panels[0].set_title, self.title)
        return figure

    @staticmethod
    def _draw(axes: Axes, quantity: str, log: Log, look: dict[str, Any], position: int, logs: int) -> list[Line2D]:
        """The curves of one log in one panel: training solid, test dashed."""
        from matplotlib.ticker import MaxNLocator

        percent = quantity == "accuracy"
        name = f"{log.name.removesuffix('/log.txt').removesuffix('.txt')}, " if logs > 1 else ""
        lines = []
        for split, style in (("train", "-"), ("test", "--")):
            values = (100 if percent else 1) * log.table[f"{split}_{quantity}"]
            label = name + ("training" if split == "train" else split)
            there = values.notna()  # not every epoch need have been evaluated
            marks = mark_every(int(there.sum()), position, logs)
            lines += axes.plot(
                log.table.epoch[there] + 1, values[there], label=label, linestyle=style, markevery=marks, **look
            )
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"{quantity} under noise" + (" (%)" if percent else ""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        add_grid(axes)
        return lines
