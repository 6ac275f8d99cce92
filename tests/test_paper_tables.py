"""scripts/paper_tables.sh on a small extract that is laid out as the released repository."""

import csv
import subprocess
from pathlib import Path

import pytest

from support.clones import make_clone, run_script

HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
# Certified correctly at these radii, of four images; the fourth is an abstention.
COHEN = {"0.25": (0.1, 0.3, 0.9), "0.50": (0.2, 0.6, 1.2)}
OURS = {"0.25": (0.4, 0.8, 0.95), "0.50": (0.5, 1.1, 1.7)}


def write_certification_log(path: Path, radii: tuple[float, ...]) -> None:
    rows = [f"{20 * i}\t{i}\t{i}\t{radius}\t1\t0:00:14.172309\n" for i, radius in enumerate(radii)]
    path.parent.mkdir(parents=True)
    path.write_text(HEADER + "".join(rows) + f"{20 * len(radii)}\t9\t-1\t0.0\t0\t0:00:14\n")


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """Best CIFAR-10 models of two groups, and one grid log with its manifest-less siblings."""
    root = tmp_path_factory.mktemp("released")
    best = root / "data/certify/best_models/cifar10"
    for sigma, radii in COHEN.items():
        write_certification_log(best / f"cohen/resnet110/noise_{sigma}/test/sigma_{sigma}", radii)
    for sigma, radii in OURS.items():
        folder = (
            best / f"ours/cifar10/PGD_2steps_multiNoiseSamples/8-multitrain/eps_255/cifar10/resnet110/noise_{sigma}"
        )
        write_certification_log(folder / f"test/sigma_{sigma}", radii)
        (folder / "test/stdout.txt").write_text("container started\n")
    return root


def run(clone: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_script(clone, "paper_tables", *arguments)


def test_tables_of_what_is_there_are_made_and_the_rest_is_named(clone, released, tmp_path):
    done = run(clone, released, tmp_path / "paper")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "paper/table2_cifar10.csv").open() as file:
        rows = {(row["group"], float(row["radius"])): row for row in csv.DictReader(file)}
    accuracies = {key: float(row["certified_accuracy"]) for key, row in rows.items()}
    assert [accuracies["Cohen", radius] for radius in (0.25, 0.5, 1.0, 1.25)] == [0.5, 0.5, 0.25, 0]
    assert [accuracies["SmoothAdv", radius] for radius in (0.25, 0.5, 1.0, 1.75)] == [0.75, 0.75, 0.5, 0]
    assert {row["models"] for row in rows.values()} == {"2"} and {row["abstention_rate"] for row in rows.values()} == {
        "0.25"
    }
    for name in ("table2_cifar10", "table3_cifar10_linf", "table4_cifar10_abstention", "selected_cifar10"):
        assert all((tmp_path / f"paper/{name}.{ending}").stat().st_size for ending in ("md", "tex", "csv"))
    assert "not there: data/certify/best_models/cifar10/ours_pretraining" in done.stdout
    assert "== table1_imagenet" in done.stdout and not (tmp_path / "paper/table1_imagenet.md").exists()
    assert "4 tables and figures" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a", "b", "c"]])
def test_wrong_use_is_answered_with_the_usage(clone, arguments):
    done = run(clone, *arguments)
    assert done.returncode == 2 and done.stderr.startswith("usage: ") and done.stderr.count("\n") == 1


def test_folder_without_released_logs_is_refused(clone, tmp_path):
    (tmp_path / "data").mkdir()
    done = run(clone, tmp_path, tmp_path / "paper")
    assert done.returncode == 1 and "none of the released logs" in done.stderr
