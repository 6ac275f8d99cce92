"""Top-k certificates and predictions from end to end: logs, attacks on them, what is refused."""

import json
import re
from collections.abc import Callable

import pytest

from smoothadv.statistics.bounds import top_k_radius
from support.commands import Outcome, call, header, rows

SIGMA, N, EXAMPLES = 0.5, 600, 30
CERTIFIED = ["idx", "label", "predict", "radius", "correct", "time", "successes", "trials"]


@pytest.fixture
def run(checkpoint, workplace, capsys) -> Callable[..., Outcome]:
    """A command on thirty digits with few draws."""

    images, usual = ["digits", checkpoint, SIGMA], ["--N", N, "--max", EXAMPLES, "--device", "cpu"]
    return lambda command, outfile, *options: call(
        capsys, command, *images, outfile, *usual, *options
    )


def test_a_log_holds_the_label_and_the_counts_behind_each_radius(run, workplace, capsys):
    assert run("certify", "one.tsv", "--method", "two-sided").code == 0
    made = run("certify", "three.tsv", "--method", "top-k", "--top-k", 3)
    assert "examples, certified top-3 accuracy " in made.out
    assert header(workplace / "three.tsv") == [*CERTIFIED, "rival_1", "rival_2", "rival_3"]
    settings = json.loads((workplace / "three.tsv.manifest.json").read_text())["settings"]
    assert (settings["method"], settings["top_k"], settings["alpha_share"]) == ("top-k", 3, 0.9)
    one, three = rows(workplace / "one.tsv"), rows(workplace / "three.tsv")
    for row in three:
        rivals = [int(row[f"rival_{number}"]) for number in (1, 2, 3)]
        radius = (
            top_k_radius(int(row["successes"]), rivals, N, SIGMA, 1e-3, 0.9)
            if row["predict"] != "-1"
            else 0
        )
        assert float(row["radius"]) == pytest.approx(radius, abs=1e-12) and rivals == sorted(
            rivals, reverse=True
        )
    assert sum(row["correct"] == "1" for row in three) > sum(row["correct"] == "1" for row in one)
    both = [
        (one, three) for one, three in zip(one, three) if one["predict"] == three["predict"] != "-1"
    ]
    assert len(both) > 15 and all(
        float(three["radius"]) > float(one["radius"]) for one, three in both
    )
    summary = call(capsys, "analyze", "summary", "one.tsv", "three.tsv")
    assert summary.code == 0 and {"two-sided", "top-3"} <= set(
        summary.out.replace("|", " ").split()
    )
    assert call(capsys, "analyze", "summary", "three.tsv").out.startswith("| log, top-3 | ")


@pytest.mark.parametrize("attack", [[], ["--attack", "PGD", "--epsilon", 1.5, "--num-steps", 4]])
def test_a_prediction_is_a_set_of_classes(run, workplace, attack, capsys):
    outcomes = run("predict", "one.tsv", *attack), run("predict", "two.tsv", "--top-k", 2, *attack)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    reason = "%, where no 2 classes lead all others significantly\n"
    assert [outcome.out.endswith(reason) for outcome in outcomes] == [False, True]
    assert header(workplace / "two.tsv") == [*header(workplace / "one.tsv"), "class_1", "class_2"]
    one, two = rows(workplace / "one.tsv"), rows(workplace / "two.tsv")
    sets = [{int(row["class_1"]), int(row["class_2"])} for row in two]
    for row, classes in zip(two, sets):
        assert int(row["predict"]) == (
            int(row["label"]) if int(row["label"]) in classes else int(row["class_1"])
        )
        assert (classes == {-1}) == (row["predict"] == "-1") and len(classes) == 2 - (
            classes == {-1}
        )
        assert row["correct"] == str(int(int(row["label"]) in classes))
    assert all(
        int(row["predict"]) in classes
        for row, classes in zip(one, sets)
        if row["predict"] != "-1" and classes != {-1}
    )
    hits = [{row["idx"] for row in table if row["correct"] == "1"} for table in (one, two)]
    if attack:
        assert len(hits[1]) > len(hits[0]), (
            "among two is easier, even where abstentions are more frequent"
        )
        outcome = call(capsys, "analyze", "empirical", "one.tsv", "two.tsv", "--format", "json")
        best = {record["group"]: record["empirical_accuracy"] for record in json.loads(outcome.out)}
        assert best == {f"top-{k}": len(found) / EXAMPLES for k, found in zip((1, 2), hits)}, (
            "neither hides the other"
        )
        assert (
            "kept apart by the number of classes that may hold the label (top-1; top-2)"
            in outcome.err
        )
    assert "top_k" not in json.loads((workplace / "one.tsv.manifest.json").read_text())["settings"]


def test_attacks_on_top_k_certificates_look_for_the_class_in_the_set(
    run, workplace, checkpoint, capsys
):
    run("certify", "log.tsv", "--method", "top-k", "--top-k", 2)
    few = "--N 300 --num-steps 4 --num-noise-vec 4 --against".split()
    attack = ["attack", "digits", checkpoint, SIGMA]
    outcome = call(capsys, *attack, "out", *few, "log.tsv")
    assert outcome.code == 0, f"more flips than one of 1,000 runs would have: {outcome.err}"
    table = rows(workplace / "out" / "against.tsv")
    assert len(table) > 20
    found = [row for row in table if row["predict"] != "-1"]
    assert all(row["certified"] in (row["class_1"], row["class_2"]) for row in found)
    assert any(row["certified"] != row["class_1"] for row in found), (
        "a single class would call these false"
    )
    forged = [line.split("\t") for line in (workplace / "log.tsv").read_text().splitlines()]
    forged = [[*line[:3], "1.7" if line[2].isdigit() else line[3], *line[4:]] for line in forged]
    (workplace / "forged.tsv").write_text("".join("\t".join(line) + "\n" for line in forged))
    false = call(capsys, *attack, "false", *few, "forged.tsv", "--max", 12)
    assert re.search(
        r"flipped: .* certified as (\d) within 1.7, is predicted as (?!\1)\d, (?!\1)\d at",
        false.out,
    )
