"""Figures, as matplotlib objects: every line shows its quantity, is named, and nothing is cut
off.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from smoothadv.analysis.figure_style import line_styles
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.plot import CertifiedAccuracyPlot, EmpiricalPlot, EnvelopePlot, TrainingPlot
from smoothadv.analysis.radii import AtRadii, ErrorProbability
from smoothadv.statistics.accuracy import (
    accuracy_curve,
    bootstrap_interval,
    certified_accuracies,
)
from smoothadv.statistics.bounds import binomial_interval
from support import certified_logs
from support.certified_logs import log, predicted, texts_around

L2, LINF = r"$\ell_2$ radius (images in [0, 1])", r"$\ell_\infty$ radius (images in [0, 1])"
RHO = ErrorProbability(0.001)
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


def dashed(figure: Figure) -> set[str]:
    return {label for label, line in lines_of(figure).items() if line.get_linestyle() == "--"}


def accuracies_drawn(line: Line2D, radii: np.ndarray) -> np.ndarray:
    """What a reader sees at the radii: a step line holds each value up to the corner on its
    right.
    """
    assert line.get_drawstyle() == "steps-pre"
    corners, heights = line.get_data()
    return heights[np.searchsorted(corners, radii)] / 100


def axis_titles(figure: Figure, panel: int = 0) -> tuple[str, str]:
    return figure.axes[panel].get_xlabel(), figure.axes[panel].get_ylabel()


ONE, TWO = log("one", [0.5, 0.25, None, None, 1.0]), log("two", [0.1] * 4 + [2.0])


def test_plot_shows_the_curve_of_each_log():
    figure = CertifiedAccuracyPlot()(Logs([ONE, TWO]))
    assert axis_titles(figure) == (L2, "certified accuracy (%)") and entries(figure) == [
        "one",
        "two",
    ]
    for each in (ONE, TWO):
        radii, accuracies = accuracy_curve(each.table)
        drawn = lines_of(figure)[each.name]
        assert np.array_equal(drawn.get_xdata(), radii) and np.allclose(
            drawn.get_ydata(), 100 * accuracies
        )
        asked = np.linspace(0, radii[-1], 77)
        assert np.allclose(accuracies_drawn(drawn, asked), certified_accuracies(each.table, asked))
    assert dashed(figure) == set()
    assert figure.axes[0].get_ylim() == (0, 100) and figure.axes[0].get_xlim() == pytest.approx(
        (0, 2.08)
    )


def test_curves_have_the_names_given_to_single_logs():
    one, two = (
        replace(log(name, [0.5], group), group_is_named=True)
        for name, group in (("a", "First"), ("b", "Second"))
    )
    for logs, names in (
        ([one, two], ["First", "Second"]),
        ([one, replace(two, group="First")], ["a", "b"]),
    ):
        assert entries(CertifiedAccuracyPlot(confidence=0.9)(Logs(logs))) == names


def test_plot_of_a_log_without_a_correct_example_is_a_line_at_nothing():
    figure = CertifiedAccuracyPlot()(Logs([log("wrong", [None, None])]))
    assert set(lines_of(figure)["wrong"].get_ydata()) == {0}


def test_band_is_the_bootstrap_interval_in_the_colour_of_its_curve():
    figure = CertifiedAccuracyPlot(confidence=0.9)(Logs([ONE]))
    (band,) = figure.axes[0].collections
    radii, accuracies = accuracy_curve(ONE.table)
    low, high = bootstrap_interval(accuracies, 5, 0.9)
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((100 * low.min(), 100 * high.max()))
    assert set(np.round(heights, 9)) <= set(np.round(100 * np.concatenate([low, high]), 9))
    assert tuple(band.get_facecolor()[0][:3]) == pytest.approx(
        tuple(int(lines_of(figure)["one"].get_color()[k : k + 2], 16) / 255 for k in (1, 3, 5))
    )
    assert not CertifiedAccuracyPlot()(Logs([ONE])).axes[0].collections


def test_plot_in_linf_shrinks_the_radii_by_the_root_of_the_pixels():
    figure = CertifiedAccuracyPlot(norm="linf")(Logs([log("one", [0.5, 1.0], dimension=100)]))
    assert axis_titles(figure)[0] == LINF
    assert lines_of(figure)["one"].get_xdata() == pytest.approx([0, 0.05, 0.1, 0.1])


def test_plot_of_high_probability_is_lower_by_the_deduction():
    certain = log("certain", [1.0] * 500, alpha=0.001)
    (line,) = lines_of(CertifiedAccuracyPlot(high_probability=RHO)(Logs([certain]))).values()
    assert line.get_ydata() == pytest.approx([98.9141, 98.9141, 0], abs=1e-4)


def test_title_is_drawn_where_asked_for():
    logs = Logs([ONE], [prediction("p", 5, 0.25)], [training("t")])
    for plot in (CertifiedAccuracyPlot, EnvelopePlot, EmpiricalPlot, TrainingPlot):
        drawn = [plot(title=title)(logs) for title in ("Digits", None)]
        titles = [figure.axes[0].get_title() or figure.get_suptitle() for figure in drawn]
        assert titles == ["Digits", ""], plot


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


def test_envelope_of_high_probability_divides_rho_among_the_models():
    group = [log(str(number), [1.0] * 500, "G", alpha=0.001) for number in range(4)]
    (line,) = lines_of(EnvelopePlot(high_probability=RHO)(Logs(group))).values()
    expected = AtRadii(high_probability=RHO).accuracies(group[0], [0], models=4)[0]
    assert line.get_ydata()[0] == pytest.approx(100 * expected)


def by_sigma(group: str, scale: float) -> list[Log]:
    return [spread(f"{group}{sigma}", scale * sigma, group, sigma=sigma) for sigma in (0.25, 0.5)]


def test_baseline_is_one_dashed_curve_in_a_colour_of_its_own():
    figure = EnvelopePlot(group_by=["sigma"], baseline="Cohen")(
        Logs([*by_sigma("Ours", 3), *by_sigma("Cohen", 2)])
    )
    assert list(lines_of(figure)) == ["Ours, sigma = 0.25", "Ours, sigma = 0.50", "Cohen"]
    assert entries(figure) == ["Ours, σ = 0.25", "Ours, σ = 0.50", "Cohen"]
    assert dashed(figure) == {"Cohen"}
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3


def test_split_baseline_has_the_colours_of_the_curves_beside_it():
    logs = [*by_sigma("Ours", 3), *by_sigma("Cohen", 2), spread("extra", 2, "Cohen", sigma=1.0)]
    figure = EnvelopePlot(group_by=["sigma"], baseline="Cohen", split_baseline=True)(Logs(logs))
    lines = lines_of(figure)
    assert dashed(figure) == {f"Cohen, sigma = {sigma}" for sigma in ("0.25", "0.50", "1.00")}
    for sigma in ("0.25", "0.50"):
        assert (
            lines[f"Cohen, sigma = {sigma}"].get_color()
            == lines[f"Ours, sigma = {sigma}"].get_color()
        )
    assert lines["Cohen, sigma = 1.00"].get_color() not in {
        line.get_color() for line in list(lines.values())[:2]
    }


ATTACKED = [
    prediction("weak", 8, 0.25, "p"),
    prediction("strong", 9, 0.25, "p"),
    prediction("far", 3, 1.0, "p"),
]
MANY_DRAWS = [prediction(f"{m}", 9, 0.25, "p", num_noise_vec=m) for m in (1, 8)]


def test_accuracy_under_attack_is_dashed_against_the_certified_envelope():
    certified = [spread("a", 0.5, "p"), spread("b", 1.0, "p")]
    figure = EmpiricalPlot(confidence=0.9)(Logs(certified, ATTACKED))
    assert axis_titles(figure) == (L2, "accuracy (%)")
    assert dashed(figure) == {"p, under attack"} and entries(figure) == [
        "certified",
        "p, under attack",
    ]
    under_attack, envelope = lines_of(figure)["p, under attack"], lines_of(figure)["certified"]
    assert [list(axis) for axis in under_attack.get_data()] == [[0.25, 1.0], [90, 30]]
    bars = [bar[:, 1] for bar in figure.axes[0].collections[0].get_segments()]
    expected = [100 * np.array(binomial_interval(right, 10, 0.9)) for right in (9, 3)]
    assert np.allclose(bars, expected)
    assert not EmpiricalPlot()(Logs([], ATTACKED)).axes[0].collections
    radii, best = EnvelopePlot().envelope_curve(certified)
    assert np.array_equal(envelope.get_xdata(), radii) and np.allclose(
        envelope.get_ydata(), 100 * best
    )


@pytest.mark.parametrize(
    ("groups", "attacked", "shown"),
    [
        ("p", MANY_DRAWS, ["certified", "m = 1", "m = 8"]),
        ("c", MANY_DRAWS, ["c, certified", "p, m = 1", "p, m = 8"]),
        ("cp", MANY_DRAWS, ["c, certified", "p, certified", "p, m = 1", "p, m = 8"]),
        ("c", ATTACKED, ["c, certified", "p, under attack"]),
        ("", [prediction("q", 9, 0.25)], ["certified", "under attack"]),
    ],
)
def test_certificates_of_another_method_are_called_so(groups, attacked, shown):
    """A solid line of theirs beside dashed ones without names would be taken for that of the
    attacked models.
    """
    certified = [spread(name, 1.0, name) for name in groups] or [
        replace(spread("q", 1.0), path=attacked[0].path)
    ]
    by = ["num_noise_vec"] if attacked is MANY_DRAWS else ()
    assert entries(EmpiricalPlot(group_by=by)(Logs(certified, attacked))) == shown


def test_attacks_alone_can_be_drawn_by_hyper_parameter():
    logs = [
        prediction(f"{m} {eps}", 9 - m, eps, num_noise_vec=m) for m in (4, 1) for eps in (0.25, 0.5)
    ]
    figure = EmpiricalPlot(group_by=["num_noise_vec"])(Logs(prediction=logs))
    assert entries(figure) == ["m = 1", "m = 4"] and dashed(figure) == {"m = 1", "m = 4"}


def test_training_curves_are_loss_and_percent_by_epoch_from_one():
    figure = TrainingPlot()(Logs(training=[training("run/log.txt")]))
    titles = ["loss under noise", "accuracy under noise (%)"]
    assert [axis_titles(figure, panel) for panel in (0, 1)] == [
        ("epoch", title) for title in titles
    ]
    assert entries(figure) == ["training", "test"] and dashed(figure) == {"test"}
    assert list(lines_of(figure, 1)["test"].get_xdata()) == [1, 2, 3, 4, 5]
    assert lines_of(figure, 1)["training"].get_ydata() == pytest.approx([0, 1, 2, 3, 4])
    assert lines_of(figure, 0)["test"].get_ydata()[0] == 3
    assert figure.axes[0].get_ylim()[1] >= 3 and figure.axes[1].get_ylim() == (0, 100)


def points(figure: Figure, panel: int, split: str) -> list[tuple[float, float]]:
    line = lines_of(figure, panel)[split]
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist()))


@pytest.mark.parametrize("evaluated", [range(0, 12, 3), range(2, 12, 3), [11], range(12)], ids=str)
def test_test_curve_has_the_epochs_that_were_evaluated(evaluated):
    figure = TrainingPlot()(Logs(training=[training("run/log.txt", 12, list(evaluated))]))
    # The line is whole: nothing undefined between its points would interrupt it.
    assert dashed(figure) == {"test"}
    assert points(figure, 0, "test") == [
        (epoch + 1, pytest.approx(3 - epoch / 100)) for epoch in evaluated
    ]
    assert points(figure, 1, "test") == [
        (epoch + 1, pytest.approx(epoch / 2)) for epoch in evaluated
    ]
    assert points(figure, 0, "training") == [
        (epoch + 1, pytest.approx(2 - epoch / 100)) for epoch in range(12)
    ]
    assert points(figure, 1, "training") == [
        (epoch + 1, pytest.approx(epoch)) for epoch in range(12)
    ]
    assert figure.axes[0].get_ylim()[1] >= 3 - evaluated[0] / 100


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
