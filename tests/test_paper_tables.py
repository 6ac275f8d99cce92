"""scripts/paper_tables.sh on a small extract that is laid out as the released repository."""

import csv
import importlib.util
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from support.clones import make_clone, run_script
from support.commands import CODE

HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
# Certified correctly at these radii, of four images; the fourth is an abstention.
COHEN = {"0.25": (0.1, 0.3, 0.9), "0.50": (0.2, 0.6, 1.2)}
OURS = {"0.25": (0.4, 0.8, 0.95), "0.50": (0.5, 1.1, 1.7)}
# Of 200 images: 77.5, 65, 49 and 37 % at 0, 0.25, 0.5 and 0.75, where Table 9 has 77, 65, 49 and 36.
OF_TABLE_9 = (0.1,) * 25 + (0.3,) * 32 + (0.6,) * 24 + (0.8,) * 74
SUMMARY = "{} cells: {} equal, {} differs by rounding, {} differs, {} not comparable: no logs, {} not comparable: no p"


def write_certification_log(path: Path, radii: tuple[float, ...], images: int = 4) -> None:
    rows = [f"{20 * i}\t{i}\t{i}\t{radius}\t1\t0:00:14.172309\n" for i, radius in enumerate(radii)]
    rows += [f"{20 * i}\t9\t-1\t0.0\t0\t0:00:14\n" for i in range(len(radii), images)]
    path.parent.mkdir(parents=True)
    path.write_text(HEADER + "".join(rows))


def write_grid_log(root: Path) -> None:
    folder = root / "data/certify/cifar10/DDN_6steps/eps_64/cifar10/resnet110/noise_0.25/test"
    write_certification_log(folder / "sigma_0.25", OF_TABLE_9, 200)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def verdicts():
    """scripts/paper_verdicts.py as a module."""
    spec = importlib.util.spec_from_file_location("paper_verdicts", CODE.parent / "scripts/paper_verdicts.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # where dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


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
    write_grid_log(root)
    (root / "data/certify/cifar10/DDN_8steps").mkdir()
    return root


@pytest.fixture(scope="module")
def made(clone, released, tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("paper")
    done = run(clone, released, out)
    assert done.returncode == 0, done.stderr
    return done, out


def run(clone: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_script(clone, "paper_tables", *arguments)


def records(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_of_what_is_there_are_made_and_the_rest_is_named(made):
    done, out = made
    rows = {(row["group"], float(row["radius"])): row for row in records(out / "table2_cifar10.csv")}
    accuracies = {key: float(row["certified_accuracy"]) for key, row in rows.items()}
    assert [accuracies["Cohen", radius] for radius in (0.25, 0.5, 1.0, 1.25)] == [0.5, 0.5, 0.25, 0]
    assert [accuracies["SmoothAdv", radius] for radius in (0.25, 0.5, 1.0, 1.75)] == [0.75, 0.75, 0.5, 0]
    assert {row["models"] for row in rows.values()} == {"2"} and {row["abstention_rate"] for row in rows.values()} == {
        "0.25"
    }
    for name in ("table2_cifar10", "table3_cifar10_linf", "table4_cifar10_abstention", "selected_cifar10"):
        assert all((out / f"{name}.{ending}").stat().st_size for ending in ("md", "tex", "csv"))
    assert "not there: data/certify/best_models/cifar10/ours_pretraining" in done.stdout
    assert "not there: data/certify/cifar10/DDN_8steps" in done.stdout, "an empty folder holds no logs"
    assert "== table1_imagenet" in done.stdout and not (out / "table1_imagenet.md").exists()
    assert "6 tables and figures" in done.stdout and (out / "figure1_middle_cifar10.png").exists()
    cannot = (out / "cannot_be_made.md").read_text()
    assert "training times" in cannot and "- data/certify/best_models/cifar10/ours_pretraining\n" in cannot


def test_models_have_a_row_each_with_their_method_and_hyper_parameters(made):
    lines = (made[1] / "table9_cifar10_6steps.md").read_text().splitlines()
    assert lines[2].startswith(r"| SmoothAdv-DDN | sigma = 0.25 \| epsilon = 0.25 |") and len(lines) == 3
    assert [cell.strip(" *") for cell in lines[2].split(" | ")[2:]][:4] == ["77.5", "65.0", "49.0", "37.0"]
    assert r"sigma = 0.25 \textbar{} epsilon = 0.25" in (made[1] / "table9_cifar10_6steps.tex").read_text()


def test_every_cell_has_a_verdict_and_all_are_counted(made):
    done, out = made
    rows = records(out / "verdicts.csv")
    model = [row for row in rows if (row["table"], row["sigma"], row["epsilon"]) == ("9", "0.25", "0.25")]
    assert [row["verdict"] for row in model if row["group"] == "SmoothAdv-DDN"][:4] == [
        "differs by rounding", "equal", "equal", "differs",
    ]  # fmt: skip
    of_table_2 = {row["verdict"] for row in rows if row["table"] == "2"}
    assert of_table_2 == {"not comparable: no logs"}, "two models of 4 and of 14 are not the ones of the paper"
    counts = [sum(row["verdict"].startswith(word) for row in rows) for word in ("equal", "differs by", "differs")]
    counts[2] -= counts[1]
    rest = [sum(row["verdict"] == f"not comparable: no {what}" for row in rows) for what in ("logs", "printed value")]
    assert SUMMARY.format(len(rows), *counts, *rest) in done.stdout and counts == [8, 1, 1]
    page = (out / "verdicts.md").read_text()
    assert "- Table 9, SmoothAdv-DDN, sigma = 0.25, epsilon = 0.25, certified accuracy at 0.75: 37.0 (36) **≠**" in page


def test_a_figure_that_fails_is_an_error_at_the_end_with_its_traceback(clone, tmp_path):
    write_grid_log(tmp_path)
    vanished = clone / "code/matplotlib.py"
    vanished.write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    try:
        done = run(clone, tmp_path, tmp_path / "paper")
    finally:
        vanished.unlink()
    assert done.returncode == 1 and "1 tables and figures are in" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        f"error: 1 tables or figures could not be made, as the tracebacks in {tmp_path}/paper/errors.txt say: "
        "figure1_middle_cifar10"
    )
    errors = (tmp_path / "paper/errors.txt").read_text()
    assert errors.startswith("== figure1_middle_cifar10\n") and "Traceback" in errors and "'matplotlib'" in errors
    assert (tmp_path / "paper/verdicts.md").exists() and (tmp_path / "paper/table9_cifar10_6steps.md").exists()


@pytest.mark.parametrize(
    ("printed", "ours", "verdict"),
    [
        ("69", "68.51", "equal"),
        ("69", "68.5", "differs by rounding"),
        ("29.5", "29.55", "differs by rounding"),
        ("68", "68.99", "differs by rounding"),
        ("68", "69", "differs"),
        ("68.2", "69.17", "differs"),
        ("", "57.2", "not comparable: no printed value"),
        ("63.8", None, "not comparable: no logs"),
    ],
)
def test_verdict_depends_on_the_digits_that_are_printed(verdicts, printed, ours, verdict):
    place = verdicts.Place("Ours")
    cell = verdicts.Cell(2, "certified_accuracy", place, "0.25", printed, ours and Fraction(ours))
    assert cell.verdict == verdict


@pytest.mark.parametrize(("models", "ours"), [(13, [Fraction("69.17"), Fraction(87)]), (12, [None, None])])
def test_best_of_several_groups_is_compared_where_all_their_models_are_there(verdicts, tmp_path, models, ours):
    """The best model of all, with its clean accuracy; the paper calls 68.2 the best."""
    groups = {"SmoothAdv": (14, 0.6076, 0.82), "+ pre-training": (14, 0.6821, 0.8616)}
    groups |= {"+ semi-supervision": (11, 0.6661, 0.8985), "+ both": (models, 0.6917, 0.87)}
    lines = [f"{group},{2 / 255!r},{best},{clean},{count}" for group, (count, best, clean) in groups.items()]
    table = tmp_path / "table3_cifar10_linf.csv"
    table.write_text("\n".join(["group,radius,certified_accuracy,clean_accuracy,models", *lines, ""]))
    best = [cell for cell in verdicts.compared(3, table) if "|" in cell.place.group]
    assert [cell.ours for cell in best] == ours
    assert [("+ pre-training: 68.21" in cell.note, cell.verdict) for cell in best] == [
        (True, "differs") if ours[0] else (False, "not comparable: no logs")
    ] * 2


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a", "b", "c"]])
def test_wrong_use_is_answered_with_the_usage(clone, arguments):
    done = run(clone, *arguments)
    assert done.returncode == 2 and done.stderr.startswith("usage: ") and done.stderr.count("\n") == 1


def test_folder_without_released_logs_is_refused(clone, tmp_path):
    (tmp_path / "data").mkdir()
    done = run(clone, tmp_path, tmp_path / "paper")
    assert done.returncode == 1 and "none of the released logs" in done.stderr
