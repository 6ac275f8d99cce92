"""From a grid to jobs: the commands of the jobs, the settings they will record, and grids that are
refused.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from smoothadv.datasets import describe_dataset
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.noise import RoundedGaussianNoise
from smoothadv.records.logs import read_manifest_file
from smoothadv.sweep.planning import CommandReader
from support.commands import call, header, rows, succeed
from support.sweeping import FIXED, grid_text, jobs_of, write_grid

pytestmark = pytest.mark.usefixtures("workplace")
PGD = {"attack": "PGD", "epsilon": 0.5, "num-steps": 1, "noise": 0.25}
HERE = "digits/digits_resnet8/noise_0.25"


def planned(*sweeps: dict, **further):
    return jobs_of(write_grid(Path("grid.toml"), *sweeps, **further))


def refused(capsys, text: str) -> str:
    """The exit code and the error line with which planning a grid is refused."""
    Path("grid.toml").write_text(text)
    outcome = call(capsys, "sweep", "plan", "grid.toml")
    assert outcome.code in (1, 2) and outcome.out == "" and outcome.err.count("\n") == 1, outcome
    assert outcome.err.startswith("error: ") and list(Path.cwd().iterdir()) == [
        Path.cwd() / "grid.toml"
    ]
    return f"{outcome.code} {outcome.err}"


@pytest.mark.parametrize("dataset", ["digits", "imagenet"])
def test_certificates_of_sound_are_planned_for_the_distance_of_their_noise(dataset, monkeypatch):
    calls, found = [], SimpleNamespace(record=dict)
    monkeypatch.setattr(CertifySpec, "procedure", lambda *given: calls.append(given) or found)
    words = f"certify {dataset} m.tar 0.25 log.tsv --sound --method sequential".split()
    training = SimpleNamespace(expected=SimpleNamespace(recipe={"arch": "resnet50"}))
    job = SimpleNamespace(classifier=None, trainings=(training,))
    CommandReader().evaluation(words, job, "")
    dimension = math.prod(describe_dataset(dataset).image_shape)
    assert calls[-1][2] == (RoundedGaussianNoise(0.25, 0).distance(dimension),) != (0,)


def test_words_of_the_commands():
    certify = [
        {"skip": 2, "N": 300},
        {"method": "adaptive", "radii": [0.25, 0.5], "sound": True, "name": "a"},
    ]
    attack = [{"epsilon": [0.25, "64/255"], "restarts": 2}]
    sweep = {**PGD, "random-start": True, "seed": [4]}
    path = write_grid(Path("grid.toml"), sweep, certify=certify, attack=attack)
    (job,) = jobs_of(path, {"--device": "cpu", "--data-dir": "some/where", "--other": None})
    folder = f"PGD_1step/eps_0.50/seed_4/{HERE}"
    words = [" ".join(stage.words).split() for stage in job.stages]
    model, logs = f"models/grid/{folder}", f"logs/grid/{folder}"
    assert [one[:4] for one in words[:1]] == [["train_pgd", "digits", "digits_resnet8", model]]
    assert [one[:5] for one in words[1:]] == [
        ["certify", "digits", f"{model}/checkpoint.pth.tar", "0.25", f"{logs}/test/sigma_0.25.tsv"],
        [
            "certify",
            "digits",
            f"{model}/checkpoint.pth.tar",
            "0.25",
            f"{logs}/test/sigma_0.25_a.tsv",
        ],
        [
            "attack",
            "digits",
            f"{model}/checkpoint.pth.tar",
            "0.25",
            f"{logs}/attacked/test/sigma_0.25",
        ],
    ]
    train = {
        "--recipe smoke",
        "--attack PGD",
        "--epsilon 0.5",
        "--num-steps 1",
        "--noise 0.25",
        "--random-start",
    }
    shared = {"--device cpu", "--data-dir some/where"}
    expected = [
        {*train, "--seed 4", *shared, "--resume"},
        {"--skip 2", "--N 300", *shared},
        {"--method adaptive", "--radii 0.25 0.5", "--sound", *shared},
        {"--epsilon 0.25 64/255", "--restarts 2", *shared},
    ]
    given = [{f"--{option}".strip() for option in " ".join(one).split("--")[1:]} for one in words]
    assert given == expected
    assert (job.cwd, job.logs, job.name, job.group) == (Path.cwd(), Path(logs), folder, "grid")
    assert (job.training.folder, job.training.expected.epochs) == (Path.cwd() / model, 2)


def test_false_is_said_where_it_means_something():
    """No crops and no mirror images are decisions; a switch that is off is just not there."""
    cifar = {"dataset": "cifar10", "arch": "cifar_resnet20", "noise": 0.25}
    jobs = planned({**cifar, "horizontal-flip": [True, False]}, fixed={})
    assert [job.training.expected.recipe["horizontal_flip"] for job in jobs] == [True, False]
    (job,) = planned({**PGD, "random-start": False})
    assert job.training.expected.recipe["objective"]["attack"]["random_start"] is False
    assert not any("random-start" in word for word in job.training.words)


TRAINED = {
    "Gaussian": {"noise": 0.25},
    "PGD": {**PGD, "num-noise-vec": 2, "epochs": 1, "random-start": True},
    "DDN one-cycle": {**PGD, "attack": "DDN", "lr-schedule": "one-cycle", "batch": 16},
    "vanilla": {**PGD, "base-attack": True, "crop-padding": 1, "horizontal-flip": True},
    "released": {**PGD, "epsilon": 64, "released-behaviour": True, "num-noise-vec": 2, "seed": 3},
    "center": {
        "noise": 0.25,
        "input-layer": "center",
        "micro-batch": 16,
        "precision": "bf16",
        "momentum": 0.5,
    },
}


@pytest.mark.parametrize("kind", TRAINED)
def test_planned_recipe_is_what_the_training_records(kind):
    (job,) = planned(TRAINED[kind])
    succeed(*job.training.words)
    recorded = json.loads((job.training.folder / "args.json").read_text())["recipe"]
    stated = json.loads(json.dumps(dict(job.training.expected.recipe)))
    assert {name: recorded[name] for name in stated} == stated
    files = {
        "dataset_fingerprint",
        "input_layer",
        "pretrained_sha256",
        "pseudo_labelled_fingerprint",
        "pseudo_weight",
    }
    assert recorded.keys() - stated.keys() <= files, "only what takes a file to know is left out"
    assert len(rows(job.training.folder / "log.txt")) == job.training.expected.epochs
    assert job.training.progress().is_complete and job.training.checkpoint.exists()


COUNTED = {"max": 2, "N": 200}
EVALUATED = {
    "exact": ("certify", COUNTED),
    "all given": (
        "certify",
        {**COUNTED, "N0": 50, "alpha": 0.01, "seed": 5, "batch": 50, "split": "train"},
    ),
    "named": ("certify", {"N": 200, "images": "./7-8"}),  # a file
    "adaptive": ("certify", {**COUNTED, "method": "adaptive"}),
    "adaptive radii": (
        "certify",
        {**COUNTED, "method": "adaptive", "radii": [0.5, 0.25], "ladder": True},
    ),
    "sound": ("certify", {**COUNTED, "sound": True}),
    "other precision": ("certify", {**COUNTED, "precision": "bf16"}),
    "attack": ("attack", {**COUNTED, "epsilon": [0.25, 1], "num-steps": 1, "num-noise-vec": 2}),
    "DDN": (
        "attack",
        {**COUNTED, "attack": "DDN", "epsilon": ["64/255"], "num-steps": 1, "num-noise-vec": 2},
    ),
    "base attack": (
        "attack",
        {**COUNTED, "epsilon": 0.5, "num-steps": 1, "gradient": "base", "restarts": 2},
    ),
    "gradient-free": (
        "attack",
        {**COUNTED, "epsilon": 0.5, "num-steps": 1, "num-noise-vec": 2, "gradient": "stein"},
    ),
    "targeted": (
        "attack",
        {**COUNTED, "epsilon": 0.5, "num-steps": 1, "num-noise-vec": 2, "target": 3},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (job,) = planned({"noise": 0.25})
        succeed(*job.training.words)
        return job.training.folder


@pytest.mark.parametrize("kind", EVALUATED)
def test_planned_settings_are_what_the_manifest_says(model, kind):
    (command, table), models = EVALUATED[kind], str(model.parents[3])
    listed = Path("grids/7-8")
    listed.parent.mkdir()
    listed.write_text("7\n358\n")
    path = write_grid(Path("grids/grid.toml"), {"noise": 0.25}, models=models, **{command: [table]})
    (job,) = jobs_of(path)
    (stage,) = job.evaluations
    assert not stage.progress().is_complete and job.training.progress().is_complete
    succeed(*stage.words)
    assert len(stage.logs) == len(stage.settings) == (2 if kind == "attack" else 1)
    for log, settings in zip(stage.logs, stage.settings):
        recorded, stated = (
            read_manifest_file(log)["settings"],
            json.loads(json.dumps(dict(settings))),
        )
        assert {name: recorded[name] for name in stated} == stated
        assert {"dataset", "split", "sigma", "alpha", "seed", "N", "precision"} <= stated.keys()
    assert stage.progress().is_complete, str(stage.progress())
    assert stage.progress().done == 2 * len(stage.logs)
    if kind == "named":
        listed.write_text("7\n357\n")
        (other,) = jobs_of(path)[0].evaluations
        assert "now ./7-8 (2 images); image 357 is new" in other.progress().conflict
    assert header(stage.logs[0])[0] == "idx"


def test_placeholder_and_sigmas_in_a_certify_table():
    jobs = planned({"noise": [0.25, 0.5]}, certify=[{"sigma": ["{noise}", 1], "N": 300}])
    assert [[float(stage.words[3]) for stage in job.evaluations] for job in jobs] == [
        [0.25, 1],
        [0.5, 1],
    ]
    (job,) = planned({**PGD, "noise": 0}, certify=[{"sigma": [0.25, 0.5]}])
    assert [stage.words[3] for stage in job.evaluations] == ["0.25", "0.5"], (
        "also of a model without noise"
    )


def test_evaluation_tables_are_for_the_groups_they_name():
    sweeps = [
        {"noise": 0.25, "group": "A"},
        {"noise": 0.5, "group": "B"},
        {"noise": 1, "group": "C"},
    ]
    certify = [{"N": 300, "group": ["A", "B"]}, {"N": 300, "group": "B", "name": "again"}]
    assert [len(job.evaluations) for job in planned(*sweeps, certify=certify)] == [1, 2, 0]


def test_files_that_others_make_are_needed():
    pretrained = {"noise": 0.25, "pretrained-model": "models/a/noise_{noise}/checkpoint.pth.tar"}
    unlabelled = {"noise": 0.25, "use-unlabelled": "pseudo.npz"}
    job, other = planned(pretrained, unlabelled, certify=[{"denoiser": "d"}])
    assert job.training.needs == (Path.cwd() / "models/a/noise_0.25/checkpoint.pth.tar",)
    assert other.training.needs == (Path.cwd() / "pseudo.npz",)
    assert job.evaluations[0].needs == (Path.cwd() / "d",)


def test_beta_and_released_behaviour_are_part_of_the_recipe():
    """The released code counts epsilon in 256ths; beta is a part of the folder, too."""
    jobs = planned({**PGD, "beta": [4, 1]}, {**PGD, "epsilon": 64, "released-behaviour": True})
    attacks = [job.training.expected.recipe["objective"]["attack"] for job in jobs]
    assert [one["estimator"] for one in attacks[:2]] == [
        {"name": "PlugIn", "beta": 4.0},
        "plug_in",
    ]
    assert "/beta_4/" in jobs[0].name and [one["epsilon"] for one in attacks] == [0.5, 0.5, 0.25]


BAD = {
    "unknown option": (grid_text(PGD, {**PGD, "nose": 1}), "[[sweep]] 2", "--nose"),
    "bad value": (
        grid_text(PGD, {**PGD, "noise": 0.5, "epsilon": [0.25, 64]}),
        "[[sweep]] 2",
        "--epsilon",
    ),
    "noise is a word": (grid_text({**PGD, "noise": "loud"}), "[[sweep]] 1", "--noise"),
    "Gaussian noise is a word": (grid_text({"noise": "loud"}), "[[sweep]] 1", "--noise"),
    "no noise": (grid_text({"lr": 0.1}), "[[sweep]] 1", "--noise"),
    "no size": (
        grid_text(PGD, {"attack": "PGD", "num-steps": 1, "noise": 1}),
        "[[sweep]] 2",
        "--eps",
    ),
    "no teacher": (grid_text({"noise": 1, "objective": "cat-rs"}), "[[sweep]] 1", "--teacher"),
    "foreign option": (grid_text({**PGD, "gamma-DDN": 0.1}), "[[sweep]] 1", "--gamma-DDN"),
    "attack without attack": (
        grid_text({"noise": 0.25, "epsilon": 0.5}),
        "[[sweep]] 1",
        "--epsilon",
    ),
    "unknown dataset": (
        grid_text({"noise": 1}, fixed={**FIXED, "dataset": "digit"}),
        "[[sweep]] 1",
        "digit",
    ),
    "unknown arch": (
        grid_text({"noise": 1}, fixed={**FIXED, "arch": "resnet"}),
        "[[sweep]] 1",
        "'resnet'",
    ),
    "unknown attack": (grid_text({**PGD, "attack": "FGSM"}), "[[sweep]] 1", "FGSM"),
    "unknown certify option": (
        grid_text(PGD, certify=[{}, {"M": 5, "name": "b"}]),
        "[[certify]] 2",
        "--M",
    ),
    "bad certify value": (grid_text(PGD, certify=[{"N": 0}]), "[[certify]] 1", "--N"),
    "no such list": (grid_text(PGD, certify=[{"images": "li.txt"}]), "[[certify]] 1", "./li.txt"),
    "sigma is a word": (grid_text(PGD, certify=[{"sigma": "loud"}]), "[[certify]] 1", "loud"),
    "foreign procedure option": (
        grid_text(PGD, certify=[{"radii": [0.5]}]),
        "[[certify]] 1",
        "--radii",
    ),
    "more classes than there are": (
        grid_text(PGD, certify=[{"method": "top-k", "top-k": 30}]),
        "[[certify]] 1",
        "--top-k 30",
    ),
    "two splits": (
        grid_text(PGD, certify=[{"split": ["test", "train"]}]),
        "[[certify]] 1",
        "train",
    ),
    "attack of no size": (grid_text(PGD, attack=[{"N": 100}]), "[[attack]] 1", "--epsilon"),
    "unknown attack option": (
        grid_text(PGD, attack=[{"epsilon": 0.5, "M": 1}]),
        "[[attack]] 1",
        "--M",
    ),
    "attack contradicts itself": (
        grid_text(PGD, attack=[{"epsilon": 0.5, "gradient": "base", "num-noise-vec": 2}]),
        "[[attack]] 1",
        "--num-noise-vec",
    ),
}


# Usage errors say where in the grid they are.
REFUSED = {
    **{
        what: (text, ["2 error: ", f"grid grid.toml, {table}", flag])
        for what, (text, table, flag) in BAD.items()
    },
    "two models in one folder": (
        grid_text({"noise": 0.25, "lr": 0.1}, {"noise": 0.25, "lr": 0.2}),
        ["1 error", f"gaussian/{HERE}", "[[sweep]] 1", "[[sweep]] 2"],
    ),
    "one model twice": (
        grid_text({"noise": 0.25}, {"noise": [0.25, 0.5]}),
        ["two models would write", "[[sweep]] 2"],
    ),
    "an ensemble of one": (
        grid_text({"noise": [0.25, 0.5], "group": "A"}, ensemble=[{"of": "A"}]),
        ["[[ensemble]] 1: gaussian/", "noise_0.25 would be alone: ", " but seed"],
    ),
    # Errors in a table about the best models do not wait for the logs that tell these.
    **{
        f"best, {word}": (
            grid_text(PGD, certify=[{"name": "a"}, {"best": "a", "name": "b", **mistaken}]),
            [word],
        )
        for mistaken, word in (
            ({"skp": 3}, "unknown option --skp"),
            ({"name": "a"}, "two tables would write"),
            ({"max": 0}, "--max"),
        )
    },
    "no such recipe": (grid_text({"noise": 0.25, "recipe": "none"}), ["none"]),
    "no such image": (
        grid_text(PGD, certify=[{"images": "0-359"}]),
        ["1 error: grid grid.toml, [[certify]] 1: images 0-359: 'digits' has 359 images"],
    ),
    "true for a number": (grid_text({"noise": True}), ["[[sweep]] 1", "noise"]),
    "false for a number": (grid_text({"noise": 0.25, "lr": False}), ["[[sweep]] 1", "lr"]),
    "false for a number of certify": (
        grid_text(PGD, certify=[{"N": False}]),
        ["[[certify]] 1", "'N'"],
    ),
    "no sigma": (
        grid_text({**PGD, "noise": 0}, certify=[{}]),
        ["[[certify]] 1", "[[sweep]] 1", "sigma"],
    ),
    "no sigma, written otherwise": (
        grid_text({**PGD, "noise": "0.00"}, certify=[{}]),
        ["[[certify]] 1", "sigma"],
    ),
    "one log for two": (grid_text(PGD, certify=[{}, {"N": 500}]), ["sigma_0.25.tsv", "'name'"]),
    "one log for two elsewhere": (
        grid_text(PGD, certify=[{}, {"N": 5}], logs="/l"),
        ["sigma_0.25.tsv", "'name'"],
    ),
    "one log for two attacks": (
        grid_text(PGD, attack=[{"epsilon": [1, 2]}, {"epsilon": 2}]),
        ["epsilon_2.tsv"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_grid_is_refused_saying_why(capsys, what):
    text, words = REFUSED[what]
    message = refused(capsys, text)
    assert [word for word in words if word not in message] == [], message
