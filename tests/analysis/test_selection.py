"""Choosing among logs: conditions, groups, the upper envelope and its ties, the best model under
attack, and warnings about comparisons. The bounds of p_A: those of the counts or of the radii, with
everything that is not proven at 0.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import (
    Log,
    Logs,
    comparison_warnings,
    groups_of,
    matches,
    restrict,
)
from smoothadv.analysis.radii import AtRadii, ErrorProbability, Radius
from smoothadv.analysis.tables import (
    Empirical,
    Envelope,
    Probabilities,
    empirical_curve,
    with_bounds,
)
from smoothadv.statistics.accuracy import accuracy, certified_accuracies
from smoothadv.statistics.bounds import certified_radius, lower_confidence_bound
from support.certified_logs import log, predicted
from support.refusals import refusal


def names(groups: dict[str, list[Log]]) -> dict[str, list[str]]:
    return {name: [each.name for each in logs] for name, logs in groups.items()}


FOUND = {
    0.25: ["0.25", "0.250", ".25"],
    127 / 256: ["0.5"],
    255 / 256: ["1"],
    1.0: ["1"],
    0.001: ["0.001", "1e-3"],
}
FOUND |= {100_000: ["100000", "1e5"], "SmoothAdv-PGD": ["SmoothAdv-PGD"], "2": ["2"]}
NOT_FOUND = {
    0.25: ["0.5", "quarter", "0"],
    127 / 256: ["0.500"],
    0.12: ["0.1234"],
    None: ["0.25", "–"],
    10: ["1"],
}
NOT_FOUND |= {"SmoothAdv-PGD": ["PGD"], 0.125: ["0"], 0.75: ["1"], 1.125: ["1"], 1.375: ["1"]}


def test_value_is_found_as_it_is_commonly_written_and_by_no_other_number():
    """The paper attacks at 0, 0.125, ..., 2.25: a condition on 1 must not mix seven of them."""
    assert [
        text for value, texts in FOUND.items() for text in texts if not matches(value, text)
    ] == []
    assert [
        (value, text)
        for value, texts in NOT_FOUND.items()
        for text in texts
        if matches(value, text)
    ] == []


def test_conditions_must_all_hold():
    logs = Logs(
        [log("a", sigma=0.25, training="Gaussian"), log("b", sigma=0.25), log("c", sigma=0.5)]
    )
    for conditions, expected in (["sigma=0.25"], "ab"), (["sigma=0.25", "training=Gaussian"], "a"):
        found = restrict(logs, conditions).certification
        assert [each.name for each in found] == [*expected]


OURS, THEIRS = log("o", group="Ours", sigma=0.5), log("t", group="Cohen", sigma=0.5)
GROUPED = {
    "of the command line, in its order": (
        [log("b1", group="B"), log("a1", group="A"), log("b2", group="B"), log("c")],
        [[]],
        {"B": ["b1", "b2"], "A": ["a1"], "all": ["c"]},
    ),
    "numbers ascend, unknown ones are last": (
        [
            log("x"),
            log("y", sigma=1.0),
            log("z", sigma=0.12),
            log("v", sigma=0.5),
            log("w", sigma=0.5),
        ],
        [["sigma"]],
        {
            "sigma = 0.12": ["z"],
            "sigma = 0.50": ["v", "w"],
            "sigma = 1.00": ["y"],
            "sigma = –": ["x"],
        },
    ),
    "the first hyper-parameter comes first": (
        [log("a", N=1000, sigma=1.0), log("b", N=100, sigma=1.0), log("c", N=1000, sigma=0.5)],
        [["sigma", "N"]],
        {
            "sigma = 0.50, n = 1,000": ["c"],
            "sigma = 1.00, n = 100": ["b"],
            "sigma = 1.00, n = 1,000": ["a"],
        },
    ),
    "named, since there are several": (
        [OURS, THEIRS],
        [["sigma"]],
        {"Ours, sigma = 0.50": ["o"], "Cohen, sigma = 0.50": ["t"]},
    ),
    "of one group, not named": ([OURS], [["sigma"]], {"sigma = 0.50": ["o"]}),
    "named, since the caller wants it": ([OURS], [["sigma"], True], {"Ours, sigma = 0.50": ["o"]}),
}


@pytest.mark.parametrize("what", GROUPED)
def test_groups_of_logs_have_names_and_an_order(what):
    logs, arguments, expected = GROUPED[what]
    groups = groups_of(logs, *arguments)
    assert names(groups) == expected and list(groups) == list(expected)


values = st.sampled_from([None, 0.25, 127 / 256, 0.5, 1.0, 10])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("AB"), values, values), min_size=1, max_size=12))
def test_groups_share_out_all_logs_by_their_values(facts):
    logs = [
        log(str(k), group=group, sigma=sigma, epsilon=eps)
        for k, (group, sigma, eps) in enumerate(facts)
    ]
    groups = groups_of(logs, ["sigma", "epsilon"])
    assert sorted(each.name for group in groups.values() for each in group) == sorted(
        each.name for each in logs
    )
    keys = [
        {(each.group, *each.facts.values.values()) for each in group} for group in groups.values()
    ]
    assert all(len(key) == 1 for key in keys), "one value each"
    assert len(set.union(*keys)) == len(groups), "and nowhere else"


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.sampled_from([None, 0.1, 0.25, 0.5, 1.0]), min_size=4, max_size=4),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0, 1.5]),
)
def test_envelope_is_that_of_comparing_every_log_with_every_other(models, radius):
    """A tie goes to the larger clean accuracy, also where nothing is certified, and then to the
    first.
    """
    logs = [log(str(k), radii) for k, radii in enumerate(models)]

    def rank(each: Log) -> tuple[float, float]:
        return float(certified_accuracies(each.table, [radius])[0]), accuracy(each.table)

    winners = [each for each in logs if all(rank(each) >= rank(other) for other in logs)]
    ((best, share),) = Envelope().select(logs, [radius])
    assert (best.name, share) == (winners[0].name, rank(winners[0])[0])


def test_linf_radii_of_the_paper_are_these_l2_radii():
    """2/255 in the 3,072 pixels of CIFAR-10 and 1/255 in the 150,528 of ImageNet."""
    norm = AtRadii(norm="linf", radii=[Radius.parse("2/255"), Radius.parse("1/255")])
    cifar, imagenet = log("c", dataset="cifar10"), log("i", dataset="imagenet")
    assert norm.l2_lengths(cifar, norm.radii)[0] == pytest.approx(0.434711, abs=5e-7)
    assert norm.l2_lengths(imagenet, norm.radii)[1] == pytest.approx(1.521488, abs=5e-7)
    assert norm.accuracies(
        log("at", [0.434712, 0.43471], dataset="cifar10"), norm.radii[:1]
    ).tolist() == [0.5]
    assert AtRadii().l2_lengths(cifar, [0.5]).tolist() == [0.5]


@pytest.mark.parametrize(
    "radius, counts", [(0.5, True), (math.nextafter(0.5, 0), False), (math.nextafter(0.5, 1), True)]
)
def test_linf_accuracy_counts_radii_of_at_least_the_exact_length(radius, counts):
    """0.05 of 100 pixels is l2 0.5: the text, for the float next to it is larger than 1/20."""
    one = log("one", [radius], dimension=100)
    for text in ("0.05", "5/100", "1/20"):
        assert AtRadii(norm="linf").accuracies(one, [Radius.parse(text)]).tolist() == [counts]
    assert AtRadii(norm="linf").accuracies(one, [0.05]).tolist() == [radius > 0.5]


@given(st.integers(1, 10**5), st.floats(1e-6, 0.1), st.floats(1e-6, 0.1), st.integers(1, 500))
@example(5, 0.001, 0.001, 1)  # which prove little
def test_best_of_many_models_divides_rho_among_them(examples, alpha, rho, models):
    few = log("certain", [1.0], alpha=alpha)
    certain = replace(few, table=few.table.loc[few.table.index.repeat(examples)])
    log_term = math.log(models / rho)
    deduction = (
        alpha + math.sqrt(2 * alpha * (1 - alpha) * log_term / examples) + log_term / (3 * examples)
    )
    found = AtRadii(high_probability=ErrorProbability(rho)).accuracies(certain, [1.0, 2.0], models)
    assert found == pytest.approx([max(0.0, 1 - deduction), 0.0], abs=1e-12)


def test_exact_deduction_is_a_quantile_of_the_number_of_false_rows():
    """Of 500, more than 4 are false with probability 1.7e-4, more than 3 with 1.7e-3; more than 5
    with 1.4e-5.
    """
    many = log("many", [1.0] * 250 + [0.5] * 250)
    exact, bernstein = (
        AtRadii(high_probability=ErrorProbability.parse(text)) for text in ("exact:0.001", "0.001")
    )
    assert exact.accuracies(many, [0.5, 1.0]) == pytest.approx([0.992, 0.492], abs=1e-12)
    assert bernstein.accuracies(many, [0.5]) == pytest.approx([0.989141], abs=5e-7)
    assert exact.accuracies(many, [0.5], models=20) == pytest.approx([0.99]), (
        "rho is divided among the logs"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "nan",
        "inf",
        "-0.25",
        "1/0",
        "2/255/3",
        "1e999",
        "1/inf",
        "1e308/1e-308",
        "/255",
        "2/",
    ],
)
def test_what_is_no_radius_is_refused(text):
    refusal(Radius.parse, text, names="is no radius: write a number like 0.25 or a frac")


def test_logs_of_as_many_other_images_are_told_apart():
    first, second = log("a", dataset="digits", alpha=0.001), log("b", alpha=0.001)
    assert comparison_warnings(Logs([first, second])) == []
    second.table["idx"] += 1
    (warning,) = comparison_warnings(Logs([first, second]))
    assert warning.startswith("the logs are not all on the same test images (1 examples)")


# Under attack


def attacked(name: str, predictions: str, epsilon: float, **values) -> Log:
    return predicted(name, predictions, attack="PGD", epsilon=epsilon, **values)


def rows_of(logs: list[Log], **options) -> list[list]:
    """Group, radius, accuracy, model, models, attacks, examples."""
    rows = Empirical(**options)(Logs(prediction=logs)).plain_rows()
    rates = {each.name: each.table.predict.eq(-1).mean() for each in logs}
    assert [abstained for *_, abstained in rows] == [rates[row[3]] for row in rows]
    return [row[:7] for row in rows]


def at(path: str, predictions: str, epsilon: float = 0.25, **values) -> Log:
    """A prediction log in the released layout, whose folders tell the attack."""
    return replace(attacked(path, predictions, epsilon, **values), path=Path(path))


def of(checkpoint: str, name: str, predictions: str) -> Log:
    """A prediction log whose manifest names the model."""
    manifest = {"settings": {"checkpoint_sha256": checkpoint}}
    facts = Facts({"epsilon": 0.25, "sigma": 0.5}, {}, manifest)
    return replace(attacked(name, predictions, 0.25), facts=facts)


# Logs, and their row. Fewer draws abstain more often: of one model the logs with the largest n
# count.
BEST = {
    "the strongest attack on a model, and then the best model": (
        [
            at("one/N1000/PGD_0.250/num_1/predictions", "RRRR", N=1000),
            at("one/N1000/PGD_0.250/num_128/predictions", "RWWW", N=1000),
            at("two/N1000/PGD_0.250/base/predictions", "RRRW", N=1000),
            at("two/N1000/PGD_0.250/num_8/predictions", "RRWW", N=1000),
        ],
        ["all", 0.25, 0.5, "two/N1000/PGD_0.250/num_8/predictions", 2, 2, 4],
    ),
    "fewer draws are no attack": (
        [
            at("one/N100/PGD_0.250/num_8/predictions", "AAAR", N=100),
            at("one/N10000/PGD_0.250/num_8/predictions", "RRRW", N=10_000),
        ],
        ["all", 0.25, 0.75, "one/N10000/PGD_0.250/num_8/predictions", 1, 1, 4],
    ),
    "checkpoints tell models apart where manifests name them": (
        [of("a", "a1", "RRRR"), of("a", "a2", "RWWW"), of("b", "b1", "RRWW")],
        ["all", 0.25, 0.5, "b1", 2, 1, 4],
    ),
}


@pytest.mark.parametrize("what", BEST)
def test_the_strongest_attack_on_a_model_counts_and_then_the_best_model(what):
    logs, expected = BEST[what]
    assert rows_of(logs) == [expected]


def test_attack_of_unknown_radius_is_refused_by_the_log():
    logs = [predicted("clean", "RRRR"), predicted("lost", "RW", attack="PGD")]
    assert refusal(empirical_curve, logs).startswith("lost was made under an attack of unknown rad")


def test_attack_on_the_base_classifier_is_called_so():
    """It has no m."""
    logs = [
        attacked("base", "RR", 0.5, gradient="base classifier"),
        attacked("smooth", "RW", 0.5, num_noise_vec=4),
    ]
    names = [row[0] for row in rows_of(logs, group_by=["num_noise_vec"])]
    assert names == ["m = 4", "vanilla PGD (base classifier)"]


# Bounds of p_A


SIGMA, N, ALPHA = 0.5, 1000, 0.001
# The last abstains; the fourth is of a wrong class.
COUNTS = [1000, 990, 800, 600, 400]


def log_with_counts(
    name: str = "log.tsv", counts: bool = True, table: dict | None = None, **settings
) -> Log:
    radii = [certified_radius(count, N, SIGMA, ALPHA) for count in COUNTS]
    columns = {
        "idx": range(5),
        "label": 1,
        "predict": [1, 1, 1, 2, -1],
        "radius": [radius or 0.0 for radius in radii],
    }
    columns |= {
        "correct": [1, 1, 1, 0, 0],
        **({"successes": COUNTS, "trials": N} if counts else {}),
        **(table or {}),
    }
    known = {"sigma": SIGMA, "N": N, "alpha": ALPHA, **settings}
    return Log(
        name,
        name,
        "",
        pd.DataFrame(columns),
        Facts(known, {}, {"settings": known, "runs": []}),
    )


def bounds_of(some: Log) -> list[float]:
    ((_, bounds),) = with_bounds([some])
    return bounds.tolist()


def test_bounds_of_counts_include_abstentions_and_those_of_radii_do_not():
    proven = [lower_confidence_bound(count, N, ALPHA) for count in COUNTS]
    assert bounds_of(log_with_counts()) == [*proven[:3], 0.0, proven[4]]
    assert bounds_of(log_with_counts(counts=False)) == pytest.approx([*proven[:3], 0, 0], abs=1e-8)
    given_up = log_with_counts(table={"trials": [N] * 4 + [700], "successes": [*COUNTS[:4], 150]})
    assert bounds_of(given_up)[4] == lower_confidence_bound(150, 700, ALPHA)


def test_adaptive_logs_have_the_bounds_of_their_radii_whatever_their_counts():
    """The counts at a look that was chosen by what they were do not bound anything by
    themselves.
    """
    grid = log_with_counts(
        method="adaptive",
        table={"samples": 500, "level": 1, "looks": 2, "radius": [0.5, 0.25, 0, 0, 0]},
    )
    assert bounds_of(grid) == pytest.approx([stats.norm.cdf(1), stats.norm.cdf(0.5), 0.5, 0, 0])
    titles = [Probabilities()(Logs([some])).columns[2].title for some in (grid, log_with_counts())]
    assert ["of grids a lower bound" in title for title in titles] == [True, False]


def test_two_sided_logs_have_the_bounds_of_their_share_of_alpha():
    """Where counting stopped early by what a rival had, nothing is assumed of the draws that were
    not made.
    """
    columns = {"rival": [0, 5, 100, 300, 590], "trials": [N, N, N, N, 900]}
    bounds = [lower_confidence_bound(count, N, 0.9 * ALPHA) for count in COUNTS]
    assert bounds_of(log_with_counts(table=columns, method="two-sided", alpha_share=0.9)) == [
        *bounds[:3],
        0,
        bounds[4],
    ]


def test_bound_of_partial_counts_holds():
    """Counting stops at the 31st miss: of p = 0.6, a bound above p has probability at most alpha;
    one of half as many misses would not hold. A true bound fails the test with probability 1e-6."""
    draws = 31 + np.random.default_rng(3).negative_binomial(31, 0.4, 20_000)
    stopped = pd.DataFrame(
        {"idx": range(len(draws)), "label": 1, "predict": -1, "radius": 0.0, "correct": 0}
    )
    alpha = 0.05
    for misses, holds in ((31, True), (16, False)):
        counted = log_with_counts(alpha=alpha)
        counted = Log(
            "l", "l", "", stopped.assign(successes=draws - misses, trials=draws), counted.facts
        )
        above = int((np.array(bounds_of(counted)) > 0.6).sum())
        assert (above <= stats.binom.isf(1e-6, len(draws), alpha)) == holds


def test_logs_that_do_not_tell_their_bounds_are_named():
    """Of a two-sided radius, p_A cannot be told; of a one-sided one, not without sigma."""
    sequential = log_with_counts(
        "sequential.tsv", table={"rival": 7, "looks": 1}, method="a procedure of another machine"
    )
    stages = log_with_counts("stages.tsv", method="cascade", sigmas=[0.5, 0.25], threshold=0.7)
    unknown = log_with_counts("unknown.tsv", counts=False, sigma=None)
    message = refusal(Probabilities(), Logs([sequential, unknown, stages]))
    assert message.endswith("told of sequential.tsv, unknown.tsv, stages.tsv")
    with pytest.warns(UserWarning, match="told of sequential.tsv$"):
        (row,) = Probabilities()(Logs([log_with_counts(), sequential])).rows
    assert row[0].value == "log.tsv"
