"""--attack and its further options, in training and in evaluation, and the attacks that these
options describe.
"""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.attacks.estimators import ESTIMATORS, PlugIn, plug_in
from smoothadv.base.errors import UsageError
from smoothadv.base.settings import (
    Checked,
    Setting,
    options_of,
    perturbation_size_in_256ths,
    positive_float,
    refuse_any,
    setting,
)
from smoothadv.cli.runner import (
    Options,
    Parser,
    add_settings,
    compose,
    group_of,
    refuse_foreign_settings,
)

_BASE = "base"
_GROUP = "attack"


@dataclass(frozen=True, kw_only=True)
class AttackOptions(Checked):
    """Which attack, and how it computes gradients; the options of training."""

    attack: str | None = setting(None, choices=ATTACKS, metavar="NAME", help="how to attack")
    beta: float | None = setting(
        None,
        parse=positive_float,
        help="inverse temperature of the softmax that the plug-in gradient averages (default: 1)",
    )
    gradient: str | None = setting(
        None,
        choices=ESTIMATORS,
        help="how gradients are computed (default: plug-in; docs/attacks.md)",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationAttackOptions(AttackOptions):
    """Which attack, and how it computes gradients; the options of evaluations."""

    gradient: str | None = setting(
        None,
        choices=ChainMap[str, Any]({_BASE: None}, ESTIMATORS),
        help="how gradients are computed (default: plug-in; docs/attacks.md); base: of the base "
        "classifier, without noise",
    )


def add_attack(
    parser: Parser,
    kind: type[AttackOptions],
    adapt: Callable[[Setting], Setting] = lambda one: one,
) -> None:
    """The options of the ``kind`` and the settings of all attacks, each changed by ``adapt``, in a
    group that further options join.
    """
    chooser, *gradients = options_of(kind)
    of_attacks = [one for attack in ATTACKS.values() for one in options_of(attack)]
    add_settings(group_of(parser, _GROUP), map(adapt, [chooser, *of_attacks, *gradients]))


def in_256ths(setting: Setting) -> Setting:
    """The setting; an epsilon is read in 1/256, as in the released code: ``64`` is 64/256."""
    if setting.flag != "--epsilon":
        return setting
    return replace(
        setting, parse=perturbation_size_in_256ths, help="attack's l2 norm in 1/256, like 64"
    )


def compose_attack(
    options: Options, noise_sd: float | None, default: str | None = None, **given: Any
) -> GradientAttack:
    """The attack that the options and the fields ``given`` describe; a usage error where they
    contradict each other.
    """
    name = options.get("--attack", default)
    if name is None:
        raise UsageError(
            "an attack is needed: --attack NAME --epsilon E --num-steps T, where NAME is "
            f"{', '.join(ATTACKS)}"
        )
    refuse_foreign_settings(options, ATTACKS, "--attack", name)
    beta = options.get("--beta")
    gradient = options.get("--gradient", "plug-in")
    way = f"--gradient {gradient}"
    estimator = plug_in
    if gradient not in ("plug-in", _BASE):
        faults = {
            f"--beta is not read by {way}, but by the plug-in gradient: leave one of them out": (
                beta is not None
            ),
            f"{way} estimates gradients from noise, and there is none: leave it out, or --noise 0, "
            "or --base-attack": noise_sd == 0,
        }
        refuse_any(faults, UsageError)
        if noise_sd is None:
            raise UsageError(f"{way} estimates gradients from noise: give --noise, like 0.25")
        estimator = ESTIMATORS[gradient][0](noise_sd)
    elif beta not in (None, 1):
        estimator = PlugIn(beta)
    return compose(ATTACKS[name], options, f"--attack {name}", estimator=estimator, **given)


def flags_of(*components: type) -> set[str]:
    """The flags of the options of components."""
    return {one.flag for component in components for one in options_of(component)}


def attacked_fields(options: Options, default: str | None = None, **given: Any) -> dict[str, Any]:
    """The fields of an ``AttackedSpec`` that are not its options: the attack, with the fields
    ``given``, and whether it is on the base classifier.

    A usage error where options contradict each other.
    """
    is_on_base = options.get("--gradient") == _BASE
    attack = compose_attack(options, 0.0 if is_on_base else options["sigma"], default, **given)
    return {"attack": attack, "base_attack": is_on_base}
