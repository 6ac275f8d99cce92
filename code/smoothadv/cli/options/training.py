"""Options of the training commands, and the specification that they describe."""

import argparse
import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any

from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.base.errors import UsageError
from smoothadv.base.registry import Registry
from smoothadv.base.settings import Checked, Setting, options_of, setting
from smoothadv.cli.options.attack import (
    AttackOptions,
    add_attack,
    compose_attack,
    flags_of,
    in_256ths,
)
from smoothadv.cli.options.recipes import (
    DENOISING_RECIPE,
    RELEASED_RECIPE,
    added_by_recipe,
    recipe_names,
)
from smoothadv.cli.runner import (
    Options,
    Parser,
    add_settings,
    compose,
    given_settings,
    group_of,
    values_of,
)
from smoothadv.models.spec import say_what_is_certified
from smoothadv.objectives import OBJECTIVES, DataPolicy, Objective, attack_field
from smoothadv.objectives.denoising import DENOISING
from smoothadv.training.execution import Execution
from smoothadv.training.spec import EvaluationSchedule, ScheduleSpec, TrainSpec

_RECIPES = "recipes (options on the command line override them)"
_CLASSIFIER = (
    "the frozen classifier behind the denoiser, a checkpoint or a network by name, like "
    "timm:resnet18: stability needs it, with mse it is for the log only"
)
_OF_CLASSIFIERS = (
    "pretrained weights finetune_quantized teacher_draws teacher_noise denoiser timestep resize "
    "lora route_labels route_weights"
).split()
_OF_TEACHER = {"--teacher", "--teacher-draws", "--teacher-noise"}
_WITH_ATTACK = {"--warmup", "--warmup-from-first-epoch", "--base-attack"}
"""Settings of objectives that do without an attack, and that only an attack reads."""


OBJECTIVES_OF: dict[str, tuple[Registry[type[Objective]], str]] = {
    "train": (OBJECTIVES, "gaussian"),
    "train_pgd": (OBJECTIVES, "smoothadv"),
    "train_denoiser": (DENOISING, "mse"),
}
"""The objectives of each command, and the one where none is named."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Checked):
    """Named sets of options, and the objective, whose own settings are options, too."""

    recipe: str | None = setting(
        None,
        parse=str,
        metavar="NAME",
        group=_RECIPES,
        help=f"take options from a recipe: {', '.join(recipe_names())}, or a file",
    )
    released_behaviour: bool = setting(
        False,
        group=_RECIPES,
        help="deviate from the paper as the released SmoothAdv code does, with --epsilon in 1/256 "
        "(docs/training.md)",
    )
    objective: str = setting(
        choices=OBJECTIVES,
        metavar="NAME",
        group="objective",
        help="what is minimised; --objective NAME --help shows its options",
    )


def training_parser(name: str, about: str, examples: str, arguments: Sequence[str]) -> Parser:
    """The parser of a training command; --released-behaviour in ``arguments`` changes the unit of
    --epsilon.

    The help shows those of the objective and of the attack that ``arguments`` name. The parser
    knows the others, too, so that a message can say who reads them.
    """
    parser = Parser(prog=name, description=about, epilog=examples)
    objectives, default = OBJECTIVES_OF[name]
    *_, asked = [default, *values_of("--objective", arguments)]
    *_, attack = ["", *values_of("--attack", arguments)]
    chosen = objectives.get(asked, objectives[default])
    recipe, released, objective = options_of(TrainingOptions)
    objective = replace(objective, default=default, choices=objectives, parse=objectives.require)
    is_denoiser = objectives is DENOISING
    add_settings(parser, [recipe, objective] if is_denoiser else [recipe, released, objective])
    for kind in (chosen, *objectives.values()):
        add_settings(group_of(parser, "objective"), options_of(kind))
    if not is_denoiser:
        adapt = in_256ths if "--released-behaviour" in arguments else lambda one: one
        add_attack(parser, AttackOptions, adapt)
    add_settings(parser, _spec_settings(is_denoiser))
    shown = flags_of(chosen)
    if attack_field(chosen) is not None:
        shown |= flags_of(AttackOptions, ATTACKS.get(attack, GradientAttack))
        shown.add("--released-behaviour")
    if chosen.TEACHER in ("logits", "votes", "drops"):
        shown |= _OF_TEACHER
    hidden = flags_of(*objectives.values(), *ATTACKS.values(), AttackOptions) | _OF_TEACHER
    for action in parser._actions:
        if action.dest in (hidden | {"--released-behaviour"}) - shown:
            action.help = argparse.SUPPRESS
    return parser


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
        return replace(one, parse=DENOISERS.require, help=names)
    if one.field == "teacher":
        return replace(one, flags=("--classifier",), help=_CLASSIFIER)
    return one


@contextlib.contextmanager
def training_of(parser: Parser, options: Options, command: Sequence[str]) -> Iterator[TrainSpec]:
    """The specification that the options of a ``command``, like ("smoothadv", "train"), describe
    with those of recipes. Within this context, a usage error says which of the options that it
    names are of a recipe.
    """
    options, recipes = with_recipes(parser, options, command[1])
    try:
        yield spec_of(options, command)
    except UsageError as error:
        own = [
            f"; {flag} is of the recipe {name}"
            for flag, name in recipes.items()
            if re.search(rf"{flag}(?![\w-])", str(error))
        ]
        raise UsageError(f"{error}{''.join(own)}") from error


def with_recipes(parser: Parser, options: Options, command: str) -> tuple[Options, dict[str, str]]:
    """The options with those of the recipes added, and the recipe that each of these is of. The
    command line comes first, then --recipe, then --released-behaviour.
    """
    names = [options["--recipe"]] if "--recipe" in options else []
    if RELEASED_RECIPE in names:
        raise UsageError(
            f"--recipe {RELEASED_RECIPE}: write --{RELEASED_RECIPE}, which also counts --epsilon "
            "in 1/256"
        )
    if "--released-behaviour" in options:
        names.append(RELEASED_RECIPE)
    objectives, name = OBJECTIVES_OF[command]
    if objectives is DENOISING and not {"--recipe", "--optimizer", "--lr"} & options.keys():
        names.append(DENOISING_RECIPE)
    if command == "train" and "--route" in options and not {"--recipe", "--objective"} & {*options}:
        names.append("router")
    default = {"--objective": name}
    general = {one.flag for one in _spec_settings(objectives is DENOISING)}
    general.add("--warmup")  # the paper's recipes have it, and serve Gaussian noise too
    recipes: dict[str, str] = {}
    for name in names:
        added = added_by_recipe(
            parser,
            options,
            name,
            lambda given: _readable({**default, **given}, objectives),
            general,
        )
        recipes |= dict.fromkeys(added, name)
        options = {**added, **options}
    return {**default, **options}, recipes


def _readable(options: Options, objectives: Registry[type[Objective]]) -> set[str]:
    """The flags of the settings that the training, its objective and its attack read."""
    objective = objectives[options["--objective"]]
    field = attack_field(objective)
    flags = {one.flag for one in _spec_settings(objective.DENOISES)}
    flags |= {"--objective"} | flags_of(objective)
    if field is not None and "--attack" in options:
        flags |= flags_of(ATTACKS[options["--attack"]], AttackOptions)
    elif field is not None and field.default is not MISSING:
        flags -= _WITH_ATTACK
    return flags


def spec_of(options: Options, command: Sequence[str]) -> TrainSpec:
    """The specification that the options of a ``command``, like ("smoothadv", "train"), with
    recipes added, describe; a usage error where they contradict each other.
    """
    objective = _objective(options, OBJECTIVES_OF[command[1]][0])
    given = given_settings(TrainSpec, options)
    if objective.DENOISES:
        given["teacher"] = options.get("--classifier")
    elif policy := given_settings(DataPolicy, options):
        if objective.policy is not None:
            given["policy"] = replace(objective.policy, **policy)
        elif "from_epoch" in policy:
            given["policy"] = DataPolicy(**policy)
        else:
            raise UsageError(
                "--drop-below and --resample-every count from an epoch: add --choose-from-epoch E"
            )
    spec = TrainSpec(
        objective=objective,
        schedule=ScheduleSpec(**given_settings(ScheduleSpec, options)),
        execution=Execution(**given_settings(Execution, options)),
        tests=EvaluationSchedule(**given_settings(EvaluationSchedule, options)),
        command=tuple(command),
        arguments={flag.lstrip("-").replace("-", "_"): one for flag, one in options.items()},
        **given,
    )
    say_what_is_certified(spec.dataset)
    return spec


def _objective(options: Options, objectives: Registry[type[Objective]]) -> Objective:
    """The objective that the options describe; a usage error where something is missing or
    contradictory.
    """
    name, kind = options["--objective"], objectives[options["--objective"]]
    field = attack_field(kind)
    given: dict[str, Any] = {}
    if field is not None and ("--attack" in options or field.default is MISSING):
        noise_sd = 0.0 if "--base-attack" in options else options.get("--noise")
        given[field.name] = compose_attack(options, noise_sd)
    unread = flags_of(AttackOptions, *ATTACKS.values(), *objectives.values())
    unread -= _readable(options, objectives)
    if flags := [flag for flag in options if flag in unread]:
        where = "" if given or field is None else " without --attack"
        raise UsageError(
            f"{flags[0]} is not read by --objective {name}{where}: leave it out, or take another "
            "objective or attack"
        )
    return compose(kind, options, f"--objective {name}", **given)
