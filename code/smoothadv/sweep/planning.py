"""From a grid to its jobs: every command of every job is read before anything runs, as the command
itself reads its words.

The folders of a sweep have names as in the released code, so that readers of logs know what made
them: ``PGD_2steps/eps_0.251/cifar10/cifar_resnet110/noise_0.25``,
``PGD_2steps_multiNoiseSamples/8-multitrain/eps_0.25/...`` for m = 8,
``PGD_2steps_baseAttackExp/without_noise/...`` for Vanilla PGD,
``finetune_cifar_from_imagenet32/...``, ``self_training/PGD_2steps/weight_0.5/...``. Other
objectives have their own name in place of ``gaussian``, or before that of an attack:
``consistency/2-multitrain/...``. An epsilon has a decimal point here; the whole numbers in released
names are in units of 1/256.
"""

import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.analysis.logs import group_by, groups_of
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.reading import read_logs
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import settings_record
from smoothadv.cli import attack, certify, train, train_pgd
from smoothadv.cli.options.training import training_of
from smoothadv.cli.runner import Parser, reading
from smoothadv.datasets import SPLITS, DatasetDescription, describe_dataset, get_dataset
from smoothadv.evaluation.image_sets import images_named
from smoothadv.evaluation.predict import specs_by_log
from smoothadv.evaluation.specs import AttackSpec, CertifySpec
from smoothadv.models.name import MEANS, Members, is_on_hub
from smoothadv.noise import GaussianNoise, RoundedGaussianNoise
from smoothadv.records.logs import IMAGE_SET, in_file, record_of
from smoothadv.sweep.grid import (
    NAMED_OPTIONS,
    EnsembleTable,
    EvaluationTable,
    Grid,
    Model,
    fill_placeholders,
    format_decimal,
    format_value,
    refuse_shared,
)
from smoothadv.sweep.jobs import SweepJob
from smoothadv.sweep.stages import (
    EvaluationStage,
    TrainingExpectation,
    TrainingStage,
)
from smoothadv.training.schedule import Schedule
from smoothadv.training.spec import TrainSpec

_RELEASED = "--released-behaviour"


class CommandReader:
    """Reads command lines as the commands do, but runs nothing; what is slow, like making a parser,
    is done once.

    Words begin with the command. Errors are usage errors of the command, and name the ``source`` of
    the words.
    """

    def __init__(self) -> None:
        self._parser, self._described = cache(_make_parser), cache(describe_dataset)
        self._image_set = cache(
            lambda *dataset, named: record_of(named, images_named(named, get_dataset(*dataset)))
        )

    def option_words(self, command: str, options: Mapping[str, Any], source: str) -> list[str]:
        """The options in a table of a grid as words: true gives the switch, false its opposite or
        nothing. UserError if an option that takes a value is given true or false.
        """
        known = self._parser(command, options.get(_RELEASED[2:]) is True)._option_string_actions
        words: list[str] = []
        for name, value in options.items():
            flag, opposite = f"--{name}", f"--no-{name}"
            if not isinstance(value, bool):
                words += [flag, *map(str, value if isinstance(value, list) else [value])]
            elif flag in known and known[flag].nargs != 0:
                raise UserError(f"{source}: '{name}' takes a value, found {str(value).lower()}")
            elif value or opposite in known:
                words.append(flag if value else opposite)
        return words

    def training(self, words: Sequence[str], source: str) -> TrainingExpectation:
        """What train or train_pgd will do."""
        with reading(source):
            spec, description, schedule = self._training(words)
        recipe = spec.recipe(description, schedule)
        # Without the option, a training that starts from other weights takes their input layer.
        if spec.input_layer is not None or spec.pretrained_model is None:
            recipe["input_layer"] = spec.input_layer or "normalize"
        read = {"pretrained_sha256": spec.pretrained_model, "teacher_sha256": spec.teacher}
        unlabelled, attack = spec.use_unlabelled, spec.objective.gradient_attack
        named = (
            None
            if attack is None
            else {**settings_record(attack), "name": spec.arguments["attack"]}
        )
        return TrainingExpectation(
            epochs=schedule.epochs,
            recipe=recipe,
            objective=spec.arguments["objective"],
            attack=named,
            copies=spec.objective.copies,
            pseudo_label_weight=spec.unlabelled_weight,
            digests={
                field: Path(path).absolute()
                for field, path in read.items()
                if path and not is_on_hub(path)
            },
            files=() if unlabelled is None else (unlabelled.absolute(),),
        )

    def evaluation(self, words: Sequence[str], job: SweepJob, source: str) -> EvaluationStage:
        """What certify or attack will do with the model of a job."""
        archs = [training.expected.recipe["arch"] for training in job.trainings]
        with reading(source):
            spec = self._evaluation(words)
            if isinstance(spec, CertifySpec):
                description = self._described(str(spec.dataset), spec.data_dir)
                kind = RoundedGaussianNoise if spec.sound else GaussianNoise
                dimension = math.prod(description.image_shape)
                noises = (kind(each.sigma, 0) for each in spec.classifiers)
                distances = tuple(noise.distance(dimension) for noise in noises)
                procedure = spec.procedure(description, distances)
                assert spec.log is not None, "a command names its log"
                records = {spec.log: {**spec.identity(*archs), **procedure.record()}}
            else:
                records = {log: one.identity(*archs) for log, one in specs_by_log(spec).items()}
            named = spec.image_set and self._image_set(
                str(spec.dataset), spec.split, spec.data_dir, named=spec.image_set
            )
        return EvaluationStage(
            words=tuple(words),
            logs=tuple(log.absolute() for log in records),
            settings=tuple(
                {**settings, **({IMAGE_SET: named} if named else {})}
                for settings in records.values()
            ),
            selection={"skip": spec.skip, "max": spec.limit},
            denoiser=spec.denoiser,
            classifier=job.classifier,
            trainings=job.trainings,
        )

    def lacking(self, words: Sequence[str]) -> str:
        """Why this machine cannot have the images of a command; "" if it can, now at the latest: a
        dataset may be downloaded.
        """
        if words[0].startswith("train"):
            training = self._training(words)[0]
            asked = [(training.dataset_name, split, training.data_dir) for split in SPLITS]
        else:
            spec = self._evaluation(words)
            asked = [(str(spec.dataset), spec.split, spec.data_dir)]
        return next(filter(None, itertools.starmap(_lacking, asked)), "")

    def _training(self, words: Sequence[str]) -> tuple[TrainSpec, DatasetDescription, Schedule]:
        parser = self._parser(words[0], _RELEASED in words)
        options = parser.parse_args(words[1:])
        with training_of(parser, vars(options), ["smoothadv", *words]) as spec:
            description = spec.augmented(self._described(spec.dataset_name, spec.data_dir))
            schedule = spec.schedule.schedule(description, spec.objective.copies)
        return spec, description, schedule

    def _evaluation(self, words: Sequence[str]) -> CertifySpec | AttackSpec:
        options = vars(self._parser(words[0]).parse_args(words[1:]))
        if words[0] == "certify":
            return certify.spec_of(options, [])
        spec = attack.spec_of(options, [])
        assert isinstance(spec, AttackSpec), "a grid cannot say --against"
        return spec


def _make_parser(command: str, is_released: bool = False) -> Parser:
    """The parser of a command; the released behaviour changes how a training command reads
    epsilon.
    """
    if command in ("certify", "attack"):
        return (certify if command == "certify" else attack).make_parser()
    return (train if command == "train" else train_pgd).make_parser([_RELEASED] * is_released)


@cache
def _lacking(dataset: str, split: str, data_dir: str | Path | None) -> str:
    """Why a split cannot be read; "" if it can."""
    try:
        get_dataset(dataset, split, data_dir)
    except UserError as error:
        return str(error)
    return ""


Evaluations = dict[str, tuple[EvaluationStage, ...]]
"""The evaluations that a table asks for, by the names of the jobs that it is about."""


def plan_jobs(
    grid: Grid,
    commands: CommandReader,
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
    refuse_shared("models", ((job.name, job.model.source) for job in jobs), "write two grids")
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
        (log, source)
        for source, evaluations in tables.items()
        for stage in itertools.chain(*evaluations.values())
        for log in stage.logs
    )
    refuse_shared("tables", logs, "give one a 'name'")
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


def _unnamed_options(model: Model) -> list[tuple[str, Any]]:
    """The swept options that the released names of folders do not hold."""
    return [(key, model.options[key]) for key in model.swept if key not in NAMED_OPTIONS]


class _Planner:
    def __init__(self, grid: Grid, commands: CommandReader, shared: list[str]) -> None:
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
            noise = job.trainings[0].expected.recipe["objective"]["noise_sd"]
            if noise == 0:
                raise UserError(
                    f"{table.source}: {job.model.source} trains without noise: say at which "
                    "'sigma' to smooth its models, or leave their 'group' out"
                )
            sigma = job.model.options.get("noise", noise)
        sigma = fill_placeholders({"sigma": sigma}, job.model.options, table.source)["sigma"]
        name = f"sigma_{format_decimal(sigma)}"
        if table.name:
            name += f"_{format_value(table.name)}"
        split = str(table.options.get("split", "test"))
        output = job.logs / split / f"{name}.tsv"
        if table.command == "attack":
            output = job.logs / "attacked" / split / name
        words = [
            table.command,
            str(job.model.options["dataset"]),
            os.path.relpath(job.classifier.name, self.cwd),
            str(sigma),
            str(output),
        ]
        words += self.commands.option_words(table.command, options, table.source)
        words += self.shared
        return self.commands.evaluation(words, job, table.source)


def model_folder(
    training: TrainingExpectation, arch: str, others: Iterable[tuple[str, Any]] = ()
) -> Path:
    """The folder of a model of the architecture ``arch`` within its sweep.

    ``others`` are further options in which the models of a sweep differ but which the released
    names do not hold: each adds one level of folders, like ``seed_1``.
    """
    objective, attack, copies = training.recipe["objective"], training.attack, training.copies
    parts: list[str] = []
    if "pretrained_sha256" in training.digests:
        parts.append("finetune_cifar_from_imagenet32")
    if training.pseudo_label_weight is not None:
        parts.append("self_training")
    if training.objective != "smoothadv":
        parts.append(format_value(training.objective))
    if attack:
        steps = f"{attack['num_steps']}step{'s' * (attack['num_steps'] != 1)}"
        kind = "_multiNoiseSamples" if copies > 1 else ""
        parts.append(f"{attack['name']}_{steps}{kind}")
        if objective.get("base_attack") or objective["noise_sd"] == 0:
            parts[-1:] = [f"{attack['name']}_{steps}_baseAttackExp", "without_noise"]
    if copies > 1:
        parts.append(f"{copies}-multitrain")
    if training.pseudo_label_weight is not None:
        weight = format_value(training.pseudo_label_weight)
        parts.append(f"weight_{weight}.0" if weight.isdigit() else f"weight_{weight}")
    if attack:
        parts.append(f"eps_{format_decimal(attack['epsilon'])}")
    parts += [f"{key}_{format_value(value)}" for key, value in others]
    dataset = training.recipe["dataset"].rstrip("/").replace(":", "/").split("/")[-1]
    parts += [format_value(dataset), format_value(arch)]
    return Path(*parts, f"noise_{format_decimal(objective['noise_sd'])}")
