"""Figures, as matplotlib objects: every line shows its quantity, is named, and nothing is cut
off.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from smoothadv.analysis.figure_style import line_styles
from smoothadv.analysis.figures import (
    CertifiedAccuracyPlot,
    EmpiricalPlot,
    EnvelopePlot,
    TrainingPlot,
)
from smoothadv.analysis.logs import Log, Logs
from smoothadv.statistics.accuracy import (
    certified_accuracies,
)
from support import certified_logs
from support.certified_logs import log, predicted, texts_around

LONG = (
    "PGD_2steps_multiNoiseSamples/8-multitrain/eps_255/cifar10/resnet110/noise_0.25/test/sigma_0.25"
)


def spread(name: str, largest: float, group: str = "", **values) -> Log:
    """A log of 40 examples with radii up to the largest, a quarter abstentions."""
    return log(name, [*np.linspace(0.01, largest, 30).tolist(), *[None] * 10], group, **values)


def prediction(name: str, right: int, epsilon: float, group: str = "", **values) -> Log:
    return predicted(
        name, "R" * right + "A" * (10 - right), group, attack="PGD", epsilon=epsilon, **values
    )


def training(name: str, epochs: int = 5, evaluated: list[int] | None = None) -> Log:
    """A log whose losses fall by 0.01 from epoch to epoch as accuracies grow, in tests of only some
    of the epochs.
    """
    ramp = np.arange(epochs) / 100
    columns = {
        "train_loss": 2 - ramp,
        "train_accuracy": ramp,
        "test_loss": 3 - ramp,
        "test_accuracy": ramp / 2,
    }
    table = pd.DataFrame({"epoch": range(epochs), **columns})
    if evaluated is not None:
        table.loc[~table.epoch.isin(evaluated), ["test_loss", "test_accuracy"]] = np.nan
    return Log(name, Path(name), "", table)


def lines_of(figure: Figure, panel: int = 0) -> dict[str, Line2D]:
    return {line.get_label(): line for line in figure.axes[panel].lines}


def legend_of(figure: Figure) -> Legend:
    (legend,) = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return legend


def entries(figure: Figure) -> list[str]:
    return [text.get_text() for text in legend_of(figure).get_texts()]


ONE = log("one", [0.5, 0.25, None, None, 1.0])


def test_plot_of_a_log_without_a_correct_example_is_a_line_at_nothing():
    figure = CertifiedAccuracyPlot()(Logs([log("wrong", [None, None])]))
    assert set(lines_of(figure)["wrong"].get_ydata()) == {0}


def test_envelope_is_the_maximum_over_its_group_at_every_radius():
    group = [spread("a", 0.5, "G"), log("b", [1.5] * 10 + [None] * 30, "G"), spread("c", 1.0, "G")]
    (line,) = lines_of(EnvelopePlot()(Logs(group))).values()
    assert line.get_label() == "G" and line.get_drawstyle() == "steps-pre"
    best = np.max([certified_accuracies(each.table, line.get_xdata()) for each in group], axis=0)
    assert np.allclose(line.get_ydata(), 100 * best)
    assert {0.5, 1.0, 1.5} <= set(line.get_xdata()), (
        "the cliff at the end of each log is where it is"
    )
    assert line.get_ydata()[-1] == 0 and np.diff(line.get_xdata()).max() <= 1.5 / 1000


@pytest.mark.parametrize("logs", [1, 2, 4])
@pytest.mark.parametrize("evaluated", [[59], [29, 59], range(9, 60, 10)], ids=str)
def test_every_curve_with_a_point_has_a_marker(evaluated, logs):
    """A curve of a single point has no line at all: without its marker it cannot be seen."""
    runs = [training(f"run{number}/log.txt", 60, list(evaluated)) for number in range(logs)]
    lines = [line for axes in TrainingPlot()(Logs(training=runs)).axes for line in axes.lines]
    assert len(lines) == 4 * logs
    assert [
        line.get_label() for line in lines if line.get_markevery()[0] >= len(line.get_xdata())
    ] == []


def test_curves_differ_in_colour_or_marker():
    assert len({(style["color"], style["marker"]) for style in line_styles(9)}) == 9, (
        "the ninth differs from the first"
    )
    assert len({(style["color"], style["marker"]) for style in line_styles(24)}) == 24
    assert len({style["color"] for style in line_styles(8)}) == 8


@pytest.mark.parametrize(
    "name", ["_private", "a_b", "$x_1$", "50 $ or $ 60", r"$\nonsense$", "100%", "a&b<c>"]
)
def test_legend_has_any_name_as_it_is(name):
    """matplotlib hides labels that begin with _, and sets what is between dollars as
    mathematics.
    """
    figure = CertifiedAccuracyPlot()(Logs([log(name, [0.5]), ONE]))
    figure.draw_without_rendering()
    assert [text.replace(r"\$", "$") for text in entries(figure)] == [name, "one"]
    for text, raw in zip(legend_of(figure).get_texts(), (name, "one")):
        assert not text.get_parse_math() or not re.search(
            r"(?<!\\)\$.*(?<!\\)\$", text.get_text()
        ), raw


def cut_off(figure: Figure) -> list[str]:
    """Texts that are not wholly within the picture, and axes squeezed to nothing."""
    figure.draw_without_rendering()
    texts = [
        *legend_of(figure).get_texts(),
        *(text for axes in figure.axes for text in texts_around(axes)),
    ]
    small = [
        f"axes {axes.bbox.size}" for axes in figure.axes if min(axes.bbox.size / figure.dpi) < 1.5
    ]
    return certified_logs.cut_off(figure, texts) + small


def overlapping(figure: Figure) -> bool:
    """Whether a legend below the axes reaches into them or their titles."""
    if not figure.legends:
        return False
    top = legend_of(figure).get_window_extent().y1
    return any(top > axes.xaxis.label.get_window_extent().y0 + 0.5 for axes in figure.axes)


NAMINGS = {
    "short": lambda number: f"m{number}",
    "of 40 characters": lambda number: (
        f"{'PGD_2steps/eps_255/noise_0.25/sigma_0.25/'[:38]}{number:02}"
    ),
    "as released": lambda number: f"{LONG}_{number}",
}


@pytest.mark.parametrize(
    ("curves", "naming"),
    [(1, "short"), (4, "of 40 characters"), (12, "as released"), (1, "as released")],
)
@pytest.mark.parametrize("kind", ["plot", "plot_envelope", "plot_empirical", "plot_training"])
def test_nothing_is_cut_off(kind, curves, naming):
    names = [NAMINGS[naming](number) for number in range(curves)]
    logs, attacks = (
        [spread(name, 1.0, name) for name in names],
        [(name, eps) for name in names for eps in (0, 1)],
    )
    under_attack = [prediction(f"{name}{eps}", 5, eps, name) for name, eps in attacks]
    runs = [training(f"{name}/log.txt") for name in names]
    figure = {
        "plot": lambda: CertifiedAccuracyPlot()(Logs(logs)),
        "plot_envelope": lambda: EnvelopePlot()(Logs(logs)),
        "plot_empirical": lambda: EmpiricalPlot()(Logs([spread("c", 1.0, names[0])], under_attack)),
        "plot_training": lambda: TrainingPlot()(Logs(training=runs)),
    }[kind]()
    assert cut_off(figure) == []
    assert not overlapping(figure)
    assert len(entries(figure)) == {"plot_empirical": curves + 1, "plot_training": 2 * curves}.get(
        kind, curves
    )
