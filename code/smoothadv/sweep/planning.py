"""From a grid to its jobs: every command of every job is read before anything runs."""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoothadv.analysis.envelope import Envelope
from smoothadv.analysis.shared.logs import read_logs
from smoothadv.analysis.shared.selection import groups_of
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, warn
from smoothadv.base.members import MEANS, Members
from smoothadv.objectives import Objective
from smoothadv.sweep.folders import (
    NAMED_OPTIONS,
    TrainingFacts,
    evaluation_name,
    fill_placeholders,
    model_folder,
)
from smoothadv.sweep.grid import EnsembleTable, EvaluationTable, Grid, Model, Options
from smoothadv.sweep.jobs import Job
from smoothadv.sweep.reading import CommandReader, EvaluationPlan, TrainingPlan
from smoothadv.sweep.stages import EvaluationStage, TrainingStage


@dataclass(frozen=True)
class Plan:
    """A job for a ``model`` of the grid, and the plans of its evaluations of the ``classifier``
    that it makes.

    ``trainings`` has the plan of the job's training or, for an ensemble, of those of all members,
    done by other jobs. ``pending`` are tables of evaluations for which the model may yet be chosen
    as one of the best, ``possible`` the plans of these evaluations.
    """

    job: Job
    trainings: tuple[TrainingPlan, ...]
    model: Model
    classifier: Members
    evaluations: tuple[EvaluationPlan, ...] = ()
    pending: tuple[EvaluationTable, ...] = ()
    possible: tuple[EvaluationPlan, ...] = ()


def plan_sweep(
    grid: Grid, shared: Mapping[str, str | None], plugin: Sequence[str] = ()
) -> list[Plan]:
    """The jobs of a grid in its order; UserError, or a usage error of the command concerned, if one
    is impossible.

    All commands get the ``shared`` options, by flag, that are not None, and each ``plugin``, as
    those of the grid.
    """
    for name in grid.plugins:
        plugins.load(name)
    pairs = [pair for pair in shared.items() if pair[1]]
    functions = filter(
        plugins.names_function, (str(model.options["arch"]) for model in grid.trained)
    )
    pairs += [("--plugin", name) for name in dict.fromkeys([*plugin, *grid.plugins, *functions])]
    planner = _Planner(grid, [str(word) for pair in pairs for word in pair])
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
    everything = plans
    for table in (
        grid.evaluations
    ):  # as if all were the best: an error must not wait for the logs that choose them
        everything = list(planner.evaluated(everything, replace(table, best=None)))
    if not any(table.best for table in grid.evaluations):
        return everything
    for table in grid.evaluations:
        plans = list(planner.evaluated(plans, table))
    return plans


def _differences(one: Options, other: Options) -> str:
    differing = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    text = ", ".join(f"{key} is {one.get(key)!r} and {other.get(key)!r}" for key in differing)
    return (
        f"{text}, which gives both the same folder: write two grids"
        if text
        else "they have the same options"
    )


def _training_facts(plan: TrainingPlan) -> TrainingFacts:
    """What the names of folders say about a training."""
    request, objective = plan.request, plan.request.objective
    attack = objective.gradient_attack
    is_vanilla = attack is not None and (
        getattr(objective, "base_attack", False) or objective.noise_sd == 0
    )
    return TrainingFacts(
        dataset=request.dataset,
        arch=request.arch,
        objective=plan.objective,
        noise=objective.noise_sd,
        copies=objective.copies,
        attack=None if attack is None else plan.attack,
        epsilon=None if attack is None else attack.epsilon,
        num_steps=None if attack is None else attack.num_steps,
        is_vanilla=is_vanilla,
        is_pretrained=request.pretrained_model is not None,
        weight=None if request.use_unlabelled is None else request.pseudo_weight,
    )


def _sigma(table: EvaluationTable, sigma: Any, model: Model, objective: Objective) -> Any:
    """The noise to smooth with: by default that of the training."""
    if sigma is not None:
        return fill_placeholders({"sigma": sigma}, model.options, table.source)["sigma"]
    if objective.noise_sd == 0:
        raise UserError(
            f"{table.source}: {model.source} trains without noise: say at which 'sigma' to smooth "
            "its models, or leave their 'group' out"
        )
    return model.options.get("noise", objective.noise_sd)


def _unnamed(model: Model) -> list[tuple[str, Any]]:
    """The swept options that the released names of folders do not hold."""
    return [(key, model.options[key]) for key in model.swept if key not in NAMED_OPTIONS]


class _Planner:
    def __init__(self, grid: Grid, shared: list[str]) -> None:
        self.grid, self.shared, self.cwd = grid, shared, Path.cwd()
        self._reader = CommandReader()
        self._trainings: dict[Path, TrainingStage] = {}

    def plan(self, model: Model) -> Plan:
        words, plan, name = self._training(model)
        request = plan.request
        checkpoints = {
            "pretrained_sha256": request.pretrained_model,
            "teacher_sha256": request.teacher,
        }
        starts = {name: self.cwd / path for name, path in checkpoints.items() if path}
        training = TrainingStage(
            words=tuple(words),
            folder=self.cwd / self.grid.models / name,
            epochs=plan.schedule.epochs,
            recipe=plan.recipe,
            digests=starts,
            needs=(
                *starts.values(),
                *([self.cwd / request.use_unlabelled] if request.use_unlabelled else []),
            ),
        )
        self._trainings[training.checkpoint] = training
        return self._plan(
            model, name, Members(training.checkpoint, (training.checkpoint,)), (plan,), training
        )

    def ensembles(self, table: EnsembleTable, plans: Sequence[Plan]) -> Iterator[Plan]:
        """The ensembles, in the order of their first members, of models whose ``plans`` these
        are.
        """
        members_by_rest: dict[str, list[Plan]] = defaultdict(list)
        for plan in plans:
            if plan.model.group == table.of:
                rest = {
                    option: value
                    for option, value in plan.model.options.items()
                    if option not in table.over
                }
                members_by_rest[repr(sorted(rest.items()))].append(plan)
        for members in members_by_rest.values():
            first = members[0].model
            if len(members) == 1:
                raise UserError(
                    f"{table.source}: {members[0].job.name} would be alone: no other model of "
                    f"{first.group!r} differs from it in nothing but {' and '.join(table.over)}"
                )
            stated = {option for plan in members for option in plan.model.options}
            if unknown := [option for option in table.over if option not in stated]:
                raise UserError(
                    f"{table.source}: 'over' names {unknown[0]!r}, which {first.source} does not "
                    "set"
                )
            trainings = tuple(training for plan in members for training in plan.trainings)
            archs = "+".join(dict.fromkeys(training.request.arch for training in trainings))
            facts = replace(_training_facts(trainings[0]), arch=archs)
            rest = {
                option: value for option, value in first.options.items() if option not in table.over
            }
            model = Model(
                rest,
                tuple(option for option in first.swept if option in rest),
                table.group,
                table.source,
            )
            kind = f"{len(members)}{'' if table.mean == MEANS[0] else f'_{table.mean}'}"
            name = model_folder(facts, [("ensemble_of", kind), *_unnamed(model)])
            checkpoints = tuple(
                plan.job.training.checkpoint for plan in members if plan.job.training
            )
            file = self.cwd / self.grid.models / name / "ensemble.toml"
            yield self._plan(model, name, Members(file, checkpoints, table.mean), trainings)

    def evaluated(self, plans: Sequence[Plan], table: EvaluationTable) -> Iterator[Plan]:
        """The plans with the evaluations that a table asks for, or saying that the best models are
        not known yet.
        """
        concerned = {plan.job.name: plan for plan in plans if plan.model.group in table.groups}
        best = self._best(concerned, table.best) if table.best else concerned.keys()
        if best is not None and not best:
            warn(
                f"{table.source}: no model certifies anything at a default radius, so none is "
                "chosen as the best"
            )
        for plan in plans:
            if best is None and plan.job.name in concerned:
                possible = (self._evaluation(table, sigma, plan)[1] for sigma in table.sigmas)
                yield replace(
                    plan, pending=(*plan.pending, table), possible=(*plan.possible, *possible)
                )
            else:
                yield (
                    self._with_evaluations(plan, table) if best and plan.job.name in best else plan
                )

    def _best(self, plans: Mapping[str, Plan], chooser: EvaluationTable) -> Collection[str] | None:
        """The names of the ``plans`` that are the best of their group at a default radius, as
        ``envelope`` chooses.

        None while a log of the table that chooses is incomplete; UserError if one cannot be read.
        """
        names = {
            self._output(chooser, chooser.sigmas[0], plan): name for name, plan in plans.items()
        }
        places = {self.cwd / log for log in names}
        stages = [
            stage
            for plan in plans.values()
            for stage in plan.job.evaluations
            if stage.logs[0] in places
        ]
        if not all(stage.progress().is_complete for stage in stages):
            return None
        logs = read_logs(
            [f"{plans[name].model.group}={log}" for log, name in names.items()], warn=warn
        ).certification
        if len(logs) < len(names):
            raise UserError(
                f"the best of {len(names)} models cannot be chosen from {len(logs)} logs"
            )
        envelope = Envelope()
        radii = envelope.chosen_radii(logs)
        winners = [
            best for group in groups_of(logs, []).values() for best in envelope.select(group, radii)
        ]
        return {names[best.log.path] for best in winners if best.certified_accuracy > 0}

    def _plan(
        self,
        model: Model,
        name: Path,
        classifier: Members,
        trainings: tuple[TrainingPlan, ...],
        training: TrainingStage | None = None,
    ) -> Plan:
        """A plan without evaluations; ``name`` is the model's folder within the sweep."""
        logs, processes, threads = self.grid.logs / name, self.grid.processes, self.grid.threads
        job = Job(name.as_posix(), model.group, self.cwd, logs, training, (), processes, threads)
        return Plan(job, trainings, model, classifier)

    def _training(self, model: Model) -> tuple[list[str], TrainingPlan, Path]:
        """The words of the training command, its plan, and the model's folder within the sweep."""
        options = {
            key: value for key, value in model.options.items() if key not in ("dataset", "arch")
        }
        command = "train_pgd" if "attack" in options else "train"
        further = [
            *self._reader.option_words(command, options, model.source),
            *self.shared,
            "--resume",
        ]
        start = [str(model.options["dataset"]), str(model.options["arch"])]
        # The name of the folder depends on the plan, so the command is read with another word in
        # its place.
        plan = self._reader.read_training(
            command, [*start, "OUTDIR", *further], options, model.source
        )
        name = model_folder(_training_facts(plan), _unnamed(model))
        return [command, *start, str(self.grid.models / name), *further], plan, name

    def _output(self, table: EvaluationTable, sigma: Any, plan: Plan) -> Path:
        """The log of a certification, or the folder of an attack's logs."""
        sigma = _sigma(table, sigma, plan.model, plan.trainings[0].request.objective)
        place = evaluation_name(str(table.options.get("split", "test")), sigma, table.name)
        is_attack = table.command == "attack"
        return plan.job.logs / (
            "attacked" / place if is_attack else place.with_name(f"{place.name}.tsv")
        )

    def _with_evaluations(self, plan: Plan, table: EvaluationTable) -> Plan:
        made = [self._evaluation(table, sigma, plan) for sigma in table.sigmas]
        stages = (*plan.job.evaluations, *(stage for stage, _ in made))
        twice = [
            log
            for log, count in Counter(log for stage in stages for log in stage.logs).items()
            if count > 1
        ]
        if twice:
            raise UserError(
                f"grid {self.grid.path}: two tables would write {os.path.relpath(twice[0])}: give "
                "one a 'name'"
            )
        evaluations = (*plan.evaluations, *(evaluation for _, evaluation in made))
        return replace(plan, job=replace(plan.job, evaluations=stages), evaluations=evaluations)

    def _evaluation(
        self, table: EvaluationTable, sigma: Any, plan: Plan
    ) -> tuple[EvaluationStage, EvaluationPlan]:
        """An evaluation of a model, by certify or attack, at one sigma."""
        output, classifier = self._output(table, sigma, plan), plan.classifier
        options = fill_placeholders(table.options, plan.model.options, table.source)
        value = _sigma(table, sigma, plan.model, plan.trainings[0].request.objective)
        checkpoint = os.path.relpath(classifier.name, self.cwd)
        words = [str(plan.model.options["dataset"]), checkpoint, str(value), str(output)]
        words += [*self._reader.option_words(table.command, options, table.source), *self.shared]
        archs = [training.request.arch for training in plan.trainings]
        evaluation = self._reader.read_evaluation(table.command, words, archs, table.source)
        denoiser = str(evaluation.request.denoiser) if evaluation.request.denoiser else None
        denoisers = (
            [self.cwd / denoiser] if denoiser and not denoiser.startswith("diffusers:") else []
        )
        stage = EvaluationStage(
            words=(table.command, *words),
            title=f"{table.command} {output.name.removesuffix('.tsv')}",
            classifier=classifier,
            logs=tuple(self.cwd / log for log in evaluation.attacks or (output,)),
            settings=evaluation.settings,
            selection=evaluation.selection,
            needs=(*(classifier.paths if classifier.mean else ()), *denoisers),
            denoiser=denoiser,
            members=tuple(self._trainings[path] for path in classifier.paths)
            if classifier.mean
            else (),
        )
        return stage, evaluation
