"""What can be asked of training: which classifier, on which images, for which objective, and
how.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from smoothadv.architectures import chosen_architecture
from smoothadv.base import plugins
from smoothadv.base.choices import EXISTING, INPUT_LAYER_NAMES
from smoothadv.base.errors import UsageError
from smoothadv.base.plugins import Plugin
from smoothadv.base.settings import (
    Checked,
    any_seed,
    checked_field,
    momentum,
    non_negative_float,
    non_negative_int,
    one_of,
    positive_float,
    positive_int,
    settings_record,
)
from smoothadv.checkpoints import MODULE_PREFIX
from smoothadv.datasets import DatasetDescription, ImageDataset
from smoothadv.objectives import DataPolicy, Objective
from smoothadv.records.logs import CHECKPOINT
from smoothadv.training.evaluate import EvaluationSchedule
from smoothadv.training.execution import Execution
from smoothadv.training.schedule import OPTIMIZERS, SHAPES, Schedule

_TEACHER_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class ScheduleChoices(Checked):
    """The fields of a ``Schedule`` that are chosen; None stands for the paper's value for the
    dataset.

    ``split_updates`` makes m updates of each batch, on batch/m images in m copies, as the released
    code does.
    """

    epochs: int | None = checked_field(positive_int, None)
    batch: int | None = checked_field(positive_int, None)
    learning_rate: float | None = checked_field(positive_float, None)
    learning_rate_step: int | None = checked_field(positive_int, None)
    learning_rate_factor: float | None = checked_field(positive_float, None)
    learning_rate_shape: str | None = checked_field(one_of(SHAPES), None)
    momentum: float | None = checked_field(momentum, None)
    weight_decay: float | None = checked_field(non_negative_float, None)
    micro_batch: int | None = checked_field(positive_int, None)
    steps_per_epoch: int | None = checked_field(positive_int, None)
    optimizer: str | None = checked_field(one_of(OPTIMIZERS), None)
    layer_decay: float | None = checked_field(positive_float, None)
    split_updates: bool = checked_field(None, False)

    def schedule(self, description: DatasetDescription, copies: int) -> Schedule:
        """The schedule on a dataset, for ``copies`` (m) of each image; UsageError where the batch
        is too small.
        """
        fields = dataclasses.asdict(description.defaults)
        fields |= {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }
        if self.optimizer == "sgd":
            del fields["optimizer"]  # as where none is named
        elif self.optimizer is not None and self.learning_rate is None:
            raise UsageError("--optimizer adamw needs --lr, like 0.001: the default is for sgd")
        if self.layer_decay is not None and not (
            self.optimizer == "adamw" and 0 < self.layer_decay <= 1
        ):
            raise UsageError(
                f"--layer-decay {self.layer_decay} must be above 0, at most 1, and with "
                "--optimizer adamw"
            )
        if fields.pop("split_updates"):
            if fields["batch"] < copies:
                raise UsageError(
                    f"--split-updates makes {copies} updates of {fields['batch']} images: take a "
                    "larger --batch"
                )
            fields["batch"] //= copies
        return Schedule(**fields)


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(Checked):
    """Train a classifier for an objective, in the folder ``outdir``.

    - ``classifier``: the name of an architecture, or a module that maps images [B, C, H, W] in [0,
      1] to logits [B, K] and is trained in place. ``input_layer`` ("normalize" or "center"; None:
      normalize, or that of ``pretrained_model``, a checkpoint to start from) is for architectures.
      With ``finetune_quantized`` that one is of integers, which are trained; float32 is the only
      precision then. ``pretrained`` starts from the weights, mean and std of the library whose
      network ``classifier`` names.
    - ``images``: the name of a dataset, whose files lie in ``data_dir``, or training images and
      test images. ``crop_padding`` and ``horizontal_flip`` augment them (None: as the dataset
      does). ``use_unlabelled`` is a file of pseudo-labelled images, whose loss counts
      ``unlabelled_weight`` (eta) times.
    - With an objective that denoises, ``classifier`` is the name of a denoiser, ``teacher`` the
      classifier behind it; ``input_layer`` is that of the latter.
    - ``policy`` chooses training images (None: as the objective does). ``teacher`` is a checkpoint
      of a frozen classifier for objectives that have one; if these use its votes on the training
      images, ``teacher_draws`` (None: 10,000, as CAT-RS) noisy copies of each image are classified
      first.
    - ``seed`` of all randomness; ``device`` (None: the first GPU, else the CPU); ``existing`` says
      what to do with a run that is there: "refuse", "resume" or "overwrite". ``board`` writes
      curves for TensorBoard.
    - ``command`` and ``arguments`` are what the record of the run says of its origin.
    """

    classifier: str | torch.nn.Module
    images: str | tuple[ImageDataset, ImageDataset]
    outdir: Path
    objective: Objective
    schedule: ScheduleChoices = checked_field(None, ScheduleChoices(), kind=ScheduleChoices)
    execution: Execution = checked_field(None, Execution(), kind=Execution)
    tests: EvaluationSchedule = checked_field(None, EvaluationSchedule(), kind=EvaluationSchedule)
    seed: int = checked_field(any_seed, 0)
    device: torch.device | None = None
    data_dir: str | Path | None = checked_field(str, None)
    input_layer: str | None = checked_field(one_of(INPUT_LAYER_NAMES), None)
    crop_padding: int | None = checked_field(non_negative_int, None)
    horizontal_flip: bool | None = checked_field(None, None)
    pretrained_model: Path | None = checked_field(Path, None)
    pretrained: bool = checked_field(None, False)
    finetune_quantized: bool = checked_field(None, False)
    policy: DataPolicy | None = checked_field(None, None, kind=DataPolicy)
    teacher: Path | None = checked_field(Path, None)
    teacher_draws: int | None = checked_field(positive_int, None)
    use_unlabelled: Path | None = checked_field(Path, None)
    unlabelled_weight: float = checked_field(positive_float, 1.0)
    existing: str = checked_field(one_of(EXISTING), "refuse")
    board: bool = checked_field(None, False)
    command: Sequence[str] | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if isinstance(self.classifier, str) and plugins.names_function(
            self.classifier
        ):  # frozen, but not complete
            object.__setattr__(self, "classifier", chosen_architecture(self.classifier))

    @property
    def data_policy(self) -> DataPolicy | None:
        """The policy asked for, or the objective's own; None: each image once in an epoch."""
        return self.objective.policy if self.policy is None else self.policy

    @property
    def votes_of_teacher(self) -> int:
        """How many noisy copies of each training image the teacher classifies first."""
        return (self.teacher_draws or _TEACHER_DRAWS) if self.objective.TEACHER == "votes" else 0

    def refuse_contradictions(self) -> None:
        """UsageError where the objective, its teacher and the data policy do not fit together."""
        objective, name = self.objective, type(self.objective).__name__
        if (
            self.teacher is not None
            and Path(self.teacher).resolve() == (self.outdir / CHECKPOINT).resolve()
        ):
            raise UsageError(
                f"--teacher {self.teacher} is what this training writes: name another folder"
            )
        if objective.TEACHER != "accuracy" and bool(objective.TEACHER) != (
            self.teacher is not None
        ):
            needed = "a --classifier CHECKPOINT" if objective.DENOISES else "a --teacher CHECKPOINT"
            advice = (
                f"needs {needed}" if objective.TEACHER else "has no teacher: leave --teacher out"
            )
            raise UsageError(f"the objective {name} {advice}")
        if self.teacher_draws is not None and objective.TEACHER != "votes":
            raise UsageError(
                f"--teacher-draws is for votes of a teacher, which the objective {name} does not "
                "use"
            )
        if self.use_unlabelled is not None and objective.TEACHER == "votes":
            raise UsageError(
                f"{name} uses votes on the training images, and those of --use-unlabelled have none"
            )
        if objective.noise_sd == 0 and (
            self.data_policy is not None or objective.TEACHER == "votes"
        ):
            raise UsageError(
                "without noise there are no votes on noisy training images: give --noise above 0"
            )

    @property
    def arch(self) -> str:
        """What a checkpoint calls the classifier: an architecture, or "module:" and the name of a
        module's class.
        """
        if isinstance(self.classifier, str):
            return self.classifier
        kind = type(self.classifier)
        return f"{MODULE_PREFIX}{kind.__module__}.{kind.__qualname__}"

    @property
    def dataset(self) -> str:
        """The name of the dataset."""
        return self.images if isinstance(self.images, str) else self.images[0].description.name

    @property
    def plugins(self) -> list[Plugin]:
        """The plug-ins that take part."""
        kind = "denoiser" if self.objective.DENOISES else "architecture"
        names = {"dataset": self.images, kind: self.classifier}
        return plugins.used(
            {kind: name for kind, name in names.items() if isinstance(name, str)}, [self.objective]
        )

    def augmented(self, description: DatasetDescription) -> DatasetDescription:
        """The description of the dataset with the crops and mirror images that are asked for."""
        chosen: dict[str, Any] = {
            "crop_padding": self.crop_padding,
            "horizontal_flip": self.horizontal_flip,
        }
        if self.crop_padding is not None and not 0 <= self.crop_padding < (
            side := min(description.image_shape[1:])
        ):
            raise UsageError(
                f"--crop-padding {self.crop_padding}: give 0 to {side - 1}: a crop must meet its "
                "image"
            )
        return dataclasses.replace(
            description, **{name: value for name, value in chosen.items() if value is not None}
        )

    def stated_recipe(self, description: DatasetDescription, schedule: Schedule) -> dict[str, Any]:
        """What decides the weights, as far as it is known before any file is read."""
        return {
            "dataset": self.dataset,
            "arch": self.arch,
            **({"pretrained": True} if self.pretrained else {}),
            "seed": self.seed,
            "crop_padding": description.crop_padding,
            "horizontal_flip": description.horizontal_flip,
            **schedule.record(),
            **self.execution.record(),
            "objective": settings_record(self.objective),
            **(
                {}
                if self.data_policy is None
                else {"data_policy": settings_record(self.data_policy)}
            ),
            **({"teacher_draws": self.votes_of_teacher} if self.votes_of_teacher else {}),
            **plugins.digests(self.plugins),
        }
