"""What the commands of a sweep will do: their words are read as the commands themselves read them, but nothing runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.attacks.smoothed import SmoothedAttack
from smoothadv.certification import PROCEDURES
from smoothadv.commands import attack, certify, train, train_pgd
from smoothadv.commands.attacking import attack_settings
from smoothadv.commands.runner import Parser
from smoothadv.commands.training_options import (
    apply_recipes,
    compose_evaluation,
    compose_execution,
    compose_objective,
    compose_schedule,
    refuse_contradictions,
)
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import DatasetDescription
from smoothadv.noise import GaussianNoise, RoundedGaussianNoise
from smoothadv.objectives import Objective
from smoothadv.sweeps.grid import Options, option_words
from smoothadv.training import Evaluation, Execution, Schedule

# Options of certify and attack that a manifest holds under the same name.
_RECORDED = ("dataset", "split", "sigma", "alpha", "seed", "precision")


@dataclass(frozen=True)
class TrainingPlan:
    """What a training command will do.

    ``attack`` is the name of the attack, None without one. ``pretrained_model`` is the checkpoint that it starts from,
    ``pseudo_labels`` the file of pseudo-labelled images, which ``pseudo_weight`` weighs (None: not given). ``recipe``
    has those fields of the recipe in args.json that are known before the training.
    """

    dataset: str
    data_dir: str | None
    arch: str
    attack: str | None
    objective: Objective
    description: DatasetDescription
    schedule: Schedule
    execution: Execution
    evaluation: Evaluation
    pretrained_model: Path | None
    pseudo_labels: Path | None
    pseudo_weight: float | None
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationPlan:
    """What a command certify or attack will do.

    ``skip`` and ``maximum`` (None: no limit) select images of ``split``. ``draws`` votes decide the certificate of an
    image or, after an attack, its prediction; ``may_stop_early`` says that a procedure may take fewer. ``attacks`` has
    one attack per log; certify has none. ``batch`` and ``attack_batch`` are None if the command chooses them itself.
    ``settings`` has, for each log, those settings of its manifest that are known before it is written.
    """

    dataset: str
    data_dir: str | None
    split: str
    skip: int
    maximum: int | None
    precision: str
    draws: int
    may_stop_early: bool
    batch: int | None
    attack_batch: int | None
    attacks: tuple[SmoothedAttack, ...]
    settings: tuple[Mapping[str, Any], ...]

    @property
    def selection(self) -> dict[str, int | None]:
        """The options that select images, by their names."""
        return {"skip": self.skip, "max": self.maximum}


class CommandReader:
    """Reads the words of many commands; what is slow, like making a parser, is done once.

    Errors are usage errors of the command concerned, and name the ``source`` of its words.
    """

    def __init__(self) -> None:
        self._parsers: dict[tuple[str, bool], Parser] = {}
        self._descriptions: dict[str, DatasetDescription] = {}
        self._procedures: dict[str, dict[str, Any]] = {}

    def option_words(self, command: str, options: Options, source: str) -> list[str]:
        """Options of a grid as words of the command."""
        return option_words(options, _flags(self._parser(command, _is_released(options))), source)

    def read_training(self, command: str, words: Sequence[str], options: Options, source: str) -> TrainingPlan:
        """The plan of a training from the words of train or train_pgd, which stand for the grid's ``options``."""
        parser = self._parser(command, _is_released(options))
        with parser.reading(source):
            return self._training(parser, parser.parse_args(words))

    def _training(self, parser: Parser, options: argparse.Namespace) -> TrainingPlan:
        """Composes what the command does, but loads no images."""
        apply_recipes(parser, options)
        objective = compose_objective(parser, options)
        refuse_contradictions(parser, options)
        description = train.with_augmentation(self._described(options), options)
        schedule = compose_schedule(parser, options, description, objective)
        execution = compose_execution(options)
        recipe = train.stated_recipe(options, description, objective, schedule, execution)
        # Without the option, a training that starts from other weights takes their input layer.
        if options.input_layer is not None or options.pretrained_model is None:
            recipe["input_layer"] = options.input_layer or "normalize"
        return TrainingPlan(
            dataset=options.dataset,
            data_dir=options.data_dir,
            arch=options.arch,
            attack=options.attack,
            objective=objective,
            description=description,
            schedule=schedule,
            execution=execution,
            evaluation=compose_evaluation(options),
            pretrained_model=options.pretrained_model,
            pseudo_labels=options.use_unlabelled,
            pseudo_weight=options.unlabelled_weight,
            recipe=recipe,
        )

    def read_certification(self, words: Sequence[str], source: str) -> EvaluationPlan:
        """The plan of a certification from the words of certify."""
        parser = self._parser("certify")
        with parser.reading(source):
            options = parser.parse_args(words)
            certify.refuse_foreign_procedures(parser, options)
            options.N = options.N or PROCEDURES[options.method].default_n
            settings = {**_recorded_settings(options), **self._procedure_settings(parser, options)}
        stops_early = options.method != "exact"
        return _evaluation(options, options.N0 + options.N, [settings], stops_early=stops_early)

    def _procedure_settings(self, parser: Parser, options: argparse.Namespace) -> dict[str, Any]:
        """What a manifest will say of the procedure; the tables of adaptive procedures are computed once."""
        flags = {flag: getattr(options, flag) for flag in vars(options) if flag.startswith("--")}
        key = repr(
            (options.dataset, options.sigma, options.N0, options.N, options.alpha, options.sound, options.method, flags)
        )
        if key not in self._procedures:
            description = self._described(options)
            noise = (RoundedGaussianNoise if options.sound else GaussianNoise)(options.sigma, options.seed)
            distance = noise.distance(math.prod(description.image_shape))
            procedure = certify.compose_procedure(parser, options, description, distance)
            self._procedures[key] = certify.procedure_settings(options, procedure)
        return self._procedures[key]

    def read_attack(self, words: Sequence[str], source: str) -> EvaluationPlan:
        """The plan of an attack from the words of attack."""
        parser = self._parser("attack")
        with parser.reading(source):
            options = parser.parse_args(words)
            attacks = [made for _, made in attack.attacks_planned(parser, options)]
        settings = []
        for made in attacks:
            known = {key: value for key, value in attack_settings(made).items() if key != "attack_batch"}
            if options.attack_batch is not None:
                known["attack_batch"] = options.attack_batch
            settings.append({**_recorded_settings(options), "N": options.N, **known})
        return _evaluation(options, options.N, settings, attacks)

    def _parser(self, command: str, released: bool = False) -> Parser:
        """The parser of a command; the released behaviour changes how a training command reads epsilon."""
        if (command, released) not in self._parsers:
            self._parsers[command, released] = _MAKE_PARSER[command](["--released-behaviour"] * released)
        return self._parsers[command, released]

    def _described(self, options: argparse.Namespace) -> DatasetDescription:
        if options.dataset not in self._descriptions:
            self._descriptions[options.dataset] = describe_dataset(options.dataset, options.data_dir)
        return self._descriptions[options.dataset]


_MAKE_PARSER: dict[str, Callable[[list[str]], Parser]] = {
    "train": train.make_parser,
    "train_pgd": train_pgd.make_parser,
    "certify": lambda words: certify.make_parser(),
    "attack": lambda words: attack.make_parser(),
}


def _is_released(options: Options) -> bool:
    return options.get("released-behaviour") is True


def _flags(parser: Parser) -> dict[str, bool]:
    """The flags of a command, and whether each takes a value."""
    return {
        flag: action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        for flag, action in parser._option_string_actions.items()
    }


def _recorded_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a manifest that the options decide, without those of the procedure or attack."""
    given = {name: getattr(options, name) for name in ("batch", "input_layer") if getattr(options, name) is not None}
    return {**{field: getattr(options, field) for field in _RECORDED}, "compiled": options.compile, **given}


def _evaluation(
    options: argparse.Namespace,
    draws: int,
    settings: Sequence[Mapping[str, Any]],
    attacks: Sequence[SmoothedAttack] = (),
    stops_early: bool = False,
) -> EvaluationPlan:
    return EvaluationPlan(
        dataset=options.dataset,
        data_dir=options.data_dir,
        split=options.split,
        skip=options.skip,
        maximum=options.max,
        precision=options.precision,
        draws=draws,
        may_stop_early=stops_early,
        batch=options.batch,
        attack_batch=getattr(options, "attack_batch", None),
        attacks=tuple(attacks),
        settings=tuple(settings),
    )
