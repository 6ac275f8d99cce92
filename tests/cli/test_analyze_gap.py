"""analyze gap and empirical --confidence from end to end, on a folder as attack leaves it."""

import csv
import io

from support.commands import call, succeed


def records(outcome) -> list[dict[str, str]]:
    assert (outcome.code, outcome.err) == (0, "")
    return list(csv.DictReader(io.StringIO(outcome.out)))


def test_attacks_contradict_no_true_certificate_and_are_found_where_attack_put_them(
    checkpoint, workplace, capsys
):
    """Over all seeds, 45 images give more contradictions than tolerated with probability at most
    0.001.
    """
    usual = ["--skip", 8, "--device", "cpu"]
    succeed("certify", "digits", checkpoint, 0.25, "certified.tsv", "--N", 1000, *usual)
    attack = ["--N", 100, "--epsilon", 0.1, 0.4, "--num-steps", 3, "--num-noise-vec", 4]
    succeed("attack", "digits", checkpoint, 0.25, "out", *usual, *attack)
    near, far = records(call(capsys, "analyze", "gap", "certified.tsv", "out", "--format", "csv"))
    for row, radius in ((near, 0.1), (far, 0.4)):
        assert float(row["radius"]) == radius and row["examples"] == "45"
        assert float(row["certified_accuracy"]) <= float(row["empirical_accuracy"]) + float(
            row["abstention_rate"]
        )
        assert int(row["contradictions"]) <= int(row["tolerated"]) <= 3
    assert float(near["certified_accuracy"]) > float(far["certified_accuracy"]) > 0
