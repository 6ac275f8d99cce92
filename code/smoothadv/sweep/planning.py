"""From a grid to its jobs: every command of every job is read before anything runs."""

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smoothadv.analysis.logs import group_by, groups_of
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.reading import read_logs
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, warn
from smoothadv.models.name import MEANS, Members
from smoothadv.records.logs import in_file
from smoothadv.sweep.folders import (
    NAMED_OPTIONS,
    evaluation_name,
    fill_placeholders,
    model_folder,
)
from smoothadv.sweep.grid import EnsembleTable, EvaluationTable, Grid, Model
from smoothadv.sweep.jobs import SweepJob
from smoothadv.sweep.stages import Commands, EvaluationStage, TrainingStage

Evaluations = dict[str, tuple[EvaluationStage, ...]]
"""The evaluations that a table asks for, by the names of the jobs that it is about."""


def plan_jobs(
    grid: Grid,
    commands: Commands,
    shared: Mapping[str, str | None],
    plugin: Sequence[str] = (),
) -> list[SweepJob]:
    """The jobs of a grid in its order; UserError, or a usage error of the command concerned, if one
    is impossible.

    All commands get the ``shared`` options, by flag, that are not None, each ``plugin``, and the
    grid's plug-ins.
    """
    for name in grid.plugins:
        plugins.load(name)
    used = dict.fromkeys([*plugin, *grid.plugins])
    words = [str(word) for flag, value in shared.items() if value for word in (flag, value)]
    words += [word for name in used for word in ("--plugin", name)]
    planner = _Planner(grid, commands, words)
    jobs = [planner.model(model) for model in grid.trained]
    jobs += [job for table in grid.ensembles for job in planner.ensembles(table, jobs)]
    _refuse_shared("models", ((job.name, job.model.source) for job in jobs), "write two grids")
    # All evaluations are read first, as if all models were the best: an error must not wait for the
    # logs that choose them.
    tables: dict[str, Evaluations] = {
        table.source: {
            job.name: tuple(planner.evaluation(table, sigma, job) for sigma in table.sigmas)
            for job in jobs
            if job.group in table.groups
        }
        for table in grid.evaluations
    }
    logs = (
        (os.path.relpath(log), source)
        for source, evaluations in tables.items()
        for stage in itertools.chain(*evaluations.values())
        for log in stage.logs
    )
    _refuse_shared("tables", logs, "give one a 'name'")
    for table in grid.evaluations:
        jobs = _with_evaluations(jobs, table, tables)
    return jobs


def _with_evaluations(
    jobs: Sequence[SweepJob], table: EvaluationTable, tables: Mapping[str, Evaluations]
) -> list[SweepJob]:
    """The jobs with the evaluations that a table asks for, or saying that the best models are not
    known yet.
    """
    stages = tables[table.source]
    best: Collection[str] | None = stages.keys()
    if table.best is not None:
        chosen_by = tables[table.best.source]
        best = _best_models([job for job in jobs if job.name in stages], chosen_by)
        if best is not None and not best:
            warn(
                f"{table.source}: no model certifies anything at a default radius, so none is "
                "chosen as the best"
            )
    changed = []
    for job in jobs:
        made = stages.get(job.name, ())
        if made and best is None:
            job = replace(job, pending=(*job.pending, table))
        elif made and best is not None and job.name in best:
            job = replace(job, evaluations=(*job.evaluations, *made))
        changed.append(job)
    return changed


def _best_models(jobs: Sequence[SweepJob], chosen_by: Evaluations) -> Collection[str] | None:
    """The names of the ``jobs`` whose models are the best of their group at a default radius, as
    ``envelope`` chooses by the first of their evaluations.

    None while a log that chooses is incomplete; UserError if one cannot be read.
    """
    stages = {job.name: chosen_by[job.name][0] for job in jobs}
    if not all(stage.progress().is_complete for stage in stages.values()):
        return None
    names = {Path(stage.words[4]): name for name, stage in stages.items()}
    arguments = [f"{job.group}={stages[job.name].words[4]}" for job in jobs]
    logs = read_logs(arguments, warn=warn).certification
    if len(logs) < len(names):
        raise UserError(f"the best of {len(names)} models cannot be chosen from {len(logs)} logs")
    default = AtRadii()
    radii, groups = default.chosen_radii(logs), groups_of(logs, []).values()
    selected = [best for group in groups for best in default.select(group, radii)]
    return {names[log.path] for log, accuracy in selected if accuracy > 0}


def _refuse_shared(what: str, places: Iterable[tuple[str, str]], advice: str) -> None:
    """UserError if two of ``places`` are the same: each is where something is written, and who says
    so.
    """
    sources: dict[str, str] = {}
    for place, source in places:
        if place in sources:
            raise UserError(
                f"{source}: two {what} would write {place}, the other is of {sources[place]}: "
                f"{advice}"
            )
        sources[place] = source


def _unnamed_options(model: Model) -> list[tuple[str, Any]]:
    """The swept options that the released names of folders do not hold."""
    return [(key, model.options[key]) for key in model.swept if key not in NAMED_OPTIONS]


class _Planner:
    def __init__(self, grid: Grid, commands: Commands, shared: list[str]) -> None:
        self.grid, self.commands, self.shared, self.cwd = grid, commands, shared, Path.cwd()

    def model(self, model: Model) -> SweepJob:
        """The job that trains a model."""
        options = {
            key: model.options[key] for key in model.options if key not in ("dataset", "arch")
        }
        command = "train_pgd" if "attack" in options else "train"
        start = [command, str(model.options["dataset"]), str(model.options["arch"])]
        further = self.commands.option_words(command, options, model.source)
        further += [*self.shared, "--resume"]
        # The name of the folder depends on what the command will do, so the command is read with
        # another word in its place.
        expected = self.commands.training([*start, "OUTDIR", *further], model.source)
        name = model_folder(expected, expected.recipe["arch"], _unnamed_options(model))
        folder = self.grid.models / name
        training = TrainingStage((*start, str(folder), *further), self.cwd / folder, expected)
        checkpoint = training.checkpoint
        return self._job(name, model, Members(checkpoint, (checkpoint,)), (training,))

    def ensembles(self, table: EnsembleTable, jobs: Sequence[SweepJob]) -> Iterator[SweepJob]:
        """The jobs of the ensembles of models of these ``jobs``, in the order of their first
        members.
        """

        def rest(job: SweepJob) -> str:
            """The options in which members must not differ."""
            options = job.model.options.items()
            return repr(sorted(one for one in options if one[0] not in table.over))

        single = [job for job in jobs if job.group == table.of]
        for members in group_by(single, rest).values():
            first = members[0].model
            if len(members) == 1:
                raise UserError(
                    f"{table.source}: {members[0].name} would be alone: no other model of "
                    f"{first.group!r} differs from it in nothing but {' and '.join(table.over)}"
                )
            options = {key: first.options[key] for key in first.options if key not in table.over}
            swept = tuple(key for key in first.swept if key in options)
            model = Model(options, swept, table.group, table.source)
            trainings = tuple(training for job in members for training in job.trainings)
            archs = dict.fromkeys(training.expected.recipe["arch"] for training in trainings)
            kind = str(len(members)) if table.mean == MEANS[0] else f"{len(members)}_{table.mean}"
            others = [("ensemble_of", kind), *_unnamed_options(model)]
            name = model_folder(trainings[0].expected, "+".join(archs), others)
            classifier = Members(
                self.cwd / self.grid.models / name / "ensemble.toml",
                tuple(training.checkpoint for training in trainings),
                table.mean,
            )
            yield self._job(name, model, classifier, trainings)

    def _job(
        self, name: Path, model: Model, classifier: Members, trainings: tuple[TrainingStage, ...]
    ) -> SweepJob:
        """A job without evaluations; ``name`` is the model's folder within the sweep."""
        return SweepJob(
            name.as_posix(),
            model,
            self.cwd,
            self.grid.logs / name,
            classifier,
            trainings,
            processes=self.grid.processes,
            threads=self.grid.threads,
        )

    def evaluation(self, table: EvaluationTable, sigma: Any, job: SweepJob) -> EvaluationStage:
        """An evaluation of a model, by certify or attack, at one sigma."""
        options = fill_placeholders(table.options, job.model.options, table.source)
        if in_file(str(options.get("images", 0))):
            options["images"] = os.path.join(self.grid.path.parent, options["images"])
        if sigma is None:
            sigma = _training_noise(table, job)
        sigma = fill_placeholders({"sigma": sigma}, job.model.options, table.source)["sigma"]
        place = evaluation_name(str(table.options.get("split", "test")), sigma, table.name)
        output = job.logs / place.with_name(f"{place.name}.tsv")
        if table.command == "attack":
            output = job.logs / "attacked" / place
        checkpoint = os.path.relpath(job.classifier.name, self.cwd)
        words = [
            table.command,
            str(job.model.options["dataset"]),
            checkpoint,
            str(sigma),
            str(output),
        ]
        words += self.commands.option_words(table.command, options, table.source)
        words += self.shared
        archs = [training.expected.recipe["arch"] for training in job.trainings]
        return EvaluationStage(
            tuple(words),
            self.commands.evaluation(words, archs, table.source),
            job.classifier,
            job.trainings,
        )


def _training_noise(table: EvaluationTable, job: SweepJob) -> Any:
    noise = job.trainings[0].expected.recipe["objective"]["noise_sd"]
    if noise == 0:
        raise UserError(
            f"{table.source}: {job.model.source} trains without noise: say at which 'sigma' to "
            "smooth its models, or leave their 'group' out"
        )
    return job.model.options.get("noise", noise)
