"""Names of trainings: a manifest gives the same as the released path of the same training.

The manifests here are made of real objectives by what the training commands record.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from smoothadv.analysis.facts import Facts, facts_of
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import settings_record
from smoothadv.objectives.consistency import Consistency
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.macer import Macer
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.records.logs import manifest_path

CERTIFIED = {"sigma": 0.25, "N": 100_000, "alpha": 0.001}
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


def write_manifest(log: Path, content: dict[str, Any]) -> Path:
    log.parent.mkdir(parents=True, exist_ok=True)
    manifest_path(log).write_text(json.dumps({"settings": content, "runs": []}))
    return log


def recipe(objective: object, extras: dict[str, Any]) -> dict[str, Any]:
    """What a training leaves in the manifest of a certification, as far as it tells what it was."""
    return {
        "dataset": "cifar10",
        "seed": 0,
        "epochs": 3,
        "objective": settings_record(objective),
        **extras,
    }


def certified(log: Path, training: object) -> Facts:
    """What the manifest of a certification of a model of this training tells."""
    return facts_of("certification", write_manifest(log, {**CERTIFIED, "training": training}), {})


@pytest.mark.parametrize("name", TRAININGS)
def test_manifest_and_released_path_give_a_training_the_same_name(tmp_path, name):
    objective, extras, path = TRAININGS[name]
    released = Path(path.format(noise=f"{objective.noise_sd:.2f}"))
    of_path = facts_of("certification", released, {})
    of_manifest = certified(tmp_path / "mine", recipe(objective, extras))
    assert of_path.get("training") == of_manifest.get("training") == name
    assert (of_path.sources["training"], of_manifest.sources["training"]) == ("path", "manifest")
    # So do the numbers that tell one training of that name from another.
    for field in ("objective", "noise", "attack", "epsilon", "num_steps"):
        assert of_path.get(field) == of_manifest.get(field), field


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    "options",
    [{"train_first_copy": True}, {"warmup_from_first_epoch": True}, {"num_noise_vec": 8}],
    ids=str,
)
@pytest.mark.parametrize(
    "attack",
    [PGD(0.25, 2, random_if_flat=True), PGD(0.25, 2, estimator=Stein(0.25))],
    ids=["random if flat", "Stein"],
)
def test_other_options_leave_the_name_as_it_is(tmp_path, attack, options, warmup):
    objective = SmoothAdv(attack, 0.25, warmup=warmup, **options)
    assert certified(tmp_path / "mine", recipe(objective, {})).get("training") == "SmoothAdv-PGD"


@pytest.mark.parametrize(
    "training", [None, {"seed": 0}, {"objective": {}, **PRETRAINED, **SELF_TRAINED}, [{}]], ids=str
)
def test_training_that_a_manifest_does_not_name_has_no_name(tmp_path, training):
    assert certified(tmp_path / "PGD_2steps/noise_0.25/mine", training).get("training") is None
