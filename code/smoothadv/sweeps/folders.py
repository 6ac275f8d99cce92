"""What a sweep's folders are called: as the released ones are, so that whoever reads logs knows what made them.

``PGD_2steps/eps_0.251/cifar10/cifar_resnet110/noise_0.25``, ``PGD_2steps_multiNoiseSamples/8-multitrain/eps_0.25/...``
for m = 8, ``PGD_2steps_baseAttackExp/without_noise/...`` for Vanilla PGD, ``finetune_cifar_from_imagenet32/...``,
``self_training/PGD_2steps/weight_0.5/...``. Sizes have a decimal point: the released whole numbers count in 1/256.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smoothadv.errors import UserError

# What the names below say of a training in words of their own.
_NAMED = {"dataset", "arch", "noise", "attack", "epsilon", "num-steps", "num-noise-vec", "base-attack"}
_NAMED |= {"pretrained-model", "use-unlabelled", "unlabelled-weight"}


def written(value: Any) -> str:
    """A value as it stands in the name of a folder; fractions as decimals of four digits."""
    text = str(value)
    numerator, slash, denominator = text.partition("/")
    try:
        number = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        return re.sub(r"[^\w.+-]+", "_", text).strip("_") or "_"
    short = f"{number:.4g}"
    return f"{number:.4f}".rstrip("0").rstrip(".") if "e" in short and abs(number) < 1e16 else short


def decimal(value: Any) -> str:
    """A size or a standard deviation as the released folders write it: two decimals, more where they are needed."""
    text = written(value)
    whole, point, rest = text.partition(".")
    return f"{whole}.{rest.ljust(2, '0')}" if whole.isdigit() and (not point or rest.isdigit()) else text


def filled_in(options: Mapping[str, Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``options`` with every "{name}" in a text replaced by what ``values`` have; UserError where they do not.

    Sizes are written as the folders have them.
    """

    def replaced(text: Any) -> Any:
        if not isinstance(text, str) or "{" not in text:
            return text
        unknown = [name for name in re.findall(r"\{([^{}]*)\}", text) if name not in values]
        if unknown:
            raise UserError(f"{source}: '{text}' asks for {{{unknown[0]}}}; known: {', '.join(values)}")
        return re.sub(r"\{([^{}]*)\}", lambda match: _part(match[1], values[match[1]]), text)

    return {
        key: [replaced(single) for single in value] if isinstance(value, list) else replaced(value)
        for key, value in options.items()
    }


def _part(name: str, value: Any) -> str:
    return decimal(value) if name in ("noise", "epsilon") else written(value)


def model_folder(options: Mapping[str, Any], swept: Iterable[str]) -> Path:
    """The folder of a model within its sweep, from the ``options`` of its training.

    Whatever is ``swept`` and has no place in the released names gets a folder of its own, like ``seed_1``.
    """
    attack, steps = options.get("attack"), options.get("num-steps", 1)
    copies, noise = options.get("num-noise-vec", 1), decimal(options.get("noise", 0))
    is_vanilla = attack and (options.get("base-attack") or float(noise) == 0)
    parts: list[str] = []
    if "pretrained-model" in options:
        parts.append("finetune_cifar_from_imagenet32")
    if "use-unlabelled" in options:
        parts.append("self_training")
    if attack:
        name = f"{written(attack)}_{written(steps)}step{'' if str(steps) == '1' else 's'}"
        several = str(copies) != "1"
        parts.append(name + ("_baseAttackExp" if is_vanilla else "_multiNoiseSamples" if several else ""))
        parts += ["without_noise"] if is_vanilla else []
        parts += [f"{written(copies)}-multitrain"] if several else []
    else:
        parts.append("gaussian")
        parts += [f"{written(copies)}-multitrain"] if str(copies) != "1" else []
    if "use-unlabelled" in options:
        weight = written(options.get("unlabelled-weight", 1.0))
        parts.append(f"weight_{weight}.0" if weight.isdigit() else f"weight_{weight}")
    if "epsilon" in options:
        parts.append(f"eps_{decimal(options['epsilon'])}")
    parts += [f"{key}_{written(options[key])}" for key in swept if key not in _NAMED]
    dataset = str(options["dataset"]).rstrip("/").replace(":", "/").split("/")[-1]
    return Path(*parts, written(dataset), written(options["arch"]), f"noise_{noise}")


def evaluation_name(split: str, sigma: Any, suffix: str) -> Path:
    """Where a smoothed classifier is evaluated, within the model's folder among the logs."""
    return Path(split, f"sigma_{decimal(sigma)}{f'_{written(suffix)}' if suffix else ''}")
