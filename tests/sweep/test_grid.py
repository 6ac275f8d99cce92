"""Grids read from files: which models they describe, in which order and folders, and which files
are refused.

Each grid of this project can be planned here without its data, and its folders say what it makes.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from smoothadv.analysis.facts import facts_of
from smoothadv.sweep.grid import Grid, Model, format_value, read_grid
from smoothadv.sweep.jobs import BLOCKED, WAITING, SweepJob, state_of
from smoothadv.sweep.planning import CommandReader, plan_jobs
from support.commands import CODE
from support.refusals import refusal
from support.sweeping import CERTIFY, CPU, grid_text, jobs_of, write_grid

BOTH = {"dataset": "digits", "arch": "digits_resnet8"}


def read(folder: Path, *sweeps: dict, **further) -> Grid:
    return read_grid(write_grid(folder / "mine.toml", *sweeps, **further))


def test_several_sweeps_add_up_in_their_order(tmp_path):
    grid = read(
        tmp_path,
        {"noise": [1, 2], "group": "first"},
        {"noise": 3},
        {"lr": [4, 6], "noise": [5, 7]},
        fixed={**BOTH, "lr": 8, "noise": [9]},
    )
    found = [(model.options["noise"], model.options["lr"]) for model in grid.trained]
    assert found == [(1, 8), (2, 8), (3, 8), (5, 4), (7, 4), (5, 6), (7, 6)]
    assert [model.group for model in grid.trained] == ["first", "first", *["mine"] * 5]
    assert "group" not in grid.trained[0].options and grid.trained[0].swept == ("noise",)


@pytest.mark.parametrize(
    ("text", "noise", "epsilon", "expected"),
    [
        ("models/noise_{noise}/a", 0.5, 1, "models/noise_0.50/a"),
        ("{dataset}/{arch}/{noise}", 1, 1, "digits/digits_resnet8/1.00"),
        ("eps_{epsilon}", 0.5, "127/255", "eps_0.498"),
        ("eps_{epsilon}/{noise}", 0.12, "255/255", "eps_1.00/0.12"),
        ("no place", 0.5, 1, "no place"),
    ],
)
def test_values_stand_in_texts_as_folders_have_them(tmp_path, text, noise, epsilon, expected):
    sweep = {"pretrained-model": text, "noise": [noise], "epsilon": epsilon}
    assert read(tmp_path, sweep, fixed=BOTH).trained[0].options["pretrained-model"] == expected


def test_names_and_places_have_defaults(tmp_path):
    grid = read(tmp_path, {"noise": 1}, fixed=BOTH)
    assert (grid.name, grid.about, grid.models, grid.logs) == (
        "mine",
        "mine",
        Path("models/mine"),
        Path("logs/mine"),
    )
    assert (grid.processes, grid.threads) == (1, None)
    top = {"about": "Mine", "models": "a/b", "logs": "c", "processes": 2, "threads": 3}
    grid = read(tmp_path, {"noise": 1}, fixed=BOTH, **top)
    assert [getattr(grid, key) for key in top] == ["Mine", Path("a/b"), Path("c"), 2, 3]


NOISE = {"noise": 0.25}
BAD = {
    "unknown key": (grid_text(NOISE, nose=1), ["'nose'", "known: "]),
    "models is no text": (grid_text(NOISE, models=5), ["'models'", "text", "5"]),
    "threads is a fraction": (grid_text(NOISE, threads=1.5), ["'threads'", "1.5"]),
    "fixed is no table": ("fixed = 1\n[[sweep]]\nnoise = 1", ["'fixed'", "table"]),
    "sweep is one table": ("[sweep]\nnoise = 1", ["'sweep'", "list of tables"]),
    "certify is one table": (
        grid_text(NOISE) + "\n[certify]\nN = 1",
        ["'certify'", "list of tables"],
    ),
    "no sweep": (grid_text(), ["[[sweep]]"]),
    "nothing": ("", ["[[sweep]]"]),
    "no dataset": (
        grid_text(NOISE, fixed={"arch": "digits_resnet8"}),
        ["[[sweep]] 1", "'dataset'"],
    ),
    "no arch": (
        grid_text({**NOISE, "arch": "a"}, NOISE, fixed={"dataset": "digits"}),
        ["[[sweep]] 2", "'arch'"],
    ),
    "empty list": (grid_text(NOISE, {"noise": []}), ["[[sweep]] 2", "'noise'", "[]"]),
    "empty list of sizes": (grid_text(NOISE, attack=[{"epsilon": []}]), ["[[attack]] 1", "[]"]),
    "a date": ("[[sweep]]\nnoise = 2020-01-01", ["[[sweep]] 1", "'noise'"]),
    "a table": ("[[sweep]]\nnoise = {a = 1}", ["[[sweep]] 1", "'noise'"]),
    "a list in a list": ("[[sweep]]\nnoise = [[1, 2], [3]]", ["[[sweep]] 1", "'noise'"]),
    "group is no text": (grid_text({**NOISE, "group": 3}), ["[[sweep]] 1", "'group'", "found 3"]),
    "group without a name": (grid_text({**NOISE, "group": ""}), ["[[sweep]] 1", "'group'", "''"]),
    "group with =": (grid_text({**NOISE, "group": "a=b"}), ["[[sweep]] 1", "'group'", "a=b"]),
    "no such group": (grid_text(NOISE, certify=[{"group": "B"}]), ["[[certify]] 1", "'B'"]),
    "ensemble of no such group": (
        grid_text(NOISE, ensemble=[{"of": "B"}]),
        ["[[ensemble]] 1", "'B'"],
    ),
    "ensemble of no group": (
        grid_text(NOISE, ensemble=[{}]),
        ["[[ensemble]] 1", "None", "there are mine"],
    ),
    "ensemble of itself": (
        grid_text(NOISE, ensemble=[{"of": "mine", "group": "mine"}]),
        ["[[ensemble]] 1", "'mine'"],
    ),
    "ensemble over noise": (
        grid_text(NOISE, ensemble=[{"of": "mine", "over": ["seed", "noise"]}]),
        ["noise", "folder"],
    ),
    "unknown mean": (
        grid_text(NOISE, ensemble=[{"of": "mine", "mean": "votes"}]),
        ["'mean'", "'votes'", "logits"],
    ),
    "unknown word": (
        grid_text(NOISE, ensemble=[{"of": "mine", "size": 3}]),
        ["[[ensemble]] 1", "'size'", "over"],
    ),
    "best of what": (
        grid_text(NOISE, certify=[{"best": "a"}]),
        ["[[certify]] 1", "'best'", "'a'", "(none)"],
    ),
    "best of which": (
        grid_text(NOISE, certify=[{}, {"name": "a"}, {"best": True}]),
        ["[[certify]] 3", "('', 'a')"],
    ),
    "best of the best": (
        grid_text(NOISE, certify=[{"name": "a"}, {"name": "b", "best": "a"}, {"best": "b"}]),
        ["[[certify]] 3", "'b'", "('a')"],
    ),
    "best of others": (
        grid_text(
            {**NOISE, "group": "A"},
            {**NOISE, "group": "B"},
            certify=[{"group": "A"}, {"best": True, "group": "B"}],
        ),
        ["[[certify]] 2", "'B'"],
    ),
    "unknown place": (grid_text({**NOISE, "recipe": "{nose}"}), ["[[sweep]] 1", "{nose}", "noise"]),
    "no processes": ("processes = 0\n" + grid_text(NOISE), ["'processes'", "from 1", "0"]),
    "true threads": ("threads = true\n" + grid_text(NOISE), ["'threads'", "from 1", "True"]),
    "no TOML": ("[[sweep]\n", ["no TOML", "line 1"]),
    "no text": ("\udcff\udcfe\0", ["no TOML"]),
    "key twice": ("[[sweep]]\nnoise = 1\nnoise = 2", ["no TOML"]),
}
for _key in ("outdir", "resume", "overwrite", "data-dir", "device", "debug", "help"):
    BAD[f"sweep says {_key}"] = (
        grid_text(NOISE, {**NOISE, _key: "x"}),
        ["[[sweep]] 2", f"'{_key}'"],
    )
    BAD[f"fixed says {_key}"] = (
        grid_text(NOISE, fixed={**BOTH, _key: "x"}),
        ["[fixed]", f"'{_key}'"],
    )
for _key in (
    "outfile",
    "checkpoint",
    "resume",
    "overwrite",
    "shard",
    "device",
    "dataset",
    "against",
    "only",
    "png",
):
    BAD[f"certify says {_key}"] = (
        grid_text(NOISE, certify=[{}, {_key: "x"}]),
        ["[[certify]] 2", f"'{_key}'"],
    )
    BAD[f"attack says {_key}"] = (
        grid_text(NOISE, attack=[{_key: "x"}]),
        ["[[attack]] 1", f"'{_key}'"],
    )


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_grid_is_refused_in_one_line_naming_file_and_key(tmp_path, what):
    text, words = BAD[what]
    path = tmp_path / "mine.toml"
    path.write_text(text, errors="surrogateescape")
    message = refusal(read_grid, path, names=path)
    assert [word for word in words if word not in message] == [], message


def test_grid_of_this_project_is_found_by_its_name_unless_a_file_has_it(workplace):
    assert read_grid(Path("digits-smoke")) == read_grid(GRIDS["digits-smoke"])
    write_grid(workplace / "digits-smoke", {"noise": 0.5})
    assert read_grid(Path("digits-smoke")).path == Path("digits-smoke")
    words = "grid digits-smok does not exist (did you mean 'digits-smoke'?); "
    message = refusal(read_grid, Path("digits-smok"), names=words)
    assert "finetune" in message


FOLDER = CODE.parent / "scripts/grids"
GRIDS = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Iterator[None]:
    """The working folder has nothing in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="module")
def jobs(empty) -> dict[str, list[SweepJob]]:
    """The jobs of each grid, without their evaluations."""
    alone = {name: replace(read_grid(path), evaluations=[]) for name, path in GRIDS.items()}
    reader = CommandReader()
    return {name: plan_jobs(grid, reader, CPU) for name, grid in alone.items()}


def values(models: list[Model]) -> set[str]:
    return {str(option) for model in models for option in model.options.items()}


@pytest.fixture(scope="module")
def evaluated(empty) -> dict[str, list[SweepJob]]:
    """Jobs with their evaluations: of a large grid every 11th, in which all values of all options
    occur.
    """
    reader, found = CommandReader(), {}
    for name, path in GRIDS.items():
        grid = read_grid(path)
        some = grid.trained[:: 11 if len(grid.trained) > 50 else 1]
        assert values(some) == values(grid.trained)
        found[name] = plan_jobs(replace(grid, trained=some), reader, CPU)
    return found


def test_no_two_models_are_identical_or_in_one_place(jobs):
    """So all of the grids can be run in one folder."""
    folders = [job.training.folder for name in GRIDS for job in jobs[name]]
    assert len(set(folders)) == len(folders) > 1000
    for name in GRIDS:
        made = {str(job.training.expected) for job in jobs[name]}
        assert len(made) == len(read_grid(GRIDS[name]).trained)


close = partial(pytest.approx, rel=5e-4)


@pytest.mark.parametrize("name", GRIDS)
def test_logs_tell_what_made_their_models(evaluated, name):
    for job in evaluated[name]:
        recipe = job.training.expected.recipe
        objective, attack = recipe["objective"], recipe["objective"].get("attack") or {}
        expected = {key: recipe[key] for key in ("dataset", "arch")}
        expected |= {"objective": objective["name"], "noise": close(objective["noise_sd"])}
        expected |= {"attack": attack.get("name"), "num_steps": attack.get("num_steps")}
        if attack:
            expected["num_noise_vec"] = objective["num_noise_vec"]
            expected["epsilon"] = close(attack["epsilon"])
        for stage in [stage for stage in job.evaluations if stage.words[0] == "certify"]:
            found = facts_of("certification", stage.logs[0], {})
            expected["sigma"] = close(stage.settings[0]["sigma"])
            assert {key: found.get(key) for key in expected} == expected
            assert isinstance(found.get("training"), str)


@pytest.mark.parametrize("name", GRIDS)
def test_nothing_is_there_yet_and_others_make_what_is_needed(jobs, name):
    """Every model that a training starts from is made by another grid."""
    checkpoints = {job.training.checkpoint for name in GRIDS for job in jobs[name]}
    for job in jobs[name]:
        needs = job.training.needs
        assert state_of(job).kind is (BLOCKED if needs else WAITING)
        models = {path for path in needs if path.suffix == ".tar"}
        assert models <= checkpoints, f"{models - checkpoints} is made by no grid"


# From the commands and the names of logs that were released, by sigma: m, lambda, and others.
RELEASED = {
    "objectives-cifar10": {
        "SmoothAdv": {
            0.25: {"num_noise_vec": 4, "attack": (1.0, 10), "warmup_from_first_epoch": True},
            0.5: {"num_noise_vec": 8, "attack": (1.0, 10)},
            1.0: {"num_noise_vec": 2, "attack": (2.0, 10)},
        },
        "Stability": {s: {"regularization": w} for s, w in ((0.25, 2), (0.5, 2), (1.0, 1))},
        "Macer": {
            0.25: {"num_noise_vec": 16, "regularization": 12, "lambda_from_epoch": 0},
            0.5: {"sharpness": 16, "regularization": 6, "lambda_from_epoch": 0},
            1.0: {"gamma": 8, "regularization": 12, "lambda_from_epoch": 50},
        },
        "SmoothMix": {
            0.25: {"mix_step_size": 0.5, "mix_steps": 4, "one_step_adversary": False},
            0.5: {"mix_step_size": 1.0, "eta": 5, "one_step_adversary": True},
            1.0: {"mix_step_size": 2.0, "num_noise_vec": 2, "one_step_adversary": True},
        },
        "CatRS": {
            0.25: {"regularization": 0.5, "confidence": "model", "teacher_noise": 0.25},
            0.5: {"regularization": 1, "num_noise_vec": 4, "teacher_noise": 0.25},
            1.0: {"regularization": 2, "noise_steps": 4, "teacher_noise": 0.25},
        },
        "AcrWeakness": {
            0.25: {"noise_step_size": 0.25, "noise_steps": 3, "data_policy": (60, 0.5, 10)},
            0.5: {"noise_step_size": 0.25, "noise_steps": 6, "data_policy": (70, 0.4, 10)},
            1.0: {"noise_step_size": 0.5, "noise_steps": 4, "data_policy": (60, 0.4, 10)},
        },
    },
    "objectives-imagenet": {
        "Consistency": {
            0.5: {"num_noise_vec": 2, "regularization": 5, "eta": 0.5, "batch": 100},
            1.0: {"learning_rate_step": 30, "regularization": 5, "eta": 0.1, "batch": 100},
        },
        "CatRS": {
            1.0: {
                **{"num_noise_vec": 2, "noise_steps": 1, "noise_epsilon": 1.0, "batch": 128},
                **{"double_from_epoch": 80, "regularization": 2, "confidence": "teacher"},
                **{"learning_rate_step": 30, "weight_decay": 1e-4, "teacher_noise": 0.25},
            }
        },
        "AcrWeakness": {
            0.25: {"noise_step_size": 0.5, "noise_steps": 2, "data_policy": (0, 0.2, 0)},
            0.5: {"noise_step_size": 1.0, "num_noise_vec": 1, "data_policy": (0, 0.2, 0)},
            1.0: {"noise_step_size": 2.0, "num_noise_vec": 2, "data_policy": (0, 0.1, 0)},
        },
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_grids_of_objectives_have_the_released_settings(jobs, name):
    left = {(kind, sigma) for kind, rows in RELEASED[name].items() for sigma in rows}
    for job in jobs[name]:
        recipe = job.training.expected.recipe
        objective, policy = recipe["objective"], recipe.get("data_policy", {})
        attack, place = objective.get("attack") or {}, (objective["name"], objective["noise_sd"])
        found = {**recipe, **objective, "attack": (attack.get("epsilon"), attack.get("num_steps"))}
        keys = ("from_epoch", "drop_below", "resample_every")
        found["data_policy"] = tuple(policy.get(key) for key in keys)
        if place in left:
            expected = RELEASED[name][place[0]][place[1]]
            assert {key: found[key] for key in expected} == expected
            left.remove(place)
        assert job.training.expected.epochs == (150 if name == "objectives-cifar10" else 90)
    assert not left


PAPER = {
    "learning_rate": [0.1],
    "learning_rate_step": [50],
    "learning_rate_factor": [0.1],
    "batch": [256],
    "weight_decay": [1e-4],
}
PAPER_OBJECTIVE = {
    "warmup": [10],
    "noise_sd": [0.12, 0.25, 0.5, 1.0],
    "num_noise_vec": [1, 2, 4, 8],
}
PAPER_SIZES = [64 / 255, 127 / 255, 255 / 255, 512 / 255]


@pytest.mark.parametrize("name", [name for name in GRIDS if name.startswith("paper-cifar10")])
def test_grids_of_the_paper_have_its_values(jobs, evaluated, name):
    """Salman et al. (2019), appendix D: 150 epochs, and the values of sigma, epsilon, T and m."""
    for job in jobs[name]:
        recipe = job.training.expected.recipe
        objective, attack = recipe["objective"], recipe["objective"]["attack"]
        assert [key for key in PAPER if recipe[key] not in PAPER[key]] == []
        assert [key for key in PAPER_OBJECTIVE if objective[key] not in PAPER_OBJECTIVE[key]] == []
        assert any(math.isclose(attack["epsilon"], size, rel_tol=0.02) for size in PAPER_SIZES)
        assert attack["num_steps"] in (2, 4, 6, 8, 10)
    assert {job.training.expected.epochs for job in jobs[name]} == {150}
    assert {stage.selection["skip"] for job in evaluated[name] for stage in job.evaluations} == {20}


# The names of folders say what made the models in them, as the released names do.


CIFAR = {"dataset": "cifar10", "arch": "cifar_resnet110"}
PGD = {"attack": "PGD", "num-steps": 2, "epsilon": 0.25, "noise": 0.25}
SELF = {**PGD, "use-unlabelled": "a.npz"}
HERE, FINETUNE = "cifar10/cifar_resnet110/noise_0.25", "finetune_cifar_from_imagenet32"


# The released names; the paper's epsilon 127/255 is 0.498.
TABLE = [
    ({"noise": 0.25}, f"gaussian/{HERE}"),
    ({"noise": 0.5}, "gaussian/cifar10/cifar_resnet110/noise_0.50"),
    ({"noise": 1}, "gaussian/cifar10/cifar_resnet110/noise_1.00"),
    (
        {"noise": 0.12, "dataset": "digits", "arch": "digits_resnet8"},
        "gaussian/digits/digits_resnet8/noise_0.12",
    ),
    (PGD, f"PGD_2steps/eps_0.25/{HERE}"),
    ({**PGD, "num-steps": 1}, f"PGD_1step/eps_0.25/{HERE}"),
    ({**PGD, "attack": "DDN", "num-steps": 10}, f"DDN_10steps/eps_0.25/{HERE}"),
    ({**PGD, "epsilon": "127/255"}, f"PGD_2steps/eps_0.498/{HERE}"),
    ({**PGD, "epsilon": "255/255"}, f"PGD_2steps/eps_1.00/{HERE}"),
    ({**PGD, "epsilon": 2}, f"PGD_2steps/eps_2.00/{HERE}"),
    ({**PGD, "num-noise-vec": 8}, f"PGD_2steps_multiNoiseSamples/8-multitrain/eps_0.25/{HERE}"),
    ({**PGD, "num-noise-vec": 1}, f"PGD_2steps/eps_0.25/{HERE}"),
    ({**PGD, "base-attack": True}, f"PGD_2steps_baseAttackExp/without_noise/eps_0.25/{HERE}"),
    ({**PGD, "base-attack": False}, f"PGD_2steps/eps_0.25/{HERE}"),
    (
        {**PGD, "noise": 0},
        "PGD_2steps_baseAttackExp/without_noise/eps_0.25/cifar10/cifar_resnet110/noise_0.00",
    ),
    ({**PGD, "pretrained-model": "a.pth.tar"}, f"{FINETUNE}/PGD_2steps/eps_0.25/{HERE}"),
    (SELF, f"self_training/PGD_2steps/weight_1.0/eps_0.25/{HERE}"),
    ({**SELF, "unlabelled-weight": 0.5}, f"self_training/PGD_2steps/weight_0.5/eps_0.25/{HERE}"),
    (
        {**SELF, "pretrained-model": "b"},
        f"{FINETUNE}/self_training/PGD_2steps/weight_1.0/eps_0.25/{HERE}",
    ),
    ({**PGD, "seed": 3, "epochs": 7}, f"PGD_2steps/eps_0.25/{HERE}"),
    ({**PGD, "seed": [3]}, f"PGD_2steps/eps_0.25/seed_3/{HERE}"),
    ({**PGD, "lr": [0.1], "warmup": [5]}, f"PGD_2steps/eps_0.25/lr_0.1/warmup_5/{HERE}"),
    ({"noise": 0.25, "objective": ["gaussian"]}, f"gaussian/{HERE}"),
    ({**PGD, "objective": ["smoothadv"]}, f"PGD_2steps/eps_0.25/{HERE}"),
    (
        {"noise": 0.25, "objective": ["macer"], "lambda": [3]},
        f"macer/16-multitrain/lambda_3/{HERE}",
    ),
    ({**PGD, "objective": "macer", "num-noise-vec": 1}, f"macer/PGD_2steps/eps_0.25/{HERE}"),
    ({**PGD, "noise": [0.25], "epsilon": [0.25]}, f"PGD_2steps/eps_0.25/{HERE}"),
]


@pytest.mark.parametrize(
    ("options", "folder"), TABLE, ids=[str(number) for number in range(len(TABLE))]
)
def test_folder(options, folder, workplace):
    (job,) = jobs_of(write_grid(Path("grid.toml"), options, fixed=CIFAR))
    assert job.name == folder


NUMBERS = {
    **dict.fromkeys((0, "0.0", -0.0, "-0.00", "-0/3"), "0"),
    **{text: text for text in ("1e400", "1e999999999", "inf", "nan")},
    **{f"{10**400}/3": f"{10**400}_3", "1/0": "1_0"},
}


@pytest.mark.parametrize("value", NUMBERS)
def test_zero_has_one_name_and_what_is_no_finite_number_stands_as_it_is(value):
    assert format_value(value) == NUMBERS[value]


def test_logs_lie_below_the_folder_under_split_and_sigma(workplace):
    certify = [{}, {"name": "fast"}, {"split": "train"}, {"sigma": [0.5, 1]}]
    (job,) = jobs_of(
        write_grid(
            Path("grid.toml"), PGD, fixed=CIFAR, certify=certify, attack=[{"epsilon": [0.25, 1]}]
        )
    )
    logs = [
        log.relative_to(Path.cwd() / "logs/grid" / job.name).as_posix() for log in sum_of_logs(job)
    ]
    assert logs == [
        "test/sigma_0.25.tsv",
        "test/sigma_0.25_fast.tsv",
        "train/sigma_0.25.tsv",
        "test/sigma_0.50.tsv",
        "test/sigma_1.00.tsv",
        "attacked/test/sigma_0.25/epsilon_0.25.tsv",
        "attacked/test/sigma_0.25/epsilon_1.tsv",
    ]


def sum_of_logs(job) -> list[Path]:
    return [log for stage in job.evaluations for log in stage.logs]


def test_released_epsilons_are_read_in_their_unit(workplace):
    """The released code counts in 1/256: 64 is a quarter."""
    sweep = {**PGD, "epsilon": [64, 127, 256], "released-behaviour": True}
    jobs = jobs_of(write_grid(Path("grid.toml"), sweep, fixed=CIFAR, certify=[CERTIFY]))
    read = [facts_of("certification", sum_of_logs(job)[0], {}).get("epsilon") for job in jobs]
    planned = [job.training.expected.recipe["objective"]["attack"]["epsilon"] for job in jobs]
    assert planned == [0.25, 127 / 256, 1] and read == pytest.approx(planned, rel=5e-4)
