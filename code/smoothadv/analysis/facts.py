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
from smoothadv.records.logs import DENOISER, IMAGE_SET, flat, manifest_beside

Value = str | float | int | bool | None

FIELDS = {
    "dataset": "dataset",
    "split": "split",
    IMAGE_SET: "images",
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
    "teacher_noise": "teacher noise",
    "confidence": "confidence",
    "lambda_from_epoch": "lambda from epoch",
    "gradient": "gradient",
    "restarts": "restarts",
    "target": "target",
    "sigma": "sigma",
    "stages": "stages",
    "threshold": "p0",
    "N": "n",
    "alpha": "alpha",
    "method": "procedure",
}
"""Name and title of every hyper-parameter. In a certification log attack, epsilon, num_steps and
num_noise_vec are those of the training; in a prediction log, those of the attack on its images.
``stages`` are the sigmas of a cascade, or of a router, whose own comes last."""
_PLACES = {
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
    "teacher_noise": "teacher_noise",
    "objective.confidence": "confidence",
    "objective.lambda_from_epoch": "lambda_from_epoch",
    "attack.name": "attack",
    "attack.epsilon": "epsilon",
    "attack.num_steps": "num_steps",
    "restarts": "restarts",
}
"""Where a training, or an attack on images, records its hyper-parameters."""
# What sweeps and the released logs of several papers call the folders of objectives.
_FOLDERS = {
    **dict.fromkeys(("gaussian", "cohen"), "Gaussian"),
    **dict.fromkeys(("smoothadv", "salman"), "SmoothAdv"),
    **dict.fromkeys(("stability", "stab"), "Stability"),
    "macer": "Macer",
    "consistency": "Consistency",
    **dict.fromkeys(("smoothmix", "smix"), "SmoothMix"),
    **dict.fromkeys(("cat-rs", "cat_rs", "catrs"), "CatRS"),
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
# For logs whose manifest states no shape of images, such as the released ones; the names are found
# in paths.
DIMENSIONS = {
    **dict.fromkeys(("cifar10", "cifar100", "imagenet32", "svhn"), 3 * 32 * 32),
    **dict.fromkeys(("mnist", "fashion-mnist"), 28 * 28),
    "tiny-imagenet": 3 * 64 * 64,
    "imagenet": 3 * 224 * 224,
    "digits": 8 * 8,
}


@dataclass(frozen=True)
class Facts:
    """Known values by field name, and the source of each, as text for people."""

    values: dict[str, Value] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def n(self) -> int:
        """The number of draws per input, or the largest number: the published one where it is
        unknown.
        """
        return int(self.get("N") or _PUBLISHED["N"])

    @property
    def alpha(self) -> float:
        """The probability of a false statement per input: the published one where it is unknown."""
        return self.get("alpha") or _PUBLISHED["alpha"]

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
        sizes = [math.prod(shape) for run in self.runs if (shape := run.get("image_shape"))]
        dataset = str(self.get("dataset")).partition("-c:")[0]
        known = [DIMENSIONS.get(dataset), *sizes, self.get("dimension")]
        return next(filter(None, reversed(known)), None)


def facts_of(kind: str, path: Path, stated: Mapping[str, Value]) -> Facts:
    """Hyper-parameters of a log; its ``kind`` is "certification" or "prediction". ``stated`` ones
    win.

    In a prediction log the attack is the one on its images; of a certification log, an unknown n or
    alpha is the published one.
    """
    is_certification = kind == "certification"
    facts = Facts(manifest=manifest_beside(path))

    def enter(found: Mapping[str, Value], source: str) -> None:
        for name, value in found.items():
            is_known = value not in (None, "") and (name, value) != ("sigma", 0)
            if name not in facts.values and is_known:
                facts.values[name], facts.sources[name] = value, source

    enter(stated, "stated")
    if facts.manifest is not None:
        settings = facts.settings
        if missing := [name for name in ("sigma", "N", "alpha") if name not in settings]:
            raise UserError(f"{path} is left in doubt: its manifest states no {missing[0]}")
        read = _certification_facts if is_certification else _prediction_facts
        denoiser = settings.get(DENOISER, {})
        network = f"{denoiser.get('arch')} {str(denoiser.get('sha256'))[:6]}"
        own = "dataset", "split", "arch", "sigma", "threshold", "N", "alpha"
        enter(
            {
                "stages": " > ".join(f"{sigma:g}" for sigma in settings.get("sigmas", ())),
                IMAGE_SET: settings.get(IMAGE_SET, {}).get("named"),
                **{name: settings.get(name) for name in own},
                **read(settings),
                "denoiser": network if denoiser else None,
            },
            "manifest",
        )
        return facts
    path = Path(_HOME.sub("", path.as_posix()))  # the name of a user is none of a method
    enter({"dataset": _corrupted_dataset(path)}, "path")
    # From the file upwards: the innermost folder that states a value is the closest to the log.
    for part in reversed(path.parts):
        for pattern in _CERTIFICATION_PARTS if is_certification else _PREDICTION_PARTS:
            if match := re.search(pattern, part):
                enter(
                    {
                        name.removesuffix("_in_256ths"): _MEANING.get(name, str)(text)
                        for name, text in match.groupdict(default="").items()
                        if text
                    },
                    f"path {part}",
                )
    if path.parent.name in ("test", "train"):
        enter({"split": path.parent.name}, f"path {path.parent.name}")
    if is_certification:
        enter(_training_facts(path, facts), "path")
        enter({"num_noise_vec": 1 if "attack" in facts.values else None, **_PUBLISHED}, "assumed")
    return facts


def _certification_facts(settings: dict[str, Any]) -> dict[str, Value]:
    recipes = settings.get("training") or {}  # one, or of an ensemble those of all members
    recipes = recipes if isinstance(recipes, list) else [recipes]
    first, *others = [recipe_facts(flat(recipe or {})) for recipe in recipes]
    in_all = {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }
    return {**in_all, "method": settings.get("method")}


def recipe_facts(recipe: dict[str, Any]) -> dict[str, Value]:
    """What the settings of a training tell, with keys like ``objective.attack.name``."""
    facts = {**_at_places(recipe), "teacher": str(recipe.get("teacher_sha256") or "")[:12]}
    if objective := facts.get("objective"):
        facts.setdefault("optimizer", "sgd")
        attack, noise = facts.get("attack"), facts.get("noise")
        is_vanilla = bool(attack) and (bool(recipe.get("objective.base_attack")) or noise == 0)
        extras = {
            "pre-training": "pretrained_sha256" in recipe,
            "self-training": "pseudo_labelled_fingerprint" in recipe,
        }
        attack = attack and f"{attack}{_beta(recipe, 'objective.attack')}"
        facts["training"] = _training_name(objective, attack, noise, is_vanilla, extras)
    return facts


def _prediction_facts(settings: dict[str, Any]) -> dict[str, Value]:
    known, target = flat(settings), settings.get("target")
    estimator = known.get("attack.estimator.name", known.get("attack.estimator"))
    decisions = ", hard decisions" if known.get("attack.estimator.hard") else ""
    gradient = _GRADIENTS.get(str(estimator), "") + decisions
    is_of_base = bool(settings.get("base_attack"))
    return {
        **_at_places(known),
        "gradient": ("base classifier" if is_of_base else gradient) + _beta(known, "attack"),
        "num_noise_vec": None if is_of_base else settings.get("num_noise_vec"),
        "target": None if target is None else str(target),
    }


def _at_places(record: dict[str, Any]) -> dict[str, Value]:
    """The hyper-parameters that a flat record has; those of plug-ins may be lists."""
    return {
        name: record[place] if isinstance(record[place], Value) else str(record[place])
        for place, name in _PLACES.items()
        if record.get(place) is not None
    }


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


_MEANING: dict[str, Callable[[str], Value]] = {
    **dict.fromkeys(("sigma", "noise", "alpha"), float),
    **dict.fromkeys(("num_steps", "num_noise_vec", "N"), int),
    # An l2 norm on [0, 1] images; whole numbers count in 1/256, as the released code did.
    "epsilon": lambda text: float(text) if "." in text else int(text) / 256,
    "epsilon_in_256ths": lambda text: float(text) / 256,
    "dataset": lambda text: {"cifar": "cifar10", "fmnist": "fashion-mnist"}.get(text, text),
    "attack": lambda text: {"pgd": "PGD", "salman": "PGD"}.get(text, text),
    "gradient": {"_nogradtrick": "gradient-free", "base": "base classifier"}.__getitem__,
}
"""What a text in a path stands for, by the hyper-parameter; others are the text itself."""
_SHARED_PARTS = (
    f"^(?P<dataset>{'|'.join([*DIMENSIONS, 'fmnist'])})$",
    r"^predict_(?P<dataset>cifar|imagenet)_",
    r"^(?P<arch>(?:cifar_|cifar100_|digits_|imagenet32_)?resnet\d+|wide_resnet\d+_\d+|lenet)$",
    r"(?:^|_)sigma_(?P<sigma>\d+(?:\.\d+)?)(?![\deE]|\.\d)",
    r"(?:^|_)alpha_(?P<alpha>0?\.\d+)",
)
_CERTIFICATION_PARTS = (
    *_SHARED_PARTS,
    r"(?:^|_)noise_(?P<noise>\d+(?:\.\d+)?)",
    r"(?:^|_)eps_(?P<epsilon>\d+(?:\.\d+)?)",
    r"(?:^|_)(?P<attack>PGD|DDN)_(?P<num_steps>\d+)steps?",
    r"^(?P<num_noise_vec>\d+)-multitrain$",
    # Of the logs released with Consistency and SmoothMix.
    r"^(?P<attack>pgd|salman)_(?P<epsilon_in_256ths>\d+(?:\.\d+)?)_(?P<num_steps>\d+)(?:_\d+)?$",
    r"^num_(?P<num_noise_vec>\d+)$",
)
_PREDICTION_PARTS = (
    *_SHARED_PARTS,
    r"(?:^|_)noise_(?P<sigma>\d+(?:\.\d+)?)",
    r"^N_?(?P<N>\d+)",
    r"(?P<gradient>_nogradtrick)$",
    r"^num_(?P<num_noise_vec>\d+)$",
    r"^(?P<gradient>base)$",
    r"^(?P<attack>PGD|DDN)_(?P<epsilon>\d+\.\d+)$",
    # What the released predict.py itself writes counts in 1/256.
    r"^(?P<attack>PGD|DDN)_(?P<epsilon_in_256ths>\d+(?:\.\d+)?)"
    r"(?:_(?P<gradient>base)|_noise_[\d.]+_mtest_(?P<num_noise_vec>\d+))$",
)
_OBJECTIVE = rf"({'|'.join(_FOLDERS)})(?:_(?:deferred)?\d[^/]*)?"
# A folder of Consistency has folders of the trainings that it was added to: the outer one counts.
_OBJECTIVES = re.compile(rf"(?:^|/){_OBJECTIVE}(?:/{_OBJECTIVE})*(?=/)", re.IGNORECASE)
_CORRUPTED = re.compile(r"(?:^|/)(cifar-?100?|mnist|(?:tiny-)?imagenet)-?c/", re.IGNORECASE)
_CORRUPTIONS = frozenset(
    "brightness canny_edges contrast defocus_blur dotted_line elastic_transform fog frost "
    "gaussian_blur gaussian_noise glass_blur identity impulse_noise jpeg_compression motion_blur "
    "pixelate rotate saturate scale shear shot_noise snow spatter speckle_noise stripe translate "
    "zigzag zoom_blur".split()
)
_HOME = re.compile(r"^(?:[a-z]:)?/(?:.*?/)?(?:home|users)/[^/]+/", re.IGNORECASE)
# The folders that hold logs in the layout of Cohen et al., which names no objective; the last two
# tell what Gaussian training was added to.
_COHENS = re.compile(
    "certify|cohen|data_cohen|replication|finetune_cifar_from_imagenet.*|self_training.*"
)
_ATTACK_PART = re.compile(r"(?:PGD|DDN)_\d.*|num_\d+|base|N_?\d+.*|predictions")


def path_without_attack(path: Path) -> tuple[str, ...]:
    """The parts of a prediction log's path that do not describe its attack: they identify the
    model.
    """
    return tuple(
        part for part in path.parts if not _ATTACK_PART.fullmatch(part.removesuffix(".tsv"))
    )


def unread_folders(path: Path) -> str:
    """The folders of a log that state no hyper-parameter: they tell methods apart whose names are
    unknown.
    """
    return "/".join(
        part
        for part in path_without_attack(path.parent)
        if not any(re.fullmatch(pattern, part) for pattern in _CERTIFICATION_PARTS)
    )


def _corrupted_dataset(path: Path) -> str | None:
    """ "cifar10-c:severity_3/fog" of a log below cifar10c/: one set of images per corruption."""
    found, names = _CORRUPTED.search(path.as_posix()), path.as_posix().removesuffix(".tsv")
    parts = names.split("/")
    known = [part for part in parts if part in _CORRUPTIONS or part.startswith("severity_")]
    words = "/".join(known or parts[-1:])
    return found and f"{found[1].lower().replace('cifar-', 'cifar')}-c:{words}"


def _objective_of(path: Path) -> str | None:
    """The objective that a folder names. A clone that is called after its own method also holds
    logs of others: above its data/ the name says what its folder "ours" is.
    """
    place = path.as_posix() if "ours" in path.parts else path.as_posix().rpartition("/data/")[2]
    names = [name for name, _ in _OBJECTIVES.findall(place)]
    return _FOLDERS[names[-1].lower()] if names else None


def _training_facts(path: Path, facts: Facts) -> dict[str, Value]:
    """Objective and name of the training: by a folder's name, or by the layout of the logs of
    Salman et al. and Cohen et al.; none if they do not tell it.
    """
    attack, noise, objective = facts.get("attack"), facts.get("noise"), _objective_of(path)
    is_vanilla = attack is not None and "without_noise" in path.parts
    if is_vanilla or None not in (attack, noise):
        objective = objective if objective not in (None, "Gaussian") else "SmoothAdv"
    elif facts.values.keys() >= {"dataset", "arch", "noise", "split"}:
        # Cohen et al.: cifar10/resnet110/noise_0.25/test/sigma_0.25, and nothing between these. A
        # folder of another name above them may be that of any method.
        is_below = all(map(_COHENS.fullmatch, path.parts[-6:-5]))
        is_cohens = is_below and unread_folders(Path(*path.parts[-5:])) == facts.get("split")
        objective = objective or ("Gaussian" if is_cohens else None)
    if objective is None:
        return {}
    folders = {"pre-training": "finetune_cifar_from_imagenet", "self-training": "self_training"}
    extras = {
        extra: any(part.startswith(start) for part in path.parts)
        for extra, start in folders.items()
    }
    name = _training_name(objective, attack, noise, is_vanilla, extras)
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
