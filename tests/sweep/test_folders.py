"""The names of folders say what made the models in them, as the released names do, also without a
manifest.
"""

from pathlib import Path

import pytest

from smoothadv.analysis.facts import facts_of
from smoothadv.sweep.grid import format_value
from support.sweeping import CERTIFY, jobs_of, write_grid

pytestmark = pytest.mark.usefixtures("workplace")
CIFAR = {"dataset": "cifar10", "arch": "cifar_resnet110"}
PGD = {"attack": "PGD", "num-steps": 2, "epsilon": 0.25, "noise": 0.25}
SELF = {**PGD, "use-unlabelled": "a.npz"}
HERE, FINETUNE = "cifar10/cifar_resnet110/noise_0.25", "finetune_cifar_from_imagenet32"


def folders(*sweeps: dict, fixed: dict = CIFAR) -> list[str]:
    """The folders of a grid's jobs."""
    return [job.name for job in jobs_of(write_grid(Path("grid.toml"), *sweeps, fixed=fixed))]


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
def test_folder(options, folder):
    assert folders(options) == [folder]


@pytest.mark.parametrize("value", [0, "0.0", -0.0, "-0.00", "-0/3"])
def test_zero_has_one_name(value):
    assert format_value(value) == "0"


@pytest.mark.parametrize("value", ["1e400", "1e999999999", "inf", "nan", f"{10**400}/3", "1/0"])
def test_value_that_is_no_finite_number_stands_as_it_is(value):
    assert format_value(value) == value.replace("/", "_")


def test_logs_lie_below_the_folder_under_split_and_sigma():
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


def test_released_epsilons_are_read_in_their_unit():
    """The released code counts in 1/256: 64 is a quarter."""
    sweep = {**PGD, "epsilon": [64, 127, 256], "released-behaviour": True}
    jobs = jobs_of(write_grid(Path("grid.toml"), sweep, fixed=CIFAR, certify=[CERTIFY]))
    read = [facts_of("certification", sum_of_logs(job)[0], {}).get("epsilon") for job in jobs]
    planned = [job.training.expected.recipe["objective"]["attack"]["epsilon"] for job in jobs]
    assert planned == [0.25, 127 / 256, 1] and read == pytest.approx(planned, rel=5e-4)
