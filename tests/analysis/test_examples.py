"""examples: images counted by hand over three logs, and against counting in plain loops."""

from dataclasses import replace

import pytest

from smoothadv.analysis.examples import Examples
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.report import Report
from support.certified_logs import log_of

KEYS = [
    "idx",
    "label",
    "logs",
    "certified",
    "abstained",
    "mean_radius",
    "largest_radius",
    "best_log",
    "taken_for",
]
Outcome = tuple[int, float]  # predict, radius


def log(name: str, outcomes: dict[int, Outcome]) -> Log:
    """A log by idx; the label of an image is its idx modulo 3."""
    label = [idx % 3 for idx in outcomes]
    predict, radius = map(list, zip(*outcomes.values()))
    return log_of(name, {"idx": [*outcomes], "label": label, "predict": predict, "radius": radius})


def rows_of(logs: list[Log], **options) -> list[tuple]:
    table = Examples(**options)(Logs(logs))
    assert [column.key for column in table.columns] == KEYS and table.for_people is None
    return [tuple(row) for row in table.plain_rows()]


# idx 0 (label 0) is easy, 1 (label 1) right once, 2 (label 2) never, 10 (label 1) in one log only.
A = log("a", {0: (0, 0.5), 1: (2, 0.9), 2: (-1, 0.0), 10: (1, 0.25)})
B = log("b", {0: (0, 1.0), 1: (1, 0.5), 2: (1, 0.7)})
C = log("c", {0: (0, 1.0), 1: (-1, 0.0), 2: (0, 0.1)})
WORST_FIRST = [
    ("2", "2", 3, 0, 1, 0.0, 0.0, None, "0"),
    ("1", "1", 3, 1, 1, pytest.approx(0.5 / 3), 0.5, "b", "2"),
    ("10", "1", 1, 1, 0, 0.25, 0.25, "a", None),
    ("0", "0", 3, 3, 0, pytest.approx(2.5 / 3), 1.0, "b", None),
]


def test_images_are_counted_over_all_logs_worst_first():
    """Radii of wrong answers count as 0; of equally common mistakes the smaller class is shown, of
    equal logs the first."""
    assert rows_of([A, B, C]) == WORST_FIRST


def test_report_shows_the_examples_beside_predictions_of_another_kind():
    predictions = replace(log("predicted", {0: (0, 0.0)}), procedure="top-2")
    page = Report()(Logs([log("a", {0: (0, 0.5)})], [predictions]))
    assert "Worst</" in page and "Best</" in page
