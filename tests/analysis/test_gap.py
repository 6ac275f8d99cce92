"""gap: what is certified beside what an attack left, and images on which the two cannot both be
right.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from smoothadv.analysis.compare import Gap
from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import Log, Logs
from smoothadv.base.errors import UserError
from smoothadv.statistics.bounds import tolerated_false_statements
from support.certified_logs import log_of

KEYS = [
    "attack",
    "radius",
    "examples",
    "certified_accuracy",
    "empirical_accuracy",
    "low",
    "high",
    "abstention_rate",
]
KEYS += ["contradictions", "tolerated"]
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


def rows_of(certification: list[Log], prediction: list[Log], **options) -> list[dict]:
    table = Gap(**options)(Logs(certification=certification, prediction=prediction))
    assert table.keys == KEYS
    return [dict(zip(KEYS, row)) for row in table.plain_rows()]


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
    assert rows_of([CERTIFICATES], [log])[0]["contradictions"] == count
    assert (
        rows_of([CERTIFICATES], [attacked([(0, 1, 0)], norm or 1e-9)])[0]["contradictions"] == count
    )


labels, classes, reals = (
    st.integers(0, 2),
    st.integers(-1, 2),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]),
)
tables = st.dictionaries(
    st.integers(0, 9), st.tuples(labels, classes, reals, classes, reals), min_size=1
)


@given(
    tables,
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
    (found,) = rows_of([log], [attacked(predictions, epsilon)], confidence=confidence)
    hits = false = reached = abstained = 0
    for label, c, r, p, n in both.values():
        norm = n if has_norms else epsilon
        reached += c == label and r >= epsilon
        hits += p == label
        abstained += p == -1
        if c != -1 and r > norm:
            false += p not in (-1, c)
    count = len(both)
    interval = stats.binomtest(hits, count).proportion_ci(confidence)
    expected = [reached / count, hits / count, interval.low, interval.high, abstained / count]
    assert [found[key] for key in KEYS[3:8]] == pytest.approx(expected, abs=1e-9)
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
    (row,) = rows_of([of_one, of_two], [sets])
    assert (row["examples"], row["contradictions"]) == (5, 1)
    assert rows_of([of_one, of_two], [attacked([(4, 1, 1)], 0.5)])[0]["examples"] == 1
    lost = replace(of_two, table=of_two.table.assign(rival_1=9, rival_2=5), facts=parameters(None))
    lone = attacked([(4, 1, 1)], 0.5, settings=None, alpha=0.001)
    assert (
        rows_of([replace(lost, facts=parameters(None, alpha=0.001))], [sets])[0]["contradictions"]
        == 1
    )
    for certificates in (of_two, lost):
        with pytest.raises(
            UserError, match="attacked: one top-1 certification log of the model .* found none"
        ):
            rows_of([certificates], [lone])


OTHER_MODEL, OTHER_SIGMA = {**SETTINGS, "checkpoint_sha256": "b"}, {**SETTINGS, "sigma": 0.5}
TRAINING_IMAGES = {**SETTINGS, "split": "train"}


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
    shares = {row["attack"]: row["certified_accuracy"] for row in rows_of(logs, attacks)}
    assert shares == {"on a": 1.0, "on b": 0.0, "on c": 1.0}


@pytest.mark.parametrize(
    ("names", "settings", "found"),
    [
        *((["one"], of, "none") for of in (OTHER_MODEL, OTHER_SIGMA, TRAINING_IMAGES)),
        (["one", "two"], SETTINGS, "one, two"),
    ],
)
def test_certificates_of_others_or_of_several_logs_are_no_clear_match(names, settings, found):
    """The numbers of training images, and by chance labels, may be the same: but they are other
    images.
    """
    logs = [certified([(0, 1, 1, 1.0)], name, settings) for name in names]
    words = f"^attacked: one certification log of the model attacked is needed, found {found}$"
    with pytest.raises(UserError, match=words):
        rows_of(logs, [attacked([(0, 1, 1)], 0.5)])


def test_only_certification_log_is_taken_where_a_manifest_is_missing():
    """As of released logs: nothing tells that they differ."""
    for first, second in [(None, SETTINGS), (SETTINGS, None), (None, None)]:
        attack = attacked([(0, 1, 1)], 0.5, "elsewhere/attacked", first)
        with pytest.warns(UserWarning, match="nothing tells whether elsewhere/attacked and cert"):
            assert len(rows_of([certified([(0, 1, 1, 1.0)], settings=second)], [attack])) == 1
