"""analyze gap and empirical --confidence from end to end, on a folder as attack leaves it."""

import csv
import io
import json
from pathlib import Path

import pytest

from smoothadv.records.logs import manifest_path
from support.commands import call, succeed

SETTINGS = {
    "sigma": 0.25,
    "N": 1000,
    "alpha": 0.001,
    "checkpoint_sha256": "a",
    "dataset": "digits",
    "split": "test",
}
HEADER = "idx\tlabel\tpredict\tbasePredict\tcorrect\ttime\tattack_norm\tepsilon\tabstain"


def put(name: str, header: str, rows: list[str], **extra) -> None:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")
    manifest_path(path).write_text(json.dumps({"settings": {**SETTINGS, **extra}, "runs": []}))


@pytest.fixture
def folder(workplace: Path) -> Path:
    """A certification log, logs of two attacks and one of falsification, as attack leaves them."""
    rows = [f"{i}\t1\t1\t{radius}\t1\t0:00:01" for i, radius in enumerate([0.4, 0.3, 0.1, 0.0])]
    put("certified.tsv", "idx\tlabel\tpredict\tradius\tcorrect\ttime", rows, method="exact")
    for epsilon, predicted in [(0.25, [1, 0, 1, -1]), (0.5, [0, 0, 1, -1])]:
        rows = [
            f"{i}\t1\t{p}\t{max(p, 0)}\t{int(p == 1)}\t0:00:01\t{epsilon}\t{epsilon}\t{int(p < 0)}"
            for i, p in enumerate(predicted)
        ]
        put(
            f"out/epsilon_{epsilon}.tsv",
            HEADER,
            rows,
            attack={"name": "PGD", "epsilon": epsilon},
            num_noise_vec=8,
        )
    put(
        "out/against.tsv",
        f"{HEADER}\tcertified\tradius\tflipped",
        ["0\t1\t1\t1\t1\t0:00:01\t0.1\t0.1\t0\t1\t0.4\t0"],
        attack={"name": "PGD"},
        against={},
    )
    (workplace / "out/epsilon_0.5.npz").write_bytes(b"PK\x03\x04")
    return workplace


def records(outcome) -> list[dict[str, str]]:
    assert (outcome.code, outcome.err) == (0, "")
    return list(csv.DictReader(io.StringIO(outcome.out)))


def test_plot_of_attacks_draws_intervals_when_told(folder, capsys):
    for name, options in [
        ("without", []),
        ("with", ["--confidence", 0.95]),
        ("wider", ["--confidence", 0.999]),
    ]:
        outcome = call(
            capsys, "analyze", "plot_empirical", "certified.tsv", "out", "-o", name, *options
        )
        assert (outcome.code, outcome.err) == (0, "")
    pictures = [(folder / f"{name}.png").read_bytes() for name in ("without", "with", "wider")]
    assert len(set(pictures)) == 3 and min(map(len, pictures)) > 5000


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
