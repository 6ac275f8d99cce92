"""train: a base classifier under Gaussian noise, or with any other registered objective."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures import ARCHITECTURES, get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.commands.components import (
    add_settings,
    compose,
    describe,
    name_in,
    refuse_foreign_settings,
    settings_record,
)
from smoothadv.commands.options import (
    add_attack,
    add_dataset,
    add_input_layer,
    add_running,
    compose_attack,
    default_device,
    device_name,
    given_attack_flags,
)
from smoothadv.commands.runner import Parser, run
from smoothadv.datasets import get_dataset
from smoothadv.datasets.images import DatasetDescription, ImageDataset
from smoothadv.noise import derive_generator
from smoothadv.objectives import OBJECTIVES, Objective
from smoothadv.records import CHECKPOINT, provenance
from smoothadv.settings import non_negative_float, non_negative_int, positive_float, positive_int, settings_of
from smoothadv.training import RunFolder, Schedule, recipe_of, train

_EXAMPLES = """examples:
  python code/train.py digits digits_resnet8 models/digits_gaussian --noise 0.25
  python code/train.py cifar10 cifar_resnet110 models/cifar10/gaussian_0.25 --noise 0.25
  python code/train.py imagenet resnet50 models/imagenet/gaussian_0.50 --noise 0.5 --data-dir /datasets/imagenet
  python code/train.py imagefolder:my_images cifar_resnet20 models/mine --noise 0.25 --epochs 30
"""


def main(arguments: list[str] | None = None) -> int:
    """The command ``train``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    return train_command(
        "train",
        "Train a classifier on Gaussian-augmented images (Cohen et al., 2019).",
        _EXAMPLES,
        "gaussian",
        arguments,
    )


def train_command(name: str, description: str, examples: str, objective: str, arguments: list[str] | None) -> int:
    """The command behind train and train_pgd, which differ in their default objective."""
    parser = Parser(prog=name, description=description, epilog=examples)
    add_dataset(parser)
    parser.add_argument("arch", metavar="ARCH", type=name_in(ARCHITECTURES), help=f"one of {', '.join(ARCHITECTURES)}")
    parser.add_argument(
        "outdir", metavar="OUTDIR", type=Path, help="folder for the checkpoint, the log and the arguments"
    )
    _add_objective(parser, objective)
    add_attack(parser)
    _add_schedule(parser)
    add_running(parser)
    return run(
        parser,
        lambda options: _train(parser, options),
        arguments,
        interrupted="every finished epoch is saved; run the same command with --resume to continue",
    )


def _add_objective(parser: Parser, default: str) -> None:
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        type=name_in(OBJECTIVES),
        default=default,
        metavar="NAME",
        help=f"one of {', '.join(OBJECTIVES)} (default: {default})",
    )
    add_settings(group, [setting for name in OBJECTIVES for setting in settings_of(OBJECTIVES[name])])


def _add_schedule(parser: Parser) -> None:
    group = parser.add_argument_group("schedule (defaults: the paper's for the dataset)")
    group.add_argument("--epochs", type=positive_int, metavar="N")
    group.add_argument(
        "--batch", type=positive_int, metavar="B", help="images per update, each in all its noisy copies"
    )
    group.add_argument("--lr", type=positive_float, help="initial learning rate")
    group.add_argument(
        "--lr-step-size",
        "--lr_step_size",
        type=positive_int,
        metavar="N",
        help="epochs between divisions of the learning rate",
    )
    group.add_argument(
        "--lr-factor",
        "--gamma",
        type=positive_float,
        default=0.1,
        metavar="F",
        help="what the learning rate is multiplied with then (default: 0.1)",
    )
    group.add_argument("--momentum", type=non_negative_float, default=0.9, help="default: 0.9")
    group.add_argument("--weight-decay", type=non_negative_float, default=1e-4, help="default: 1e-4")
    group.add_argument(
        "--crop-padding",
        type=non_negative_int,
        metavar="P",
        help="random crops after padding by P pixels, 0 for none (default: the dataset's)",
    )
    group.add_argument(
        "--horizontal-flip",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="random mirror images (default: the dataset's)",
    )
    add_input_layer(parser, "normalize", "first layer of the model (default: normalize)")


def _train(parser: Parser, options: argparse.Namespace) -> None:
    objective = _compose_objective(parser, options)
    device = options.device or default_device()
    training_set = get_dataset(options.dataset, "train", options.data_dir)
    test_set = get_dataset(options.dataset, "test", options.data_dir)
    description = training_set.description = _with_augmentation(training_set.description, options)
    schedule = _schedule(description, options)
    recipe = {
        "dataset": options.dataset,
        "dataset_fingerprint": training_set.fingerprint(),
        "arch": options.arch,
        "input_layer": options.input_layer,
        "seed": options.seed,
        "crop_padding": description.crop_padding,
        "horizontal_flip": description.horizontal_flip,
        **recipe_of(schedule),
        "objective": settings_record(objective),
    }
    this_run = {"epochs": schedule.epochs, "device": device_name(device), **provenance(options.command)}
    facts = _facts(options, description, objective)
    # Else cuDNN may choose kernels whose sums depend on timing, and a resumed run would end with other weights.
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(derive_generator("cpu", options.seed).initial_seed())
    model = get_architecture(options.arch, description, options.input_layer)
    with RunFolder(options.outdir, facts, recipe, this_run, options.existing) as run_folder:
        _announce(options, objective, schedule, training_set, test_set, device)
        train(model, objective, training_set, test_set, schedule, options.seed, device, run_folder)
    print(f"saved {options.outdir / CHECKPOINT}; certify it with:\n  {_certify_command(options, objective)}")


def _compose_objective(parser: Parser, options: argparse.Namespace) -> Objective:
    component = OBJECTIVES[options.objective]
    everything = [OBJECTIVES[name] for name in OBJECTIVES]
    given: dict[str, Any] = {}
    if any(field.name == "attack" for field in dataclasses.fields(component)):
        if "--noise" not in options:
            parser.error("--noise is required: the noise's standard deviation on images in [0, 1], like 0.25")
        given["attack"] = compose_attack(parser, options, getattr(options, "--noise", 0.0))
        chosen = [component, *(ATTACKS[name] for name in ATTACKS)]
    else:
        chosen = [component]
        if given_attack_flags(options):
            parser.error(
                f"{given_attack_flags(options)[0]} is not read by --objective {options.objective}, which makes no "
                "attack: leave it out, or use train_pgd"
            )
    refuse_foreign_settings(parser, options, everything, chosen, f"--objective {options.objective}")
    return compose(parser, component, options, f"--objective {options.objective}", **given)


def _with_augmentation(description: DatasetDescription, options: argparse.Namespace) -> DatasetDescription:
    changes = {
        name: getattr(options, name)
        for name in ("crop_padding", "horizontal_flip")
        if getattr(options, name) is not None
    }
    return dataclasses.replace(description, **changes)


def _schedule(description: DatasetDescription, options: argparse.Namespace) -> Schedule:
    defaults = description.defaults
    return Schedule(
        epochs=options.epochs or defaults.epochs,
        batch=options.batch or defaults.batch,
        learning_rate=options.lr or defaults.learning_rate,
        learning_rate_step=options.lr_step_size or defaults.learning_rate_step,
        learning_rate_factor=options.lr_factor,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )


def _facts(options: argparse.Namespace, description: DatasetDescription, objective: Objective) -> dict[str, Any]:
    """What a reader of the checkpoint needs to use the model."""
    return {
        "arch": options.arch,
        "dataset": description.name,
        "classes": list(description.class_names),
        "image_shape": list(description.image_shape),
        "input_layer": options.input_layer,
        "mean": list(description.mean or ()),
        "std": list(description.std or ()),
        "noise_sd": objective.noise_sd,
    }


def _announce(
    options: argparse.Namespace,
    objective: Objective,
    schedule: Schedule,
    training_set: ImageDataset,
    test_set: ImageDataset,
    device: torch.device,
) -> None:
    print(
        f"training {options.arch} on {options.dataset} ({len(training_set)} images, {len(test_set)} to test) with "
        f"{describe(objective)}, "
        f"{schedule.epochs} epochs on {device}"
    )


def _certify_command(options: argparse.Namespace, objective: Objective) -> str:
    """The command line that certifies the trained model at the noise it was trained for."""
    sigma = str(objective.noise_sd or 0.25)
    words = ["python", "code/certify.py", options.dataset, str(options.outdir / CHECKPOINT), sigma]
    words.append(f"logs/{options.outdir.name}_sigma_{sigma}.tsv")
    return shlex.join(words + (["--data-dir", options.data_dir] if options.data_dir else []))
