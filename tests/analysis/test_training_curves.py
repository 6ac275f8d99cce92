"""plot_training where not every epoch was evaluated: test curves have the points that there are, and show them."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from smoothadv.analysis.plot_training import TrainingPlot
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.readers import read_training_log
from smoothadv.records import TRAINING_COLUMNS


def write_log(path: Path, epochs: int, evaluated: list[int]) -> Path:
    """A log as training writes it: loss 2 - e / 100 and accuracy e / 100, in tests 1 higher and e / 200."""
    rows = ["\t".join(TRAINING_COLUMNS)]
    for epoch in range(epochs):
        tested = epoch in evaluated
        row = {
            **{"epoch": epoch, "time": 1.5, "lr": 0.1, "epsilon": 0.25, "images_per_second": 99.5},
            **{"train_loss": 2 - epoch / 100, "train_accuracy": epoch / 100, "train_unattacked_accuracy": epoch / 100},
            **{"test_loss": 3 - epoch / 100 if tested else "nan", "test_accuracy": epoch / 200 if tested else "nan"},
            **{"test_clean_accuracy": 0.5 if tested else "nan", "test_adversarial_accuracy": "nan"},
            "test_images": 100 if tested else 0,
        }
        rows.append("\t".join(str(row[name]) for name in TRAINING_COLUMNS))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def drawn(folder: Path, epochs: int, *evaluated: list[int]) -> Figure:
    """The figure of as many logs, each with these epochs evaluated."""
    logs = []
    for number, of_one in enumerate(evaluated):
        path = write_log(folder / f"run{number}" / "log.txt", epochs, of_one)
        logs.append(replace(Log(f"run{number}/log.txt", path, "", read_training_log(path)), name=f"run{number}"))
    figure = TrainingPlot()(Logs(training=logs))
    figure.draw_without_rendering()
    return figure


def curves(figure: Figure, split: str) -> list[list[Line2D]]:
    """The lines of one split, by panel: loss and accuracy."""
    return [[line for line in axes.lines if line.get_label().endswith(split)] for axes in figure.axes]


def points(line: Line2D) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist()))


@pytest.mark.parametrize(
    "evaluated",
    [list(range(0, 12, 3)), list(range(2, 12, 3)), [11], list(range(12))],
    ids=["every third from the first", "every third from the third", "the last", "all"],
)
def test_test_curve_has_the_epochs_that_were_evaluated(tmp_path, evaluated):
    figure = drawn(tmp_path, 12, evaluated)
    (loss,), (accuracy,) = curves(figure, "test")
    assert points(loss) == [(epoch + 1, pytest.approx(3 - epoch / 100)) for epoch in evaluated]
    assert points(accuracy) == [(epoch + 1, pytest.approx(epoch / 2)) for epoch in evaluated]
    # The line is whole: nothing undefined between its points would interrupt it.
    assert loss.get_linestyle() == "--" and not any(value != value for value in loss.get_ydata())
    (loss,), (accuracy,) = curves(figure, "training")
    assert points(loss) == [(epoch + 1, pytest.approx(2 - epoch / 100)) for epoch in range(12)]
    assert points(accuracy) == [(epoch + 1, pytest.approx(epoch)) for epoch in range(12)]
    assert figure.axes[0].get_ylim()[1] >= 3 - evaluated[0] / 100


def test_log_without_any_test_is_drawn_with_its_training_curve(tmp_path):
    figure = drawn(tmp_path, 12, [])
    assert all(points(line) == [] for panel in curves(figure, "test") for line in panel)
    (loss,), (accuracy,) = curves(figure, "training")
    assert len(points(loss)) == len(points(accuracy)) == 12
    low, high = figure.axes[0].get_ylim()
    assert low == 0 and 2 <= high < 2.5 and figure.axes[1].get_ylim() == (0, 100)


def marked(line: Line2D) -> list[int]:
    """The points of a line that have a marker, which matplotlib chooses by (start, step)."""
    start, step = line.get_markevery()
    return list(range(len(line.get_xdata())))[start::step]


@pytest.mark.parametrize("logs", [1, 2, 4])
@pytest.mark.parametrize("evaluated", [[59], [29, 59], list(range(9, 60, 10))], ids=["the last", "two", "every tenth"])
def test_every_curve_with_a_point_has_a_marker(tmp_path, evaluated, logs):
    """A curve of a single point has no line at all: without its marker it cannot be seen."""
    figure = drawn(tmp_path, 60, *[evaluated] * logs)
    lines = [line for split in ("training", "test") for panel in curves(figure, split) for line in panel]
    assert len(lines) == 4 * logs
    assert [line.get_label() for line in lines if not marked(line)] == []
