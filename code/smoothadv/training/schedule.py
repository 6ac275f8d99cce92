"""The number of epochs, the order of images and the learning rate of training."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from smoothadv.datasets import TrainingDefaults
from smoothadv.noise import Purpose, derive_generator
from smoothadv.objectives import DataPolicy

SHAPES = ("step", "one-cycle")
OPTIMIZERS = ("sgd", "adamw")
_RISE = 0.2


@dataclass(frozen=True)
class Schedule(TrainingDefaults):
    """SGD with momentum, or the ``optimizer`` "adamw" without, and the schedule of its learning
    rate.

    ``batch`` is the number of images of an update in all processes together, each trained on with
    all of its noisy copies; ``micro_batch`` is the number of images whose gradients a process
    computes at a time (None: all of its share). ``steps_per_epoch`` ends every epoch after so many
    updates. With the shape "step" epoch e, from 0, uses learning_rate *
    learning_rate_factor^floor(e / learning_rate_step) (SmoothAdv, appendix D); with "one-cycle" the
    rate rises from 0 to learning_rate over the first fifth of the updates and falls back to 0,
    linearly (Smith and Topin, 2018). ``layer_decay`` multiplies the rate once more for each layer
    before the last one (None: not).
    """

    learning_rate_factor: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    learning_rate_shape: str = "step"
    micro_batch: int | None = None
    steps_per_epoch: int | None = None
    optimizer: str | None = None
    layer_decay: float | None = None

    def learning_rate_at(self, epoch: int, step: int, steps: int) -> float:
        """The learning rate of update ``step``, counted from 0, in an epoch of ``steps``
        updates.
        """
        if self.learning_rate_shape == "step":
            return self.learning_rate * self.learning_rate_factor ** (
                epoch // self.learning_rate_step
            )
        done = (epoch + (step + 0.5) / steps) / self.epochs
        return self.learning_rate * min(done / _RISE, (1 - done) / (1 - _RISE))

    def record(self) -> dict[str, Any]:
        """The fields that decide the weights: ``epochs``, which a resumed run may raise, only if
        the shape uses it.
        """
        fields = asdict(self)
        if self.learning_rate_shape != "one-cycle":
            del fields["epochs"]
        return fields


@dataclass(frozen=True)
class Step:
    """One update, on images ``indices`` int64 [B] of the labelled set (``source`` 0) or the
    pseudo-labelled one (1).
    """

    source: int
    indices: torch.Tensor


def steps_of_epoch(
    schedule: Schedule,
    labelled: int,
    pseudo_labelled: int,
    seed: int,
    epoch: int,
    smallest: int = 1,
    weights: np.ndarray | None = None,
) -> list[Step]:
    """The updates of an epoch: every labelled image once, in random order, in batches of at least
    ``smallest`` images.

    With ``weights`` [labelled] as many images are drawn by these weights instead. With
    pseudo-labelled images, equally many batches of those, drawn without replacement, are mixed in.
    (This is self-training: the paper draws the kind of each batch at random, its code takes one of
    each as here.)
    """
    generator = derive_generator("cpu", seed, epoch, Purpose.DATA_ORDER)
    if weights is None:
        order = torch.randperm(labelled, generator=generator)
    else:
        order = DataPolicy.order(weights, generator)
    steps = [Step(0, indices) for indices in order.split(schedule.batch)]
    if pseudo_labelled:
        wanted = len(steps) * schedule.batch
        rounds = [
            torch.randperm(pseudo_labelled, generator=generator)
            for _ in range(-(-wanted // pseudo_labelled))
        ]
        steps += [Step(1, indices) for indices in torch.cat(rounds)[:wanted].split(schedule.batch)]
        steps = [
            steps[number] for number in torch.randperm(len(steps), generator=generator).tolist()
        ]
    return [step for step in steps if len(step.indices) >= smallest][: schedule.steps_per_epoch]
