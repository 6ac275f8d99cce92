"""--attack and its further options, in training and in evaluation, and the attacks that these
options describe.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.attacks.estimators import ESTIMATORS, GradientEstimator, PlugIn, Stein, plug_in
from smoothadv.attacks.shared.smoothed_attack import EVERY, KNOWN_TARGETS, TARGET_RULES
from smoothadv.base.settings import (
    Setting,
    batch_size,
    non_negative_int,
    perturbation_size_in_256ths,
    positive_float,
    positive_int,
)
from smoothadv.cli.options.components import add_components, add_options, compose_chosen
from smoothadv.cli.runner import Parser
from smoothadv.evaluation.specs import AttackPlan

BASE = "base"
_GROUP = "attack"
_BETA = (
    "inverse temperature of the softmax that the plug-in gradient averages (SmoothAdv, appendix "
    "B): the larger, the closer to a vote (default: 1, as in the paper)"
)
NO_GRADIENT = {
    "--no-grad-attack": (
        None,
        "estimate gradients from probabilities, without backpropagation (SmoothAdv, section 3.1)",
    ),
    "--hard-no-grad-attack": (
        None,
        "as --no-grad-attack, but from the base classifier's decisions only",
    ),
}
"""The estimators of gradients that training offers."""


def unchanged(setting: Setting) -> Setting:
    """The setting as its attack declares it."""
    return setting


def add_attack(
    parser: Parser, adapt: Callable[[Setting], Setting], default: str | None = None
) -> argparse._ArgumentGroup:
    """--attack and the settings of all attacks, each changed by ``adapt``, in a group that further
    options join.
    """
    group = parser.add_argument_group(_GROUP)
    names = f"one of {', '.join(ATTACKS)} (default: {default or 'none'})"
    add_components(group, "--attack", ATTACKS, names, default, adapt)
    add_options(group, {"--beta B": (positive_float, _BETA)})
    return group


def in_256ths(setting: Setting) -> Setting:
    """The setting; an epsilon is read in 1/256, as in the released code: ``64`` is 64/256."""
    if setting.flag != "--epsilon":
        return setting
    return dataclasses.replace(
        setting, parse=perturbation_size_in_256ths, help="attack's l2 norm in 1/256, like 64"
    )


def compose_attack(
    parser: Parser, options: argparse.Namespace, noise_sd: float, **given: Any
) -> GradientAttack:
    """The attack that the options and the fields ``given`` describe; a usage error where they
    contradict each other.
    """
    if options.attack is None:
        parser.error(
            "an attack is needed: --attack NAME --epsilon E --num-steps T, where NAME is "
            f"{', '.join(ATTACKS)}"
        )
    estimator = _estimator(parser, options, noise_sd)
    return compose_chosen(parser, ATTACKS, options, "--attack", estimator=estimator, **given)


def _estimator(parser: Parser, options: argparse.Namespace, noise_sd: float) -> GradientEstimator:
    given = [flag for flag in NO_GRADIENT if getattr(options, flag[2:].replace("-", "_"))]
    named: Any = getattr(options, "gradient", None)
    if named is not None and given:
        parser.error(f"{given[0]} and --gradient say the same thing: leave one of them out")
    if not given and named in (None, "plug-in", BASE):
        return plug_in if options.beta in (None, 1) else PlugIn(options.beta)
    if options.beta is not None:
        other = given[0] if given else f"--gradient {named}"
        parser.error(
            f"--beta is not read by {other}, but by the plug-in gradient: leave one of them out"
        )
    if not given:
        return ESTIMATORS[named][0](noise_sd)
    if noise_sd == 0:
        is_base = getattr(options, "base_attack", False) or "--base-attack" in options
        reason = "--base-attack has none" if is_base else "--noise is 0"
        parser.error(
            f"{given[0]} estimates gradients from noise, and {reason}: leave one of them out"
        )
    return Stein(noise_sd, hard="--hard-no-grad-attack" in given)


def given_attack_flags(parser: Parser, options: argparse.Namespace) -> list[str]:
    """The options of an attack that are on the command line: a command that makes no attack must
    refuse them.
    """
    (group,) = (group for group in parser._action_groups if group.title == _GROUP)
    actions = group._group_actions
    return [
        one.option_strings[0]
        for one in actions
        if getattr(options, one.dest, one.default) != one.default
    ]


def _target(text: str) -> int | str:
    if text.isascii() and text.isdigit():
        return non_negative_int(text)
    if text not in KNOWN_TARGETS:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no target: write a class number, {', '.join(TARGET_RULES)} or {EVERY}"
        )
    return text


_EVALUATION = {
    "--restarts R": (
        positive_int,
        "number of runs of the attack, all but the first from random points; the strongest counts "
        "(default: 1)",
    ),
    "--target CLASS": (
        _target,
        f"class at which the attack aims: a number, {', '.join(TARGET_RULES)}, or {EVERY} (each in "
        "turn; the strongest counts); images of that class are not attacked (default: any class "
        "but the label)",
    ),
    "--attack-batch B": (
        batch_size,
        "noisy images per forward and backward pass of the attack (default: on a CPU 16, or M if "
        "that is more; by free memory on an accelerator); halved when memory runs out",
    ),
}


def add_evaluation_attack(
    parser: Parser,
    adapt: Callable[[Setting], Setting] = unchanged,
    default: str | None = None,
    default_draws: int = 1,
) -> None:
    """--attack and its settings, and the further options of an attack on a smoothed classifier."""
    group = add_attack(parser, adapt, default)
    kinds = {name: what for name, (_, what) in ESTIMATORS.items()}
    kinds[BASE] = "of the base classifier, without noise"
    text = "; ".join(f"{name}: {what}" for name, what in kinds.items())
    draws = (
        f"noise draws that the attack averages over (default: {default_draws}; paper: up to 512)"
    )
    add_options(
        group,
        {
            "--num-noise-vec M": (positive_int, draws),
            "--gradient": (list(kinds), f"how gradients are computed (default: plug-in). {text}"),
            "--base-attack": (None, f"the same as --gradient {BASE}"),
            "--no-grad-attack": (None, "the same as --gradient stein"),
            "--hard-no-grad-attack": (None, "the same as --gradient hard-stein"),
            **_EVALUATION,
        },
    )


def attack_plan_of(
    parser: Parser, options: argparse.Namespace, default_draws: int = 1, **given: Any
) -> AttackPlan:
    """The attack that the options and the fields ``given`` describe; a usage error where they
    contradict each other.
    """
    if options.base_attack and options.gradient is not None:
        parser.error("--base-attack and --gradient say the same thing: leave one of them out")
    is_on_base = options.base_attack or options.gradient == BASE
    if is_on_base and options.num_noise_vec is not None:
        flag = "--base-attack" if options.base_attack else f"--gradient {BASE}"
        parser.error(
            f"--num-noise-vec is not read with {flag}, which attacks without noise: leave one out"
        )
    return AttackPlan(
        attack=compose_attack(parser, options, 0.0 if is_on_base else options.sigma, **given),
        num_noise_vec=1 if is_on_base else options.num_noise_vec or default_draws,
        is_on_base=is_on_base,
        restarts=options.restarts or 1,
        target=options.target,
        batch=options.attack_batch,
    )
