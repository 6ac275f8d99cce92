"""What made a log: hyper-parameters from its manifest or else from its path, each with its source.

The paths understood are those of the released logs, like
``PGD_2steps_multiNoiseSamples/8-multitrain/eps_255/cifar10/resnet110/noise_0.25/test/sigma_0.25``
and ``N10000/PGD_0.250/num_128/predictions``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.records.logs import DENOISER, flat, manifest_beside

Value = str | float | int | bool | None

FIELDS = {
    "dataset": "dataset",
    "split": "split",
    "arch": "architecture",
    "training": "training",
    "objective": "objective",
    "denoiser": "denoiser",
    "noise": "training noise",
    "attack": "attack",
    "epsilon": "epsilon",
    "num_steps": "T",
    "num_noise_vec": "m",
    "lambda": "lambda",
    "eta": "eta",
    "step_size": "step size",
    "attack_from_epoch": "attack from epoch",
    "transfer": "transfer",
    "choose_from_epoch": "choose from epoch",
    "drop_below": "drop below",
    "resample_every": "resample every",
    "optimizer": "optimizer",
    "teacher": "teacher",
    "teacher_draws": "teacher draws",
    "gradient": "gradient",
    "restarts": "restarts",
    "target": "target",
    "sigma": "sigma",
    "N": "n",
    "alpha": "alpha",
    "method": "procedure",
}
"""Name and title of every hyper-parameter. In a certification log attack, epsilon, num_steps and
num_noise_vec are those of the training; in a prediction log, those of the attack on its images."""
_SETTINGS = ("dataset", "split", "arch", "sigma", "N", "alpha")
# Where the settings of a training, and of an attack on images, have hyper-parameters.
_OF_RECIPE = {
    "objective.name": "objective",
    "objective.noise_sd": "noise",
    "objective.attack.name": "attack",
    "objective.attack.epsilon": "epsilon",
    "objective.noise_epsilon": "epsilon",
    "objective.attack.num_steps": "num_steps",
    "objective.mix_steps": "num_steps",
    "objective.noise_steps": "num_steps",
    "objective.mix_step_size": "step_size",
    "objective.noise_step_size": "step_size",
    "objective.num_noise_vec": "num_noise_vec",
    "objective.regularization": "lambda",
    "objective.eta": "eta",
    "objective.attack_from_epoch": "attack_from_epoch",
    "objective.transfer": "transfer",
    "data_policy.from_epoch": "choose_from_epoch",
    "data_policy.drop_below": "drop_below",
    "data_policy.resample_every": "resample_every",
    "optimizer": "optimizer",
    "teacher_draws": "teacher_draws",
}
_OF_ATTACK = {
    "attack.name": "attack",
    "attack.epsilon": "epsilon",
    "attack.num_steps": "num_steps",
    "restarts": "restarts",
}
# What sweeps call the folders of objectives, beside "gaussian" and those of SmoothAdv.
_FOLDERS = {
    "stability": "Stability",
    "macer": "Macer",
    "consistency": "Consistency",
    "smoothmix": "SmoothMix",
    "cat-rs": "CatRS",
    "acr-weakness": "AcrWeakness",
    "distillation": "Distillation",
}

_GRADIENTS = {
    "plug_in": "plug-in",
    "PlugIn": "plug-in",
    "expected_loss": "expected loss",
    "Stein": "gradient-free",
}
_PUBLISHED = {"N": 100_000, "alpha": 0.001}
_NOMINAL: dict[Value, Value] = {127 / 256: 0.5, 255 / 256: 1.0}
"""What the paper calls the epsilons of released models."""
# Only for logs without a manifest that states the shape of the images, such as the released ones.
_DIMENSIONS = {
    "cifar10": 3 * 32 * 32,
    "imagenet32": 3 * 32 * 32,
    "imagenet": 3 * 224 * 224,
    "digits": 8 * 8,
}


@dataclass(frozen=True)
class Facts:
    """Known values by field name, and the source of each, as text for people."""

    values: dict[str, Value] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None

    def get(self, name: str) -> Value:
        return self.values.get(name)

    def number(self, name: str) -> float | None:
        """A hyper-parameter that is a number; None where it is unknown."""
        value = self.values.get(name)
        return value if isinstance(value, (int, float)) else None

    @property
    def n(self) -> int:
        """The number of draws per input, or the largest number: the published one where it is
        unknown.
        """
        return int(self.number("N") or _PUBLISHED["N"])

    @property
    def alpha(self) -> float:
        """The probability of a false statement per input: the published one where it is unknown."""
        return self.number("alpha") or _PUBLISHED["alpha"]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in the manifest; empty without one."""
        return (self.manifest or {}).get("settings", {})

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that wrote the log, as the manifest describes them."""
        return (self.manifest or {}).get("runs", [])

    def replaced(self, name: str, value: Value, source: str) -> Facts:
        """A copy in which one hyper-parameter has another value, from another source."""
        return Facts({**self.values, name: value}, {**self.sources, name: source}, self.manifest)

    @property
    def dimension(self) -> int | None:
        """Number of coordinates of an image, on which l_inf radii depend; None if it is unknown."""
        if stated := self.number("dimension"):
            return int(stated)
        sizes = [math.prod(shape) for run in self.runs if (shape := run.get("image_shape"))]
        return sizes[-1] if sizes else _DIMENSIONS.get(str(self.get("dataset")))


def facts_of(kind: str, path: Path, stated: Mapping[str, Value]) -> Facts:
    """Hyper-parameters of a log; its ``kind`` is "certification" or "prediction". ``stated`` ones
    win.

    In a prediction log the attack is the one on its images; of a certification log, an unknown n or
    alpha is the published one.
    """
    is_certification = kind == "certification"
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}

    def enter(found: Mapping[str, Value], source: str) -> None:
        for name, value in found.items():
            is_known = value not in (None, "") and (name, value) != ("sigma", 0)
            if name not in values and is_known:
                values[name], sources[name] = value, source

    enter(stated, "stated")
    manifest = manifest_beside(path)
    if manifest is not None:
        settings = manifest["settings"]
        if missing := [name for name in ("sigma", "N", "alpha") if name not in settings]:
            raise UserError(f"{path} is left in doubt: its manifest states no {missing[0]}")
        enter({name: settings.get(name) for name in _SETTINGS}, "manifest")
        if denoiser := settings.get(DENOISER):
            enter(
                {"denoiser": f"{denoiser.get('arch')} {str(denoiser.get('sha256'))[:6]}"},
                "manifest",
            )
        read = _certification_facts if is_certification else _prediction_facts
        enter(read(settings), "manifest")
        return Facts(values, sources, manifest)
    # From the file upwards: the innermost folder that states a value is the closest to the log.
    for part in reversed(path.parts):
        for pattern, meaning in _CERTIFICATION_PARTS if is_certification else _PREDICTION_PARTS:
            if match := re.search(pattern, part):
                enter(meaning(match), f"path {part}")
    if path.parent.name in ("test", "train"):
        enter({"split": path.parent.name}, f"path {path.parent.name}")
    if is_certification:
        enter(_training_facts(path, values), "path")
        if "attack" in values:
            enter({"num_noise_vec": 1}, "assumed")
        enter(_PUBLISHED, "assumed")
    return Facts(values, sources)


def _certification_facts(settings: dict[str, Any]) -> dict[str, Value]:
    recipes = settings.get("training") or {}  # one, or of an ensemble those of all members
    recipes = recipes if isinstance(recipes, list) else [recipes]
    first, *others = [_recipe_facts(flat(recipe or {})) for recipe in recipes]
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _recipe_facts(recipe: dict[str, Any]) -> dict[str, Value]:
    """What the settings of a training tell, with keys like ``objective.attack.name``."""
    facts = _those_of(_OF_RECIPE, recipe)
    facts["teacher"] = str(recipe.get("teacher_sha256") or "")[:12]
    objective, attack, noise = map(facts.get, ("objective", "attack", "noise"))
    if objective:
        facts.setdefault("optimizer", "sgd")
        attack = attack and f"{attack}{_beta(recipe, 'objective.attack')}"
        is_vanilla = bool(attack) and (bool(recipe.get("objective.base_attack")) or noise == 0)
        extras = {
            "pre-training": "pretrained_sha256" in recipe,
            "self-training": "pseudo_labelled_fingerprint" in recipe,
        }
        facts["training"] = _training_name(objective, attack, noise, is_vanilla, extras)
    return facts


def _prediction_facts(settings: dict[str, Any]) -> dict[str, Value]:
    known, is_base = flat(settings), settings.get("base_attack")
    facts = _those_of(_OF_ATTACK, known)
    gradient = _GRADIENTS.get(
        str(known.get("attack.estimator.name", known.get("attack.estimator"))), ""
    )
    if known.get("attack.estimator.hard"):
        gradient += ", hard decisions"
    facts["gradient"] = ("base classifier" if is_base else gradient) + _beta(known, "attack")
    facts["num_noise_vec"] = None if is_base else settings.get("num_noise_vec")
    target = settings.get("target")
    return {**facts, "target": None if target is None else str(target)}


def _those_of(places: dict[str, str], record: dict[str, Any]) -> dict[str, Value]:
    """The hyper-parameters that a flat record has at these places."""
    return {name: record[place] for place, name in places.items() if record.get(place) is not None}


def _beta(record: dict[str, Any], attack: str) -> str:
    """What to say of the softmax's inverse temperature in an attack's gradients, if it is not that
    of the paper.
    """
    beta = record.get(f"{attack}.estimator.beta")
    return "" if beta is None else f", beta = {beta}"


def _training_name(
    objective: Value, attack: Value, noise: Value, is_vanilla: bool, extras: dict[str, bool]
) -> str:
    """The name of a training: with that of the attack if the objective has one, and ``extras``."""
    name = f"{objective}-{attack}" if attack else str(objective)
    if is_vanilla:
        name = f"vanilla {attack}" + (" + noise" if noise else "")
    return " + ".join([name, *(extra for extra, is_there in extras.items() if is_there)])


def released_epsilon(text: str) -> float:
    """The l2 norm on [0, 1] images that a released name states: whole numbers count in 1/256, as
    the code did.
    """
    return float(text) if "." in text else int(text) / 256


def _one(name: str, convert: Callable[[str], Value]) -> Callable[[re.Match[str]], dict[str, Value]]:
    return lambda match: {name: convert(match[1])}


_SHARED_PARTS = [
    (r"^(cifar10|imagenet32|imagenet|digits)$", _one("dataset", str)),
    (r"^predict_(cifar|imagenet)_", lambda m: {"dataset": {"cifar": "cifar10"}.get(m[1], m[1])}),
    (r"^((?:cifar_|digits_|imagenet32_)?resnet\d+)$", _one("arch", str)),
    (r"(?:^|_)sigma_(\d+(?:\.\d+)?)(?![\deE]|\.\d)", _one("sigma", float)),
    (r"(?:^|_)alpha_(0?\.\d+)", _one("alpha", float)),
]
_CERTIFICATION_PARTS = [
    *_SHARED_PARTS,
    (r"(?:^|_)noise_(\d+(?:\.\d+)?)", _one("noise", float)),
    (r"(?:^|_)eps_(\d+(?:\.\d+)?)", _one("epsilon", released_epsilon)),
    (r"(?:^|_)(PGD|DDN)_(\d+)steps?", lambda m: {"attack": m[1], "num_steps": int(m[2])}),
    (r"^(\d+)-multitrain$", _one("num_noise_vec", int)),
    (f"^({'|'.join(_FOLDERS)})$", _one("objective", _FOLDERS.__getitem__)),
]
_PARTS, _DRAWS = r"(\d+(?:\.\d+)?)", r"_noise_[\d.]+_mtest_(\d+)"
_PREDICTION_PARTS = [
    *_SHARED_PARTS,
    (r"(?:^|_)noise_(\d+(?:\.\d+)?)", _one("sigma", float)),
    (r"^N_?(\d+)", _one("N", int)),
    (r"_nogradtrick$", lambda m: {"gradient": "gradient-free"}),
    (r"^num_(\d+)$", lambda m: {"num_noise_vec": int(m[1])}),
    (r"^base$", lambda m: {"gradient": "base classifier"}),
    (r"^(PGD|DDN)_(\d+\.\d+)$", lambda m: {"attack": m[1], "epsilon": float(m[2])}),
    # What the released predict.py itself writes counts in 1/256.
    (
        rf"^(PGD|DDN)_{_PARTS}(?:_base|{_DRAWS})$",
        lambda m: {"attack": m[1], "epsilon": float(m[2]) / 256},
    ),
    (rf"^(?:PGD|DDN)_{_PARTS}_base$", lambda m: {"gradient": "base classifier"}),
    (rf"^(?:PGD|DDN)_{_PARTS}{_DRAWS}$", lambda m: {"num_noise_vec": int(m[2])}),
]


_ATTACK_PART = re.compile(r"(?:PGD|DDN)_\d.*|num_\d+|base|N_?\d+.*|predictions")


def path_without_attack(path: Path) -> tuple[str, ...]:
    """The parts of a prediction log's path that do not describe its attack: they identify the
    model.
    """
    return tuple(
        part for part in path.parts if not _ATTACK_PART.fullmatch(part.removesuffix(".tsv"))
    )


def _training_facts(path: Path, values: dict[str, Value]) -> dict[str, Value]:
    """Objective and name of the training, from values that the path states and from its folders;
    none if they do not tell it.
    """
    attack, is_vanilla = values.get("attack"), "without_noise" in path.parts
    if not is_vanilla and "noise" not in values:
        return {}
    objective = values.get("objective") or ("SmoothAdv" if attack else "Gaussian")
    folders = {"pre-training": "finetune_cifar_from_imagenet", "self-training": "self_training"}
    extras = {
        extra: any(part.startswith(start) for part in path.parts)
        for extra, start in folders.items()
    }
    name = _training_name(objective, attack, values.get("noise"), is_vanilla, extras)
    return {"objective": objective, "training": name}


def display(name: str, value: Value, others: Container[Value] = ()) -> str:
    """A hyper-parameter's value as tables and legends show it; ``others`` are values from which it
    must differ.
    """
    if value is None:
        return "–"
    if name == "epsilon":
        value = value if (nominal := _NOMINAL.get(value, value)) in others else nominal
        return f"{value:.4g}"
    if isinstance(value, float):
        return f"{value:.4g}" if not math.isclose(value, round(value, 2)) else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and name == "N" else str(value)
