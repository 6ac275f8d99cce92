"""From a grid to its jobs: every option is read by the command that it is for, before anything is run."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
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
    compose_execution,
    compose_objective,
    compose_schedule,
    refuse_contradictions,
)
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import DatasetDescription
from smoothadv.errors import UserError
from smoothadv.noise import GaussianNoise, RoundedGaussianNoise
from smoothadv.objectives import Objective
from smoothadv.records import attacked_log
from smoothadv.sweeps.folders import NAMED_OPTIONS, TrainingFacts, evaluation_name, fill_placeholders, model_folder
from smoothadv.sweeps.grid import EvaluationTable, Grid, Model, Options, option_words
from smoothadv.sweeps.jobs import Job
from smoothadv.sweeps.stages import EvaluationStage, TrainingStage
from smoothadv.training import Execution, Schedule

# What certify says in a manifest under names of its own, or only once the images are there.
_STATED = ("dataset", "split", "sigma", "alpha", "seed", "precision")


@dataclass(frozen=True)
class TrainingPlan:
    """What a training's options describe, as the command will compose it."""

    options: argparse.Namespace
    objective: Objective
    description: DatasetDescription
    schedule: Schedule
    execution: Execution


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation's options describe: for an attack, one for each of its logs."""

    options: argparse.Namespace
    attacks: tuple[SmoothedAttack, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A job, what its training and its evaluations were read as, and where in the grid it comes from."""

    job: Job
    training: TrainingPlan
    evaluations: tuple[EvaluationPlan, ...]
    model: Model


@dataclass(frozen=True)
class SharedOptions:
    """What the command line of a sweep says for all of its jobs."""

    data_dir: str | None = None
    device: str | None = None

    @property
    def words(self) -> list[str]:
        return [
            *(["--data-dir", self.data_dir] if self.data_dir else []),
            *(["--device", self.device] if self.device else []),
        ]


def plan_sweep(grid: Grid, shared: SharedOptions) -> list[Plan]:
    """The jobs of a grid in its order; UserError, or a usage error of the command concerned, if one is impossible."""
    planner = _Planner(grid, shared)
    plans = [planner.plan(model) for model in grid.trained]
    owners: dict[str, Plan] = {}
    for plan in plans:
        other = owners.setdefault(plan.job.name, plan)
        if other is not plan:
            raise UserError(
                f"{plan.model.source}: two models would share the folder {plan.job.name}, one from "
                f"{other.model.source}: {_told_apart(other.model.options, plan.model.options)}"
            )
    return plans


def _told_apart(one: Options, other: Options) -> str:
    differing = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    said = ", ".join(f"{key} is {one.get(key)!r} and {other.get(key)!r}" for key in differing)
    return f"{said}, which folders do not tell apart: write two grids" if said else "they have the same options"


def _recipe(planned: TrainingPlan) -> dict[str, Any]:
    """What is known of the recipe before the training."""
    options = planned.options
    stated = train.stated_recipe(options, planned.description, planned.objective, planned.schedule, planned.execution)
    # Else it is that of the weights to start from, or the default.
    if options.input_layer is not None or options.pretrained_model is None:
        stated["input_layer"] = options.input_layer or "normalize"
    return stated


def _stated(options: argparse.Namespace) -> dict[str, Any]:
    """What is known of the settings in an evaluation's manifest before it, beside those of the procedure."""
    given = {name: getattr(options, name) for name in ("batch", "input_layer") if getattr(options, name) is not None}
    return {**{field: getattr(options, field) for field in _STATED}, "compiled": options.compile, **given}


def _flags(parser: Parser) -> dict[str, bool]:
    """The flags of a command, and whether each takes a value."""
    return {flag: action.nargs != 0 for flag, action in parser._option_string_actions.items()} | {
        flag: False
        for flag, action in parser._option_string_actions.items()
        if isinstance(action, argparse.BooleanOptionalAction)
    }


def _trained(planned: TrainingPlan) -> TrainingFacts:
    """What the names of folders say of a training."""
    objective, options = planned.objective, planned.options
    attack = getattr(objective, "attack", None)
    is_vanilla = attack is not None and (getattr(objective, "base_attack", False) or objective.noise_sd == 0)
    return TrainingFacts(
        dataset=options.dataset,
        arch=options.arch,
        noise=objective.noise_sd,
        copies=objective.copies,
        attack=attack and options.attack,
        epsilon=attack and attack.epsilon,
        num_steps=attack and attack.num_steps,
        is_vanilla=is_vanilla,
        is_pretrained=options.pretrained_model is not None,
        weight=None if options.use_unlabelled is None else options.unlabelled_weight or 1.0,
    )


def _sigma(table: EvaluationTable, sigma: Any, model: Model, objective: Objective) -> Any:
    """The noise to smooth with: by default that of the training."""
    if sigma is not None:
        return fill_placeholders({"sigma": sigma}, model.options, table.source)["sigma"]
    if objective.noise_sd == 0:
        raise UserError(
            f"{table.source}: {model.source} trains without noise: say at which 'sigma' to smooth its models, "
            "or leave their 'group' out"
        )
    return model.options.get("noise", objective.noise_sd)


def _further(model: Model) -> list[tuple[str, Any]]:
    """What is swept and has no place in the released names."""
    return [(key, model.options[key]) for key in model.swept if key not in NAMED_OPTIONS]


@dataclass(frozen=True)
class _EvaluationSpec:
    """A model, ``name`` within its sweep, that a ``table`` evaluates with noise ``sigma``."""

    table: EvaluationTable
    sigma: Any
    model: Model
    name: Path
    training: TrainingStage

    @property
    def place(self) -> Path:
        """Where that goes within the folder of the model."""
        return evaluation_name(str(self.table.options.get("split", "test")), self.sigma, self.table.name)


class _Planner:
    """Plans the models of one grid. Parsers are made once, for there may be hundreds of models."""

    def __init__(self, grid: Grid, shared: SharedOptions) -> None:
        self.grid, self.shared, self.cwd = grid, shared, Path.cwd()
        self._parsers: dict[tuple[str, bool], Parser] = {}
        self._descriptions: dict[str, DatasetDescription] = {}
        self._procedures: dict[str, dict[str, Any]] = {}

    def plan(self, model: Model) -> Plan:
        words, planned, name = self._training(model)
        training = TrainingStage(
            words=tuple(words),
            folder=self.cwd / self.grid.models / name,
            epochs=planned.schedule.epochs,
            recipe=_recipe(planned),
            started_from=planned.options.pretrained_model and self.cwd / planned.options.pretrained_model,
            needs=tuple(
                self.cwd / path for path in (planned.options.pretrained_model, planned.options.use_unlabelled) if path
            ),
        )
        evaluations = [
            plan(_EvaluationSpec(table, _sigma(table, sigma, model, planned.objective), model, name, training))
            for plan, tables in ((self._certification, self.grid.certify), (self._attack, self.grid.attack))
            for table in tables
            if model.group in table.groups
            for sigma in table.sigmas
        ]
        logs = [log for stage, _ in evaluations for log in stage.logs]
        twice = [log for log in logs if logs.count(log) > 1]
        if twice:
            raise UserError(
                f"grid {self.grid.path}: two tables would write {os.path.relpath(twice[0])}: give one a 'name'"
            )
        job = Job(
            name=name.as_posix(),
            group=model.group,
            cwd=self.cwd,
            logs=self.grid.logs / name,
            training=training,
            evaluations=tuple(stage for stage, _ in evaluations),
            processes=self.grid.processes,
            threads=self.grid.threads,
        )
        return Plan(job, planned, tuple(read for _, read in evaluations), model)

    def _parser(self, command: str, make: Callable[[], Parser], released: bool = False) -> Parser:
        if (command, released) not in self._parsers:
            self._parsers[command, released] = make()
        return self._parsers[command, released]

    def _training(self, model: Model) -> tuple[list[str], TrainingPlan, Path]:
        """The words of the command, what they mean, and the folder within the sweep that this makes."""
        options = {key: value for key, value in model.options.items() if key not in ("dataset", "arch")}
        command, module = ("train_pgd", train_pgd) if "attack" in options else ("train", train)
        released = options.get("released-behaviour") is True
        special = ["--released-behaviour"] * released  # with it, sizes are read otherwise
        parser = self._parser(command, lambda: module.make_parser(special), released)
        said = [*option_words(options, _flags(parser), model.source), *self.shared.words, "--resume"]
        start = [str(model.options["dataset"]), str(model.options["arch"])]
        with parser.reading(model.source):
            # Where the model goes depends on what the options mean.
            planned = self._compose_training(parser, [*start, "OUTDIR", *said])
        name = model_folder(_trained(planned), _further(model))
        return [command, *start, str(self.grid.models / name), *said], planned, name

    def _compose_training(self, parser: Parser, words: Sequence[str]) -> TrainingPlan:
        """As the command itself does, but for what needs images."""
        options = parser.parse_args(words)
        apply_recipes(parser, options)
        objective = compose_objective(parser, options)
        refuse_contradictions(parser, options)
        description = train.with_augmentation(self._described(options), options)
        schedule = compose_schedule(parser, options, description, objective)
        return TrainingPlan(options, objective, description, schedule, compose_execution(options))

    def _evaluation_words(self, wanted: _EvaluationSpec, parser: Parser, output: Path) -> list[str]:
        options = fill_placeholders(wanted.table.options, wanted.model.options, wanted.table.source)
        checkpoint = os.path.relpath(wanted.training.checkpoint, self.cwd)
        words = [str(wanted.model.options["dataset"]), checkpoint, str(wanted.sigma), str(output)]
        said = option_words(options, _flags(parser), wanted.table.source)
        return [*words, *said, *self.shared.words]

    def _certification(self, wanted: _EvaluationSpec) -> tuple[EvaluationStage, EvaluationPlan]:
        place = wanted.place
        log = self.grid.logs / wanted.name / place.with_name(f"{place.name}.tsv")
        parser = self._parser("certify", certify.make_parser)
        words = self._evaluation_words(wanted, parser, log)
        with parser.reading(wanted.table.source):
            options = parser.parse_args(words)
            certify.refuse_foreign_procedures(parser, options)
            options.N = options.N or PROCEDURES[options.method].default_n
            settings = {**_stated(options), **self._procedure_settings(parser, options)}
        return self._stage("certify", words, options, wanted, (log,), (settings,)), EvaluationPlan(options)

    def _procedure_settings(self, parser: Parser, options: argparse.Namespace) -> dict[str, Any]:
        """What a manifest will say of the procedure; the tables of adaptive ones are made once."""
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

    def _described(self, options: argparse.Namespace) -> DatasetDescription:
        if options.dataset not in self._descriptions:
            self._descriptions[options.dataset] = describe_dataset(options.dataset, options.data_dir)
        return self._descriptions[options.dataset]

    def _attack(self, wanted: _EvaluationSpec) -> tuple[EvaluationStage, EvaluationPlan]:
        folder = self.grid.logs / wanted.name / "attacked" / wanted.place
        parser = self._parser("attack", attack.make_parser)
        words = self._evaluation_words(wanted, parser, folder)
        with parser.reading(wanted.table.source):
            options = parser.parse_args(words)
            planned = attack.attacks_planned(parser, options)
        settings = []
        for _, made in planned:
            known = {key: value for key, value in attack_settings(made).items() if key != "attack_batch"}
            if options.attack_batch is not None:
                known["attack_batch"] = options.attack_batch
            settings.append({**_stated(options), "N": options.N, **known})
        logs = tuple(attacked_log(folder, made.attack.epsilon) for _, made in planned)
        return self._stage("attack", words, options, wanted, logs, tuple(settings)), EvaluationPlan(
            options, tuple(made for _, made in planned)
        )

    def _stage(
        self,
        command: str,
        words: Sequence[str],
        options: argparse.Namespace,
        wanted: _EvaluationSpec,
        logs: tuple[Path, ...],
        settings: tuple[dict[str, Any], ...],
    ) -> EvaluationStage:
        return EvaluationStage(
            words=(command, *words),
            title=f"{command} {wanted.place.name}",
            checkpoint=wanted.training.checkpoint,
            logs=tuple(self.cwd / log for log in logs),
            settings=settings,
            selection={"skip": options.skip, "max": options.max},
        )
