"""train: a base classifier under Gaussian noise, or with any other registered objective."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures import ARCHITECTURES, get_architecture
from smoothadv.checkpoints import (
    file_digest,
    read_checkpoint,
    recorded_input_layer,
    start_from,
    with_recorded_constants,
)
from smoothadv.commands.components import describe, name_in, settings_record, warn
from smoothadv.commands.options import add_attack, add_dataset, add_running, default_device, device_name, in_256ths
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
    refuse_contradictions,
)
from smoothadv.datasets import get_dataset
from smoothadv.datasets.images import DatasetDescription
from smoothadv.datasets.unlabelled import load_pseudo_labelled
from smoothadv.errors import UserError
from smoothadv.noise import derive_generator
from smoothadv.objectives import Objective
from smoothadv.records import CHECKPOINT, provenance
from smoothadv.training import Data, Execution, Processes, RunFolder, Schedule, TrainingRun, ended, join_processes
from smoothadv.workers import own_device

_EXAMPLES = """examples:
  python code/train.py digits digits_resnet8 models/digits_gaussian --noise 0.25
  python code/train.py cifar10 cifar_resnet110 models/cifar10/gaussian_0.25 --noise 0.25
  python code/train.py imagenet resnet50 models/imagenet/gaussian_0.50 --noise 0.5 --data-dir /datasets/imagenet
  python code/train.py imagefolder:my_images cifar_resnet20 models/mine --noise 0.25 --epochs 30
"""


def main(arguments: list[str] | None = None) -> int:
    """The command ``train``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    return train_command(make_parser(arguments), arguments)


def make_parser(arguments: Sequence[str] | None) -> Parser:
    """The parser of the command ``train`` for ``arguments``, some of which change what others mean."""
    description = "Train a classifier on Gaussian-augmented images (Cohen et al., 2019)."
    return training_parser("train", description, _EXAMPLES, "gaussian", arguments)


def training_parser(
    name: str, description: str, examples: str, objective: str, arguments: Sequence[str] | None
) -> Parser:
    """The parser of train or train_pgd, which differ in their default objective."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog=name, description=description, epilog=examples)
    add_dataset(parser)
    parser.add_argument("arch", metavar="ARCH", type=name_in(ARCHITECTURES), help=f"one of {', '.join(ARCHITECTURES)}")
    parser.add_argument(
        "outdir", metavar="OUTDIR", type=Path, help="folder for the checkpoint, the log and the arguments"
    )
    add_recipe(parser)
    add_objective(parser, objective)
    add_attack(parser, *[in_256ths] * ("--released-behaviour" in words))
    add_schedule(parser)
    add_data(parser)
    add_execution(parser)
    add_running(parser)
    return parser


def train_command(parser: Parser, arguments: list[str] | None) -> int:
    """The command behind train and train_pgd."""
    code = run(
        parser,
        lambda options: _train(parser, options),
        arguments,
        interrupted="with --resume the same command continues from the last checkpoint",
    )
    return ended(code)


@dataclass(frozen=True)
class _Job:
    """What the command line describes: a model, what it is trained on and for, and how.

    ``started_from`` says which weights it has, if they are not new ones.
    """

    options: argparse.Namespace
    objective: Objective
    data: Data
    schedule: Schedule
    execution: Execution
    processes: Processes
    device: torch.device
    description: DatasetDescription
    input_layer: str
    model: torch.nn.Module
    started_from: str | None


def _train(parser: Parser, options: argparse.Namespace) -> None:
    apply_recipes(parser, options)
    objective = compose_objective(parser, options)
    refuse_contradictions(parser, options)
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
            schedule = compose_schedule(parser, options, data.training.description, objective)
            model = _model(options, data.training.description)
        _run(_Job(options, objective, data, schedule, execution, processes, device, *model))


def _load(options: argparse.Namespace) -> Data:
    """The images, augmented as the options say."""
    training = get_dataset(options.dataset, "train", options.data_dir)
    training.description = with_augmentation(training.description, options)
    pseudo = load_pseudo_labelled(options.use_unlabelled, training.description) if options.use_unlabelled else None
    test = get_dataset(options.dataset, "test", options.data_dir)
    return Data(training, test, pseudo, options.unlabelled_weight or 1.0)


def with_augmentation(description: DatasetDescription, options: argparse.Namespace) -> DatasetDescription:
    """The description with what the options say of crops and mirror images."""
    changes = {
        name: getattr(options, name)
        for name in ("crop_padding", "horizontal_flip")
        if getattr(options, name) is not None
    }
    return dataclasses.replace(description, **changes)


def _model(
    options: argparse.Namespace, description: DatasetDescription
) -> tuple[DatasetDescription, str, torch.nn.Module, str | None]:
    """Description with the model's constants, input layer, model, and what it starts from."""
    path, content = options.pretrained_model, None
    input_layer = options.input_layer or "normalize"
    if path is not None:
        content = read_checkpoint(path)
        input_layer = recorded_input_layer(content, path, options.input_layer)
        description = with_recorded_constants(content, description)
    torch.manual_seed(derive_generator("cpu", options.seed).initial_seed())
    model = get_architecture(options.arch, description, input_layer)
    started_from = None if content is None else start_from(model, content, path, options.arch, description)
    return description, input_layer, model, started_from


def _run(job: _Job) -> None:
    """Train, from the last checkpoint where there is one."""
    options, processes = job.options, job.processes
    this_run = {
        "epochs": job.schedule.epochs,
        "device": device_name(job.device),
        "processes": processes.size,
        **({"launch": processes.launch} if processes.launch is not None else {}),
        "arguments": {name: _plain(value) for name, value in vars(options).items() if name != "command"},
        **provenance(options.command),
    }
    folder = RunFolder(options.outdir, _facts(job), _recipe(job), this_run, options.existing)
    with contextlib.ExitStack() as stack:
        with processes.first_goes_first():
            if processes.is_first:
                if job.schedule.batch < processes.size:
                    raise UserError(f"--batch is {job.schedule.batch} images for {processes.size} processes: take more")
                stack.enter_context(folder)
                _announce(job, folder)
        training = TrainingRun(
            job.model,
            job.objective,
            job.data,
            job.schedule,
            options.seed,
            job.device,
            folder,
            job.execution,
            compose_evaluation(options),
            processes,
        )
        training.run_epochs(board=options.tensorboard)
    if processes.is_first:
        print(f"saved {options.outdir / CHECKPOINT}; certify it with:\n  {_certify_command(options, job.objective)}")


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _recipe(job: _Job) -> dict[str, Any]:
    """All that decides the weights, for the reader and for a resumed run to be compared with."""
    options, data = job.options, job.data
    recipe = {
        **stated_recipe(options, job.description, job.objective, job.schedule, job.execution),
        "dataset_fingerprint": data.training.fingerprint(),
        "input_layer": job.input_layer,
    }
    if options.pretrained_model:
        recipe["pretrained_sha256"] = file_digest(options.pretrained_model)
    if data.pseudo_labelled is not None:
        recipe["pseudo_labelled_fingerprint"] = data.pseudo_labelled.fingerprint()
        recipe["pseudo_weight"] = data.pseudo_weight
    return recipe


def stated_recipe(
    options: argparse.Namespace,
    description: DatasetDescription,
    objective: Objective,
    schedule: Schedule,
    execution: Execution,
) -> dict[str, Any]:
    """The part of a recipe that is known before any file is read."""
    return {
        "dataset": options.dataset,
        "arch": options.arch,
        "seed": options.seed,
        "crop_padding": description.crop_padding,
        "horizontal_flip": description.horizontal_flip,
        **schedule.record(),
        **execution.record(),
        "objective": settings_record(objective),
    }


def _facts(job: _Job) -> dict[str, Any]:
    """What a reader of the checkpoint needs to use the model."""
    return {
        "arch": job.options.arch,
        "dataset": job.description.name,
        "classes": list(job.description.class_names),
        "image_shape": list(job.description.image_shape),
        "input_layer": job.input_layer,
        "mean": list(job.description.mean or ()),
        "std": list(job.description.std or ()),
        "noise_sd": job.objective.noise_sd,
    }


def _announce(job: _Job, folder: RunFolder) -> None:
    """Say what is about to happen, and what is probably not meant."""
    images = f"{len(job.data.training)} images, {len(job.data.test)} to test"
    if job.data.pseudo_labelled is not None:
        images += f", {len(job.data.pseudo_labelled)} pseudo-labelled"
    size = job.processes.size
    where = f"{size} processes on {job.device.type}" if size > 1 else str(job.device)
    print(
        f"training {job.options.arch} on {job.options.dataset} ({images}) with {describe(job.objective)}, "
        f"{job.schedule.epochs} epochs on {where}"
    )
    if folder.saved is None and job.started_from is not None:
        print(job.started_from)
    if folder.saved is not None and (before := folder.saved["runs"][-1].get("processes", size)) != size:
        warn(
            f"this run had {before} processes and goes on with {size}: batch normalization sees other shares of a "
            "batch, and the weights will not be those of a run that was not interrupted"
        )
    reached = job.objective.epsilon(job.schedule.epochs - 1)
    if reached < job.objective.full_epsilon:
        warn(
            f"epsilon reaches {reached:.3g} of {job.objective.full_epsilon:.3g} in {job.schedule.epochs} epochs: "
            "a smaller --warmup or more --epochs would let it grow to the end"
        )


def _certify_command(options: argparse.Namespace, objective: Objective) -> str:
    """The command line that certifies the trained model at the noise it was trained for."""
    sigma = str(objective.noise_sd or 0.25)
    is_clone = Path(sys.argv[0]).suffix == ".py"
    words = ["python", "code/certify.py"] if is_clone else ["smoothadv", "certify"]
    words += [options.dataset, str(options.outdir / CHECKPOINT), sigma]
    words.append(f"logs/{options.outdir.resolve().name}_sigma_{sigma}.tsv")
    return shlex.join(words + (["--data-dir", options.data_dir] if options.data_dir else []))
