"""Names of a sweep's folders: as in the released code, so that readers of logs know what made them.

``PGD_2steps/eps_0.251/cifar10/cifar_resnet110/noise_0.25``,
``PGD_2steps_multiNoiseSamples/8-multitrain/eps_0.25/...`` for m = 8,
``PGD_2steps_baseAttackExp/without_noise/...`` for Vanilla PGD,
``finetune_cifar_from_imagenet32/...``, ``self_training/PGD_2steps/weight_0.5/...``. Other
objectives have their own name in place of ``gaussian``, or before that of an attack:
``consistency/2-multitrain/...``. An epsilon has a decimal point here; the whole numbers in released
names are in units of 1/256.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError


@dataclass(frozen=True)
class TrainingFacts:
    """What the name of a folder says about a training; ``attack`` is None for a training without an
    attack.

    ``objective`` is its name in OBJECTIVES. ``is_vanilla`` says that the base classifier is
    attacked, without noise. ``weight`` is that of pseudo-labels.
    """

    dataset: str
    arch: str
    objective: str
    noise: float
    copies: int = 1
    attack: str | None = None
    epsilon: float | None = None
    num_steps: int | None = None
    is_vanilla: bool = False
    is_pretrained: bool = False
    weight: float | None = None


NAMED_OPTIONS = {
    "dataset",
    "arch",
    "noise",
    "attack",
    "epsilon",
    "num-steps",
    "num-noise-vec",
    "base-attack",
}
NAMED_OPTIONS |= {"unlabelled-weight", "objective"}
"""The options whose values ``TrainingFacts`` holds."""


def format_value(value: Any) -> str:
    """A value as text in the name of a folder: numbers with four significant digits, without an
    exponent.
    """
    text = str(value)
    if re.fullmatch("[0-9]+", text):
        return text
    numerator, slash, denominator = text.partition("/")
    try:
        number = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        return re.sub(r"[^\w.+-]+", "_", text).strip("_") or "_"
    digits = f"{Decimal(f'{number:.4g}'):f}"
    return digits.removesuffix(".0")


def format_decimal(value: Any) -> str:
    """An epsilon or a standard deviation as the released folders write it: two decimals, or more if
    needed.
    """
    text = format_value(value)
    whole, point, rest = text.partition(".")
    return (
        f"{whole}.{rest.ljust(2, '0')}"
        if whole.isdigit() and (not point or rest.isdigit())
        else text
    )


def fill_placeholders(
    table: Mapping[str, Any], values: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """``table`` with every "{name}" in a text replaced by that value in ``values``; UserError for
    an unknown name.

    Values are written as in the names of folders.
    """

    def formatted(place: re.Match[str]) -> str:
        name = place[1]
        if name not in values:
            raise UserError(
                f"{source}: '{place.string}' asks for {{{name}}}; known: {', '.join(values)}"
            )
        return (
            format_decimal(values[name])
            if name in ("noise", "epsilon")
            else format_value(values[name])
        )

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(replaced, value))
        return re.sub(r"\{([^{}]*)\}", formatted, value) if isinstance(value, str) else value

    return {key: replaced(value) for key, value in table.items()}


def model_folder(trained: TrainingFacts, others: Iterable[tuple[str, Any]] = ()) -> Path:
    """The folder of a model within its sweep.

    ``others`` are further options in which the models of a sweep differ but which the released
    names do not hold: each adds one level of folders, like ``seed_1``.
    """
    parts: list[str] = []
    if trained.is_pretrained:
        parts.append("finetune_cifar_from_imagenet32")
    if trained.weight is not None:
        parts.append("self_training")
    several = trained.copies > 1
    if trained.objective != "smoothadv":
        parts.append(format_value(trained.objective))
    if trained.attack:
        name = f"{trained.attack}_{trained.num_steps}step{'' if trained.num_steps == 1 else 's'}"
        kind = "_baseAttackExp" if trained.is_vanilla else "_multiNoiseSamples" if several else ""
        parts += [name + kind, *["without_noise"] * trained.is_vanilla]
    parts += [f"{trained.copies}-multitrain"] * several
    if trained.weight is not None:
        weight = format_value(trained.weight)
        parts.append(f"weight_{weight}.0" if weight.isdigit() else f"weight_{weight}")
    if trained.attack:
        parts.append(f"eps_{format_decimal(trained.epsilon)}")
    parts += [f"{key}_{format_value(value)}" for key, value in others]
    dataset = trained.dataset.rstrip("/").replace(":", "/").split("/")[-1]
    return Path(
        *parts,
        format_value(dataset),
        format_value(trained.arch),
        f"noise_{format_decimal(trained.noise)}",
    )


def evaluation_name(split: str, sigma: Any, suffix: str) -> Path:
    """The path of an evaluation's logs, without ending, within the model's folder of logs."""
    return Path(
        split, f"sigma_{format_decimal(sigma)}{f'_{format_value(suffix)}' if suffix else ''}"
    )
