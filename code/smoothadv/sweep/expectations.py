"""What commands will do, for sweeps: their words are read as the commands themselves read them, but
nothing runs.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.settings import settings_record
from smoothadv.cli import attack, certify, train, train_pgd
from smoothadv.cli.options.training import training_of
from smoothadv.cli.runner import Parser, reading
from smoothadv.datasets import SPLITS, DatasetDescription, describe_dataset, get_dataset
from smoothadv.evaluation.image_sets import images_named
from smoothadv.evaluation.predict import specs_by_log
from smoothadv.evaluation.specs import AttackSpec, CertifySpec
from smoothadv.models.name import HUB
from smoothadv.noise import GaussianNoise, RoundedGaussianNoise
from smoothadv.records.logs import IMAGE_SET, record_of
from smoothadv.sweep.stages import EvaluationExpectation, TrainingExpectation
from smoothadv.training.schedule import Schedule
from smoothadv.training.spec import TrainSpec

_RELEASED = "--released-behaviour"


class CommandReader:
    """Implements ``smoothadv.sweep.stages.Commands``; what is slow, like making a parser, is done
    once.
    """

    def __init__(self) -> None:
        self._parser, self._described = cache(_make_parser), cache(describe_dataset)
        self._image_set = cache(
            lambda *dataset, named: record_of(named, images_named(named, get_dataset(*dataset)))
        )

    def option_words(self, command: str, options: Mapping[str, Any], source: str) -> list[str]:
        """As ``Commands``; UserError if an option that takes a value is given true or false."""
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
                if path and not str(path).startswith(HUB)
            },
            files=() if unlabelled is None else (unlabelled.absolute(),),
        )

    def evaluation(
        self, words: Sequence[str], archs: Sequence[str], source: str
    ) -> EvaluationExpectation:
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
        return EvaluationExpectation(
            logs=tuple(log.absolute() for log in records),
            settings=tuple(
                {**settings, **({IMAGE_SET: named} if named else {})}
                for settings in records.values()
            ),
            selection={"skip": spec.skip, "max": spec.limit},
            denoiser=spec.denoiser,
        )

    def lacking(self, words: Sequence[str]) -> str:
        """As ``Commands``; may download a dataset."""
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
