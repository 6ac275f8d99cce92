"""What the commands of a sweep will do: their words are read as the commands themselves read them,
but nothing runs.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.cli import attack, certify, train, train_pgd
from smoothadv.cli.options.training import spec_of, with_recipes
from smoothadv.cli.runner import Parser
from smoothadv.datasets import DatasetDescription, describe_dataset
from smoothadv.evaluation.attack import specs_by_log
from smoothadv.evaluation.certify import make_procedure, procedure_record
from smoothadv.evaluation.specs import AttackSpec, CertifySpec, FalsifySpec
from smoothadv.sweep.grid import Options, option_words
from smoothadv.training.schedule import Schedule
from smoothadv.training.spec import TrainSpec


@dataclass(frozen=True)
class TrainingPlan:
    """What a training command will do.

    ``objective`` and ``attack`` are names, the latter None without one. ``recipe`` has the fields
    of args.json's recipe that are known before.
    """

    request: TrainSpec
    objective: str
    attack: str | None
    description: DatasetDescription
    schedule: Schedule
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationPlan:
    """What a command certify or attack will do: of an attack, one of the ``attacks`` makes each
    log.

    ``settings`` has, for each log, those settings of its manifest that are known before it is
    written.
    """

    request: CertifySpec | AttackSpec
    settings: tuple[Mapping[str, Any], ...]
    attacks: Mapping[Path, AttackSpec]

    @property
    def draws(self) -> int:
        """The votes that each image takes, at most, for a certificate or for each prediction."""
        request = self.request
        return request.n + request.n0 if isinstance(request, CertifySpec) else request.n

    @property
    def attack_batch(self) -> int | None:
        """The noisy images per pass of an attack; None where the command chooses them itself, or
        attacks nothing.
        """
        return self.request.attack_batch if isinstance(self.request, AttackSpec) else None

    @property
    def may_stop_early(self) -> bool:
        """Whether a certification procedure can do with fewer draws."""
        return isinstance(self.request, CertifySpec) and not self.request.procedure.fixed_sample

    @property
    def selection(self) -> dict[str, int | None]:
        """The options that select images, by their names."""
        return {"skip": self.request.skip, "max": self.request.limit}


class CommandReader:
    """Reads the words of many commands; what is slow, like making a parser, is done once.

    Errors are usage errors of the command concerned, and name the ``source`` of its words.
    """

    def __init__(self) -> None:
        self._parser, self._described = cache(_make_parser), cache(describe_dataset)
        self._procedures: dict[str, dict[str, Any]] = {}

    def option_words(self, command: str, options: Options, source: str) -> list[str]:
        """Options of a grid as words of the command."""
        takes_value = {
            flag: action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
            for flag, action in self._parser(
                command, _is_released(options)
            )._option_string_actions.items()
        }
        return option_words(options, takes_value, source)

    def read_training(
        self, command: str, words: Sequence[str], options: Options, source: str
    ) -> TrainingPlan:
        """The plan of a training from the words of train or train_pgd, which stand for the grid's
        ``options``.
        """
        parser = self._parser(command, _is_released(options))
        with parser.reading(source):
            chosen = with_recipes(parser, parser.parse_args(words))
            request = spec_of(parser, chosen, [])
            description = request.augmented(self._described(request.dataset, request.data_dir))
            schedule = request.schedule.schedule(description, request.objective.copies)
        recipe = request.recipe(description, schedule)
        # Without the option, a training that starts from other weights takes their input layer.
        if request.input_layer is not None or request.pretrained_model is None:
            recipe["input_layer"] = request.input_layer or "normalize"
        return TrainingPlan(request, chosen.objective, chosen.attack, description, schedule, recipe)

    def read_evaluation(
        self, command: str, words: Sequence[str], archs: Sequence[str], source: str
    ) -> EvaluationPlan:
        """The plan of an evaluation from the words of certify or attack; ``archs`` are those of all
        members.
        """
        parser = self._parser(command)
        with parser.reading(source):
            options = parser.parse_args(words)
            if command == "certify":
                request = certify.spec_of(parser, options, [])
                settings = {**request.identity(*archs), **self._procedure_settings(request)}
                return EvaluationPlan(request, (settings,), {})
            return _attack_plan(attack.spec_of(parser, options, []), archs)

    def _procedure_settings(self, request: CertifySpec) -> dict[str, Any]:
        """What a manifest will say of the procedure; the tables of adaptive procedures are computed
        once.
        """
        numbers = (
            request.dataset,
            request.sigma,
            request.n0,
            request.n,
            request.alpha,
            request.sound,
        )
        key = repr((*numbers, request.method, dict(request.settings or {})))
        if key not in self._procedures:
            description = self._described(str(request.dataset), request.data_dir)
            self._procedures[key] = procedure_record(make_procedure(request, description))
        return self._procedures[key]


def _attack_plan(request: AttackSpec | FalsifySpec, archs: Sequence[str]) -> EvaluationPlan:
    assert isinstance(request, AttackSpec), "a grid cannot say --against"
    attacks = specs_by_log(request)
    settings = tuple(attack.identity(*archs) for attack in attacks.values())
    return EvaluationPlan(request, settings, attacks)


def _make_parser(command: str, is_released: bool = False) -> Parser:
    """The parser of a command; the released behaviour changes how a training command reads
    epsilon.
    """
    if command in ("certify", "attack"):
        return (certify if command == "certify" else attack).make_parser()
    return (train if command == "train" else train_pgd).make_parser(
        ["--released-behaviour"] * is_released
    )


def _is_released(options: Options) -> bool:
    return options.get("released-behaviour") is True
