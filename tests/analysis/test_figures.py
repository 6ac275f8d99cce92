"""Figures, as matplotlib objects: every line shows its quantity, is named, and nothing is cut off;
every cell of a heat map says the best of its logs, and those without a log look empty.
"""

import math
import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text

from smoothadv.analysis.figure_style import line_styles
from smoothadv.analysis.figures import (
    MEASURES,
    CertifiedAccuracyPlot,
    EmpiricalPlot,
    EnvelopePlot,
    HeatMap,
    TrainingPlot,
)
from smoothadv.analysis.logs import Log, Logs
from smoothadv.statistics.accuracy import certified_accuracies
from support.certified_logs import log, predicted

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
    figure = CertifiedAccuracyPlot()(
        Logs([log(name, [0.5]), log("one", [0.5, 0.25, None, None, 1.0])])
    )
    figure.draw_without_rendering()
    assert [text.replace(r"\$", "$") for text in entries(figure)] == [name, "one"]
    for text, raw in zip(legend_of(figure).get_texts(), (name, "one")):
        assert not text.get_parse_math() or not re.search(
            r"(?<!\\)\$.*(?<!\\)\$", text.get_text()
        ), raw


def texts_around(axes: Axes) -> list[Text]:
    """The title, the names of the axes, and the labels of the ticks that are drawn."""
    texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())  # beyond it ticks exist, but are not drawn
        texts += [
            label
            for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels())
            if low <= at <= high
        ]
    return texts


def cut_off(figure: Figure, texts: list[Text]) -> list[str]:
    """Those of the ``texts`` of a drawn figure that are not wholly within it."""
    width, height = figure.bbox.size
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in texts
        if text.get_text() and text.get_visible()
    ]
    return [
        text
        for text, box in boxes
        if box.x0 < -0.5 or box.y0 < -0.5 or box.x1 > width + 0.5 or box.y1 > height + 0.5
    ]


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
    figure.draw_without_rendering()
    around = [text for axes in figure.axes for text in texts_around(axes)]
    assert cut_off(figure, [*legend_of(figure).get_texts(), *around]) == []
    assert min(size for axes in figure.axes for size in axes.bbox.size) / figure.dpi >= 1.5
    assert not overlapping(figure)
    assert len(entries(figure)) == {"plot_empirical": curves + 1, "plot_training": 2 * curves}.get(
        kind, curves
    )


# Heat maps


def right(name: str, radii: list[float], examples: int = 4, **values) -> Log:
    """A certification log: right with each of the ``radii``, abstentions otherwise."""
    return log(name, [*radii, *[None] * (examples - len(radii))], **values)


# By hand, (sigma, epsilon) at radius 0.2: (0.25, none) 75, (0.25, 1) 50 of c, (0.5, 0.25) 25, (0.5,
# 1) 100; at 0.5: 25, 25 of b, 25, 75. No log has (0.25, 0.25) or (0.5, none).
ORACLE = Logs(
    [
        right("d", [0.9, 0.9, 0.9, 0.2], sigma=0.5, epsilon=1.0, num_steps=2),
        right("a", [0.5, 0.2, 0.2], sigma=0.25, group="Gaussian"),
        right("b", [0.5], sigma=0.25, epsilon=1.0, num_steps=10),
        right("c", [0.2, 0.2], sigma=0.25, epsilon=1.0, num_steps=2, group="Ours"),
        right("e", [1.5], sigma=0.5, epsilon=0.25, num_steps=2),
        right("f", [0.1], sigma=0.5, epsilon=0.25, num_steps=2),
    ]
)


def panels_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def labels(texts: list[Text]) -> list[str]:
    return [text.get_text() for text in texts]


def cells_of(panel: Axes) -> list[list[str | None]]:
    """The panel as a reader sees it, from the top left: the text of each cell, None where it is
    hatched.
    """
    (mesh,) = panel.collections
    rows, columns = mesh.get_array().shape
    seen = [[None] * columns for _ in range(rows)]
    for text in panel.texts:
        x, y = text.get_position()
        assert seen[math.floor(y)][math.floor(x)] is None, "one text per cell"
        seen[math.floor(y)][math.floor(x)] = text.get_text()
    for patch in panel.patches:
        assert patch.get_hatch() and seen[int(patch.get_y())][int(patch.get_x())] is None
    assert panel.yaxis_inverted() and len(panel.patches) == sum(row.count(None) for row in seen)
    return seen


def test_cells_are_those_of_the_oracle():
    figure = HeatMap(radii=[0.2, 0.5])(ORACLE)
    first, second = panels_of(figure)
    assert cells_of(first) == [["75.0", None, "50.0"], [None, "25.0", "100.0"]]
    assert cells_of(second) == [["25.0", None, "25.0"], [None, "25.0", "75.0"]]
    assert [panel.get_title() for panel in (first, second)] == [
        r"$\ell_2$ radius 0.20",
        r"$\ell_2$ radius 0.50",
    ]
    assert labels(first.get_xticklabels()) == labels(second.get_xticklabels()) == ["–", "0.25", "1"]
    assert labels(first.get_yticklabels()) == ["0.25", "0.50"] and labels(
        second.get_yticklabels()
    ) == ["", ""]
    assert (first.get_ylabel(), first.get_xlabel(), second.get_xlabel()) == ("σ", "ε", "ε")
    assert figure.axes[-1].get_ylabel() == "certified accuracy (%)"
    note = "best of up to 2 logs per cell; hatched: no log; –: no ε stated"
    assert figure.get_supxlabel().replace("\n", " ") == note


def grid_of_logs(
    rows: int, columns: int, copies: int = 1, missing: bool = False, seed: int = 0
) -> list[Log]:
    """Logs of 1,000 examples with random radii for each of rows x columns pairs, without some of
    them if asked.
    """
    random, logs = np.random.default_rng(seed), []
    for row, column, copy in product(range(rows), range(columns), range(copies)):
        if not (missing and (row + column) % 3 == 1):
            radii = (random.random(random.integers(1, 1000)) * 3).tolist()
            values = {
                "sigma": 0.125 * (row + 1),
                "epsilon": 0.2501 * column or None,
                "num_steps": copy,
            }
            logs.append(right(f"{row} {column} {copy}", radii, 1000, **values))
    return logs


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.1)."""
    red, green, blue = (
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_survive_grey_printing_and_texts_stand_out():
    """The contrast that WCAG 2.1 asks of small text is 4.5."""
    figure = HeatMap(radii=[0.25, 1.0, 2.0])(Logs(grid_of_logs(6, 6, copies=2)))
    colours = set()
    for panel in panels_of(figure):
        (mesh,) = panel.collections
        for text in panel.texts:
            behind = luminance(mesh.cmap(mesh.norm(float(text.get_text()))))
            of_text = {"black": 0.0, "white": 1.0}[text.get_color()]
            dark, light = sorted((behind, of_text))
            assert (light + 0.05) / (dark + 0.05) >= 4.5
            colours.add(text.get_color())
    assert colours == {"black", "white"}
    scale = [luminance(colour) for colour in colormaps[mesh.cmap.name](np.linspace(0, 1, 256))]
    assert np.all(np.diff(scale) > -1e-3) and scale[-1] - scale[0] > 0.7


def test_one_of_the_two_hyper_parameters_is_enough():
    logs = Logs([right("a", [0.5], epsilon=1.0), right("b", [], sigma=1.0)])
    (panel,) = panels_of(HeatMap(radii=[0.5])(logs))
    assert cells_of(panel) == [[None, "25.0"], ["0.0", None]]


@pytest.mark.parametrize("measure", MEASURES)
def test_nothing_certified_is_drawn_as_nothing(measure):
    (panel,) = panels_of(HeatMap(measure=measure)(Logs([right("a", [], sigma=0.5, epsilon=1.0)])))
    ((text,),) = cells_of(panel)
    assert float(text) == 0 and panel.collections[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("panels", "shape"),
    [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (6, (2, 3)), (7, (3, 3)), (12, (4, 3))],
)
def test_panels_wrap_into_rows(panels, shape):
    figure = HeatMap(radii=[0.1 * (number + 1) for number in range(panels)])(ORACLE)
    drawn = panels_of(figure)
    assert len(drawn) == panels
    assert {panel.get_subplotspec().get_gridspec().get_geometry() for panel in drawn} == {shape}
    lowest = [
        panel
        for panel, below in zip(drawn, [*drawn[shape[1] :], *[None] * shape[1]])
        if below is None
    ]
    assert [panel for panel in drawn if panel.get_xlabel()] == lowest, (
        "the axis is named once per column"
    )
    assert sum(bool(panel.get_ylabel()) for panel in drawn) == shape[0]


def texts_of(figure: Figure) -> list[Text]:
    texts = [*figure.texts, figure._supxlabel, *([figure._suptitle] if figure._suptitle else [])]
    for axes in figure.axes:
        texts += [*axes.texts, *texts_around(axes)]
    unique = {id(text): text for text in texts}.values()
    return [text for text in unique if text.get_text() and text.get_visible()]


def unreadable(figure: Figure) -> list[str]:
    """Texts that leave the picture or touch each other, and numbers wider than their cells."""
    figure.draw_without_rendering()
    texts = texts_of(figure)
    faults = [f"{text} is cut off" for text in cut_off(figure, texts)]
    low, high = np.array([text.get_window_extent().get_points() for text in texts]).swapaxes(0, 1)
    shared = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    touching = np.argwhere(np.triu((shared > 0.5).all(axis=2), 1))
    faults += [f"{labels(texts)[one]} touches {labels(texts)[other]}" for one, other in touching]
    for panel in panels_of(figure):
        for text in panel.texts:
            x, y = text.get_position()
            cell = panel.transData.transform(
                [(math.floor(x), math.floor(y)), (math.ceil(x), math.ceil(y))]
            )
            box = text.get_window_extent()
            if box.width > 0.95 * np.ptp(cell[:, 0]) or box.height > 0.95 * np.ptp(cell[:, 1]):
                faults.append(f"{text.get_text()} is wider than its cell")
    return faults


# Every size with one panel, every measure in a small and a large grid, several panels in grids of
# every shape.
@pytest.mark.parametrize(
    ("size", "measure", "panels"),
    [
        *(
            (size, "certified_accuracy", 1)
            for size in [(1, 1), (1, 10), (6, 1), (4, 5), (6, 10), (12, 16)]
        ),
        *(
            (size, measure, 1)
            for size in [(1, 1), (6, 10)]
            for measure in MEASURES
            if measure != "certified_accuracy"
        ),
        *((size, "certified_accuracy", 3) for size in [(1, 10), (6, 1), (4, 5)]),
        *((size, "certified_accuracy", 8) for size in [(1, 1), (4, 5)]),
        pytest.param((12, 16), "certified_accuracy", 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_everything_can_be_read(size, measure, panels):
    settings = (
        {"radii": [0.25 * number for number in range(panels)]}
        if measure == "certified_accuracy"
        else {}
    )
    figure = HeatMap(measure=measure, title="Digits", **settings)(
        Logs(grid_of_logs(*size, missing=min(size) > 1))
    )
    assert unreadable(figure) == []
    panel = panels_of(figure)[0]
    width, height = panel.bbox.size / figure.dpi
    assert width / size[1] >= 0.4 and height / size[0] >= 0.3, "inches of a cell"


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("panels", [1, 4])
def test_long_names_can_be_read(panels, swap):
    trainings = ["SmoothAdv-DDN + pre-training + self-training", "Gaussian", "vanilla PGD"]
    pairs = product(trainings, (100, 10_000, 1_000_000))
    logs = [right(f"{name}{N}", [0.5], sigma=0.5, training=name, N=N) for name, N in pairs]
    names = ["training", "N"][:: -1 if swap else 1]
    figure = HeatMap(rows=names[0], columns=names[1], radii=[0.1] * panels)(Logs(logs))
    assert unreadable(figure) == []
    panel = panels_of(figure)[0]
    found = [labels(panel.get_yticklabels()), labels(panel.get_xticklabels())][:: -1 if swap else 1]
    assert found == [sorted(trainings), ["100", "10,000", "1,000,000"]]
