"""compare, gap and cascade: counts by hand, plain loops, McNemar's test against SciPy, coverage of
the interval by enumeration.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

import smoothadv
from smoothadv.analysis import Analysis
from smoothadv.analysis.compare import (
    Comparison,
    Gap,
    estimated_radii,
    mcnemar_p_value,
    pair_up,
    paired_difference_interval,
)
from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.radii import Radius
from smoothadv.statistics.bounds import tolerated_false_statements
from support import analyzed_folder
from support.analyzed_folder import FIVE
from support.certified_logs import log_of
from support.models import IntervalClassifier
from support.refusals import refusal

quantile = stats.norm.ppf


def rows_of(analysis: Analysis, logs: Logs) -> list[dict]:
    table = analysis(logs)
    return [dict(zip(table.keys, row)) for row in table.plain_rows()]


def log(
    name: str, radii: dict[int, float | None], labels: dict[int, int] | None = None, **values
) -> Log:
    """A log by idx: the radius of an example that it gets right, None for one that it gets wrong at
    radius 0.9.
    """
    label = [(labels or {}).get(idx, 1) for idx in radii]
    predict = [0 if radius is None else own for own, radius in zip(label, radii.values())]
    radius = [0.9 if radius is None else radius for radius in radii.values()]
    return log_of(
        name, {"idx": [*radii], "label": label, "predict": predict, "radius": radius}, **values
    )


def compared(first: Log, second: Log, **options) -> list[dict]:
    return rows_of(Comparison(**options), Logs([first, second]))


def test_linf_radii_are_those_of_each_log():
    """In 100 pixels l_inf 0.05 is l2 0.5, in 400 it is l2 1."""
    small, large = (
        log("s", {0: 0.5, 1: 0.99}, dimension=100),
        log("l", {0: 0.5, 1: 1.01}, dimension=400),
    )
    row = compared(small, large, norm="linf", radii=[Radius.parse("0.05")])[0]
    assert (row["first"], row["second"]) == (1.0, 0.5)


def test_logs_of_different_images_are_refused_by_an_example():
    words = "a and b are not on the same images: example 4 has label 7 in one"
    assert words in refusal(pair_up, log("a", {3: 1.0, 4: 1.0}, {4: 7}), log("b", {4: 1.0}))


def test_one_example_in_common_can_be_compared():
    """No resampling can vary it; and a log beside itself is noticed."""
    same = log("a", {0: 0.5})
    with pytest.warns(UserWarning, match="^a is compared with itself$"):
        compared(same, same)
    *_, average = compared(log("a", {0: 0.5}), log("b", {0: 1.0}), radii=[Radius.parse("0")])
    assert average["difference"] == 0.5


@given(st.integers(0, 12) | st.integers(0, 5000), st.integers(0, 12) | st.integers(0, 5000))
@example(0, 0)
def test_p_value_is_that_of_the_discordant_pairs_as_coin_flips(only_first, only_second):
    expected = 1.0  # nothing speaks for a difference
    if only_first + only_second:
        expected = stats.binomtest(only_first, only_first + only_second, 0.5).pvalue
    assert mcnemar_p_value(only_first, only_second) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def coverage(interval, first: float, second: float, pairs: int) -> float:
    """The exact probability that the interval of 95 % holds second - first, where those are the
    probabilities that only the first and only the second log is right. Sums over all counts."""
    truth, total = second - first, 0.0
    b, c = np.meshgrid(np.arange(pairs + 1), np.arange(pairs + 1), indexing="ij")
    possible = b + c <= pairs
    counts = np.stack([b, c, pairs - b - c], axis=-1)[possible]
    probabilities = stats.multinomial.pmf(counts, pairs, [first, second, 1 - first - second])
    for (only_first, only_second, _), probability in zip(counts.tolist(), probabilities):
        if probability > 1e-9:
            low, high = interval(only_first, only_second, pairs, 0.95)
            total += probability * (low - 1e-12 <= truth <= high + 1e-12)
    return total


def wald(only_first: int, only_second: int, pairs: int, confidence: float) -> tuple[float, float]:
    """The interval of textbooks, without pseudo-pairs: it is a point where no pair is
    discordant.
    """
    difference = (only_second - only_first) / pairs
    z = float(stats.norm.ppf((1 + confidence) / 2))
    half = z * math.sqrt((only_first + only_second) / pairs - difference**2) / math.sqrt(pairs)
    return difference - half, difference + half


SHARES = [
    *zip(
        [0, 0, 0.02, 0.1, 0.05, 0.02, 0.3, 0.25, 0.4],
        [0.02, 0.05, 0.02, 0.02, 0.05, 0.2, 0.1, 0.25, 0.1],
    )
]


def test_interval_holds_the_difference_about_as_often_as_it_says():
    """Exactly computed: never below 94 % and on average below 98 %; the textbook interval falls to
    55 %.
    """
    covered = [coverage(paired_difference_interval, *shares, 40) for shares in SHARES]
    assert min(covered) >= 0.94
    assert 0.95 <= np.mean(covered) <= 0.98
    assert min(coverage(wald, *shares, 40) for shares in SHARES) < 0.6


def average_row(first: np.ndarray, second: np.ndarray, **settings_) -> dict:
    """The last row: average radii of two logs that are right everywhere."""
    logs = [
        log(name, dict(enumerate(radii.tolist()))) for name, radii in (("a", first), ("b", second))
    ]
    return compared(*logs, radii=[Radius.parse("0")], **settings_)[-1]


def test_resampled_average_has_the_quantiles_counted_by_hand():
    """Differences 0 and 1: a resample's mean is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4."""
    for confidence, ends in ((0.95, (0, 1)), (0.6, (0, 1)), (0.4, (0.5, 0.5))):
        row = average_row(np.array([0.5, 0.5]), np.array([0.5, 1.5]), confidence=confidence)
        assert (row["low"], row["high"]) == ends
    # Resampled in pairs: apart, the logs would have the interval of another scale.
    constant = average_row(np.array([0.5, 1.0, 2.0]), np.array([0.75, 1.25, 2.25]))
    assert (constant["low"], constant["high"]) == (0.25, 0.25)


def test_seed_decides_the_resampling_and_nothing_else():
    first, second = np.linspace(0, 1, 40), np.linspace(0, 2, 40) ** 2
    again = [average_row(first, second, seed=seed) for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    assert again[0]["difference"] == again[2]["difference"]


# gap


SETTINGS = {
    "sigma": 0.25,
    "N": 1000,
    "alpha": 0.001,
    "checkpoint_sha256": "a",
    "dataset": "digits",
    "split": "test",
}


def parameters(settings: dict | None, **values) -> Facts:
    """Those that a manifest of these settings tells; without one, ``values`` alone."""
    known = (
        {}
        if settings is None
        else {name: settings[name] for name in ("sigma", "N", "alpha", "dataset", "split")}
    )
    return Facts({**known, **values}, {}, None if settings is None else {"settings": settings})


def certified(
    rows: list[tuple[int, int, int, float]],
    name: str = "certified",
    settings: dict | None = SETTINGS,
) -> Log:
    """A certification log of rows (idx, label, predict, radius)."""
    columns = zip(["idx", "label", "predict", "radius"], map(list, zip(*rows)))
    return replace(log_of(name, dict(columns)), facts=parameters(settings))


def attacked(
    rows: list[tuple],
    epsilon: float,
    name: str = "attacked",
    settings: dict | None = SETTINGS,
    **values,
) -> Log:
    """A prediction log under attack of rows (idx, label, predict) or (idx, label, predict,
    attack_norm).
    """
    columns = zip(["idx", "label", "predict", "attack_norm"], map(list, zip(*rows)))
    known = parameters(settings, attack="PGD", epsilon=epsilon, **values)
    return replace(log_of(name, dict(columns)), facts=known)


def gaps(certification: list[Log], prediction: list[Log], **options) -> list[dict]:
    return rows_of(Gap(**options), Logs(certification=certification, prediction=prediction))


# Certified within 1, certified as something else, an abstention, and certified within 0.1.
CERTIFICATES = certified([(0, 1, 1, 1.0), (1, 1, 2, 1.0), (2, 1, -1, 0.0), (3, 1, 1, 0.1)])


@pytest.mark.parametrize(
    ("norm", "count"), [(0.0, 1), (0.999, 1), (1 - 1e-9, 0), (1.0, 0), (1.001, 0)]
)
def test_certificate_reaches_as_far_as_its_open_ball(norm, count):
    """The norm of the perturbation counts, not the allowed one; in float32 it may equal the radius
    but for rounding.
    """
    log = attacked([(0, 1, 0, norm)], 5.0)
    assert gaps([CERTIFICATES], [log])[0]["contradictions"] == count
    assert gaps([CERTIFICATES], [attacked([(0, 1, 0)], norm or 1e-9)])[0]["contradictions"] == count


labels, classes, reals = (
    st.integers(0, 2),
    st.integers(-1, 2),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]),
)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.integers(0, 9), st.tuples(labels, classes, reals, classes, reals), min_size=1
    ),
    st.sets(st.integers(0, 9), max_size=4),
    st.sampled_from([0.25, 0.5]),
    st.booleans(),
    st.floats(0.5, 0.99),
)
def test_gap_is_that_of_plain_loops(facts, only_certified, epsilon, has_norms, confidence):
    """Images of which there is no prediction do not count."""
    rows = {i: (label, c, 0.0 if c < 0 else r, p, n) for i, (label, c, r, p, n) in facts.items()}
    both = {i: row for i, row in rows.items() if i not in only_certified}
    log = certified([(i, label, c, r) for i, (label, c, r, _, _) in rows.items()])
    if not both:
        return
    predictions = [
        (i, label, p, n)[: 3 + has_norms]
        for i, (label, _, _, p, n) in sorted(both.items(), reverse=True)
    ]
    (found,) = gaps([log], [attacked(predictions, epsilon)], confidence=confidence)
    hits = sum(label == p for label, _, _, p, _ in both.values())
    reached = sum(c == label and r >= epsilon for label, c, r, _, _ in both.values())
    abstained = sum(p == -1 for _, _, _, p, _ in both.values())
    false = sum(
        c != -1 and r > (n if has_norms else epsilon) and p not in (-1, c)
        for _, c, r, p, n in both.values()
    )
    count = len(both)
    interval = stats.binomtest(hits, count).proportion_ci(confidence)
    expected = [reached / count, hits / count, interval.low, interval.high, abstained / count]
    shares = ("certified_accuracy", "empirical_accuracy", "low", "high", "abstention_rate")
    assert [found[key] for key in shares] == pytest.approx(expected, abs=1e-9)
    assert (found["examples"], found["contradictions"]) == (count, false)
    assert found["tolerated"] == tolerated_false_statements(count, 0.002, 0.001), (
        "of all images, certified or not"
    )


def test_top_k_certificates_are_set_beside_attacks_on_the_same_number_of_classes():
    """Classes (label first, else the most frequent one) of the attacked images: only the last lost
    its certified 2.
    """
    sets = attacked(
        [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 1, -1), (4, 1, 1)],
        0.5,
        settings={**SETTINGS, "top_k": 2},
    )
    sets.table[["class_1", "class_2"]] = [(1, 0), (2, 1), (2, 0), (-1, -1), (0, 1)]
    claims = [(0, 1, 1, 1.0), (1, 1, 2, 1.0), (2, 1, 2, 1.0), (3, 1, 1, 1.0), (4, 1, 2, 1.0)]
    of_two = certified(claims, "of two", {**SETTINGS, "top_k": 2})
    of_one = certified([(4, 1, 2, 0.1)], "of one")
    (row,) = gaps([of_one, of_two], [sets])
    assert (row["examples"], row["contradictions"]) == (5, 1)
    assert gaps([of_one, of_two], [attacked([(4, 1, 1)], 0.5)])[0]["examples"] == 1
    lost = replace(of_two, table=of_two.table.assign(rival_1=9, rival_2=5), facts=parameters(None))
    lone = attacked([(4, 1, 1)], 0.5, settings=None, alpha=0.001)
    assert (
        gaps([replace(lost, facts=parameters(None, alpha=0.001))], [sets])[0]["contradictions"] == 1
    )
    for certificates in (of_two, lost):
        words = "attacked: one top-1 certification log of the model attacked is needed, found none"
        assert refusal(gaps, [certificates], [lone]) == words


OTHER_MODEL, OTHER_SIGMA = {**SETTINGS, "checkpoint_sha256": "b"}, {**SETTINGS, "sigma": 0.5}


def test_each_attack_is_set_beside_the_certificates_of_its_own_model_and_sigma():
    logs = [
        certified([(0, 1, 1, radius)], name, settings)
        for name, radius, settings in [
            ("a", 1.0, SETTINGS),
            ("b", 0.1, OTHER_MODEL),
            ("c", 0.6, OTHER_SIGMA),
        ]
    ]
    attacks = [
        attacked([(0, 1, 1)], epsilon, name, settings)
        for name, epsilon, settings in [
            ("on a", 0.8, SETTINGS),
            ("on b", 0.7, OTHER_MODEL),
            ("on c", 0.5, OTHER_SIGMA),
        ]
    ]
    shares = {row["attack"]: row["certified_accuracy"] for row in gaps(logs, attacks)}
    assert shares == {"on a": 1.0, "on b": 0.0, "on c": 1.0}


@pytest.mark.parametrize(
    ("names", "settings", "found"),
    [
        *(
            (["one"], of, "none")
            for of in (OTHER_MODEL, OTHER_SIGMA, {**SETTINGS, "split": "train"})
        ),
        (["one", "two"], SETTINGS, "one, two"),
    ],
)
def test_certificates_of_others_or_of_several_logs_are_no_clear_match(names, settings, found):
    """The numbers of training images, and by chance labels, may be the same: but they are other
    images.
    """
    logs = [certified([(0, 1, 1, 1.0)], name, settings) for name in names]
    words = f"attacked: one certification log of the model attacked is needed, found {found}"
    assert refusal(gaps, logs, [attacked([(0, 1, 1)], 0.5)]) == words


def test_only_certification_log_is_taken_where_a_manifest_is_missing():
    """As of released logs: nothing tells that they differ."""
    for first, second in [(None, SETTINGS), (SETTINGS, None), (None, None)]:
        attack = attacked([(0, 1, 1)], 0.5, "elsewhere/attacked", first)
        with pytest.warns(UserWarning, match="nothing tells whether elsewhere/attacked and cert"):
            assert len(gaps([certified([(0, 1, 1, 1.0)], settings=second)], [attack])) == 1


# cascade


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
    analyzed_folder.log("a.tsv", [0.5, 0.0] * 10, sigma=0.5)
    analyzed_folder.log("b.tsv", [0.0, 0.2] * 10, sigma=0.25)
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
    analyzed_folder.log("a.tsv", [0.5] * 5, run=FIVE)
    analyzed_folder.log("b.tsv", [0.1] * 5 + [0.5] * 5)
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
    analyzed_folder.log("a.tsv", [0.25] * 4, dataset="digits")
    analyzed_folder.log("b.tsv", [0.1] * 4, **settings)
    assert words in refusal(smoothadv.cascade, "a.tsv", "b.tsv")
