"""train: a base classifier under Gaussian noise, or with any other registered objective."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures import ARCHITECTURES, get_architecture
from smoothadv.checkpoints import file_digest, read_checkpoint, recorded_input_layer, start_from
from smoothadv.commands.components import describe, name_in, settings_record
from smoothadv.commands.options import add_attack, add_dataset, add_running, default_device, device_name
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.training_options import (
    add_data,
    add_execution,
    add_objective,
    add_recipe,
    add_schedule,
    apply_recipes,
    compose_evaluation,
    compose_execution,
    compose_objective,
    compose_schedule,
)
from smoothadv.datasets import get_dataset
from smoothadv.datasets.images import DatasetDescription
from smoothadv.datasets.unlabelled import load_pseudo_labelled
from smoothadv.errors import UserError
from smoothadv.noise import derive_generator
from smoothadv.objectives import Objective
from smoothadv.records import CHECKPOINT, provenance
from smoothadv.training import Data, Execution, Processes, RunFolder, Schedule, join_processes, train
from smoothadv.workers import own_device

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
    words = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog=name, description=description, epilog=examples)
    add_dataset(parser)
    parser.add_argument("arch", metavar="ARCH", type=name_in(ARCHITECTURES), help=f"one of {', '.join(ARCHITECTURES)}")
    parser.add_argument(
        "outdir", metavar="OUTDIR", type=Path, help="folder for the checkpoint, the log and the arguments"
    )
    add_recipe(parser)
    add_objective(parser, objective)
    add_attack(parser, in_256ths="--released-behaviour" in words)
    add_schedule(parser)
    add_data(parser)
    add_execution(parser)
    add_running(parser)
    return run(
        parser,
        lambda options: _train(parser, options),
        arguments,
        interrupted="what was trained is saved; run the same command with --resume to continue",
    )


def _train(parser: Parser, options: argparse.Namespace) -> None:
    apply_recipes(parser, options)
    objective = compose_objective(parser, options)
    if options.unlabelled_weight is not None and options.use_unlabelled is None:
        parser.error("--unlabelled-weight weighs the images of --use-unlabelled: name their file, or leave it out")
    processes = join_processes()
    local_rank = processes.local_rank if processes.size > 1 else None
    device = own_device(options.device or default_device(), local_rank)
    execution = compose_execution(options)
    if execution.synchronized_norm and device.type != "cuda":
        raise UserError(f"--sync-bn is for GPUs, and this trains on {device.type}: leave it out")
    # Else cuDNN may choose kernels whose sums depend on timing, and a resumed run would end with other weights.
    torch.backends.cudnn.deterministic = True
    with processes.connected(device):
        with processes.first_goes_first():
            data = _load(options)
        _train_on(parser, options, objective, data, execution, processes, device)


def _load(options: argparse.Namespace) -> Data:
    """The images, augmented as the options say."""
    training = get_dataset(options.dataset, "train", options.data_dir)
    training.description = _with_augmentation(training.description, options)
    pseudo = load_pseudo_labelled(options.use_unlabelled, training.description) if options.use_unlabelled else None
    test = get_dataset(options.dataset, "test", options.data_dir)
    return Data(training, test, pseudo, options.unlabelled_weight or 1.0)


def _train_on(
    parser: Parser,
    options: argparse.Namespace,
    objective: Objective,
    data: Data,
    execution: Execution,
    processes: Processes,
    device: torch.device,
) -> None:
    description = data.training.description
    schedule = compose_schedule(parser, options, description, objective)
    pretrained = read_checkpoint(options.pretrained_model) if options.pretrained_model else None
    input_layer = options.input_layer or "normalize"
    if pretrained is not None:
        input_layer = recorded_input_layer(pretrained, options.pretrained_model, options.input_layer)
    torch.manual_seed(derive_generator("cpu", options.seed).initial_seed())
    model = get_architecture(options.arch, description, input_layer)
    said = (
        start_from(model, pretrained, options.pretrained_model, options.arch, description)
        if pretrained is not None
        else None
    )
    this_run = {
        "epochs": schedule.epochs,
        "device": device_name(device),
        "processes": processes.size,
        **provenance(options.command),
    }
    existing = "resume" if processes.is_continued() else options.existing
    recipe = _recipe(options, objective, data, schedule, execution, input_layer)
    folder = RunFolder(options.outdir, _facts(options, description, objective, input_layer), recipe, this_run, existing)
    with folder if processes.is_first else contextlib.nullcontext():
        if processes.is_first:
            _announce(options, objective, schedule, data, processes, device)
            if said is not None and folder.saved is None:
                print(said)
        train(
            model,
            objective,
            data,
            schedule,
            options.seed,
            device,
            folder,
            execution,
            compose_evaluation(options),
            processes,
            board=options.tensorboard,
        )
    if processes.is_first:
        print(f"saved {options.outdir / CHECKPOINT}; certify it with:\n  {_certify_command(options, objective)}")


def _recipe(
    options: argparse.Namespace,
    objective: Objective,
    data: Data,
    schedule: Schedule,
    execution: Execution,
    input_layer: str,
) -> dict[str, Any]:
    """All that decides the weights, for the reader and for a resumed run to be compared with."""
    description = data.training.description
    recipe = {
        "dataset": options.dataset,
        "dataset_fingerprint": data.training.fingerprint(),
        "arch": options.arch,
        "input_layer": input_layer,
        "seed": options.seed,
        "crop_padding": description.crop_padding,
        "horizontal_flip": description.horizontal_flip,
        **schedule.record(),
        **execution.record(),
        "objective": settings_record(objective),
    }
    if options.pretrained_model:
        recipe["pretrained_sha256"] = file_digest(options.pretrained_model)
    if data.pseudo_labelled is not None:
        recipe["pseudo_labelled_fingerprint"] = data.pseudo_labelled.fingerprint()
        recipe["pseudo_weight"] = data.pseudo_weight
    return recipe


def _with_augmentation(description: DatasetDescription, options: argparse.Namespace) -> DatasetDescription:
    changes = {
        name: getattr(options, name)
        for name in ("crop_padding", "horizontal_flip")
        if getattr(options, name) is not None
    }
    return dataclasses.replace(description, **changes)


def _facts(
    options: argparse.Namespace, description: DatasetDescription, objective: Objective, input_layer: str
) -> dict[str, Any]:
    """What a reader of the checkpoint needs to use the model."""
    return {
        "arch": options.arch,
        "dataset": description.name,
        "classes": list(description.class_names),
        "image_shape": list(description.image_shape),
        "input_layer": input_layer,
        "mean": list(description.mean or ()),
        "std": list(description.std or ()),
        "noise_sd": objective.noise_sd,
    }


def _announce(
    options: argparse.Namespace,
    objective: Objective,
    schedule: Schedule,
    data: Data,
    processes: Processes,
    device: torch.device,
) -> None:
    images = f"{len(data.training)} images, {len(data.test)} to test"
    if data.pseudo_labelled is not None:
        images += f", {len(data.pseudo_labelled)} pseudo-labelled"
    where = f"{processes.size} processes on {device.type}" if processes.size > 1 else str(device)
    print(
        f"training {options.arch} on {options.dataset} ({images}) with {describe(objective)}, "
        f"{schedule.epochs} epochs on {where}"
    )


def _certify_command(options: argparse.Namespace, objective: Objective) -> str:
    """The command line that certifies the trained model at the noise it was trained for."""
    sigma = str(objective.noise_sd or 0.25)
    words = ["python", "code/certify.py", options.dataset, str(options.outdir / CHECKPOINT), sigma]
    words.append(f"logs/{options.outdir.name}_sigma_{sigma}.tsv")
    return shlex.join(words + (["--data-dir", options.data_dir] if options.data_dir else []))
