"""What a training is asked to do: one frozen specification, whose fields say what they mean, which
values they take, and what commands call them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from smoothadv.architectures import ARCHITECTURES, LIBRARIES, require_architecture
from smoothadv.base import plugins
from smoothadv.base.errors import UsageError, counted
from smoothadv.base.plugins import Plugin
from smoothadv.base.settings import (
    EXISTING,
    INPUT_LAYER_NAMES,
    NEAREST,
    RELEASED,
    Checked,
    identity,
    momentum,
    non_negative_float,
    non_negative_int,
    one_of,
    output_folder,
    positive_float,
    positive_int,
    refuse_any,
    setting,
)
from smoothadv.datasets import DatasetDescription
from smoothadv.models.checkpoint import MODULE_PREFIX
from smoothadv.models.spec import DenoisedSpec
from smoothadv.objectives import DataPolicy, Objective
from smoothadv.records.logs import CHECKPOINT_FILE
from smoothadv.training.execution import Execution
from smoothadv.training.schedule import OPTIMIZERS, SHAPES, Schedule
from smoothadv.training.trackers import TRACKERS

_TEACHER_DRAWS = 10_000
_SCHEDULE = "schedule (defaults: the paper's for the dataset)"
_DATA = "data and start"
_EXECUTION = "execution"


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(Checked):
    """The fields of a ``Schedule`` that are chosen; None stands for the paper's value for the
    dataset.
    """

    epochs: int | None = setting(
        None,
        parse=positive_int,
        metavar="N",
        group=_SCHEDULE,
        help="passes over the training images",
    )
    batch: int | None = setting(
        None,
        parse=positive_int,
        metavar="B",
        group=_SCHEDULE,
        help="images per update, each with all its noisy copies",
    )
    micro_batch: int | None = setting(
        None,
        parse=positive_int,
        metavar="B",
        group=_SCHEDULE,
        help="compute gradients of so many images at a time, to save memory; statistics of batch "
        "normalization are then those of the micro-batch (default: all images of an update)",
    )
    split_updates: bool = setting(
        False,
        group=_SCHEDULE,
        help="make m updates of each batch, on B/m images in m copies, as the released code does "
        "with --train-multi-noise",
    )
    steps_per_epoch: int | None = setting(
        None,
        parse=positive_int,
        metavar="N",
        group=_SCHEDULE,
        help="updates per epoch (default: all)",
    )
    learning_rate: float | None = setting(
        None,
        parse=positive_float,
        flag="--lr",
        metavar="LR",
        group=_SCHEDULE,
        help="initial learning rate, or the highest of one-cycle",
    )
    learning_rate_shape: str | None = setting(
        None,
        choices=SHAPES,
        flag="--lr-schedule",
        group=_SCHEDULE,
        help="divide the learning rate in steps, or let it rise and fall, in lines or as a cosine "
        "(default: step)",
    )
    learning_rate_rise: int | None = setting(
        None,
        parse=non_negative_int,
        flag="--lr-rise",
        metavar="N",
        group=_SCHEDULE,
        help="of cosine: epochs in which it rises (default: 0)",
    )
    learning_rate_end: float | None = setting(
        None,
        parse=non_negative_float,
        flag="--lr-end",
        metavar="LR",
        group=_SCHEDULE,
        help="of cosine: its last value (default: 0)",
    )
    learning_rate_step: int | None = setting(
        None,
        parse=positive_int,
        flag="--lr-step-size --lr_step_size",
        metavar="N",
        group=_SCHEDULE,
        help="epochs between two steps of the learning rate",
    )
    learning_rate_factor: float | None = setting(
        None,
        parse=positive_float,
        flag="--lr-factor --gamma",
        metavar="F",
        group=_SCHEDULE,
        help="factor by which each step multiplies the learning rate (default: 0.1)",
    )
    optimizer: str | None = setting(
        None,
        choices=OPTIMIZERS,
        group=_SCHEDULE,
        help="stochastic gradient descent with momentum, or AdamW (default: sgd)",
    )
    layer_decay: float | None = setting(
        None,
        parse=positive_float,
        metavar="D",
        group=_SCHEDULE,
        help="multiply the learning rate by D for each layer before the last one, in networks of "
        "timm, as 0.75 (default: 1)",
    )
    momentum: float | None = setting(
        None, parse=momentum, group=_SCHEDULE, help="of sgd (default: 0.9)"
    )
    weight_decay: float | None = setting(
        None, parse=non_negative_float, group=_SCHEDULE, help="default: 1e-4"
    )
    weight_decay_end: float | None = setting(
        None,
        parse=non_negative_float,
        metavar="D",
        group=_SCHEDULE,
        help="its last value, reached as a cosine (default: constant)",
    )
    clip_gradients: float | None = setting(
        None,
        parse=positive_float,
        metavar="C",
        group=_SCHEDULE,
        help="largest norm of the gradient of each tensor (default: any)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_steps = self.learning_rate_step is not None or self.learning_rate_factor is not None
        is_adam, decay = self.optimizer == "adamw", self.layer_decay
        shape, curve = self.learning_rate_shape, (self.learning_rate_rise, self.learning_rate_end)
        refuse_any(
            {
                f"--lr-schedule {shape} has no steps: leave out --lr-step-size and --lr-factor": (
                    shape in ("one-cycle", "cosine") and has_steps
                ),
                "--lr-rise and --lr-end are of --lr-schedule cosine: leave them out": (
                    shape != "cosine" and curve != (None, None)
                ),
                "--momentum is of sgd, and --optimizer adamw has none: leave it out": (
                    is_adam and self.momentum is not None
                ),
                "--optimizer adamw needs --lr, like 0.001: the rates of recipes and datasets are "
                "for sgd": is_adam and self.learning_rate is None,
                f"--layer-decay {decay} must be above 0, at most 1, and with --optimizer adamw": (
                    decay is not None and not (is_adam and decay <= 1)
                ),
            },
            UsageError,
        )

    def schedule(self, description: DatasetDescription, copies: int) -> Schedule:
        """The schedule on a dataset, for ``copies`` (m) of each image; UsageError where the batch
        is too small.
        """
        chosen = {name: value for name, value in vars(self).items() if value is not None}
        fields = {**dataclasses.asdict(description.defaults), **chosen}
        if self.optimizer == "sgd":
            del fields["optimizer"]  # as where none is named
        if fields.pop("split_updates"):
            if fields["batch"] < copies:
                raise UsageError(
                    f"--split-updates makes {copies} updates of "
                    f"{counted(fields['batch'], 'image')}: take a larger --batch"
                )
            fields["batch"] //= copies
        schedule = Schedule(**fields)
        rise, end, rate = (
            getattr(schedule, f"learning_rate{one}") for one in ("_rise", "_end", "")
        )
        faults = {
            f"--lr-rise {rise}: give less than the {counted(schedule.epochs, 'epoch')}": (
                rise >= schedule.epochs
            ),
            f"--lr-end {end:g}: give less than the learning rate {rate:g}": end > rate,
        }
        refuse_any(faults, UsageError)
        return schedule


@dataclass(frozen=True)
class EvaluationSchedule(Checked):
    """Evaluate after every ``every``-th epoch and the last one, on ``images`` evenly spaced test
    images (None: all).
    """

    every: int = setting(
        1,
        parse=positive_int,
        flag="--evaluate-every",
        metavar="K",
        group=_EXECUTION,
        help="test after every K-th epoch and the last",
    )
    images: int | None = setting(
        1000,
        parse=positive_int,
        flag="--evaluate-images",
        metavar="N",
        group=_EXECUTION,
        help="number of evenly spaced test images to evaluate on",
    )

    def chosen(self, available: int) -> torch.Tensor:
        """The indices, int64, of the images to evaluate on."""
        count = min(available, self.images or available)
        return torch.arange(count) * available // count


def _architectures() -> str:
    """For the help: the first and the last name of a family stand for all."""
    libraries = ", ".join(f"{kind}:NAME" for kind in LIBRARIES if kind != "onnx")
    families = groupby(ARCHITECTURES, lambda name: name.rstrip("0123456789_"))
    known = [[*names] for _, names in families]
    named = [one for each in known for one in ([each[0], "...", each[-1]] if each[3:] else each)]
    return f"one of {', '.join(named)}; of a library: {libraries} (docs/networks.md)"


@dataclass(frozen=True, kw_only=True)
class TrainSpec(DenoisedSpec):
    """Train a classifier for an objective, in the folder ``outdir``.

    ``dataset`` is a name, or training images and test images. ``model`` is the name of an
    architecture, or a module that maps images [B, C, H, W] in [0, 1] to logits [B, K] and is
    trained in place. With an objective that denoises, it is the name of a denoiser, and ``teacher``
    the classifier behind it, to which ``input_layer`` belongs. ``command`` and ``arguments`` are
    what the record of the run says of its origin.
    """

    model: str | torch.nn.Module = setting(
        parse=require_architecture,
        check=str,
        flag="arch",
        metavar="ARCH",
        keyword=False,
        help=_architectures,
    )
    outdir: Path = setting(
        parse=output_folder,
        flag="outdir",
        metavar="OUTDIR",
        keyword=False,
        help="folder for the checkpoint, the log and the arguments",
    )
    existing: str = setting(
        "refuse",
        parse=one_of(EXISTING),
        group="running",
        constants={
            "resume": "continue the output of an earlier run of the same command",
            "overwrite": "replace the output of an earlier run",
        },
        keyword=False,
        help='"resume" continues earlier output, "overwrite" replaces it, "refuse" raises',
    )
    objective: Objective = setting(keyword=False, records="objective")
    schedule: ScheduleSpec = setting(ScheduleSpec(), keyword=False)
    execution: Execution = setting(
        Execution(), flag="", help="how to compute: a ``training.spec.Execution``"
    )
    tests: EvaluationSchedule = setting(
        EvaluationSchedule(),
        flag="",
        help="when to evaluate, and on how many images: a ``training.spec.EvaluationSchedule``",
    )
    policy: DataPolicy | None = setting(
        None,
        flag="",
        records="data_policy",
        help="how to choose training images: an ``objectives.DataPolicy`` (default: as the "
        "objective does)",
    )
    crop_padding: int | None = setting(
        None,
        parse=non_negative_int,
        metavar="P",
        group=_DATA,
        help="random crops after padding by P pixels, 0 for none (default: the dataset's)",
    )
    horizontal_flip: bool | None = setting(
        None, group=_DATA, help="random mirror images (default: the dataset's)"
    )
    pretrained_model: Path | None = setting(
        None,
        parse=Path,
        metavar="CHECKPOINT",
        group=_DATA,
        help="start from these weights, with a new classification layer where the classes differ",
    )
    weights: str | None = setting(
        None,
        parse=str,
        metavar="KEY",
        group=_DATA,
        records="pretrained_weights",
        help="which weights of a --pretrained-model that holds several, like state_dict_ema",
    )
    pretrained: bool = setting(
        False,
        group=_DATA,
        records="pretrained",
        help="start from the weights, mean and standard deviation of the library whose network "
        "ARCH names, with a new classification layer where the number of classes differs",
    )
    finetune_quantized: bool = setting(
        False,
        group=_DATA,
        help="start from a --pretrained-model of integers, which quantize made, and train these: "
        "rounded in each pass, with the gradient of the identity",
    )
    lora: int | None = setting(
        None,
        parse=positive_int,
        metavar="RANK",
        group=_DATA,
        records="lora",
        help="adapt queries and values of a Vision Transformer of timm, and its last layer, by "
        "changes of this rank (Hu et al., 2022)",
    )
    teacher: Path | None = setting(
        None,
        parse=Path,
        metavar="CHECKPOINT",
        group=_DATA,
        help="the frozen classifier of distillation and cat-rs; that of acr-weakness says, in "
        "place of the model, which images are left out",
    )
    teacher_draws: int = setting(
        None,
        parse=positive_int,
        metavar="N",
        group=_DATA,
        records="teacher_draws",
        help="largest number of noisy copies of a training image on which the teacher of cat-rs "
        "votes; fewer once the standard error is small enough (default: 10000)",
    )
    teacher_noise: float = setting(
        None,
        parse=positive_float,
        metavar="S",
        group=_DATA,
        records="teacher_noise",
        help="standard deviation of the noise of these copies (default: --noise)",
    )
    use_unlabelled: Path | None = setting(
        None,
        parse=Path,
        metavar="FILE",
        group=_DATA,
        help="self-training: mix in batches of images with pseudo-labels, from a .npz file or a "
        "pickle with data and extrapolated_targets",
    )
    unlabelled_weight: float = setting(
        None,
        parse=positive_float,
        metavar="ETA",
        group=_DATA,
        records="pseudo_weight",
        help="weight of the loss on the images of --use-unlabelled (paper: 0.1, 0.5, 1; default: "
        "1)",
    )
    route: tuple[Path, ...] | None = setting(
        None,
        parse=Path,
        metavar="LOG",
        group=_DATA,
        help="train a router by logs of stages on training images (docs/cascades.md; default of "
        "train: --recipe router)",
    )
    route_labels: str | None = setting(
        None,
        choices=("hard", "soft"),
        group=_DATA,
        records="route_labels",
        help="of --route: the best stage, or shares like exp(radius) (default: hard)",
    )
    route_weights: str | None = setting(
        None,
        choices=("even", "balanced"),
        group=_DATA,
        records="route_weights",
        help="of --route: equal, or 1 / share of the same best stage (default: even)",
    )
    input_layer: str | None = setting(
        None,
        choices=INPUT_LAYER_NAMES,
        group=_DATA,
        help="first layer of the model (default: normalize, or that of --pretrained-model)",
    )
    tf32: bool = setting(
        True,
        flag="--no-tf32",
        group=_EXECUTION,
        help="on GPUs, compute in full float32",
    )
    track: tuple[str, ...] = setting(
        (),
        choices=TRACKERS,
        metavar="NAME",
        group=_EXECUTION,
        help="show the epochs in other tools",
    )
    command: Sequence[str] | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        super().__post_init__()
        execution, objective, start = self.execution, self.objective, self.pretrained_model
        has_micro_batch = self.schedule.micro_batch is not None
        is_exact = start is not None and execution.precision == "fp32"
        name, teacher, votes = type(objective).__name__, self.teacher, objective.TEACHER == "votes"
        polls = votes or (objective.TEACHER == "drops" and teacher is not None)
        flag = "--classifier" if objective.DENOISES else "--teacher"
        follows_radii = getattr(objective, "route_consistency", None) is not None
        own, is_plain = self.outdir / CHECKPOINT_FILE, not (self.finetune_quantized or self.route)
        is_plain = is_plain and not objective.DENOISES
        refuse_any(
            {
                "--denoiser, --resize and --lora are not for denoisers, routers and networks of "
                "integers: leave them out": bool(self.denoiser or self.resize or self.lora)
                and not is_plain,
                "--unlabelled-weight weighs the images of --use-unlabelled: name their file, or "
                "leave it out": self.unlabelled_weight is not None and self.use_unlabelled is None,
                "--sync-bn exchanges statistics in the midst of an update, where --cuda-graph "
                "cannot: leave one out": execution.synchronized_norm and execution.cuda_graph,
                "--cuda-graph keeps one weight decay, and --weight-decay-end changes it: leave one "
                "out": bool(execution.cuda_graph) and self.schedule.weight_decay_end is not None,
                "--sync-bn computes statistics of whole batches, --micro-batch of parts: leave one "
                "of them out": execution.synchronized_norm and has_micro_batch,
                "--finetune-quantized needs a --pretrained-model of integers, and their exact "
                "sums: no --precision": self.finetune_quantized and not is_exact,
                "--route names the classes of the training images, and --use-unlabelled others: "
                "leave one of them out": self.route is not None and self.use_unlabelled is not None,
                "--route-labels, --route-weights and --route-consistency are of a router: add "
                "--route LOG..., or leave them out": self.route is None
                and any([self.route_labels, self.route_weights, follows_radii]),
                f"the objective {name} takes no soft or weighted labels: leave --route-labels and "
                "--route-weights out, or take consistency, gaussian or smoothadv": (
                    (self.route_labels == "soft" or self.route_weights == "balanced")
                    and not objective.TAKES_SHARES
                ),
                "--weights chooses in a --pretrained-model: name one, or leave it out": (
                    self.weights is not None and start is None
                ),
                "--pretrained and --pretrained-model both say where to start: leave one of them "
                "out": self.pretrained and start is not None,
                f"--noise 0 makes all {objective.copies} noisy copies of an image identical: leave "
                "--num-noise-vec out, or give noise": (
                    objective.noise_sd == 0 and objective.copies > 1
                ),
                f"--timestep {self.timestep} finds no step of a diffusion model for --noise 0: "
                "give noise above 0, or the number of a step": (
                    objective.noise_sd == 0 and self.timestep in (RELEASED, NEAREST)
                ),
                f"{flag} {teacher} is what this training writes: name another folder": (
                    teacher is not None and teacher.resolve() == own.resolve()
                ),
                f"the objective {name} needs a {flag} CHECKPOINT": (
                    teacher is None and objective.TEACHER in ("logits", "votes")
                ),
                f"the objective {name} has no teacher: leave --teacher out": (
                    teacher is not None and not objective.TEACHER
                ),
                "--teacher-draws is for votes of a teacher, which the objective "
                f"{name} does not use": self.teacher_draws is not None and not votes,
                f"{name} uses votes on the training images, and those of --use-unlabelled have "
                "none": self.use_unlabelled is not None and votes,
                f"--teacher-noise is for votes of a teacher, which {name} does not use": (
                    self.teacher_noise is not None and not polls
                ),
                "without noise there are no votes on noisy training images: give --noise above 0": (
                    objective.noise_sd == 0 and (votes or self.policy or objective.policy)
                ),
            },
            UsageError,
        )
        if self.policy is None:
            self._set(policy=objective.policy)
        if votes and self.teacher_draws is None:
            self._set(teacher_draws=_TEACHER_DRAWS)
        if polls and self.teacher_noise is None:
            self._set(teacher_noise=objective.noise_sd)
        if self.use_unlabelled is not None and self.unlabelled_weight is None:
            self._set(unlabelled_weight=1.0)

    @property
    def arch(self) -> str:
        """What a checkpoint calls the classifier: an architecture, or "module:" and the name of a
        module's class.
        """
        if isinstance(self.model, str):
            return self.model
        kind = type(self.model)
        return f"{MODULE_PREFIX}{kind.__module__}.{kind.__qualname__}"

    @property
    def dataset_name(self) -> str:
        """The name of the dataset, or of the images in its place."""
        return self.dataset if isinstance(self.dataset, str) else self.dataset[0].description.name

    @property
    def plugins(self) -> list[Plugin]:
        """The plug-ins that take part."""
        kind = "denoiser" if self.objective.DENOISES else "architecture"
        names = {"dataset": self.dataset, kind: self.model}
        return plugins.used(
            {kind: name for kind, name in names.items() if isinstance(name, str)}, [self.objective]
        )

    def augmented(self, description: DatasetDescription) -> DatasetDescription:
        """The description of the dataset with the given crops and mirror images."""
        side = min(description.image_shape[1:])
        if self.crop_padding is not None and self.crop_padding >= side:
            raise UsageError(
                f"--crop-padding {self.crop_padding}: give 0 to {side - 1}: a crop must meet its "
                "image"
            )
        chosen = {"crop_padding": self.crop_padding, "horizontal_flip": self.horizontal_flip}
        given: dict[str, Any] = {name: one for name, one in chosen.items() if one is not None}
        return dataclasses.replace(description, **given)

    def recipe(self, description: DatasetDescription, schedule: Schedule) -> dict[str, Any]:
        """What decides the weights, as far as it is known before any file is read."""
        return {
            "dataset": self.dataset_name,
            "arch": self.arch,
            **identity(self),
            "crop_padding": description.crop_padding,
            "horizontal_flip": description.horizontal_flip,
            **schedule.record(),
            **identity(self.execution),
            **plugins.digests(self.plugins),
        }
