"""Estimates of cascades: those of an obvious loop over images, and the choice on other images."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import smoothadv
from smoothadv.analysis.compare import estimated_radii
from smoothadv.base.errors import UserError
from support.analyzed_folder import FIVE, log
from support.models import IntervalClassifier

quantile = stats.norm.ppf


def one_by_one(stages: list[tuple[int, float, float]], threshold: float, label: int) -> float:
    """The radius of one image: the largest one of all certificates; -1 where its class is wrong."""
    found = []
    for k, (c, radius, sigma) in enumerate(stages):
        if c < 0:
            continue
        radii = [radius if k == len(stages) - 1 else radius - sigma * quantile(threshold)]
        for other, before, noise in stages[:k]:
            p_a = stats.norm.cdf(before / noise) if other >= 0 else 0.5
            rival = 1 - p_a if other == c else p_a
            radii.append(noise * (quantile(threshold) - quantile(rival)))
        if min(radii) >= 0:
            found.append((min(radii), -k, c))
    radius, _, c = max(found, default=(-1.0, 0, -1))
    return radius if c == label else -1.0


image = st.tuples(st.integers(-1, 2), st.floats(0.01, 1))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.tuples(image, image, image), min_size=1, max_size=8), st.floats(0.5, 0.95))
def test_the_estimate_is_that_of_an_obvious_loop(images, threshold):
    sigmas, labels = (1.0, 0.5, 0.25), np.arange(len(images)) % 3
    stages = []
    for place, sigma in enumerate(sigmas):
        classes = np.array([each[place][0] for each in images])
        radii = np.array([each[place][1] * sigma * 3 for each in images]) * (classes >= 0)
        stages.append((classes, radii, sigma))
    found = estimated_radii(stages, threshold, labels)
    expected = [
        one_by_one(
            [(int(c[row]), float(r[row]), sigma) for c, r, sigma in stages], threshold, row % 3
        )
        for row in range(len(images))
    ]
    assert found == pytest.approx(np.array(expected), abs=1e-9)


def test_the_best_is_chosen_on_some_images_and_measured_on_the_others(workplace):
    """The first model is good on even images, the second one on odd ones."""
    log("a.tsv", [0.5, 0.0] * 10, sigma=0.5)
    log("b.tsv", [0.0, 0.2] * 10, sigma=0.25)
    table = smoothadv.cascade("a.tsv", "b.tsv", choose_on=2, radii=[0, 0.25], thresholds=[0.5])
    assert table.iloc[0].cascade == "a > b"
    alone = table[table.threshold.isna()].set_index("cascade")
    assert alone.loc["a", "0.25"] == 0 and alone.loc["b", "0"] == 1
    whole = smoothadv.cascade("a.tsv", "b.tsv", radii=[0, 0.25], thresholds=[0.5])
    alone = whole[whole.threshold.isna()].set_index("cascade")
    assert alone.loc["a", "0.25"] == 0.5
    oracle = whole.iloc[-1]
    assert oracle.cascade.startswith("oracle") and (oracle["0"], oracle["0.25"]) == (1, 0.5)
    assert oracle.average == pytest.approx(0.35)


def test_counts_say_more_than_the_radius_of_a_grid(workplace):
    """p_A is at least the bound of Clopper and Pearson, whatever radius the grid has."""
    pictures = torch.full((6, 1, 2, 2), 0.5)
    pictures[:, 0, 0, 0] = torch.tensor([0.1, 0.3, 0.5, 0.6, 0.8, 0.9])
    given = {"images": pictures, "labels": (pictures[:, 0, 0, 0] > 0.5).long(), "n": 1000}
    given |= {"method": "adaptive", "settings": {"radii": (0.0, 0.05)}}
    stages = []
    for name, sigma in (("a", 0.5), ("b", 0.25)):
        table = smoothadv.certify(IntervalClassifier(0.5), **given, sigma=sigma, log=f"{name}.tsv")
        bounds = stats.beta.ppf(0.001, table.successes, table.trials - table.successes + 1)
        radii = sigma * quantile(bounds) * (table.predict >= 0)
        stages.append([*zip(table.predict, radii, [sigma] * 6)])
    found = smoothadv.cascade("a.tsv", "b.tsv", radii=[0], thresholds=[0.6]).set_index("cascade")
    for name, order in (("a > b", stages), ("b > a", stages[::-1])):
        radii = [one_by_one(each, 0.6, label) for *each, label in zip(*order, table.label)]
        average = float(np.maximum(radii, 0).mean())
        assert average > 0.06 and found.loc[name].average == pytest.approx(average, abs=1e-9)
    assert found.loc["b"].average <= 0.05


def test_images_that_all_logs_hold_are_paired_and_others_said_to_be_left_out(workplace):
    log("a.tsv", [0.5] * 5, run=FIVE)
    log("b.tsv", [0.1] * 5 + [0.5] * 5)
    with pytest.warns(UserWarning) as said:
        table = smoothadv.cascade("a.tsv", "b.tsv", radii=[0.25])
    sentence = "only the 5 examples that all logs hold, of 5 and 10, are compared"
    assert [str(each.message) for each in said] == [sentence]
    assert table.set_index("cascade").loc["b", "0.25"] == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sigmas": [0.5, 0.25], "threshold": 0.7}, "b.tsv has several stages: give logs of sing"),
        ({"dataset": "mnist"}, "a.tsv and b.tsv are not on the same images, but of digits, mnist"),
        ({"idx": range(1, 9, 2)}, "a.tsv and b.tsv have no example in common"),
    ],
)
def test_logs_of_several_stages_or_of_other_images_are_refused(workplace, settings, words):
    log("a.tsv", [0.25] * 4, dataset="digits")
    log("b.tsv", [0.1] * 4, **settings)
    with pytest.raises(UserError, match=words):
        smoothadv.cascade("a.tsv", "b.tsv")
