"""Names of a sweep's folders: as in the released code, so that readers of logs know what made them.

``PGD_2steps/eps_0.251/cifar10/cifar_resnet110/noise_0.25``,
``PGD_2steps_multiNoiseSamples/8-multitrain/eps_0.25/...`` for m = 8,
``PGD_2steps_baseAttackExp/without_noise/...`` for Vanilla PGD,
``finetune_cifar_from_imagenet32/...``, ``self_training/PGD_2steps/weight_0.5/...``. Other
objectives have their own name in place of ``gaussian``, or before that of an attack:
``consistency/2-multitrain/...``. An epsilon has a decimal point here; the whole numbers in released
names are in units of 1/256.
"""

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.sweep.stages import TrainingExpectation

NAMED_OPTIONS = {
    *("dataset", "arch", "objective", "noise", "attack", "epsilon", "num-steps", "num-noise-vec"),
    *("base-attack", "unlabelled-weight"),
}
"""The options whose values the released names of folders hold."""


def format_value(value: Any) -> str:
    """A value as text in the name of a folder: numbers with four significant digits, without an
    exponent.
    """
    text = str(value)
    if re.fullmatch("[0-9]+", text):
        return text
    try:
        # Not by a Fraction of any text: that of 1e999999999 would fill the memory.
        number = float(Fraction(text) if "/" in text else text) + 0.0  # -0.0 is 0.0
    except (ValueError, ArithmeticError):
        number = math.nan
    if not math.isfinite(number):
        return re.sub(r"[^\w.+-]+", "_", text).strip("_") or "_"
    return f"{Decimal(f'{number:.4g}'):f}".removesuffix(".0")


def format_decimal(value: Any) -> str:
    """An epsilon or a standard deviation as the released folders write it: two decimals, or more if
    needed.
    """
    text = format_value(value)
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return text
    whole, _, decimals = text.partition(".")
    return f"{whole}.{decimals.ljust(2, '0')}"


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
            known = ", ".join(values)
            raise UserError(f"{source}: '{place.string}' asks for {{{name}}}; known: {known}")
        write = format_decimal if name in ("noise", "epsilon") else format_value
        return write(values[name])

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(replaced, value))
        return re.sub(r"\{([^{}]*)\}", formatted, value) if isinstance(value, str) else value

    return {key: replaced(value) for key, value in table.items()}


def model_folder(
    training: TrainingExpectation, arch: str, others: Iterable[tuple[str, Any]] = ()
) -> Path:
    """The folder of a model of the architecture ``arch`` within its sweep.

    ``others`` are further options in which the models of a sweep differ but which the released
    names do not hold: each adds one level of folders, like ``seed_1``.
    """
    objective, attack, copies = training.recipe["objective"], training.attack, training.copies
    parts: list[str] = []
    if "pretrained_sha256" in training.digests:
        parts.append("finetune_cifar_from_imagenet32")
    if training.pseudo_label_weight is not None:
        parts.append("self_training")
    if training.objective != "smoothadv":
        parts.append(format_value(training.objective))
    if attack:
        steps = f"{attack['num_steps']}step{'s' * (attack['num_steps'] != 1)}"
        kind = "_multiNoiseSamples" if copies > 1 else ""
        parts.append(f"{attack['name']}_{steps}{kind}")
        if objective.get("base_attack") or objective["noise_sd"] == 0:
            parts[-1:] = [f"{attack['name']}_{steps}_baseAttackExp", "without_noise"]
    if copies > 1:
        parts.append(f"{copies}-multitrain")
    if training.pseudo_label_weight is not None:
        weight = format_value(training.pseudo_label_weight)
        parts.append(f"weight_{weight}.0" if weight.isdigit() else f"weight_{weight}")
    if attack:
        parts.append(f"eps_{format_decimal(attack['epsilon'])}")
    parts += [f"{key}_{format_value(value)}" for key, value in others]
    dataset = training.recipe["dataset"].rstrip("/").replace(":", "/").split("/")[-1]
    parts += [format_value(dataset), format_value(arch)]
    return Path(*parts, f"noise_{format_decimal(objective['noise_sd'])}")


def evaluation_name(split: str, sigma: Any, suffix: str) -> Path:
    """The path of an evaluation's logs, without ending, within the model's folder of logs."""
    name = f"sigma_{format_decimal(sigma)}"
    return Path(split, f"{name}_{format_value(suffix)}" if suffix else name)
