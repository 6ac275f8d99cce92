"""From a specification to a trained classifier: loads images and model, trains, and records what
decides the weights.
"""

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smoothadv.architectures import made_architecture
from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.architectures.integers import of_integers
from smoothadv.base.devices import device_name, device_of_run, uses_tf32
from smoothadv.base.distributed import Processes, is_launched
from smoothadv.base.errors import UsageError, UserError, counted, warn
from smoothadv.base.files import digest
from smoothadv.base.provenance import provenance
from smoothadv.base.settings import describe
from smoothadv.datasets import SPLITS, DatasetDescription, get_dataset
from smoothadv.datasets.arrays import load_pseudo_labelled
from smoothadv.datasets.images import StreamedImages, changing_image
from smoothadv.models.checkpoint import (
    INTEGER,
    digest_of,
    read_checkpoint,
    recorded_input_layer,
    start_from,
    with_recorded_constants,
)
from smoothadv.models.contents import checkpoint_digest
from smoothadv.models.load import denoiser_before
from smoothadv.noise import derive_generator
from smoothadv.records.logs import training_record
from smoothadv.training.folder import RunFolder
from smoothadv.training.low_rank import adapt, merge
from smoothadv.training.routing import routed, shares_of_stages
from smoothadv.training.run import TrainingRun, TrainingSetup
from smoothadv.training.schedule import layer_groups
from smoothadv.training.spec import TrainSpec
from smoothadv.training.teacher import load_teacher
from smoothadv.training.trackers import TRACKERS


@dataclass(frozen=True)
class Trained:
    """A trained classifier and the history of its training, one row of TRAINING_COLUMNS per epoch.

    Of several processes one ``is_first``: it has written the checkpoint.
    """

    model: torch.nn.Module
    history: list[dict[str, Any]]
    is_first: bool


def train(spec: TrainSpec, report: Callable[[str], None] = print) -> Trained:
    """Train, from the last checkpoint in the folder if the specification resumes; ``report`` takes
    lines for people.

    UserError where the parts of the specification do not fit together, NonFiniteError if the loss
    or the weights stop being finite; KeyboardInterrupt or Terminated, after saving, on Ctrl-C or
    SIGTERM.
    """
    processes = Processes(is_launched())
    before = training_record(spec.outdir)["runs"][-1:] if spec.existing == "resume" else []
    device = device_of_run(spec, dict(*before), processes, says=False)
    spec.execution.check(device)
    for name in spec.track:  # before there is a folder
        TRACKERS[name].check(name)
    # Else cuDNN may choose kernels whose sums depend on timing, and a resumed run would end with
    # other weights.
    torch.backends.cudnn.deterministic = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.connected(device))
        with processes.first_goes_first():
            setup = _loaded(spec, processes, device)
        folder = _folder(setup)
        with processes.first_goes_first():
            if processes.is_first:
                stack.enter_context(folder.opened())
                _announce(setup, folder.saved, report)
        history = TrainingRun(setup, folder).run_epochs(report, spec.track)
        merge(setup.model)
    return Trained(setup.model, history, processes.is_first)


def _loaded(spec: TrainSpec, processes: Processes, device: torch.device) -> TrainingSetup:
    """What the specification names: images, augmented as asked, model and teacher."""
    if not isinstance(spec.dataset, str):
        training, test = copy.copy(spec.dataset[0]), spec.dataset[1]
    else:
        training, test = (get_dataset(spec.dataset, split, spec.data_dir) for split in SPLITS)
    if spec.crop_padding is not None and isinstance(training, StreamedImages):
        raise UsageError(
            f"--crop-padding: of '{spec.dataset_name}' random parts are resized instead: leave it "
            "out"
        )
    images = training.description = spec.augmented(training.description)
    if not spec.objective.DENOISES:
        for doubt in images.doubts():
            warn(doubt)
    routes: dict[str, torch.Tensor] = {}
    if spec.route is not None:
        training, test, radii = routed(training, spec.route)
        images = training.description
        sigmas = torch.tensor([*map(float, images.class_names)], dtype=radii.dtype)
        routes = {
            "targets": shares_of_stages(
                radii, spec.route_labels == "soft", spec.route_weights == "balanced"
            ),
            "stages": torch.stack([sigmas.expand_as(radii), radii], -1).float(),
        }
    schedule = spec.schedule.schedule(images, spec.objective.copies)
    if schedule.batch < processes.size:
        raise UserError(
            f"--batch is {counted(schedule.batch, 'image')} for {processes.size} processes: take "
            "more"
        )
    if len(training) < processes.size:
        raise UserError(
            f"found {counted(len(training), 'training image')} for {processes.size} processes: "
            "start fewer"
        )
    description, input_layer, model, started_from = _model(spec, spec.seen(images))
    if spec.lora is not None:
        adapt(model, spec.lora)
    layer_groups(model, schedule.layer_decay)  # refused before there is a folder
    denoiser, behind = None, None
    if spec.denoiser is not None:
        denoiser, behind, doubts = denoiser_before(spec, images, spec.objective.noise_sd)
        for doubt in doubts:
            warn(doubt)
    return TrainingSetup(
        spec=spec,
        training=training,
        test=test,
        pseudo_labelled=(
            load_pseudo_labelled(spec.use_unlabelled, images) if spec.use_unlabelled else None
        ),
        schedule=schedule,
        processes=processes,
        device=device,
        description=description,
        input_layer=input_layer,
        model=model,
        started_from=started_from,
        teacher=load_teacher(spec, training, device) if spec.teacher else None,
        denoiser=denoiser and denoiser.requires_grad_(False),
        behind=behind,
        routes=routes,
    )


def _model(
    spec: TrainSpec, description: DatasetDescription
) -> tuple[DatasetDescription, str | None, torch.nn.Module, str | None]:
    """The description with the model's constants, the input layer, the model, and from where it
    starts: the classifier, or the denoiser, which has no input layer.
    """
    name, path, denoises = spec.model, spec.pretrained_model, spec.objective.DENOISES
    if not isinstance(name, str):
        given = spec.input_layer, spec.lora, path
        if denoises or spec.pretrained or any(one is not None for one in given):
            raise UserError(
                "a module is trained as a classifier with its own weights and input layer: leave "
                "pretrained_model, input_layer and lora out, or name an architecture"
            )
        return description, None, name, None
    input_layer = spec.input_layer or "normalize"
    # Beside several sets of weights there may be no name of an architecture.
    choice = spec.weights and name, spec.weights
    content = {} if path is None else read_checkpoint(path, denoises, *choice)
    if path is not None and not denoises:
        input_layer = recorded_input_layer(content, path, spec.input_layer)
        description = with_recorded_constants(content, path, description)
        if spec.finetune_quantized:
            integers = of_integers("trained", path)(
                content, path, name, spec.objective.noise_sd, description
            )
            return description, input_layer, integers, f"starting from the integers of {path}"
        if INTEGER in content:
            raise UserError(
                f"{path} is a checkpoint of integers: add --finetune-quantized to train them"
            )
    torch.manual_seed(derive_generator("cpu", spec.seed).initial_seed())
    if denoises and not spec.pretrained:
        denoiser = DENOISERS[name](description)
        started = None if path is None else start_from(denoiser, content, path, name, description)
        return description, None, denoiser, started
    description, model = made_architecture(name, description, input_layer, spec.pretrained)
    started = f"starting from the weights of {name}" if spec.pretrained else None
    if path is not None:
        started = start_from(model, content, path, name, description)
    return description, input_layer, model, started


def _folder(setup: TrainingSetup) -> RunFolder:
    """The folder of the run, with what a reader of the checkpoint needs to use the model, what
    decides the weights, and what is known of this process.
    """
    spec, description, pseudo_labelled = setup.spec, setup.description, setup.pseudo_labelled
    facts: dict[str, Any] = {
        "arch": f"{INTEGER}:{spec.arch}" if spec.finetune_quantized else spec.arch,
        "dataset": description.name,
        "classes": list(description.class_names),
        "image_shape": list(description.image_shape),
        "input_layer": setup.input_layer,
        "mean": list(description.mean or ()),
        "std": list(description.std or ()),
        "noise_sd": spec.objective.noise_sd,
        "plugins": [plugin.record for plugin in spec.plugins],
        "denoiser": spec.objective.DENOISES,
    }
    recipe = spec.recipe(description, setup.schedule)
    changes = changing_image(setup.training) is not None
    recipe["dataset_fingerprint"] = None if changes else setup.training.fingerprint()
    if changes and setup.processes.is_first:
        warn(
            f"the images of '{description.name}' change each time they are read: a resumed run "
            "ends with other weights than an uninterrupted one"
        )
    recipe["input_layer"] = setup.input_layer
    if setup.behind is not None:
        recipe["behind"] = facts["behind"] = setup.behind
    if spec.pretrained_model:
        recipe["pretrained_sha256"] = checkpoint_digest(spec.pretrained_model)
    if spec.pretrained:
        recipe["pretrained_sha256"] = digest_of(setup.model.state_dict())
    if setup.routes:
        recipe["route_sha256"] = digest(table.numpy() for table in setup.routes.values())
    if setup.teacher is not None:
        recipe["teacher_sha256"] = setup.teacher.sha256
    if pseudo_labelled is not None:
        recipe["pseudo_labelled_fingerprint"] = pseudo_labelled.fingerprint()
    this_run = {
        "epochs": setup.schedule.epochs,
        # now, so that an image that cannot be read is named now
        "test_fingerprint": setup.test.fingerprint(),
        "device": device_name(setup.device),
        **({"tf32": uses_tf32(setup.device)} if setup.device.type == "cuda" else {}),
        "processes": setup.processes.size,
        "launch": setup.processes.launch,
        "torch_threads": torch.get_num_threads(),
        "arguments": {
            name: value if value is None or isinstance(value, (int, float, str)) else str(value)
            for name, value in spec.arguments.items()
        },
        **provenance(spec.command),
    }
    return RunFolder(
        spec.outdir,
        facts,
        recipe,
        this_run,
        spec.existing,
        [f"train_{name}" for name in spec.objective.TERMS],
    )


def _announce(
    setup: TrainingSetup, saved: dict[str, Any] | None, report: Callable[[str], None]
) -> None:
    """Say what is about to happen, and warn of what is probably a mistake."""
    spec, epochs, size = setup.spec, setup.schedule.epochs, setup.processes.size
    images = f"{counted(len(setup.training), 'image')}, {len(setup.test)} to test"
    if setup.pseudo_labelled is not None:
        images += f", {len(setup.pseudo_labelled)} pseudo-labelled"
    where = f"{size} processes on {setup.device.type}" if size > 1 else str(setup.device)
    report(
        f"training {spec.arch} on {spec.dataset_name} ({images}) with {describe(spec.objective)}, "
        f"{counted(epochs, 'epoch')} on {where}"
    )
    if saved is None and setup.started_from is not None:
        report(setup.started_from)
    if spec.teacher_draws is not None:
        report("the first epoch is the longest: the teacher votes on each image when it comes")
    if saved is not None and (before := saved["runs"][-1].get("processes", size)) != size:
        warn(
            f"this run had {counted(before, 'process')} and goes on with {size}: batch "
            "normalization sees other shares of a batch, and an uninterrupted run would end with "
            "other weights"
        )
    if (policy := spec.policy) is not None and policy.from_epoch >= epochs:
        begin = "--choose-from-epoch" if policy != spec.objective.policy else "--attack-from-epoch"
        warn(
            f"training images are chosen from epoch {policy.from_epoch + 1} on, and there are only "
            f"{epochs}: a smaller {begin} would let that begin"
        )
    reached, full = spec.objective.epsilon(epochs - 1), spec.objective.epsilon(math.inf)
    if reached < full:
        begins = "warmup", "attack_from_epoch", "double_from_epoch"
        begin = next((name for name in begins if hasattr(spec.objective, name)), begins[0])
        warn(
            f"epsilon reaches {reached:.3g} of {full:.3g} in {counted(epochs, 'epoch')}: a smaller "
            f"--{begin.replace('_', '-')} or more --epochs would let it grow to the end"
        )
