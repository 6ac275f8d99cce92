"""predict from end to end: the log, attacks that lower accuracy, reproducibility, and what it
refuses.
"""

import pytest

from support.commands import call, header, rows, timeless

EXAMPLES = 25


@pytest.fixture
def predict(checkpoint, workplace, capsys):
    """Predict with the shared classifier and few draws; returns what the command did."""

    shared = ["--N", 50, "--max", EXAMPLES, "--device", "cpu"]
    return lambda outfile, *options, sigma=0.25: call(
        capsys, "predict", "digits", checkpoint, sigma, outfile, *shared, *options
    )


def attack(name: str, epsilon: object, *options: object) -> list[object]:
    return ["--attack", name, "--epsilon", epsilon, "--num-steps", 5, *options]


def accuracy(log, predicted: str) -> float:
    return sum(row[predicted] == row["label"] for row in rows(log)) / len(rows(log))


def test_rows_are_consistent_and_have_the_columns_of_the_contract(predict, workplace):
    assert predict("out.tsv", sigma=0.5).code == 0
    assert header(workplace / "out.tsv") == [
        "idx",
        "label",
        "predict",
        "basePredict",
        "correct",
        "time",
    ]
    table = rows(workplace / "out.tsv")
    assert [row["idx"] for row in table] == [str(index) for index in range(EXAMPLES)]
    assert {row["predict"] for row in table} <= {str(label) for label in range(-1, 10)}
    assert [row["correct"] for row in table] == [
        str(int(row["predict"] == row["label"])) for row in table
    ]
    assert "-1" in {row["predict"] for row in table}, (
        "an abstention is needed for this test to say anything"
    )


@pytest.mark.parametrize(
    ("name", "options", "lowered"),
    [
        ("PGD", ["--num-noise-vec", 4], "predict"),
        ("DDN", ["--num-noise-vec", 4], "predict"),
        ("PGD", ["--gradient", "base"], "basePredict"),
    ],
)
def test_large_attack_lowers_the_accuracy_of_what_it_attacks(
    predict, workplace, name, options, lowered
):
    predict("clean.tsv")
    assert predict("attacked.tsv", *attack(name, 2, *options)).code == 0
    clean, attacked = (accuracy(workplace / log, lowered) for log in ("clean.tsv", "attacked.tsv"))
    assert attacked <= clean - 0.3


def test_attack_of_size_zero_changes_nothing(predict, workplace):
    """Not even the attack's own random numbers, drawn all the same, are taken from the
    prediction's.
    """
    predict("clean.tsv")
    predict("attacked.tsv", *attack("PGD", 0, "--num-noise-vec", 8, "--random-start"))
    shared = header(workplace / "clean.tsv")
    attacked = [
        {name: row.get(name) for name in shared if name != "time"}
        for row in rows(workplace / "attacked.tsv")
    ]
    assert attacked == timeless(workplace / "clean.tsv")
