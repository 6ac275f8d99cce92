"""plot_training: loss and accuracy by epoch, from training logs."""

from dataclasses import dataclass
from typing import ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.shared.figure_style import Figure, add_legend, add_title, looks, mark_every, new_figure
from smoothadv.analysis.shared.logs import Logs
from smoothadv.settings import setting


@ANALYSES.register("plot_training")
@dataclass(frozen=True)
class TrainingPlot(Analysis):
    """training curves from log.txt: loss and accuracy by epoch, training solid and test dashed, as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    kinds: ClassVar[tuple[str, ...]] = ("training",)
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __call__(self, logs: Logs) -> Figure:
        from matplotlib.ticker import MaxNLocator

        figure, panels = new_figure(panels=2)
        count = len(logs.training)
        for axes, quantity, scale, unit in zip(panels, ("loss", "accuracy"), (1, 100), ("", " (%)")):
            for position, (log, look) in enumerate(zip(logs.training, looks(count))):
                name = f"{log.name.removesuffix('/log.txt').removesuffix('.txt')}, " if count > 1 else ""
                for split, word, style in (("train", "training", "-"), ("test", "test", "--")):
                    values = scale * log.table[f"{split}_{quantity}"]
                    values = values[values.notna()]  # not every epoch need have been evaluated
                    look = {**look, "linestyle": style, "markevery": mark_every(len(values), position, count)}
                    axes.plot(log.table.epoch[values.index] + 1, values, label=name + word, **look)
            axes.set_xlabel("epoch")
            axes.set_ylabel(f"{quantity} under noise{unit}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylim(0, 1.05 * panels[0].dataLim.ymax)
        panels[1].set_ylim(0, 100)
        add_legend(figure, panels[0], panels[0].get_lines(), inside=False)  # both panels show the same curves
        add_title(panels[0].set_title, self.title)
        return figure
