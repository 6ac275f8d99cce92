"""What scripts/environment.sh installs and .ci/newest.py tries, by what they ask of pip; the
versions of the lock; and the shell scripts around sweeps: which commands they call.

scripts/paper_tables.sh on a small extract that is laid out as the released repository.
"""

import csv
import json
import re
import runpy
import subprocess
import sys
from fractions import Fraction
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from smoothadv.sweep.grid import read_grids
from support.clones import make_clone, run_script
from support.commands import CODE, run_process, succeed

# Answers for Python and pip: appends what is asked of pip to `asked`, and installs nothing if there
# is a file `refuses`. Its PyTorch is what the file `pytorch` says; `-m venv` copies it.
PIP = """#!/bin/sh
[ "$1" != - ] || exec cat pytorch
[ "$1" = -m ] || exit 0
[ "$2" != venv ] || { for folder; do :; done; mkdir -p $folder/bin; cp "$0" $folder/bin/python; }
[ "$3" != --version ] || exit 0
echo "$@" >>asked
[ ! -e refuses ]
"""
LOCKED = "--constraint requirements.lock"


@pytest.fixture
def enter(tmp_path):
    """Enters a clone as its scripts do; returns what pip was asked for, and what was said on
    standard error.
    """
    clone = make_clone(tmp_path)
    (clone / ".venv/bin/python").write_text(PIP)
    installed = clone / ".venv/installed"
    installed.write_text(installed.read_text().replace("\ntest\n", "\n\n"))

    def run(*words: str, code: int = 0, **environment: str) -> tuple[list[str], str]:
        (run.clone / "asked").write_text("")
        program = ["bash", *"-euo pipefail -c".split(), "source scripts/environment.sh", "bash"]
        program += words
        run.done = run_process(program, run.clone, **environment)
        assert run.done.returncode == code, run.done.stderr
        return (run.clone / "asked").read_text().splitlines(), run.done.stderr

    run.clone = clone
    return run


def test_versions_are_installed_once_and_again_where_what_is_wanted_changes(enter, tmp_path):
    """With another lock, for a clone that was moved, and with the newest versions or without."""
    assert enter() == ([], "")
    with (enter.clone / "requirements.lock").open("a") as lock:
        lock.write("another==1.0\n")
    (asked,), _ = enter()
    assert LOCKED in asked and "--upgrade" not in asked and enter() == ([], "")
    enter.clone = enter.clone.rename(tmp_path.with_name("another folder"))
    (asked,), _ = enter()
    assert asked.endswith("--editable .") and enter() == ([], "")
    (asked,), _ = enter(SMOOTHADV_NEWEST="1")
    assert "--upgrade" in asked and LOCKED not in asked and enter(SMOOTHADV_NEWEST="1")[0] == []
    assert LOCKED in enter()[0][0], "and those of the lock again without the switch"


def test_installation_that_fails_is_tried_again(enter):
    (enter.clone / "requirements.lock").write_text("numpy==9\n")
    (refuses := enter.clone / "refuses").touch()
    _, said = enter(code=1)
    assert said.startswith("error: pip could not install that; SMOOTHADV_NEWEST=1 tries other")
    refuses.unlink()
    assert LOCKED in enter()[0][0] and enter() == ([], "")


def test_extras_are_added_to_what_is_there(enter):
    """Each once; `test` has all."""
    (asked,), _ = enter(
        "--only", "x", "--engine", "slurm", "--detach", SMOOTHADV_EXTRAS="timm, onnx"
    )
    assert LOCKED in asked and asked.endswith("--editable .[onnx,slurm,timm]")
    assert enter("--engine=slurm") == enter() == ([], "")
    (asked,), _ = enter(SMOOTHADV_EXTRAS="test")
    assert asked.endswith("--editable .[test]") and enter("--engine", "ray") == ([], "")


def test_unknown_extra_is_refused(enter):
    """pip only warns of it."""
    asked, said = enter(code=1, SMOOTHADV_EXTRAS="onnx,tim")
    assert asked == [] and said == "error: there is no extra 'tim'; docs/install.md lists them\n"


def test_scripts_install_no_more_than_they_need(enter, repository):
    texts = {path.stem: path.read_text() for path in (repository / "scripts").glob("*.sh")}
    needs = {
        name: re.findall(r"(?m)^SMOOTHADV_EXTRAS=(\w+)$", text) for name, text in texts.items()
    }
    few = {"test": ["test"], "check": ["test"], "denoised_comparison": ["diffusers"]}
    assert {name: extras for name, extras in needs.items() if extras} == few and len(needs) > 10
    assert run_process(["bash", "scripts/test.sh", "-x"], enter.clone).returncode == 0
    installed, ran = (enter.clone / "asked").read_text().splitlines()
    assert (
        installed.endswith("--editable .[test]")
        and ran.startswith("-m pytest")
        and ran.endswith(" -x")
    )


def test_environment_without_pip_is_completed(enter):
    """As the making of one leaves it that was interrupted."""
    no_pip = PIP.replace("\n", '\n[ "$3" != --version ] || exit 1\n', 1)
    (enter.clone / ".venv/bin/python").write_text(no_pip)
    (enter.clone / ".venv/installed").unlink()
    asked, _ = enter()
    assert asked[0] == "-m ensurepip" and LOCKED in asked[1]


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("./a python", "no .venv can be made in {clone} (Debian"),
        ("no_such_python", "no Python 3.10 or newer found: set PYTHON=/path/to/python\n"),
    ],
    ids=["without venv, with a space in its path", "missing or old"],
)
def test_interpreter_that_makes_no_environment_is_refused(enter, python, words):
    (poor := enter.clone / "a python").write_text('#!/bin/sh\n[ "$1" != -m ]\n')
    poor.chmod(0o755)
    (enter.clone / ".venv/bin/python").unlink()
    asked, said = enter(code=1, PYTHON=python)
    assert asked == [] and said.startswith(f"error: {words.format(clone=enter.clone)}")


@pytest.mark.parametrize("whose", ["the interpreter's", "of a .venv that a person made"])
def test_pytorch_that_is_there_is_kept(enter, tmp_path, whose):
    (enter.clone / "pytorch").write_text("torch==2.9.0+cpu\ntorchvision==0.24.0+cpu\n")
    (enter.clone / ".venv/installed").unlink()
    (python := tmp_path / "python").write_text(PIP)
    python.chmod(0o755)
    if whose == "the interpreter's":
        (enter.clone / ".venv/bin/python").unlink()
    asked, _ = enter(PYTHON=str(python))
    venv = ["-m venv --clear --system-site-packages .venv"] if whose == "the interpreter's" else []
    assert asked[:-1] == venv and asked[-1].endswith(
        "--constraint .venv/lock --constraint .venv/kept --editable ."
    )
    assert (enter.clone / ".venv/kept").read_text() == (enter.clone / "pytorch").read_text()
    lock = (enter.clone / ".venv/lock").read_text()
    assert "numpy==" in lock and not re.search("(?m)^(torch|torchvision|triton|nvidia-.*)==", lock)
    assert "== taking the PyTorch that is there" in enter.done.stdout and enter() == ([], "")
    assert "--constraint .venv/kept" in enter(SMOOTHADV_NEWEST="1")[0][0]


def test_pytorch_is_kept_if_requirements_allow_it(tmp_path):
    """That of the interpreter of these tests is."""
    clone = make_clone(tmp_path)
    (clone / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    command = ["bash", "-c", "source scripts/environment.sh && keep_pytorch"]
    assert run_process(command, clone).returncode == 0
    versions = [f"{name}=={metadata.version(name)}" for name in ("torch", "torchvision")]
    assert (clone / ".venv/kept").read_text().splitlines() == versions
    lines = ["source scripts/environment.sh", "echo torch'>='99.0 >requirements.txt"]
    run_process(["bash", "-c", "\n".join([*lines, "keep_pytorch"])], clone)
    assert not (clone / ".venv/kept").exists()


def test_lock_names_one_version_of_each_requirement(repository, monkeypatch):
    declared, setuptools = (
        {},
        pytest.importorskip("setuptools", reason="setuptools is not installed"),
    )
    monkeypatch.setattr(setuptools, "setup", lambda **given: declared.update(given))
    runpy.run_path(str(repository / "setup.py"))
    lines = [
        line
        for line in (repository / "requirements.lock").read_text().splitlines()
        if line[0] != "#"
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), (
        "no address, no path, no local version"
    )
    locked = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }
    assert len(locked) == len(lines)
    for text in [*declared["install_requires"], *declared["extras_require"]["test"]]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text


SAY = """import sys
print("{name}", *sys.argv[1:], flush=True)
said = " ".join(sys.argv)
sys.exit(130 if "interrupted" in said else "fails" in said)
"""


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> Path:
    """A clone whose certify and sweep only say what they were asked for, and fail where "fails" is
    among it, or end as by Ctrl-C where "interrupted" is.
    """
    clone = make_clone(tmp_path_factory.mktemp("speaking"))
    for name in ("certify", "sweep"):
        (clone / f"code/{name}.py").write_text(SAY.format(name=name))
    return clone


def said(done: subprocess.CompletedProcess[str], name: str) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(f"{name} ")]


def checkpoint(folder: Path, recipe: dict | None = None) -> None:
    folder.mkdir(parents=True)
    (folder / "checkpoint.pth.tar").touch()
    if recipe is not None:
        (folder / "args.json").write_text(json.dumps({"recipe": recipe}))


NOISY = {"dataset": "digits", "objective": {"noise_sd": 0.25}}


def test_every_checkpoint_is_certified_as_it_was_trained(speaking, tmp_path):
    """Two in one folder have logs of their own."""
    checkpoint(
        tmp_path / "models/a b/x",
        {"dataset": "imagefolder:my images", "objective": {"noise_sd": 0.5}},
    )
    released = "cifar10/PGD_2steps/eps_64/cifar10/resnet110/noise_0.12"
    checkpoint(tmp_path / "models" / released)
    (tmp_path / "models" / released / "best.pth.tar").touch()
    done = run_script(speaking, "certify_all", "models", "mine", "--skip", 20, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    models, logs = tmp_path / "models", tmp_path / "mine"
    assert said(done, "certify") == [
        f"certify imagefolder:my images {models}/a b/x/checkpoint.pth.tar 0.5 {logs}/a "
        "b/x/sigma_0.5.tsv --skip 20",
        *(
            f"certify cifar10 {models}/{released}/{file}.pth.tar 0.12 "
            f"{logs}/{released}/{log}_0.12.tsv --skip 20"
            for file, log in (("best", "best_sigma"), ("checkpoint", "sigma"))
        ),
    ]
    assert "3 of 3 models are certified" in done.stdout


def test_what_cannot_be_certified_is_named_and_stops_no_other(speaking, tmp_path):
    checkpoint(tmp_path / "models/vanilla", {"dataset": "digits", "objective": {"noise_sd": 0}})
    checkpoint(tmp_path / "models/strange")
    checkpoint(tmp_path / "models/fails", NOISY)
    checkpoint(tmp_path / "models/good", NOISY)
    done = run_script(speaking, "certify_all", tmp_path / "models")
    assert done.returncode == 1
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        "strange/checkpoint.pth.tar",
        "vanilla/checkpoint.pth.tar",
    ]
    assert len(said(done, "certify")) == 2 and "1 of 4 models are certified" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["certify_all"],
        ["certify_all", "nowhere"],
        ["reproduce_paper"],
        ["reproduce_paper", "mnist"],
    ],
)
def test_call_without_what_exists_is_told_how(speaking, tmp_path, words):
    done = run_script(speaking, *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


@pytest.mark.parametrize("name", ["quickstart", "denoised_quickstart", "attack_comparison"])
def test_words_that_a_script_does_not_read_are_refused(speaking, name):
    done = run_script(speaking, name, "digits")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: this script takes no arguments, found digits\n"
    done = run_script(speaking, name, "-h")
    assert done.returncode == 0 and done.stderr == "" and "to start anew: rm -r" in done.stdout


def test_folder_without_checkpoints_is_refused(speaking, tmp_path):
    done = run_script(speaking, "certify_all", tmp_path)
    assert done.returncode == 1 and "holds no checkpoint" in done.stderr


SWEEPS = {
    "sweep_cifar10": ["run", "report"],
    "sweep_imagenet": ["run", "report"],
    "reproduce_paper cifar10": ["plan", "run", "report"],
    "reproduce_paper imagenet": ["plan", "run", "report"],
    "reproduce_paper extras": ["plan", "run", "run", "report"],
    "reproduce_paper digits": ["plan", "run", "report"],
}


@pytest.mark.parametrize("script", SWEEPS)
def test_script_goes_from_grids_to_a_report(speaking, script):
    name, *what = script.split()
    done = run_script(speaking, name, *what, "--engine", "slurm")
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in said(done, "sweep")]
    assert [each[1] for each in calls] == SWEEPS[script]
    grids = {word for each in calls for word in each if word.endswith(".toml")}
    assert grids and all((speaking / grid).is_file() for grid in grids)
    for each in calls:
        assert (each[-2:] == ["--engine", "slurm"]) == (each[1] == "run")


@pytest.mark.parametrize(
    ("words", "code", "actions"),
    [(["fails"], 1, ["run", "report"]), (["--engine", "slurm", "--detach"], 0, ["run"])],
)
def test_jobs_are_reported_on_unless_they_are_left_to_a_queue(speaking, words, code, actions):
    """Failed ones are no reason not to report on the others."""
    done = run_script(speaking, "sweep_imagenet", *words)
    assert (done.returncode, [line.split()[1] for line in said(done, "sweep")]) == (code, actions)


def test_models_of_the_scripts_are_counted_right(speaking, repository):
    """reproduce_paper.sh says how many models there are."""
    text = (repository / "scripts/reproduce_paper.sh").read_text()
    numbers = {
        "cifar10": 664,
        "released": 424,
        "cohen": 4,
        "imagenet": 27,
        "extras": 816,
        "digits": 8,
    }
    for what, stated in numbers.items():
        first = said(run_script(speaking, "reproduce_paper", what), "sweep")[0]
        grids = [speaking / word for word in first.split() if word.endswith(".toml")]
        trained = [model for grid in read_grids(grids) for model in grid.trained]
        assert len(trained) == stated and f"{stated}" in text


def test_interruption_is_meant_for_all_models(speaking, tmp_path):
    for name in ("a", "b"):
        checkpoint(tmp_path / "interrupted" / name, NOISY)
    done = run_script(speaking, "certify_all", tmp_path / "interrupted")
    assert done.returncode == 130 and len(said(done, "certify")) == 1


HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
# Certified correctly at these radii, of four images; the fourth is an abstention.
COHEN = {"0.25": (0.1, 0.3, 0.9), "0.50": (0.2, 0.6, 1.2)}
OURS = {"0.25": (0.4, 0.8, 0.95), "0.50": (0.5, 1.1, 1.7)}
# Of 200 images: 77.5, 65, 49 and 37 % at 0, 0.25, 0.5 and 0.75, where Table 9 has 77, 65, 49 and
# 36.
OF_TABLE_9 = (0.1,) * 25 + (0.3,) * 32 + (0.6,) * 24 + (0.8,) * 74
VERDICTS = runpy.run_path(str(CODE.parent / "scripts/paper_verdicts.py"))


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
def released(tmp_path_factory) -> Path:
    """Best CIFAR-10 models of two groups, beside other files, and one model of the grid."""
    root = tmp_path_factory.mktemp("released")
    best = root / "data/certify/best_models/cifar10"
    for sigma, radii in COHEN.items():
        write_certification_log(best / f"cohen/resnet110/noise_{sigma}/test/sigma_{sigma}", radii)
    for sigma, radii in OURS.items():
        folder = (
            best
            / "ours/cifar10/PGD_2steps_multiNoiseSamples/8-multitrain/eps_255"
            / f"resnet110/noise_{sigma}"
        )
        write_certification_log(folder / f"test/sigma_{sigma}", radii)
        (folder / "test/stdout.txt").write_text("container started\n")
    write_grid_log(root)
    (root / "data/certify/cifar10/DDN_8steps").mkdir()
    return root


def run(clone: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_script(clone, "paper_tables", *arguments)


def records(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_of_what_is_there_are_made_with_verdicts_and_the_rest_is_named(
    clone, released, tmp_path
):
    done, out = run(clone, released, tmp_path / "paper"), tmp_path / "paper"
    assert done.returncode == 0, done.stderr
    rows = {
        (row["group"], float(row["radius"])): row for row in records(out / "table2_cifar10.csv")
    }
    accuracies = {key: float(row["certified_accuracy"]) for key, row in rows.items()}
    assert [accuracies["Cohen", radius] for radius in (0.25, 0.5, 1.0, 1.25)] == [0.5, 0.5, 0.25, 0]
    assert [accuracies["SmoothAdv", radius] for radius in (0.25, 0.5, 1.0, 1.75)] == [
        0.75,
        0.75,
        0.5,
        0,
    ]
    assert {(row["models"], row["abstention_rate"]) for row in rows.values()} == {("2", "0.25")}
    for name in (
        "table2_cifar10",
        "table3_cifar10_linf",
        "table4_cifar10_abstention",
        "selected_cifar10",
    ):
        assert all((out / f"{name}.{ending}").stat().st_size for ending in ("md", "tex", "csv"))
    assert "not there: data/certify/best_models/cifar10/ours_pretraining" in done.stdout
    assert "not there: data/certify/cifar10/DDN_8steps" in done.stdout, (
        "an empty folder holds no logs"
    )
    assert "== table1_imagenet" in done.stdout and not (out / "table1_imagenet.md").exists()
    assert "6 tables and figures" in done.stdout and (out / "figure1_middle_cifar10.png").exists()
    cannot = (out / "cannot_be_made.md").read_text()
    assert (
        "training times" in cannot
        and "- data/certify/best_models/cifar10/ours_pretraining\n" in cannot
    )
    model = (out / "table9_cifar10_6steps.md").read_text()
    assert r"| SmoothAdv-DDN | sigma = 0.25 \| epsilon = 0.25 |" in model and model.count("\n") == 3
    cells = [row for row in records(out / "verdicts.csv") if row["ours"] and row["table"] == "9"]
    assert [(float(cell["ours"]), cell["printed"], cell["verdict"]) for cell in cells[:4]] == [
        (77.5, "77", "differs by "
        "rounding"), (65, "65", "equal"), (49, "49", "equal"), (37, "36", "differs"),
    ]  # fmt: skip
    assert "cells: 8 equal, 1 differs by rounding, 1 differs, " in done.stdout, (
        "of 14 models, 2 are not all"
    )
    assert (
        "- Table 9, SmoothAdv-DDN, sigma = 0.25, epsilon = 0.25, certified accuracy at 0.75: 37.0 "
        "(36) **≠**" in (out / "verdicts.md").read_text()
    )


def test_a_figure_that_fails_is_an_error_at_the_end_with_its_traceback(clone, tmp_path):
    write_grid_log(tmp_path)
    vanished = clone / "code/matplotlib.py"
    vanished.write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    try:
        done = run(clone, tmp_path, tmp_path / "paper")
    finally:
        vanished.unlink()
    assert done.returncode == 1 and "1 tables and figures are in" in done.stdout
    assert done.stderr.endswith(
        f"the tracebacks in {tmp_path}/paper/errors.txt say: figure1_middle_cifar10\n"
    )
    errors = (tmp_path / "paper/errors.txt").read_text()
    assert (
        errors.startswith("== figure1_middle_cifar10\n")
        and "Traceback" in errors
        and "'matplotlib'" in errors
    )
    assert (tmp_path / "paper/verdicts.md").exists() and (
        tmp_path / "paper/table9_cifar10_6steps.md"
    ).exists()


@pytest.mark.parametrize(
    ("printed", "ours", "verdict"),
    [("69", "68.51", "equal"), ("69", "68.5", "differs by rounding"), ("68", "68.99", "differs by "
    "rounding"),
     ("68", "69", "differs"), ("29.5", "29.55", "differs by "
     "rounding"), ("68.2", "69.17", "differs"),
     ("", "57.2", "not comparable: no printed value"), ("63.8", None, "not comparable: no logs")],
)  # fmt: skip
def test_verdict_depends_on_the_digits_that_are_printed(printed, ours, verdict):
    place = VERDICTS["Place"]("Ours")
    assert (
        VERDICTS["Cell"](
            2, "clean_accuracy", place, "0.25", printed, ours and Fraction(ours)
        ).verdict
        == verdict
    )


def test_a_finished_grid_is_set_beside_the_published_rows(tmp_path, capsys):
    """Images certified at 0.5, 1.1 and 1.7, and one not: 0.825 on average, where two groups have
    0.7195 and 0.7157.
    """
    log = (
        tmp_path
        / "logs/consistency/2-multitrain/cifar10/cifar_resnet110/noise_0.50/test/sigma_0.50.tsv"
    )
    write_certification_log(log, OURS["0.50"])
    options = [
        "--label-by",
        "training",
        "sigma",
        "--radii",
        0,
        0.25,
        1.25,
        "-o",
        tmp_path / "objectives_cifar10.csv",
    ]
    succeed("analyze", "summary", tmp_path / "logs", *options)
    VERDICTS["main"](tmp_path, ["objectives_cifar10"])
    rows = records(tmp_path / "objectives_cifar10_beside.csv")
    assert {(row["training"], row["sigma"], row["images"]) for row in rows} == {
        ("Consistency", "0.5", "4")
    }
    found = [
        tuple(float(row[name]) for name in ("published", "ours", "difference")) for row in rows
    ]
    assert found[:4] == [
        (0.7195, 0.825, 0.1055),
        (64.34, 75, 10.66),
        (57.49, 75, 17.51),
        (29.47, 25, -4.47),
    ]
    assert found[4] == (0.7157, 0.825, 0.1093)
    page = (tmp_path / "objectives_cifar10_beside.md").read_text()
    assert (
        "| Consistency, 0.5, alinlab/smoothing-catrs | 4 | 0.825 (0.720, +0.105) | 75.0 (64.3, "
        "+10.7) |" in page
    )
    assert "| Gaussian, 0.25, eth-sri/acr-weakness | – | – (0.487) | – (80.4) |" in page
    assert (
        "41 published rows, 2 comparisons with models of ours, average radius +0.1"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("models", "ours"), [(13, [Fraction("69.17"), Fraction(87)]), (12, [None, None])]
)
def test_best_of_several_groups_is_compared_where_all_their_models_are_there(
    tmp_path, models, ours
):
    """The best model of all, with its clean accuracy; the paper calls 68.2 the best."""
    groups = [
        ("SmoothAdv", 14, 0.6),
        ("+ pre-training", 14, 0.6821),
        ("+ semi-supervision", 11, 0.66),
    ]
    groups.append(("+ both", models, 0.6917))
    lines = [
        f"{group},{2 / 255!r},{best},{0.87 if best > 0.69 else 0.9},{count}"
        for group, count, best in groups
    ]
    table = tmp_path / "table3_cifar10_linf.csv"
    table.write_text(
        "\n".join(["group,radius,certified_accuracy,clean_accuracy,models", *lines, ""])
    )
    best = [cell for cell in VERDICTS["compared"](3, table) if "|" in cell.place.group]
    assert [cell.ours for cell in best] == ours and all(
        bool(cell.note) == (None not in ours) for cell in best
    )


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a", "b", "c"]])
def test_wrong_use_is_answered_with_the_usage(clone, arguments):
    done = run(clone, *arguments)
    assert (
        done.returncode == 2 and done.stderr.startswith("usage: ") and done.stderr.count("\n") == 1
    )


def test_verdicts_without_a_folder_are_answered_with_the_usage():
    done = run_process([sys.executable, "scripts/paper_verdicts.py", "nowhere"], CODE.parent)
    assert done.returncode == 1 and done.stderr.startswith("usage: "), done.stderr


def test_folder_without_released_logs_is_refused(clone, tmp_path):
    (tmp_path / "data").mkdir()
    done = run(clone, tmp_path, tmp_path / "paper")
    assert done.returncode == 1 and "none of the released logs" in done.stderr
