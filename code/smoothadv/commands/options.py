"""Options that several commands share: dataset, examples, running, attack."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from smoothadv.architectures import INPUT_LAYERS
from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.attacks.estimators import ESTIMATORS, GradientEstimator, Stein, plug_in
from smoothadv.commands.components import add_settings, compose, name_in, name_that, refuse_foreign_settings
from smoothadv.commands.runner import Parser
from smoothadv.datasets import DATASETS, SPLITS, check_dataset_name
from smoothadv.settings import Setting, non_negative_int, perturbation_size_in_256ths, positive_int, settings_of


def add_dataset(parser: Parser) -> None:
    """The positional DATASET."""
    names = ", ".join(
        f"{name}:PATH" if source.takes_location else name
        for name, source in ((name, DATASETS[name]) for name in DATASETS)
    )
    parser.add_argument("dataset", metavar="DATASET", type=name_that(check_dataset_name), help=f"one of {names}")


def add_running(parser: Parser, existing: str = "refuse") -> None:
    """Where data lies, where to compute, the seed and what to do with output that exists (by default ``existing``)."""
    group = parser.add_argument_group("running")
    group.add_argument(
        "--data-dir", metavar="DIR", help="folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)"
    )
    group.add_argument(
        "--device", type=_device, default=None, help="torch device like cpu or cuda:1 (default: cuda if there is one)"
    )
    group.add_argument("--seed", type=non_negative_int, default=0, help="seed of all randomness (default: 0)")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        default=existing,
        help="continue what an earlier run of the same command left; start anew if there is nothing"
        + (" (the default)" if existing == "resume" else ""),
    )
    choice.add_argument(
        "--overwrite",
        dest="existing",
        action="store_const",
        const="overwrite",
        help="replace the output of an earlier run",
    )


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.Generator(device=device)  # a device without random numbers cannot smooth
        torch.zeros((), dtype=torch.float64, device=device)  # nor can one, like mps, without float64 keep count
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no device that can be used here: {str(error).splitlines()[0]}"
        ) from None
    return device


def default_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The device as a reader of a manifest knows it: a GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def add_input_layer(parser: argparse._ActionsContainer, default: str | None, help: str) -> None:
    """--input-layer, one of the registered input layers."""
    parser.add_argument("--input-layer", choices=list(INPUT_LAYERS), default=default, help=help)


def add_examples(parser: Parser) -> None:
    """Which images to visit."""
    group = parser.add_argument_group("images")
    group.add_argument("--split", choices=SPLITS, default="test", help="images to use (default: test)")
    group.add_argument(
        "--skip", type=positive_int, default=1, metavar="K", help="take every K-th image (default: 1, all)"
    )
    group.add_argument(
        "--max", type=_maximum, default=None, metavar="M", help="stop after M images; -1, the default, takes all"
    )


def _maximum(text: str) -> int | None:
    return None if text == "-1" else positive_int(text)


_NO_GRADIENT = {
    "--no-grad-attack": "estimate gradients without gradients (SmoothAdv, appendix B.1)",
    "--hard-no-grad-attack": "as --no-grad-attack, from the base classifier's decisions alone",
}


def add_attack(
    parser: Parser,
    adapt: Callable[[Setting], Setting] = lambda setting: setting,
    default: str | None = None,
    same_as: Mapping[str, str] = MappingProxyType({}),
) -> argparse._ArgumentGroup:
    """--attack, where its gradients come from, and the settings of each attack, as ``adapt`` makes them.

    ``same_as`` has other help texts for flags that a command knows by another name too.
    """
    group = parser.add_argument_group("attack")
    names = ", ".join(ATTACKS)
    group.add_argument(
        "--attack",
        type=name_in(ATTACKS),
        metavar="NAME",
        default=default,
        help=f"one of {names} (default: {default or 'none'})",
    )
    add_settings(group, map(adapt, _attack_settings()))
    for flag, what in _NO_GRADIENT.items():
        group.add_argument(
            flag, dest=flag, action="store_true", default=argparse.SUPPRESS, help=same_as.get(flag, what)
        )
    return group


def _attack_settings() -> list[Setting]:
    return [setting for name in ATTACKS for setting in settings_of(ATTACKS[name])]


def in_256ths(setting: Setting) -> Setting:
    """The setting with an epsilon that is read as the released code does: ``64`` is 64/256."""
    if setting.flag != "--epsilon":
        return setting
    return dataclasses.replace(setting, parse=perturbation_size_in_256ths, help="attack's l2 norm in 1/256, like 64")


def compose_attack(parser: Parser, options: argparse.Namespace, noise_sd: float) -> GradientAttack:
    """The attack that the options describe; a usage error where something is missing or contradictory."""
    if options.attack is None:
        parser.error(
            f"an attack is needed: --attack NAME --epsilon E --num-steps T, where NAME is {', '.join(ATTACKS)}"
        )
    chosen, name = ATTACKS[options.attack], f"--attack {options.attack}"
    refuse_foreign_settings(parser, options, [ATTACKS[other] for other in ATTACKS], [chosen], name)
    return compose(parser, chosen, options, name, estimator=_estimator(parser, options, noise_sd))


def _estimator(parser: Parser, options: argparse.Namespace, noise_sd: float) -> GradientEstimator:
    given = [flag for flag in _NO_GRADIENT if flag in options]
    named = getattr(options, "gradient", None)
    if named is not None and given:
        parser.error(f"{given[0]} and --gradient say the same thing: leave one of them out")
    if not given:
        return ESTIMATORS[named].make(noise_sd) if named in ESTIMATORS else plug_in
    if noise_sd == 0:
        is_base = getattr(options, "base_attack", False) or "--base-attack" in options
        reason = "--base-attack has none" if is_base else "--noise is 0"
        parser.error(f"{given[0]} estimates gradients from noise, and {reason}: leave one of them out")
    return Stein(noise_sd, hard="--hard-no-grad-attack" in given)


def given_attack_flags(options: argparse.Namespace) -> list[str]:
    """The attack options on the command line: what a command that makes no attack must refuse."""
    flags = ["--attack"] * (options.attack is not None)
    return flags + [
        flag for flag in (*(setting.flag for setting in _attack_settings()), *_NO_GRADIENT) if flag in options
    ]
