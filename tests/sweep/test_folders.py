"""The names of folders say what made the models in them, as the released names do, also without a
manifest.
"""

import tempfile
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoothadv.analysis.facts import facts_of
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


def number(value: object) -> float:
    return float(Fraction(str(value)))


NOISES = st.sampled_from([0, 0.12, 0.25, 0.5, 1, 1.0, 0.125]) | st.integers(1, 2000).map(
    lambda n: n / 1000
)
SIZES = st.integers(1, 1023).map(lambda n: f"{n}/255") | st.integers(1, 4000).map(
    lambda n: n / 1000
)


@st.composite
def trainings(draw) -> dict:
    """Options of a training like those of the paper."""
    archs = {
        "cifar10": ["cifar_resnet110", "cifar_resnet20"],
        "imagenet": ["resnet50"],
        "digits": ["digits_resnet8"],
    }
    dataset = draw(st.sampled_from(sorted(archs)))
    made = {
        "dataset": dataset,
        "arch": draw(st.sampled_from(archs[dataset])),
        "noise": draw(NOISES),
    }
    if draw(st.booleans()) or not made["noise"]:
        # The released names have vanilla trainings with PGD only.
        is_vanilla = not made["noise"] or draw(st.booleans())
        made["attack"] = "PGD" if is_vanilla else draw(st.sampled_from(["PGD", "DDN"]))
        made |= {"epsilon": draw(SIZES), "num-steps": draw(st.integers(1, 20))}
        if made["noise"]:
            made |= {
                "base-attack": is_vanilla,
                "num-noise-vec": draw(st.sampled_from([1, 2, 4, 8, 16])),
            }
    if draw(st.booleans()):
        made["pretrained-model"] = "imagenet32.pth.tar"
    if draw(st.booleans()):
        made |= {
            "use-unlabelled": "pseudo.pickle",
            "unlabelled-weight": draw(st.sampled_from([0.1, 0.5, 1])),
        }
    if draw(st.booleans()):
        made["seed"] = [draw(st.integers(0, 10**6))]
    return made


def training_name(options: dict) -> str:
    """The name of a training in reports, computed from its options."""
    name = "Gaussian"
    if "attack" in options:
        name = f"SmoothAdv-{options['attack']}"
        if not options["noise"]:
            name = "vanilla PGD"
        elif options["base-attack"]:
            name = "vanilla PGD + noise"
    name += " + pre-training" if "pretrained-model" in options else ""
    return name + (" + self-training" if "use-unlabelled" in options else "")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=trainings(),
    sigma=st.sampled_from([0.12, 0.25, 0.5, 1]),
    name=st.sampled_from(["", "adaptive", "2"]),
)
def test_reader_without_manifest_learns_what_made_a_log(options, sigma, name):
    certify = {**CERTIFY, "sigma": sigma, **({"name": name} if name else {})}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        (job,) = jobs_of(
            write_grid(Path(folder) / "grid.toml", options, fixed={}, certify=[certify])
        )
    (log,) = sum_of_logs(job)
    found = facts_of("certification", log, {})
    assert not found.manifest
    expected = {
        "dataset": options["dataset"],
        "arch": options["arch"],
        "split": "test",
        "sigma": sigma,
    }
    expected["training"] = training_name(options)
    assert {key: found.get(key) for key in expected} == expected
    assert found.get("noise") == pytest.approx(options["noise"], rel=5e-4)
    if "attack" in options:
        assert found.get("attack") == options["attack"]
        assert found.get("epsilon") == pytest.approx(number(options["epsilon"]), rel=5e-4, abs=5e-5)
        assert found.get("num_steps") == options["num-steps"]
        assert found.get("num_noise_vec") == options.get("num-noise-vec", 1)
    else:
        assert [found.get(key) for key in ("attack", "epsilon", "num_steps")] == [None] * 3


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noises=st.lists(st.integers(0, 10**4), min_size=1, max_size=3, unique=True),
    sizes=st.lists(st.integers(1, 9999), min_size=1, max_size=3, unique=True),
    rates=st.lists(
        st.sampled_from([1, 0.1, 0.05, 1e-3, 5e-4, 1e-4, 5e-5, 1e-6]),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=2, unique=True),
)
def test_options_that_differ_have_folders_that_differ(noises, sizes, rates, seeds):
    axes = {
        "noise": [value / 10**3 for value in noises],
        "epsilon": [value / 10**3 for value in sizes],
        "weight-decay": rates,
        "seed": seeds,
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = write_grid(
            Path(folder) / "grid.toml", axes, fixed={**CIFAR, "attack": "PGD", "num-steps": 1}
        )
        names = [job.name for job in jobs_of(path)]
    assert len(set(names)) == len(noises) * len(sizes) * len(rates) * len(seeds)


def test_files_to_start_from_can_be_swept():
    paths = ["models/a/checkpoint.pth.tar", "models/b/checkpoint.pth.tar"]
    assert len(set(folders({**PGD, "pretrained-model": paths}))) == 2
    assert len(set(folders({**PGD, "use-unlabelled": ["a.npz", "b.npz"]}))) == 2


def test_released_epsilons_are_read_in_their_unit():
    """The released code counts in 1/256: 64 is a quarter."""
    sweep = {**PGD, "epsilon": [64, 127, 256], "released-behaviour": True}
    jobs = jobs_of(write_grid(Path("grid.toml"), sweep, fixed=CIFAR, certify=[CERTIFY]))
    read = [facts_of("certification", sum_of_logs(job)[0], {}).get("epsilon") for job in jobs]
    planned = [job.training.expected.recipe["objective"]["attack"]["epsilon"] for job in jobs]
    assert planned == [0.25, 127 / 256, 1] and read == pytest.approx(planned, rel=5e-4)


def test_folder_never_contradicts_a_recipe(workplace, capsys):
    """Either the folder states the recipe's values, or a grid refuses the recipe."""
    (workplace / "mine.txt").write_text(
        "--objective smoothadv --attack PGD --epsilon 0.5 --num-steps 4\n"
    )
    path = write_grid(
        Path("grid.toml"), {"noise": 0.25, "recipe": "mine.txt"}, fixed=CIFAR, certify=[CERTIFY]
    )
    try:
        (job,) = jobs_of(path)
    except BaseException as refused:
        assert "mine.txt" in f"{refused}{capsys.readouterr().err}"
    else:
        found = facts_of("certification", sum_of_logs(job)[0], {})
        assert [found.get(key) for key in ("attack", "epsilon", "num_steps")] == ["PGD", 0.5, 4]
