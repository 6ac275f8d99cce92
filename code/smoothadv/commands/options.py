"""Options that several commands share: dataset, examples, running, attack."""

from __future__ import annotations

import argparse

import torch

from smoothadv.architectures import INPUT_LAYERS
from smoothadv.attacks import ATTACKS, Attack
from smoothadv.attacks.gradients import GradientEstimator, Stein, plug_in
from smoothadv.commands.components import add_settings, compose, name_in, refuse_foreign_settings
from smoothadv.commands.runner import Parser
from smoothadv.datasets import DATASETS, SPLITS
from smoothadv.settings import non_negative_int, perturbation_size, positive_int, settings_of


def add_dataset(parser: Parser) -> None:
    names = ", ".join(
        f"{name}:PATH" if source.takes_location else name
        for name, source in ((name, DATASETS[name]) for name in DATASETS)
    )
    parser.add_argument("dataset", metavar="DATASET", type=name_in(DATASETS, location=True), help=f"one of {names}")


def add_running(parser: Parser) -> None:
    """Where data lies, where to compute, the seed and what to do with output that exists."""
    group = parser.add_argument_group("running")
    group.add_argument(
        "--data-dir", metavar="DIR", help="folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)"
    )
    group.add_argument(
        "--device", type=_device, default=None, help="torch device like cpu or cuda:1 (default: cuda if there is one)"
    )
    group.add_argument("--seed", type=non_negative_int, default=0, help="seed of all randomness (default: 0)")
    existing = group.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        default="refuse",
        help="continue what an earlier run of the same command left; start anew if there is nothing",
    )
    existing.add_argument(
        "--overwrite",
        dest="existing",
        action="store_const",
        const="overwrite",
        help="replace the output of an earlier run",
    )


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no device of this machine: {str(error).splitlines()[0]}"
        ) from None
    return device


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def add_input_layer(parser: Parser, default: str | None, help: str) -> None:
    parser.add_argument("--input-layer", choices=list(INPUT_LAYERS), default=default, help=help)


def add_examples(parser: Parser) -> None:
    """Which images to visit."""
    group = parser.add_argument_group("examples")
    group.add_argument("--split", choices=SPLITS, default="test", help="images to use (default: test)")
    group.add_argument(
        "--skip", type=positive_int, default=1, metavar="K", help="take every K-th image (default: 1, all)"
    )
    group.add_argument(
        "--max", type=_maximum, default=None, metavar="M", help="stop after M images; -1, the default, takes all"
    )


def _maximum(text: str) -> int | None:
    return None if text == "-1" else positive_int(text)


ATTACK_FLAGS = ("--attack", "--epsilon", "--num-steps", "--no-grad-attack", "--hard-no-grad-attack")


def add_attack(parser: Parser) -> None:
    """--attack, what all attacks share, and the settings of each."""
    group = parser.add_argument_group("attack")
    group.add_argument(
        "--attack",
        dest="--attack",
        type=name_in(ATTACKS),
        default=argparse.SUPPRESS,
        metavar="NAME",
        help=f"one of {', '.join(ATTACKS)}",
    )
    group.add_argument(
        "--epsilon",
        dest="--epsilon",
        type=perturbation_size,
        default=argparse.SUPPRESS,
        metavar="E",
        help="l2 norm of the attack on images in [0, 1], like 0.25 or 64/255",
    )
    group.add_argument(
        "--num-steps",
        dest="--num-steps",
        type=positive_int,
        default=argparse.SUPPRESS,
        metavar="T",
        help="steps of the attack (paper: 1 to 10 in training, 20 in evaluation)",
    )
    group.add_argument(
        "--no-grad-attack",
        dest="--no-grad-attack",
        action="store_true",
        default=argparse.SUPPRESS,
        help="estimate gradients without gradients (SmoothAdv, appendix B.1)",
    )
    group.add_argument(
        "--hard-no-grad-attack",
        dest="--hard-no-grad-attack",
        action="store_true",
        default=argparse.SUPPRESS,
        help="as --no-grad-attack, from the base classifier's decisions alone",
    )
    add_settings(group, [setting for name in ATTACKS for setting in settings_of(ATTACKS[name])])


def compose_attack(parser: Parser, options: argparse.Namespace, noise_sd: float) -> Attack:
    """The attack that the options describe; a usage error where something is missing or contradictory."""
    for flag in ("--attack", "--epsilon", "--num-steps"):
        if flag not in options:
            parser.error(f"an attack needs {flag}: --attack {{{','.join(ATTACKS)}}} --epsilon E --num-steps T")
    name = getattr(options, "--attack")
    refuse_foreign_settings(parser, options, [ATTACKS[other] for other in ATTACKS], [ATTACKS[name]], f"--attack {name}")
    return compose(
        parser,
        ATTACKS[name],
        options,
        f"--attack {name}",
        epsilon=getattr(options, "--epsilon"),
        num_steps=getattr(options, "--num-steps"),
        estimator=_estimator(parser, options, noise_sd),
    )


def _estimator(parser: Parser, options: argparse.Namespace, noise_sd: float) -> GradientEstimator:
    hard = "--hard-no-grad-attack" in options
    if not hard and "--no-grad-attack" not in options:
        return plug_in
    if noise_sd == 0:
        parser.error("a gradient-free attack estimates from noise: it needs --noise above 0")
    return Stein(noise_sd, hard)


def given_attack_flags(options: argparse.Namespace) -> list[str]:
    """The attack options on the command line, in the order of the help text."""
    own = [setting.flag for name in ATTACKS for setting in settings_of(ATTACKS[name])]
    return [flag for flag in (*ATTACK_FLAGS, *own) if flag in options]
