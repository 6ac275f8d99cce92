"""empirical: accuracy under attack by attack radius, the best attacked model of each group."""

from dataclasses import replace
from pathlib import Path

import pytest

from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.tables import Empirical, empirical_curve
from smoothadv.base.errors import UserError
from support.certified_logs import predicted

KEYS = [
    "group",
    "radius",
    "empirical_accuracy",
    "model",
    "models",
    "attacks",
    "examples",
    "abstention_rate",
]


def attacked(name: str, predictions: str, epsilon: float, **values) -> Log:
    return predicted(name, predictions, attack="PGD", epsilon=epsilon, **values)


CLEAN = predicted("clean", "RRRR")


def rows_of(logs: list[Log], **options) -> list[list]:
    table = Empirical(**options)(Logs(prediction=logs))
    assert [column.key for column in table.columns] == KEYS
    rates = {each.name: each.table.predict.eq(-1).mean() for each in logs}
    assert [row[7] for row in table.plain_rows()] == [rates[row[3]] for row in table.plain_rows()]
    return [row[:7] for row in table.plain_rows()]


def at(path: str, predictions: str, epsilon: float = 0.25, **values) -> Log:
    """A prediction log in the released layout, whose folders tell the attack."""
    return replace(attacked(path, predictions, epsilon, **values), path=Path(path))


def test_the_strongest_attack_on_a_model_counts_and_then_the_best_model():
    logs = [
        at("one/N1000/PGD_0.250/num_1/predictions", "RRRR", N=1000),
        at("one/N1000/PGD_0.250/num_128/predictions", "RWWW", N=1000),
        at("two/N1000/PGD_0.250/base/predictions", "RRRW", N=1000),
        at("two/N1000/PGD_0.250/num_8/predictions", "RRWW", N=1000),
    ]
    assert rows_of(logs) == [["all", 0.25, 0.5, "two/N1000/PGD_0.250/num_8/predictions", 2, 2, 4]]


def test_fewer_draws_are_no_attack():
    """They abstain more often: of one model the logs with the largest n count."""
    logs = [
        at(f"one/N{n}/PGD_0.250/num_8/predictions", text, N=n)
        for n, text in [(100, "AAAR"), (10_000, "RRRW")]
    ]
    assert [row[2:6] for row in rows_of(logs)] == [
        [0.75, "one/N10000/PGD_0.250/num_8/predictions", 1, 1]
    ]


def test_checkpoints_tell_models_apart_where_manifests_name_them():
    def of(checkpoint: str, name: str, predictions: str) -> Log:
        manifest = {"settings": {"checkpoint_sha256": checkpoint}}
        return replace(
            attacked(name, predictions, 0.25),
            facts=Facts({"epsilon": 0.25, "sigma": 0.5}, {}, manifest),
        )

    rows = rows_of([of("a", "a1", "RRRR"), of("a", "a2", "RWWW"), of("b", "b1", "RRWW")])
    assert rows == [["all", 0.25, 0.5, "b1", 2, 1, 4]]


def test_attack_of_unknown_radius_is_refused_by_the_log():
    with pytest.raises(UserError, match="^lost was made under an attack of unknown radius"):
        empirical_curve([CLEAN, predicted("lost", "RW", attack="PGD")])


def test_attack_on_the_base_classifier_is_called_so():
    """It has no m."""
    logs = [
        attacked("base", "RR", 0.5, gradient="base classifier"),
        attacked("smooth", "RW", 0.5, num_noise_vec=4),
    ]
    names = [row[0] for row in rows_of(logs, group_by=["num_noise_vec"])]
    assert names == ["m = 4", "vanilla PGD (base classifier)"]
