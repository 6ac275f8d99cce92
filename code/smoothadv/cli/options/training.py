"""Options of the training commands, and the specification that they describe."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.base.registry import Registry
from smoothadv.base.settings import Setting, options_of
from smoothadv.cli.options.attack import (
    GradientOptions,
    add_attack,
    compose_attack,
    given_attack_flags,
)
from smoothadv.cli.options.components import (
    add_options,
    add_settings,
    compose_chosen,
    given_settings,
)
from smoothadv.cli.options.recipes import RELEASED, recipe_names, with_recipe
from smoothadv.cli.options.shared import say_what_is_certified
from smoothadv.cli.runner import Parser
from smoothadv.objectives import OBJECTIVES, DataPolicy, Objective, attack_field
from smoothadv.objectives.denoising import DENOISING
from smoothadv.training.execution import Execution
from smoothadv.training.spec import EvaluationSchedule, ScheduleSpec, TrainSpec

_RECIPE = {
    "--recipe NAME": (str, f"take options from a recipe: {', '.join(recipe_names())}, or a file"),
}
_RELEASED_BEHAVIOUR = {
    "--released-behaviour": (
        None,
        "deviate from the paper as the released SmoothAdv code does, with --epsilon in 1/256 "
        "(docs/training.md)",
    ),
}
_OVERRIDDEN = "recipes (options on the command line override them)"
_CLASSIFIER = (
    "the frozen classifier behind the denoiser, a checkpoint or a network by name, like "
    "timm:resnet18: stability needs it, with mse it is for the log only"
)
_OF_CLASSIFIERS = ("pretrained", "finetune_quantized", "teacher_draws")
_WITH_ATTACK = ("--warmup", "--warmup-from-first-epoch", "--base-attack")
"""Settings of objectives that do without an attack, and that only an attack reads."""


def objectives_with(default: str) -> Registry[type[Objective]]:
    """The objectives of a command with this default: those of denoisers, or of classifiers."""
    return DENOISING if default in DENOISING else OBJECTIVES


def add_training(
    parser: Parser, objective: str, adapt: Callable[[Setting], Setting], arguments: Sequence[str]
) -> None:
    """The options of training, with this default ``objective``; ``adapt`` changes the settings of
    attacks.

    The help shows those of the objective and of the attack that ``arguments`` name. The parser
    knows the others, too, so that a message can say who reads them.
    """
    recipes, group = (parser.add_argument_group(name) for name in (_OVERRIDDEN, "objective"))
    objectives = objectives_with(objective)
    chosen = objectives.get(_value_of("--objective", arguments), objectives[objective])
    names = (
        f"one of {', '.join(objectives)} (default: {objective}); --objective NAME --help shows its "
        "options"
    )
    parser.set_defaults(default_objective=objective, attack=None, released_behaviour=False)
    add_options(group, {"--objective NAME": (objectives.require, names)})
    for component in (chosen, *objectives.values()):
        add_settings(group, options_of(component))
    add_options(recipes, _RECIPE)
    if objectives is OBJECTIVES:
        add_options(recipes, _RELEASED_BEHAVIOUR)
        add_attack(parser, adapt)
    add_settings(parser, _spec_settings(objectives is DENOISING))
    attack = ATTACKS.get(_value_of("--attack", arguments), GradientAttack)
    hidden = _flags(*objectives.values()) - _flags(chosen)
    if attack_field(chosen) is None:
        hidden |= _flags(*ATTACKS.values(), GradientOptions) | {"--attack", "--released-behaviour"}
    else:
        hidden |= _flags(*ATTACKS.values()) - _flags(attack)
    if chosen.TEACHER not in ("logits", "votes"):
        hidden |= {"--teacher", "--teacher-draws"}
    for action in parser._actions:
        if hidden & {*action.option_strings}:
            action.help = argparse.SUPPRESS


def _flags(*components: type) -> set[str]:
    """The flags of the options of components."""
    return {one.flag for component in components for one in options_of(component)}


def _value_of(flag: str, arguments: Sequence[str]) -> str:
    """The last value of an option in the words of a command line; "" without one."""
    values = [word.partition("=")[2] for word in arguments if word.startswith(f"{flag}=")]
    pairs = zip(arguments, arguments[1:])
    values += [value for word, value in pairs if word == flag]
    return values[-1] if values else ""


def _spec_settings(denoises: bool) -> list[Setting]:
    """The settings of a training of denoisers, or of classifiers, besides its objective."""
    own = options_of(TrainSpec)
    if denoises:
        own = [_of_denoiser(one) for one in own if one.field not in _OF_CLASSIFIERS]
    policy = [] if denoises else options_of(DataPolicy)
    execution = [*options_of(Execution), *options_of(EvaluationSchedule)]
    settings = [*options_of(ScheduleSpec), *own, *policy, *execution]
    return sorted(settings, key=lambda one: one.group == "running")


def _of_denoiser(one: Setting) -> Setting:
    """A setting of a training, as it is of a denoiser."""
    if one.field == "model":
        names = f"one of {', '.join(DENOISERS)}"
        return dataclasses.replace(one, parse=DENOISERS.require, help=names)
    if one.field == "teacher":
        return dataclasses.replace(one, flags=("--classifier",), help=_CLASSIFIER)
    return one


def with_recipes(parser: Parser, options: argparse.Namespace) -> argparse.Namespace:
    """The options with those of the recipes added; --recipe overrides --released-behaviour, the
    command line both.
    """
    if options.recipe == RELEASED:
        parser.error(
            f"--recipe {RELEASED}: write --{RELEASED}, which also counts --epsilon in 1/256"
        )
    names = [] if options.recipe is None else [options.recipe]
    if options.released_behaviour:
        names.append(RELEASED)
    for name in names:
        options = with_recipe(parser, options, name, _readable)
    if options.objective is None:
        options.objective = options.default_objective
    return options


def _readable(options: argparse.Namespace) -> set[str]:
    """The flags of the settings that the training, its objective and its attack read."""
    objectives = objectives_with(options.default_objective)
    objective = objectives[options.objective or options.default_objective]
    settings = [*_spec_settings(objectives is DENOISING), *options_of(objective)]
    field = attack_field(objective)
    if field is not None and options.attack:
        settings += [*options_of(ATTACKS[options.attack]), *options_of(GradientOptions)]
    flags = {one.flag for one in settings}
    if field is not None and not (options.attack or _is_required(field)):
        flags -= {*_WITH_ATTACK}
    return flags


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def spec_of(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> TrainSpec:
    """The specification that the options, with recipes added, describe; a usage error where they
    contradict each other.
    """
    objective = _objective(parser, options)
    given = given_settings(TrainSpec, options)
    if objective.DENOISES:
        given["teacher"] = getattr(options, "--classifier", None)
    else:
        given["policy"] = _policy(parser, options, objective)
    spec = TrainSpec(
        objective=objective,
        schedule=ScheduleSpec(**given_settings(ScheduleSpec, options)),
        execution=Execution(**given_settings(Execution, options)),
        tests=EvaluationSchedule(**given_settings(EvaluationSchedule, options)),
        command=tuple(command),
        arguments={_plain(name): value for name, value in vars(options).items()},
        **given,
    )
    say_what_is_certified(spec.dataset)
    return spec


def _plain(name: str) -> str:
    """The name of an option without dashes."""
    return name.removeprefix("--").replace("-", "_")


def _policy(parser: Parser, options: argparse.Namespace, objective: Objective) -> DataPolicy | None:
    """The data policy on the command line, completed by the objective's own; None where neither is
    given.
    """
    given = given_settings(DataPolicy, options)
    if not given:
        return None
    if objective.policy is not None:
        return dataclasses.replace(objective.policy, **given)
    if "from_epoch" not in given:
        parser.error(
            "--drop-below and --resample-every count from an epoch: add --choose-from-epoch E"
        )
    return DataPolicy(**given)


def _objective(parser: Parser, options: argparse.Namespace) -> Objective:
    """The objective that the options describe; a usage error where something is missing or
    contradictory.
    """
    objectives = objectives_with(options.default_objective)
    field = attack_field(objectives[options.objective])
    given: dict[str, Any] = {}
    if field is not None and (options.attack is not None or _is_required(field)):
        if "--noise" not in options:
            parser.error(
                "--noise is required: the noise's standard deviation on images in [0, 1], like 0.25"
            )
        noise_sd = 0.0 if "--base-attack" in options else getattr(options, "--noise")
        given[field.name] = compose_attack(parser, options, noise_sd)
    elif objectives is OBJECTIVES:
        _refuse_attack(parser, options, "leave it out" if field is None else "add --attack NAME")
    also = ATTACKS.values() if given else ()
    return compose_chosen(parser, objectives, options, "--objective", also=also, **given)


def _refuse_attack(parser: Parser, options: argparse.Namespace, advice: str) -> None:
    """A usage error if an option of an attack is given, where there is none."""
    if flags := given_attack_flags(parser, options):
        parser.error(
            f"{flags[0]} is not read by --objective {options.objective}, which makes no attack: "
            f"{advice}, or take --objective smoothadv"
        )
    is_optional = attack_field(OBJECTIVES[options.objective]) is not None
    if is_optional and (flags := [flag for flag in _WITH_ATTACK if flag in options]):
        parser.error(
            f"{flags[0]} is of an attack, and there is none: add --attack NAME, or leave it out"
        )
