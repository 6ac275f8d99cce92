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
from smoothadv.records.logs import DENOISER, manifest_beside

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
# Fields of objectives and of data policies, and the hyper-parameters that they are.
_OBJECTIVE_FIELDS = {
    "regularization": "lambda",
    "noise_epsilon": "epsilon",
    "mix_steps": "num_steps",
    "noise_steps": "num_steps",
    "mix_step_size": "step_size",
    "noise_step_size": "step_size",
    "eta": "eta",
    "attack_from_epoch": "attack_from_epoch",
    "transfer": "transfer",
}
_POLICY_FIELDS = {
    "from_epoch": "choose_from_epoch",
    "drop_below": "drop_below",
    "resample_every": "resample_every",
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

_SENSIBLE: dict[str, Callable[[Any], bool]] = {
    "sigma": lambda value: 0 < value < 1e6,
    "N": lambda value: 1 <= value < 2**63 and value == int(value),
    "alpha": lambda value: 0 < value < 1,
}
"""What certificates depend on: a manifest must state these."""
_NUMBERS = {
    "sigma",
    "N",
    "alpha",
    "noise",
    "epsilon",
    "num_steps",
    "num_noise_vec",
    "restarts",
    "dimension",
    "teacher_draws",
    *_OBJECTIVE_FIELDS.values(),
    *_POLICY_FIELDS.values(),
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
        stated = self.number("dimension")
        if stated:
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
            if name not in values and _is_sensible(name, value):
                values[name], sources[name] = value, source

    enter(stated, "stated")
    manifest = manifest_beside(path)
    if manifest is not None:
        if missing := [name for name in _SENSIBLE if name not in manifest["settings"]]:
            raise UserError(f"{path} is left in doubt: its manifest states no {missing[0]}")
        read = _certification_facts if is_certification else _prediction_facts
        enter(read(manifest["settings"]), "manifest")
        return Facts(values, sources, manifest)
    # From the file upwards: the innermost folder that states a value is the closest to the log.
    for part in reversed(path.parts):
        for pattern, meaning in _CERTIFICATION_PARTS if is_certification else _PREDICTION_PARTS:
            if match := re.search(pattern, part):
                enter(meaning(match), f"path {part}")
    if path.parent.name in ("test", "train"):
        enter({"split": path.parent.name}, f"path {path.parent.name}")
    if is_certification:
        if "attack" in values:
            enter({"num_noise_vec": 1}, "assumed")
        enter({"training": _training_name(path, values)}, "path")
        if "training" in values:
            enter({"objective": "SmoothAdv" if values.get("attack") else "Gaussian"}, "path")
        enter(_PUBLISHED, "assumed")
    return Facts(values, sources)


def _is_sensible(name: str, value: Any) -> bool:
    """Whether a value is of the kind that the hyper-parameter has; a manifest may hold anything."""
    if name not in _NUMBERS:
        return isinstance(value, str) and value != ""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e18:
        return False
    return _SENSIBLE[name](value) if name in _SENSIBLE else value >= 0


def _certification_facts(settings: dict[str, Any]) -> dict[str, Value]:
    recipes = settings.get("training")  # one, or of an ensemble those of all members
    members = [
        _recipe_facts(_mapping(one))
        for one in (recipes if recipes and isinstance(recipes, list) else [recipes])
    ]
    common = {
        name: value
        for name, value in members[0].items()
        if all(other.get(name) == value for other in members)
    }
    return {**_evaluation_facts(settings), **common}


def _recipe_facts(recipe: dict[str, Any]) -> dict[str, Value]:
    objective = _mapping(recipe.get("objective"))
    attack, policy = _mapping(objective.get("attack")), _mapping(recipe.get("data_policy"))
    teacher = recipe.get("teacher_sha256")
    return {
        "training": _training_name_of(recipe, objective, attack),
        "objective": objective.get("name"),
        "teacher": teacher[:12] if isinstance(teacher, str) else None,
        "teacher_draws": recipe.get("teacher_draws"),
        "optimizer": (recipe.get("optimizer") or "sgd") if objective else None,
        "noise": objective.get("noise_sd"),
        **_attack_facts(attack),
        "num_noise_vec": objective.get("num_noise_vec"),
        **{
            name: objective[field]
            for field, name in _OBJECTIVE_FIELDS.items()
            if field in objective
        },
        **{name: policy.get(field) for field, name in _POLICY_FIELDS.items()},
    }


def _training_name_of(
    recipe: dict[str, Any], objective: dict[str, Any], attack: dict[str, Any]
) -> str | None:
    """The name of the training, as ``_training_name`` has it: with that of the attack if the
    objective has one.
    """
    name, noise = objective.get("name"), objective.get("noise_sd")
    if not isinstance(name, str):
        return None
    if isinstance(attack.get("name"), str):
        if objective.get("base_attack") or noise == 0:
            if not isinstance(noise, (int, float)):
                return None
            name = f"vanilla {attack['name']}" + (" + noise" if noise else "")
        else:
            name = f"{name}-{attack['name']}{_beta(attack)}"
    extras = [
        ("pre-training", "pretrained_sha256"),
        ("self-training", "pseudo_labelled_fingerprint"),
    ]
    return " + ".join([name, *(extra for extra, key in extras if key in recipe)])


def _prediction_facts(settings: dict[str, Any]) -> dict[str, Value]:
    attack = _mapping(settings.get("attack"))
    estimator, is_base = attack.get("estimator"), settings.get("base_attack")
    gradient = _GRADIENTS.get(str(_mapping(estimator).get("name", estimator)))
    if gradient == "gradient-free" and _mapping(estimator).get("hard"):
        gradient = "gradient-free, hard decisions"
    target = settings.get("target")
    return {
        **_evaluation_facts(settings),
        **_attack_facts(attack),
        "num_noise_vec": None if is_base else settings.get("num_noise_vec"),
        "gradient": ("base classifier" if is_base else gradient or "") + _beta(attack),
        "restarts": settings.get("restarts"),
        "target": target if target is None else str(target),
    }


def _attack_facts(attack: dict[str, Any]) -> dict[str, Value]:
    return {
        "attack": attack.get("name"),
        "epsilon": attack.get("epsilon"),
        "num_steps": attack.get("num_steps"),
    }


def _beta(attack: dict[str, Any]) -> str:
    """What to say of the softmax's inverse temperature in an attack's gradients, if it is not that
    of the paper.
    """
    estimator = _mapping(attack.get("estimator"))
    return f", beta = {estimator.get('beta')}" if estimator.get("name") == "PlugIn" else ""


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _evaluation_facts(settings: dict[str, Any]) -> dict[str, Value]:
    names = ("dataset", "split", "arch", "sigma", "N", "alpha")
    facts = {name: settings.get(name) for name in names}
    if denoiser := settings.get(DENOISER):
        facts["denoiser"] = f"{denoiser.get('arch')} {str(denoiser.get('sha256'))[:6]}"
    return facts


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
    (r"(?:^|_)alpha_(\d*\.\d+)", _one("alpha", float)),
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
    (r"^num_(\d+)$", lambda m: {"num_noise_vec": int(m[1]), "gradient": None}),
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


def _training_name(path: Path, values: dict[str, Value]) -> str | None:
    """The name of the training, from values that the path states and from its folders; None if they
    do not tell it.
    """
    if "without_noise" in path.parts:
        training = f"vanilla {values.get('attack', 'PGD')}" + (
            " + noise" if values.get("noise") else ""
        )
    elif values.get("attack") and "noise" in values:
        training = f"{values.get('objective', 'SmoothAdv')}-{values['attack']}"
    elif values.get("noise"):
        training = str(values.get("objective", "Gaussian"))
    else:
        return None
    extras = {"finetune_cifar_from_imagenet": "pre-training", "self_training": "self-training"}
    found = [
        extra
        for start, extra in extras.items()
        if any(part.startswith(start) for part in path.parts)
    ]
    return " + ".join([training, *found])


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
