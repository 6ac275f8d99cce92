"""The shell scripts around sweeps: which commands they call, and certify_all.sh on real
checkpoints.
"""

import json
import subprocess
from pathlib import Path

import pytest

from smoothadv.sweep.grid import read_grids
from support.clones import make_clone, run_script
from support.commands import succeed

SAY = 'import sys\nprint("{name}", *sys.argv[1:])\nsys.exit("fails" in " ".join(sys.argv))\n'


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> Path:
    """A clone whose certify and sweep only say what they were asked for, and fail where "fails" is
    among it.
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
    checkpoint(
        tmp_path / "models/a b/x",
        {"dataset": "imagefolder:my images", "objective": {"noise_sd": 0.5}},
    )
    checkpoint(tmp_path / "models/cifar10/PGD_2steps/eps_64/cifar10/resnet110/noise_0.12")
    done = run_script(speaking, "certify_all", "models", "mine", "--skip", 20, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    released = "cifar10/PGD_2steps/eps_64/cifar10/resnet110/noise_0.12"
    models, logs = tmp_path / "models", tmp_path / "mine"
    assert said(done, "certify") == [
        f"certify imagefolder:my images {models}/a b/x/checkpoint.pth.tar 0.5 {logs}/a "
        "b/x/sigma_0.5.tsv --skip 20",
        f"certify cifar10 {models}/{released}/checkpoint.pth.tar 0.12 "
        f"{logs}/{released}/sigma_0.12.tsv --skip 20",
    ]
    assert "2 of 2 models are certified" in done.stdout


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


def test_checkpoints_are_really_certified(tmp_path):
    clone = make_clone(tmp_path / "clone")
    smoke = ["--noise", 0.5, "--recipe", "smoke", "--device", "cpu"]
    succeed("train", "digits", "digits_resnet8", tmp_path / "models/first", *smoke)
    options = ["--N", 100, "--max", 3, "--device", "cpu"]
    done = run_script(clone, "certify_all", tmp_path / "models", tmp_path / "logs", *options)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "logs").rglob("*.tsv")
    assert log == tmp_path / "logs/first/sigma_0.5.tsv" and len(log.read_text().splitlines()) == 4


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


def test_checkpoints_of_one_folder_have_logs_of_their_own(speaking, tmp_path):
    checkpoint(tmp_path / "models/a", NOISY)
    (tmp_path / "models/a/best.pth.tar").touch()
    done = run_script(speaking, "certify_all", tmp_path / "models", tmp_path / "logs")
    logs = {line.split()[4] for line in said(done, "certify")}
    assert logs == {f"{tmp_path}/logs/a/{name}.tsv" for name in ("sigma_0.25", "best_sigma_0.25")}


def test_interruption_is_meant_for_all_models(tmp_path):
    """As if Ctrl-C had ended the first one, which it does with 130."""
    clone = make_clone(tmp_path / "clone")
    (clone / "code/certify.py").write_text("print('certify', flush=True)\nraise SystemExit(130)\n")
    for name in ("a", "b"):
        checkpoint(tmp_path / "models" / name, NOISY)
    done = run_script(clone, "certify_all", tmp_path / "models")
    assert done.returncode == 130 and done.stdout.count("certify\n") == 1
