"""From a grid to its jobs: every command of every job is read before anything runs."""

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv import plugins
from smoothadv.commands.sweep.reading import CommandReader, EvaluationPlan, TrainingPlan
from smoothadv.ensembles import MEANS, Members
from smoothadv.errors import UserError
from smoothadv.objectives import Objective
from smoothadv.sweeps.folders import NAMED_OPTIONS, TrainingFacts, evaluation_name, fill_placeholders, model_folder
from smoothadv.sweeps.grid import EnsembleTable, EvaluationTable, Grid, Model, Options
from smoothadv.sweeps.jobs import Job
from smoothadv.sweeps.stages import EvaluationStage, TrainingStage


@dataclass(frozen=True)
class Plan:
    """A job, the plans of its evaluations, and the ``model`` of the grid that it is for.

    ``trainings`` has the plan of the job's training or, for an ensemble, of those of all members, done by other jobs.
    """

    job: Job
    trainings: tuple[TrainingPlan, ...]
    evaluations: tuple[EvaluationPlan, ...]
    model: Model


@dataclass(frozen=True)
class SharedOptions:
    """Options on the command line of a sweep, or in its grid, that go to the commands of all its jobs."""

    data_dir: str | None = None
    device: str | None = None
    plugins: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return [
            *(["--data-dir", self.data_dir] if self.data_dir else []),
            *(["--device", self.device] if self.device else []),
            *(word for plugin in self.plugins for word in ("--plugin", plugin)),
        ]


def plan_sweep(grid: Grid, shared: SharedOptions) -> list[Plan]:
    """The jobs of a grid in its order; UserError, or a usage error of the command concerned, if one is impossible."""
    for plugin in grid.plugins:
        plugins.load(plugin)
    shared = dataclasses.replace(shared, plugins=tuple(dict.fromkeys([*shared.plugins, *grid.plugins])))
    planner = _Planner(grid, shared)
    plans = [planner.plan(model) for model in grid.trained]
    plans += [plan for table in grid.ensembles for plan in planner.ensembles(table, plans)]
    first_by_name: dict[str, Plan] = {}
    for plan in plans:
        other = first_by_name.setdefault(plan.job.name, plan)
        if other is not plan:
            raise UserError(
                f"{plan.model.source}: two models would share the folder {plan.job.name}, one from "
                f"{other.model.source}: {_differences(other.model.options, plan.model.options)}"
            )
    return plans


def _differences(one: Options, other: Options) -> str:
    differing = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    text = ", ".join(f"{key} is {one.get(key)!r} and {other.get(key)!r}" for key in differing)
    return f"{text}, which gives both the same folder: write two grids" if text else "they have the same options"


def _training_facts(plan: TrainingPlan) -> TrainingFacts:
    """What the names of folders say about a training."""
    request, objective = plan.request, plan.request.objective
    attack = getattr(objective, "attack", None)
    is_vanilla = attack is not None and (getattr(objective, "base_attack", False) or objective.noise_sd == 0)
    return TrainingFacts(
        dataset=request.dataset,
        arch=request.arch,
        noise=objective.noise_sd,
        copies=objective.copies,
        attack=attack and plan.attack,
        epsilon=attack and attack.epsilon,
        num_steps=attack and attack.num_steps,
        is_vanilla=is_vanilla,
        is_pretrained=request.pretrained_model is not None,
        weight=None if request.use_unlabelled is None else request.unlabelled_weight,
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


def _unnamed(model: Model) -> list[tuple[str, Any]]:
    """The swept options that the released names of folders do not hold."""
    return [(key, model.options[key]) for key in model.swept if key not in NAMED_OPTIONS]


class _Planner:
    """Plans the models of one grid."""

    def __init__(self, grid: Grid, shared: SharedOptions) -> None:
        self.grid, self.shared, self.cwd = grid, shared, Path.cwd()
        self._reader = CommandReader()

    def plan(self, model: Model) -> Plan:
        words, plan, name = self._training(model)
        request = plan.request
        training = TrainingStage(
            words=tuple(words),
            folder=self.cwd / self.grid.models / name,
            epochs=plan.schedule.epochs,
            recipe=plan.recipe,
            started_from=request.pretrained_model and self.cwd / request.pretrained_model,
            needs=tuple(self.cwd / path for path in (request.pretrained_model, request.use_unlabelled) if path),
        )
        return self._job(model, name, Members(training.checkpoint, (training.checkpoint,)), (plan,), training)

    def ensembles(self, table: EnsembleTable, plans: Sequence[Plan]) -> Iterator[Plan]:
        """The ensembles, in the order of their first members, of models whose ``plans`` these are."""
        members_by_rest: dict[str, list[Plan]] = defaultdict(list)
        for plan in plans:
            if plan.model.group == table.of:
                rest = {option: value for option, value in plan.model.options.items() if option not in table.over}
                members_by_rest[repr(sorted(rest.items()))].append(plan)
        for members in members_by_rest.values():
            first = members[0].model
            if len(members) == 1:
                raise UserError(
                    f"{table.source}: {members[0].job.name} would be alone: no other model of {first.group!r} differs "
                    f"from it in nothing but {' and '.join(table.over)}"
                )
            trainings = tuple(training for plan in members for training in plan.trainings)
            archs = "+".join(dict.fromkeys(training.request.arch for training in trainings))
            facts = dataclasses.replace(_training_facts(trainings[0]), arch=archs)
            rest = {option: value for option, value in first.options.items() if option not in table.over}
            model = Model(rest, tuple(option for option in first.swept if option in rest), table.group, table.source)
            kind = f"{len(members)}{'' if table.mean == MEANS[0] else f'_{table.mean}'}"
            name = model_folder(facts, [("ensemble_of", kind), *_unnamed(model)])
            checkpoints = tuple(plan.job.training.checkpoint for plan in members if plan.job.training)
            file = self.cwd / self.grid.models / name / "ensemble.toml"
            yield self._job(model, name, Members(file, checkpoints, table.mean), trainings)

    def _job(
        self,
        model: Model,
        name: Path,
        classifier: Members,
        trainings: tuple[TrainingPlan, ...],
        training: TrainingStage | None = None,
    ) -> Plan:
        objective = trainings[0].request.objective
        evaluations = [
            self._evaluation(command, table, _sigma(table, sigma, model, objective), model, name, classifier, trainings)
            for command, tables in (("certify", self.grid.certify), ("attack", self.grid.attack))
            for table in tables
            if model.group in table.groups
            for sigma in table.sigmas
        ]
        logs = [log for stage, _ in evaluations for log in stage.logs]
        twice = [log for log, count in Counter(logs).items() if count > 1]
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
        return Plan(job, trainings, tuple(evaluation for _, evaluation in evaluations), model)

    def _training(self, model: Model) -> tuple[list[str], TrainingPlan, Path]:
        """The words of the training command, its plan, and the model's folder within the sweep."""
        options = {key: value for key, value in model.options.items() if key not in ("dataset", "arch")}
        command = "train_pgd" if "attack" in options else "train"
        further = [*self._reader.option_words(command, options, model.source), *self.shared.words, "--resume"]
        start = [str(model.options["dataset"]), str(model.options["arch"])]
        # The name of the folder depends on the plan, so the command is read with another word in its place.
        plan = self._reader.read_training(command, [*start, "OUTDIR", *further], options, model.source)
        name = model_folder(_training_facts(plan), _unnamed(model))
        return [command, *start, str(self.grid.models / name), *further], plan, name

    def _evaluation(
        self,
        command: str,
        table: EvaluationTable,
        sigma: Any,
        model: Model,
        name: Path,
        classifier: Members,
        trainings: tuple[TrainingPlan, ...],
    ) -> tuple[EvaluationStage, EvaluationPlan]:
        """An evaluation, by certify or attack, that a ``table`` asks for; ``name`` is the model's folder."""
        place = evaluation_name(str(table.options.get("split", "test")), sigma, table.name)
        is_attack, folder = command == "attack", self.grid.logs / name
        output = folder / "attacked" / place if is_attack else folder / place.with_name(f"{place.name}.tsv")
        options = fill_placeholders(table.options, model.options, table.source)
        checkpoint = os.path.relpath(classifier.name, self.cwd)
        words = [str(model.options["dataset"]), checkpoint, str(sigma), str(output)]
        words += [*self._reader.option_words(command, options, table.source), *self.shared.words]
        read = self._reader.read_attack if is_attack else self._reader.read_certification
        plan = read(words, [training.request.arch for training in trainings], table.source)
        stage = EvaluationStage(
            words=(command, *words),
            title=f"{command} {place.name}",
            classifier=classifier,
            logs=tuple(self.cwd / log for log in plan.attacks or (output,)),
            settings=plan.settings,
            selection=plan.selection,
            needs=classifier.paths if classifier.mean else (),
        )
        return stage, plan
