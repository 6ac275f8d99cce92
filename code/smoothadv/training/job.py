"""From a request to a trained classifier: loads images and model, trains, and records what decides
the weights.
"""

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from smoothadv.architectures import LIBRARIES, get_architecture, pretrained_architecture
from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.base.devices import default_device, device_name, device_of_process
from smoothadv.base.digests import file_digest
from smoothadv.base.distributed import join_processes
from smoothadv.base.errors import UsageError, UserError, warn
from smoothadv.base.provenance import provenance
from smoothadv.base.settings import describe
from smoothadv.checkpoints import (
    INTEGER,
    digest_of,
    read_checkpoint,
    recorded_input_layer,
    start_from,
    with_recorded_constants,
)
from smoothadv.datasets import SPLITS, DatasetDescription, ImageDataset, get_dataset
from smoothadv.datasets.preparation import split_location
from smoothadv.datasets.unlabelled import load_pseudo_labelled
from smoothadv.exact.training import trained_integers
from smoothadv.noise import derive_generator
from smoothadv.training.graphed import layer_groups
from smoothadv.training.loop import Job, TrainingRun
from smoothadv.training.run_folder import RunFolder
from smoothadv.training.schedule import Schedule
from smoothadv.training.spec import TrainingRequest
from smoothadv.training.teacher import Teacher, library_teacher, load_teacher


@dataclass(frozen=True)
class Trained:
    """A trained classifier and the history of its training, one row of TRAINING_COLUMNS per epoch.

    Of several processes one ``is_first``: it has written the checkpoint.
    """

    model: torch.nn.Module
    history: list[dict[str, Any]]
    is_first: bool


def train(request: TrainingRequest, report: Callable[[str], None] = print) -> Trained:
    """Train, from the last checkpoint in the folder where the request resumes; ``report`` takes
    lines for people.

    UserError where what is asked for does not fit together, NonFiniteError if the loss or the
    weights stop being finite; KeyboardInterrupt or Terminated, after saving, on Ctrl-C or SIGTERM.
    """
    processes = join_processes()
    local_rank = processes.local_rank if processes.size > 1 else None
    device = device_of_process(request.device or default_device(), local_rank)
    of_gpus = {
        "--sync-bn": request.execution.synchronized_norm,
        "--cuda-graph": request.execution.cuda_graph,
    }
    for flag, is_asked_for in of_gpus.items():
        if is_asked_for and device.type != "cuda":
            raise UserError(f"{flag} is for GPUs, and this trains on {device.type}: leave it out")
    if request.finetune_quantized and (
        request.pretrained_model is None or request.execution.precision != "fp32"
    ):
        raise UsageError(
            "--finetune-quantized needs a --pretrained-model of integers, and their exact sums: no "
            "--precision"
        )
    # Else cuDNN may choose kernels whose sums depend on timing, and a resumed run would end with
    # other weights.
    torch.backends.cudnn.deterministic = True
    with processes.connected(device):
        with processes.first_goes_first():
            training, test, pseudo_labelled = _load(request)
            description = training.description
            schedule = request.schedule.schedule(description, request.objective.copies)
            model = _model(request, description)
            request.refuse_contradictions()
            layer_groups(model[2], schedule.layer_decay)  # before there is a folder
            _warn_of_policy(request, schedule)
            teacher = _teacher(request, description, device)
        return _run(
            Job(
                request,
                training,
                test,
                pseudo_labelled,
                schedule,
                processes,
                device,
                *model,
                teacher,
            ),
            report,
        )


def _teacher(
    request: TrainingRequest, description: DatasetDescription, device: torch.device
) -> Teacher | None:
    if request.teacher is None:
        return None
    name, denoises = str(request.teacher), request.objective.DENOISES
    if denoises and name.partition(":")[0] in LIBRARIES and not os.path.exists(name):
        if request.input_layer is not None:
            raise UsageError(
                f"{name} has the normalization that its library says: leave --input-layer out"
            )
        return library_teacher(name, description, device)
    return load_teacher(
        request.teacher, description, device, request.input_layer if denoises else None
    )


def _warn_of_policy(request: TrainingRequest, schedule: Schedule) -> None:
    """Warn if the data policy will not begin."""
    if request.data_policy is not None and request.data_policy.from_epoch >= schedule.epochs:
        flag = "--attack-from-epoch" if request.policy is None else "--choose-from-epoch"
        warn(
            f"training images are chosen from epoch {request.data_policy.from_epoch + 1} on, and "
            f"there are only {schedule.epochs}: a smaller {flag} would let that begin"
        )


def _with_votes(job: Job) -> Job:
    """The job with the votes of its teacher, if the objective uses them."""
    draws, schedule = job.request.votes_of_teacher, job.schedule
    if job.teacher is None or not draws:
        return job
    batch = (schedule.micro_batch or schedule.batch) * job.request.objective.copies
    noise_sd = job.request.objective.noise_sd
    return replace(
        job,
        teacher=job.teacher.voting(job.training, noise_sd, draws, job.device, batch, job.processes),
    )


def _load(request: TrainingRequest) -> tuple[ImageDataset, ImageDataset, ImageDataset | None]:
    """The images, augmented as asked: to train and to test on, and pseudo-labelled ones."""
    if isinstance(request.images, str):
        if request.crop_padding is not None and split_location(request.images)[1] is not None:
            raise UsageError(
                f"--crop-padding: of '{request.images}' random parts are resized instead: leave it "
                "out"
            )
        training, test = (get_dataset(request.images, split, request.data_dir) for split in SPLITS)
    else:
        training, test = copy.copy(request.images[0]), request.images[1]
    training.description = request.augmented(training.description)
    path = request.use_unlabelled
    pseudo = None if path is None else load_pseudo_labelled(path, training.description)
    return training, test, pseudo


def _model(
    request: TrainingRequest, description: DatasetDescription
) -> tuple[DatasetDescription, str | None, torch.nn.Module, str | None]:
    """Description with the model's constants, input layer, model, and what it starts from."""
    if request.objective.DENOISES:
        return _denoiser(request, description)
    if not isinstance(request.classifier, str):
        if (
            request.pretrained_model is not None
            or request.input_layer is not None
            or request.pretrained
        ):
            raise UserError(
                "a module has weights and input layer: leave pretrained_model and input_layer out"
            )
        return description, None, request.classifier, None
    path, content = request.pretrained_model, None
    if request.pretrained and path is not None:
        raise UsageError(
            "--pretrained and --pretrained-model both say where to start: leave one of them out"
        )
    input_layer = request.input_layer or "normalize"
    if path is not None:
        content = read_checkpoint(path)
        input_layer = recorded_input_layer(content, path, request.input_layer)
        description = with_recorded_constants(content, path, description)
    if content is not None and path is not None and request.finetune_quantized:
        integers = trained_integers(
            content, path, request.classifier, request.objective.noise_sd, description
        )
        return description, input_layer, integers, f"starting from the integers of {path}"
    if content is not None and INTEGER in content:
        raise UserError(
            f"{path} is a checkpoint of integers: add --finetune-quantized to train them"
        )
    torch.manual_seed(derive_generator("cpu", request.seed).initial_seed())
    if request.pretrained:
        description, model = pretrained_architecture(request.classifier, description, input_layer)
        return description, input_layer, model, f"starting from the weights of {request.classifier}"
    model = get_architecture(request.classifier, description, input_layer)
    if content is None or path is None:
        return description, input_layer, model, None
    return (
        description,
        input_layer,
        model,
        start_from(model, content, path, request.classifier, description),
    )


def _denoiser(
    request: TrainingRequest, description: DatasetDescription
) -> tuple[DatasetDescription, None, torch.nn.Module, str | None]:
    """As ``_model``, of a denoiser, which has no input layer."""
    if not isinstance(request.classifier, str):
        raise UserError(
            f"the model is a {type(request.classifier).__name__}: name one of "
            f"{', '.join(DENOISERS)}"
        )
    torch.manual_seed(derive_generator("cpu", request.seed).initial_seed())
    model, path = DENOISERS[request.classifier](description), request.pretrained_model
    if path is None:
        return description, None, model, None
    content = read_checkpoint(path, denoiser=True)
    return (
        description,
        None,
        model,
        start_from(model, content, path, request.classifier, description),
    )


def _run(job: Job, report: Callable[[str], None]) -> Trained:
    """Train, from the last checkpoint where there is one."""
    request, processes = job.request, job.processes
    this_run = {
        "epochs": job.schedule.epochs,
        # now, so that an image that cannot be read is named now
        "test_fingerprint": job.test.fingerprint(),
        "device": device_name(job.device),
        "processes": processes.size,
        "torch_threads": torch.get_num_threads(),
        **({"launch": processes.launch} if processes.launch is not None else {}),
        "arguments": {
            name: value
            if value is None or isinstance(value, (bool, int, float, str))
            else str(value)
            for name, value in request.arguments.items()
        },
        **provenance(request.command),
    }
    terms = request.objective.columns
    folder = RunFolder(request.outdir, _facts(job), _recipe(job), this_run, request.existing, terms)
    with contextlib.ExitStack() as stack:
        with processes.first_goes_first():
            if processes.is_first:
                if job.schedule.batch < processes.size:
                    raise UserError(
                        f"--batch is {job.schedule.batch} images for {processes.size} processes: "
                        "take more"
                    )
                stack.enter_context(folder)
                _announce(job, folder, report)
        history = TrainingRun(_with_votes(job), folder).run_epochs(report, board=request.board)
    return Trained(job.model, history, processes.is_first)


def _recipe(job: Job) -> dict[str, Any]:
    """All that decides the weights, for the reader and for a resumed run to be compared with."""
    request, pseudo_labelled = job.request, job.pseudo_labelled
    recipe = {
        **request.stated_recipe(job.description, job.schedule),
        "dataset_fingerprint": job.training.fingerprint(),
        "input_layer": job.input_layer,
    }
    if request.pretrained_model:
        recipe["pretrained_sha256"] = file_digest(request.pretrained_model)
    if request.pretrained:
        recipe["pretrained_sha256"] = digest_of(job.model.state_dict())
    if job.teacher is not None:
        recipe["teacher_sha256"] = job.teacher.sha256
    if pseudo_labelled is not None:
        recipe["pseudo_labelled_fingerprint"] = pseudo_labelled.fingerprint()
        recipe["pseudo_weight"] = request.unlabelled_weight
    return recipe


def _facts(job: Job) -> dict[str, Any]:
    """What a reader of the checkpoint needs to use the model."""
    plugins = [plugin.record for plugin in job.request.plugins]
    return {
        "arch": f"{INTEGER}:{job.request.arch}"
        if job.request.finetune_quantized
        else job.request.arch,
        "dataset": job.description.name,
        "classes": list(job.description.class_names),
        "image_shape": list(job.description.image_shape),
        "input_layer": job.input_layer,
        "mean": list(job.description.mean or ()),
        "std": list(job.description.std or ()),
        "noise_sd": job.request.objective.noise_sd,
        **({"plugins": plugins} if plugins else {}),
        **({"denoiser": True} if job.request.objective.DENOISES else {}),
    }


def _announce(job: Job, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Say what is about to happen, and what is probably not meant."""
    request, objective = job.request, job.request.objective
    images = f"{len(job.training)} images, {len(job.test)} to test"
    if job.pseudo_labelled is not None:
        images += f", {len(job.pseudo_labelled)} pseudo-labelled"
    size = job.processes.size
    where = f"{size} processes on {job.device.type}" if size > 1 else str(job.device)
    report(
        f"training {request.arch} on {request.dataset} ({images}) with {describe(objective)}, "
        f"{job.schedule.epochs} epochs on {where}"
    )
    if folder.saved is None and job.started_from is not None:
        report(job.started_from)
    if (
        folder.saved is not None
        and (before := folder.saved["runs"][-1].get("processes", size)) != size
    ):
        warn(
            f"this run had {before} processes and goes on with {size}: batch normalization sees "
            "other shares of a batch, and the weights will not be those of a run that was not "
            "interrupted"
        )
    reached = objective.epsilon(job.schedule.epochs - 1)
    if reached < objective.full_epsilon and hasattr(objective, "warmup"):
        warn(
            f"epsilon reaches {reached:.3g} of {objective.full_epsilon:.3g} in "
            f"{job.schedule.epochs} epochs: a smaller --warmup or more --epochs would let it grow "
            "to the end"
        )
