"""--attack and its further options, in training and in evaluation, and the attacks that these
options describe.
"""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.attacks.estimators import ESTIMATORS, GradientEstimator, PlugIn, Stein, plug_in
from smoothadv.base.settings import (
    Checked,
    Setting,
    options_of,
    perturbation_size_in_256ths,
    positive_float,
    setting,
)
from smoothadv.cli.options.components import (
    add_components,
    add_settings,
    compose_chosen,
    given_settings,
    group_of,
)
from smoothadv.cli.runner import Parser

_BASE = "base"
_GROUP = "attack"


@dataclass(frozen=True, kw_only=True)
class GradientOptions(Checked):
    """How an attack computes gradients; the options of training."""

    beta: float | None = setting(
        None,
        parse=positive_float,
        help="inverse temperature of the softmax that the plug-in gradient averages (default: 1)",
    )
    no_grad_attack: bool = setting(
        False, help="gradients from probabilities, without backpropagation: stein"
    )
    hard_no_grad_attack: bool = setting(
        False, help="gradients from the base classifier's decisions only: hard-stein"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationGradientOptions(GradientOptions):
    """How an attack computes gradients; the options of evaluations."""

    gradient: str | None = setting(
        None,
        choices=(*ESTIMATORS, _BASE),
        help="how gradients are computed (default: plug-in); base: as --base-attack "
        "(docs/attacks.md)",
    )


def unchanged(setting: Setting) -> Setting:
    """The setting as its attack declares it."""
    return setting


def add_attack(
    parser: Parser,
    adapt: Callable[[Setting], Setting],
    default: str | None = None,
    gradients: type[GradientOptions] = GradientOptions,
) -> argparse._ArgumentGroup:
    """--attack, the settings of all attacks, each changed by ``adapt``, and how gradients are
    computed, in a group that further options join.
    """
    group = group_of(parser, _GROUP)
    names = f"one of {', '.join(ATTACKS)} (default: {default or 'none'})"
    add_components(group, "--attack", ATTACKS, names, default, adapt)
    add_settings(group, options_of(gradients))
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
    chosen = EvaluationGradientOptions(**given_settings(EvaluationGradientOptions, options))
    named, without = chosen.gradient, None
    if chosen.hard_no_grad_attack:
        without = "--hard-no-grad-attack"
    if chosen.no_grad_attack:
        without = "--no-grad-attack"
    if named is not None and without:
        parser.error(f"{without} and --gradient say the same thing: leave one of them out")
    if not without and named in (None, "plug-in", _BASE):
        return plug_in if chosen.beta in (None, 1) else PlugIn(chosen.beta)
    if chosen.beta is not None:
        other = without or f"--gradient {named}"
        parser.error(
            f"--beta is not read by {other}, but by the plug-in gradient: leave one of them out"
        )
    if named is not None:
        return ESTIMATORS[named][0](noise_sd)
    if noise_sd == 0:
        reason = "--base-attack has none" if "--base-attack" in options else "--noise is 0"
        parser.error(
            f"{without} estimates gradients from noise, and {reason}: leave one of them out"
        )
    return Stein(noise_sd, hard=chosen.hard_no_grad_attack)


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


def attacked_fields(parser: Parser, options: argparse.Namespace, **given: Any) -> dict[str, Any]:
    """The fields of an ``AttackedSpec`` that are not its options: the attack, with the fields
    ``given``, and whether it is on the base classifier.

    A usage error where options contradict each other.
    """
    gradient = getattr(options, "--gradient", None)
    if "--base-attack" in options and gradient is not None:
        parser.error("--base-attack and --gradient say the same thing: leave one of them out")
    is_on_base = "--base-attack" in options or gradient == _BASE
    noise_sd = 0.0 if is_on_base else options.sigma
    attack = compose_attack(parser, options, noise_sd, **given)
    return {"attack": attack, "base_attack": is_on_base}
