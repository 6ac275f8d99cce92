"""What a certification log says, on a log that is counted by hand."""

import numpy as np
import pandas as pd
import pytest

from smoothadv.analysis.quantities import (
    abstention_rate,
    accuracy_curve,
    average_certified_radius,
    certified_accuracy,
    clean_accuracy,
)

# Correct at 0.5 and 0.25, an abstention, wrong at 0.8, correct at 1.
LOG = pd.DataFrame({"predict": [3, 4, -1, 1, 2], "correct": [1, 1, 0, 0, 1], "radius": [0.5, 0.25, 0.0, 0.8, 1.0]})


@pytest.mark.parametrize(
    "radius, accuracy", [(0, 0.6), (0.25, 0.6), (0.26, 0.4), (0.5, 0.4), (0.8, 0.2), (1, 0.2), (1.01, 0)]
)
def test_certified_accuracy_counts_correct_examples_of_at_least_the_radius(radius, accuracy):
    assert certified_accuracy(LOG, radius) == pytest.approx(accuracy, abs=1e-15)


def test_averages():
    assert clean_accuracy(LOG) == pytest.approx(0.6)
    assert average_certified_radius(LOG) == pytest.approx(0.35)
    assert abstention_rate(LOG) == pytest.approx(0.2)


def test_curve_has_the_accuracies_at_its_corners_and_encloses_the_average_radius():
    radii, accuracies = accuracy_curve(LOG)
    assert radii.tolist() == [0, 0.25, 0.5, 1, 1]
    assert accuracies == pytest.approx([0.6, 0.6, 0.4, 0.2, 0])
    # Between two corners the accuracy is that of the larger radius.
    assert np.sum(np.diff(radii) * accuracies[1:]) == pytest.approx(0.35)


def test_a_log_without_a_correct_example_has_a_flat_curve():
    wrong = LOG.assign(correct=0)
    assert certified_accuracy(wrong, 0) == average_certified_radius(wrong) == 0
    assert set(accuracy_curve(wrong)[1]) == {0}
