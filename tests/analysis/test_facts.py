"""Hyper-parameters come from what was stated, else from the manifest, else from the path, and say
from where; what released names stand for, and how values are shown to people."""

import json
from pathlib import Path
from typing import Any

import pytest

from smoothadv.analysis.facts import Facts, display, facts_of
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import settings_record
from smoothadv.objectives.consistency import Consistency
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.macer import Macer
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.records.logs import manifest_path
from support.analyzed_folder import log
from support.refusals import refusal

PUBLISHED = {"N": 100_000, "alpha": 0.001}
CIFAR = "cifar10/resnet110/noise_0.25/test/sigma_0.25"
OF_CIFAR = {
    "dataset": "cifar10",
    "arch": "resnet110",
    "noise": 0.25,
    "sigma": 0.25,
    "split": "test",
    **PUBLISHED,
}
OF_CIFAR |= {"training": "Gaussian", "objective": "Gaussian"}


def of_attack(attack: str, num_steps: int, num_noise_vec: int, epsilon: float, **more) -> dict:
    """What the path tells of a CIFAR-10 log, adversarially trained: by SmoothAdv, unless ``more``
    says otherwise.
    """
    numbers = {"num_steps": num_steps, "num_noise_vec": num_noise_vec, "epsilon": epsilon}
    names = {"training": f"SmoothAdv-{attack}", "objective": "SmoothAdv", "attack": attack}
    return {**OF_CIFAR, **names, **numbers, **more}


IMAGENET = {"dataset": "imagenet", "arch": "resnet50"}
BASE_ATTACK = "data/certify/cifar10/PGD_2steps_baseAttackExp"
ONE_STEP = "data/certify/imagenet/PGD_1step/imagenet/eps_1024/resnet50"
SIX_STEPS = "cifar10/finetune_cifar_from_imagenetPGD2steps/PGD_6steps_30epochs_multinoise"
SELF_TRAINED, FINETUNED = "SmoothAdv-PGD + self-training", "SmoothAdv-PGD + pre-training"
CERTIFICATION_PATHS = {
    f"data_cohen/certify/{CIFAR}": OF_CIFAR,
    "data_cohen/certify/imagenet/resnet50/noise_0.50/train/sigma_0.50": dict(
        OF_CIFAR, **IMAGENET, noise=0.5, sigma=0.5, split="train"
    ),
    f"data/certify/cifar10/PGD_2steps_multiNoiseSamples/8-multitrain/eps_127/{CIFAR}": of_attack(
        "PGD", 2, 8, 127 / 256
    ),
    f"data/certify/cifar10/DDN_10steps/eps_64/{CIFAR}": of_attack("DDN", 10, 1, 0.25),
    f"{ONE_STEP}/noise_1.00/test/sigma_1.00": of_attack(
        "PGD", 1, 1, 4.0, **IMAGENET, noise=1.0, sigma=1.0
    ),
    f"data/certify/cifar10/self_training/PGD_4steps/weight_0.5/eps_255/{CIFAR}": of_attack(
        "PGD", 4, 1, 255 / 256, training=SELF_TRAINED
    ),
    f"{SIX_STEPS}/4-multitrain/eps_255/{CIFAR}": of_attack(
        "PGD", 6, 4, 255 / 256, training=FINETUNED
    ),
    f"{BASE_ATTACK}/without_noise/eps_64/{CIFAR}": of_attack(
        "PGD", 2, 1, 0.25, training="vanilla PGD + noise"
    ),
    f"{BASE_ATTACK}/with_noise/eps_64/{CIFAR}": of_attack("PGD", 2, 1, 0.25),
    "sigma_0.12": {"sigma": 0.12, **PUBLISHED},
    "mine/cifar_resnet20/noise_0.5_seed_3/sigma_0.25.tsv": dict(
        PUBLISHED,
        arch="cifar_resnet20",
        noise=0.5,
        sigma=0.25,
    ),
    "mnist/cohen/noise_0.25/lenet/sigma_0.25": dict(
        PUBLISHED,
        dataset="mnist",
        arch="lenet",
        noise=0.25,
        sigma=0.25,
        training="Gaussian",
        objective="Gaussian",
    ),
    "cifar10_sigma_0.5_alpha_0.01": {"sigma": 0.5, "N": 100_000, "alpha": 0.01},
    "results/log.tsv": PUBLISHED,
    # The innermost folder wins.
    "noise_1.00/eps_512/PGD_10steps/noise_0.25/eps_64/DDN_2steps/sigma_0.5/sigma_0.25": dict(
        PUBLISHED,
        **{
            "training": "SmoothAdv-DDN",
            "objective": "SmoothAdv",
            "attack": "DDN",
            "num_noise_vec": 1,
        },
        **{"noise": 0.25, "epsilon": 0.25, "num_steps": 2, "sigma": 0.25},
    ),
}
# Folders of released logs: the objective, and the attack of the training.
OBJECTIVES = {
    "cifar10/noise_0.25/salman/noise_0.25.tsv": ("SmoothAdv", None),
    "clone/data/certify/cifar10/smoothadv/noise_0.5.tsv": ("SmoothAdv", None),
    "mnist/salman/pgd_255.0_10_10/num_8/noise_0.25_919": ("SmoothAdv", "PGD"),
    "fmnist/noise_0.25/stab/noise_0.25.tsv": ("Stability", None),
    "cifar10/catrs/noise_0.25.tsv": ("CatRS", None),
    "cifar10c/cat_rs/fog.tsv": ("CatRS", None),
    "cifar10c/cohen/gaussian_noise.tsv": ("Gaussian", None),
    "consistency/cohen/num_2/lbd_10.0/noise_0.25": ("Consistency", None),
    "consistency/salman_255.0_10_10/num_4/noise_0.25": ("Consistency", None),
    "mnist/macer_deferred30/num_16/noise_0.25_508": ("Macer", None),
    "certify/ablation/eta/smix_1.0_8_m0/tau_2.0/num_4/11/noise_1.0": ("SmoothMix", None),
    "acr-weakness/data/certify/cifar10/ours/noise_0.5.tsv": ("AcrWeakness", None),
    "smoothmix/data/certify/cifar10/mine/noise_0.5": (None, None),
    "cifar10/ours/noise_0.5.tsv": (None, None),
    "cifar10/mine/resnet110/noise_0.25/test/sigma_0.25": (None, None),
    f"own/ours/{CIFAR}": (None, None),
    f"own/trades/{CIFAR}": (None, None),
    f"data/certify/cifar10/replication/{CIFAR}": ("Gaussian", None),
    CIFAR: ("Gaussian", None),
    f"/home/cohen/trades/{CIFAR}": (None, None),
    "/home/cohen/logs/mine.tsv": (None, None),
    "/home/salman/results/x": (None, None),
    "/mnt/home/salman/logs/macer/x": ("Macer", None),
}


@pytest.mark.parametrize("path", OBJECTIVES)
def test_an_objective_is_known_by_its_folder_or_not_at_all(path):
    facts = facts_of("certification", Path(path), {})
    objective, attack = OBJECTIVES[path]
    assert facts.get("objective") == objective and attack in (None, facts.get("attack"))


@pytest.mark.parametrize(
    ("path", "dataset"),
    [
        ("cifar10c/cat_rs/fog.tsv", "cifar10-c:fog"),
        ("data/cifar10c/severity_3/stab/snow.tsv", "cifar10-c:severity_3/snow"),
        ("CIFAR-10-C/fog/mine.tsv", "cifar10-c:fog"),
        ("mnistc/cat-rs/odd.tsv", "mnist-c:odd"),
    ],
)
def test_corrupted_images_are_called_by_their_corruption(path, dataset):
    facts = facts_of("certification", Path(path), {})
    assert facts.get("dataset") == dataset and facts.dimension in (3072, 784)


COHEN, UNDER_PGD = (
    "data/predict/predict_cifar_cohen",
    {"dataset": "cifar10", "N": 10_000, "attack": "PGD"},
)
PREDICTION_PATHS = {
    f"{COHEN}/N10000/PGD_0.250/num_128/predictions": {
        **UNDER_PGD,
        "epsilon": 0.25,
        "num_noise_vec": 128,
    },
    "data/predict/predict_cifar_ours/N100/PGD_1.125/base/predictions": dict(
        UNDER_PGD, N=100, epsilon=1.125, gradient="base classifier"
    ),
    f"{COHEN}/N10000_nogradtrick/PGD_0.000/num_1/predictions": dict(
        UNDER_PGD, epsilon=0.0, num_noise_vec=1, gradient="gradient-free"
    ),
    "data_cohen/predict/imagenet/resnet50/noise_0.25/test/N_1000": dict(
        IMAGENET, sigma=0.25, N=1000, split="test"
    ),
    "outdir/PGD_64.0_noise_0.12_mtest_32/predictions": dict(
        attack="PGD", epsilon=0.25, num_noise_vec=32, sigma=0.12
    ),
    "outdir/PGD_25.5_noise_0.12_mtest_8/predictions": dict(
        attack="PGD", epsilon=25.5 / 256, num_noise_vec=8, sigma=0.12
    ),
    "outdir/PGD_64.00_base/predictions": dict(
        attack="PGD", epsilon=0.25, gradient="base classifier"
    ),
    "outdir/noise_0.12/predictions": {"sigma": 0.12},
    "predictions": {},
}


OF_KINDS = {"certification": CERTIFICATION_PATHS, "prediction": PREDICTION_PATHS}


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind, paths in OF_KINDS.items() for path in paths]
)
def test_path_of_a_log_is_understood(kind, path):
    """What that of predictions does not say is unknown: the published n and alpha are those of
    certification.
    """
    parameters, values = facts_of(kind, Path(path), {}), OF_KINDS[kind][path]
    assert parameters.values == values
    assert parameters.sources.keys() == values.keys() and parameters.manifest is None


@pytest.mark.parametrize(
    "name, absent",
    [
        ("sigma_1e-3", "sigma"),
        ("sigma_0.25.1", "sigma"),
        ("sigma_x", "sigma"),
        ("sigma_0.00", "sigma"),  # which is not computed with
        ("mysigma_0.25", "sigma"),
        ("noise_x/sigma_0.5", "noise"),
        ("steps_PGD_steps/sigma_0.5", "num_steps"),
        ("XPGD_4steps/sigma_0.5", "attack"),
        ("x-multitrain/sigma_0.5", "num_noise_vec"),
        ("testing/sigma_0.5", "split"),
    ],
)
def test_what_a_path_only_resembles_is_not_understood(name, absent):
    assert facts_of("certification", Path(name), {}).get(absent) is None


def test_every_value_says_where_it_is_from():
    path = Path("cifar10/PGD_4steps/eps_127/noise_0.50/test/sigma_0.25")
    parts = {
        "sigma": "sigma_0.25",
        "split": "test",
        "noise": "noise_0.50",
        "epsilon": "eps_127",
        "dataset": "cifar10",
    }
    from_path = {name: f"path {part}" for name, part in parts.items()} | {"training": "path"}
    from_path |= dict.fromkeys(["attack", "num_steps"], "path PGD_4steps") | {"objective": "path"}
    expected = {"alpha": "stated", **from_path, "num_noise_vec": "assumed", "N": "assumed"}
    assert facts_of("certification", path, {"alpha": 0.01}).sources == expected


SETTINGS = {
    **{
        "dataset": "digits",
        "split": "test",
        "arch": "digits_resnet8",
        "sigma": 0.5,
        "N": 1000,
        "alpha": 0.01,
    },
    "training": {
        "objective": {
            **{"name": "SmoothAdv", "noise_sd": 0.25, "num_noise_vec": 4},
            "attack": {"name": "PGD", "epsilon": 0.5, "num_steps": 10},
        }
    },
}
SHARED = {name: SETTINGS[name] for name in ("dataset", "split", "arch", "sigma", "N", "alpha")}
FROM_SETTINGS = {
    "training": "SmoothAdv-PGD",
    "noise": 0.25,
    "attack": "PGD",
    "epsilon": 0.5,
    "num_steps": 10,
}
FROM_SETTINGS |= {
    "objective": "SmoothAdv",
    "optimizer": "sgd",
}  # there was no other when the recipe did not say


def with_manifest(folder: Path, content: object) -> Path:
    """The path of a log with such a manifest beside it; text is written as it is, the rest as
    JSON.
    """
    log = folder / "PGD_4steps/eps_127" / CIFAR
    log.parent.mkdir(parents=True, exist_ok=True)
    manifest_path(log).write_text(
        content if isinstance(content, str) else json.dumps({"runs": [], **content})
    )
    return log


def test_manifest_wins_over_the_path(tmp_path):
    log = with_manifest(tmp_path, {"settings": SETTINGS, "runs": []})
    parameters = facts_of("certification", log, {})
    assert parameters.values == {**SHARED, **FROM_SETTINGS, "num_noise_vec": 4}
    assert set(parameters.sources.values()) == {"manifest"}
    assert parameters.manifest == {"settings": SETTINGS, "runs": []}
    manifest_path(log).unlink()
    assert facts_of("certification", log, {}).get("sigma") == 0.25, "without it, the path decides"


def test_lists_of_plug_ins_are_texts_and_the_path_fills_no_gaps(tmp_path):
    """A folder's name is no evidence against the record of the run itself."""
    settings = {"sigma": 0.5, "N": 1000, "alpha": 0.01}
    settings |= {"training": {"objective": {"name": "own", "regularization": [1.0, 2.0]}}}
    log = with_manifest(tmp_path, {"settings": settings, "runs": []})
    found = facts_of("certification", log, {}).values
    named = {"objective": "own", "training": "own", "optimizer": "sgd", "lambda": "[1.0, 2.0]"}
    assert found == {"sigma": 0.5, "N": 1000, "alpha": 0.01, **named}


def test_stated_values_win_over_all_others(tmp_path):
    log = with_manifest(tmp_path, {"settings": SETTINGS})
    stated = {"sigma": 0.75, "N": 50, "alpha": 0.02, "dimension": 64}
    for parameters in (
        facts_of("certification", log, stated),
        facts_of("prediction", log, stated),
    ):
        assert {name: parameters.get(name) for name in stated} == stated
        assert {parameters.sources[name] for name in stated} == {"stated"}
    unstated = {**stated, "sigma": None}
    assert facts_of("certification", Path("sigma_0.25"), unstated).get("sigma") == 0.25


@pytest.mark.parametrize(
    "name, estimator, base, gradient, target",
    [
        (None, None, False, None, None),
        ("PGD", "plug_in", False, "plug-in", None),
        ("PGD", "expected_loss", False, "expected loss", 3),
        ("PGD", {"name": "Stein", "hard": False}, False, "gradient-free", "runner-up"),
        ("PGD", {"name": "Stein", "hard": True}, False, "gradient-free, hard decisions", None),
        ("DDN", "plug_in", True, "base classifier", None),
        ("PGD", {"name": "PlugIn", "beta": 4.0}, False, "plug-in, beta = 4.0", None),
        ("PGD", {"name": "PlugIn", "beta": 4.0}, True, "base classifier, beta = 4.0", None),
    ],
)
def test_manifest_of_a_prediction_log_tells_its_attack(
    tmp_path, name, estimator, base, gradient, target
):
    attack = name and {"name": name, "estimator": estimator, "epsilon": 0.5, "num_steps": 20}
    values = {"attack": name, "gradient": gradient} if name else {}
    values |= {"restarts": 4, **({} if target is None else {"target": str(target)})}
    content = {**SETTINGS, "attack": attack, "num_noise_vec": attack and 8, "base_attack": base}
    content |= {"restarts": 4, "target": target}
    parameters = facts_of("prediction", with_manifest(tmp_path, {"settings": content}), {})
    more = {"epsilon": 0.5, "num_steps": 20} if attack else {}
    draws = {"num_noise_vec": 8} if attack and not base else {}
    assert parameters.values == {**SHARED, **more, **draws, **values}


BROKEN = {
    "empty": "",
    "torn": json.dumps({"settings": SETTINGS})[:-9],
    "no object": "[1, 2]",
    "no settings": '{"runs": []}',
    "settings that are a list": '{"settings": []}',
    "nested too deeply": "[" * 100_000,
    "not a number as sigma": '{"settings": {"sigma": NaN, "N": 100, "alpha": 0.1}}',
    "an infinite n": '{"settings": {"sigma": 0.5, "N": Infinity, "alpha": 0.1}}',
    "an n beyond a float": '{"settings": {"sigma": 0.5, "N": 1%s, "alpha": 0.1}}' % ("0" * 400),
    "a sigma beyond a float": '{"settings": {"sigma": 1%s, "N": 100, "alpha": 0.1}}' % ("0" * 400),
}


@pytest.mark.parametrize("kind", ["certification", "prediction"])
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_manifest_leaves_the_log_in_doubt(tmp_path, kind, text):
    log = with_manifest(tmp_path, text)
    assert "manifest" in refusal(facts_of, kind, log, {}, names=log)


@pytest.mark.parametrize(
    "runs, dimension",
    [
        ([{"image_shape": [1, 4, 4]}], 16),
        ([{"image_shape": [1, 4, 4]}, {"image_shape": [3, 8, 8]}], 192),
        ([{"image_shape": [3, 8, 8]}, {}], 192),
        ([{}, {"image_shape": []}], 64),
        ([], 64),
    ],
)
def test_dimension_of_an_image_is_that_of_the_last_run_whose_manifest_states_a_shape(
    tmp_path, runs, dimension
):
    """Else that of the dataset, here digits."""
    log = with_manifest(tmp_path, {"settings": SETTINGS, "runs": runs})
    assert facts_of("certification", log, {}).dimension == dimension
    assert facts_of("certification", log, {"dimension": 5}).dimension == 5


@pytest.mark.parametrize(
    "name, value, text",
    [
        *(
            ("sigma", value, text)
            for value, text in zip((0.25, 0.5, 1.0), ("0.25", "0.50", "1.00"))
        ),
        *(
            ("epsilon", k / 256, text)
            for k, text in zip((64, 127, 255, 512), ("0.25", "0.5", "1", "2"))
        ),
        ("epsilon", 0.4961, "0.4961"),
        ("epsilon", 0.496, "0.496"),
        ("alpha", 0.001, "0.001"),
        ("alpha", 1e-5, "1e-05"),
        ("N", 100_000, "100,000"),
        ("num_noise_vec", 1024, "1024"),
        ("num_steps", 10, "10"),
        ("attack", "PGD", "PGD"),
        ("attack", None, "–"),
    ],
)
def test_values_are_shown_as_people_write_them(name, value, text):
    assert display(name, value) == text


@pytest.mark.parametrize(
    "path, stated, dimension",
    [
        *((f"{name}/sigma_0.25", {}, 3072) for name in ("cifar10", "cifar100", "imagenet32")),
        *(
            (f"{name}/sigma_0.25", {}, size)
            for name, size in (("imagenet", 150_528), ("digits", 64), ("fmnist", 784))
        ),
        ("sigma_0.25", {}, None),
        ("cifar10/sigma_0.25", {"dimension": 100}, 100),
    ],
)
def test_dimension_of_an_image_follows_from_the_dataset_unless_stated(path, stated, dimension):
    assert facts_of("certification", Path(path), stated).dimension == dimension


def test_a_cascade_has_its_stages_and_its_threshold(workplace):
    path = log("cascade.tsv", [0.25], sigmas=[0.5, 0.25], threshold=0.7)
    values = facts_of("certification", path, {}).values
    assert (values["stages"], values["threshold"], values["sigma"]) == ("0.5 > 0.25", 0.7, 0.5)
    assert "stages" not in facts_of("certification", log("one.tsv", [0.25]), {}).values


# A manifest gives a training the same name as its released path: those here are made of real
# objectives by what the training commands record.


PGD_2, DDN_4 = PGD(0.25, 2), DDN(0.25, 4)
BY_PGD, BY_DDN = SmoothAdv(PGD_2, 0.25), SmoothAdv(DDN_4, 0.25)
PRETRAINED = {"pretrained_sha256": "0" * 64}
SELF_TRAINED = {"pseudo_labelled_fingerprint": "1" * 64, "pseudo_weight": 0.5}
BOTH, ON_BASE = {**SELF_TRAINED, **PRETRAINED}, SmoothAdv(PGD_2, 0.0, base_attack=True)
FINETUNED = "cifar10/finetune_cifar_from_imagenetPGD2steps"
WITHOUT_NOISE = "cifar10/PGD_2steps_baseAttackExp/without_noise"
END = "cifar10/resnet110/noise_{noise}/test/sigma_0.25"
EPS = f"eps_64/{END}"

# The name, an objective, what else the recipe of such a training holds, and where its released log
# would be.
TRAININGS = {
    "Gaussian": (Gaussian(0.25), {}, END),
    "SmoothAdv-PGD": (BY_PGD, {}, f"cifar10/PGD_2steps/{EPS}"),
    "SmoothAdv-DDN": (BY_DDN, {}, f"cifar10/DDN_4steps/{EPS}"),
    "vanilla PGD": (SmoothAdv(PGD_2, 0.0), {}, f"{WITHOUT_NOISE}/{EPS}"),
    "vanilla PGD + noise": (SmoothAdv(PGD_2, 0.25, base_attack=True), {}, f"{WITHOUT_NOISE}/{EPS}"),
    "SmoothAdv-PGD + pre-training": (BY_PGD, PRETRAINED, f"{FINETUNED}/PGD_2steps_30epochs/{EPS}"),
    "SmoothAdv-DDN + pre-training": (BY_DDN, PRETRAINED, f"{FINETUNED}/DDN_4steps_30epochs/{EPS}"),
    "SmoothAdv-PGD + self-training": (
        BY_PGD,
        SELF_TRAINED,
        f"cifar10/self_training/PGD_2steps/weight_0.5/{EPS}",
    ),
    "SmoothAdv-PGD + pre-training + self-training": (
        BY_PGD,
        BOTH,
        f"{FINETUNED}/self_training_PGD_2steps/{EPS}",
    ),
    "Gaussian + pre-training": (Gaussian(0.25), PRETRAINED, f"{FINETUNED}/{END}"),
    "Gaussian + self-training": (Gaussian(0.25), SELF_TRAINED, f"self_training/{END}"),
    "Consistency": (Consistency(0.25), {}, f"consistency/2-multitrain/{END}"),
    "Consistency-PGD": (
        Consistency(0.25, regularization=2.0, attack=PGD_2),
        {},
        f"consistency/PGD_2steps_multiNoiseSamples/2-multitrain/{EPS}",
    ),
    "Macer": (Macer(0.25), {}, f"macer/16-multitrain/{END}"),
    "vanilla PGD + pre-training": (
        ON_BASE,
        PRETRAINED,
        f"{FINETUNED}/PGD_2steps/without_noise/{EPS}",
    ),
}


def recipe(objective: object, extras: dict[str, Any]) -> dict[str, Any]:
    """What a training leaves in the manifest of a certification, as far as it tells what it was."""
    return {
        "dataset": "cifar10",
        "seed": 0,
        "epochs": 3,
        "objective": settings_record(objective),
        **extras,
    }


def certified(folder: Path, training: object) -> Facts:
    """What the manifest of a certification of a model of this training tells."""
    settings = {"sigma": 0.25, "N": 100_000, "alpha": 0.001, "training": training}
    return facts_of("certification", with_manifest(folder, {"settings": settings}), {})


@pytest.mark.parametrize("name", TRAININGS)
def test_manifest_and_released_path_give_a_training_the_same_name(tmp_path, name):
    objective, extras, path = TRAININGS[name]
    released = Path(path.format(noise=f"{objective.noise_sd:.2f}"))
    of_path = facts_of("certification", released, {})
    of_manifest = certified(tmp_path, recipe(objective, extras))
    assert of_path.get("training") == of_manifest.get("training") == name
    assert (of_path.sources["training"], of_manifest.sources["training"]) == ("path", "manifest")
    # So do the numbers that tell one training of that name from another.
    for field in ("objective", "noise", "attack", "epsilon", "num_steps"):
        assert of_path.get(field) == of_manifest.get(field), field


MINE = {
    **{"name": "Mine", "noise_sd": 0.5},
    "attack": {"name": "PGD", "epsilon": 1.0, "num_steps": 2},
}


@pytest.mark.parametrize(
    ("training", "name"),
    [
        *(
            (recipe(objective, {}), "SmoothAdv-PGD")
            for objective in [
                SmoothAdv(PGD(0.25, 2, random_if_flat=True), 0.25, train_first_copy=True),
                SmoothAdv(
                    PGD(0.25, 2, estimator=Stein(0.25)),
                    0.25,
                    warmup=10,
                    warmup_from_first_epoch=True,
                ),
                SmoothAdv(PGD(0.25, 2), 0.25, num_noise_vec=8),
            ]
        ),
        # Any objective that records an attack is named after both.
        ({"objective": MINE}, "Mine-PGD"),
        ({"objective": {**MINE, "base_attack": True}}, "vanilla PGD + noise"),
        ({"objective": {**MINE, "noise_sd": 0}}, "vanilla PGD"),
        # What the manifest does not name has no name.
        (None, None),
        ({"seed": 0}, None),
        ({"objective": {}, **PRETRAINED, **SELF_TRAINED}, None),
        ([{}], None),
    ],
)
def test_training_is_named_by_what_its_manifest_says_alone(tmp_path, training, name):
    assert certified(tmp_path, training).get("training") == name
