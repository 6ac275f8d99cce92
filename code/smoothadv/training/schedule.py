"""The number of epochs, the order of images, the optimizer and the learning rate of training."""

import math
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from smoothadv.base.errors import UserError
from smoothadv.datasets import TrainingDefaults
from smoothadv.noise import Purpose, derive_generator
from smoothadv.objectives import DataPolicy

SHAPES = ("step", "one-cycle", "cosine")
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
    linearly (Smith and Topin, 2018); with "cosine" it rises from 0 to learning_rate over
    ``learning_rate_rise`` epochs and falls to ``learning_rate_end``, as half a cosine.
    ``layer_decay`` multiplies the rate once more for each layer before the last one (None: not).
    The weight decay goes to ``weight_decay_end``, as half a cosine, where there is such.
    ``clip_gradients`` is the largest norm of the gradient of a tensor (None: any).
    """

    learning_rate_factor: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    learning_rate_shape: str = "step"
    micro_batch: int | None = None
    steps_per_epoch: int | None = None
    optimizer: str | None = None
    layer_decay: float | None = None
    learning_rate_rise: int = 0
    learning_rate_end: float = 0.0
    weight_decay_end: float | None = None
    clip_gradients: float | None = None

    def learning_rate_at(self, epoch: int, step: int, steps: int) -> float:
        """The learning rate of update ``step``, counted from 0, in an epoch of ``steps``
        updates.
        """
        if self.learning_rate_shape == "step":
            return self.learning_rate * self.learning_rate_factor ** (
                epoch // self.learning_rate_step
            )
        if self.learning_rate_shape == "cosine":
            done, rise = epoch + step / steps, self.learning_rate_rise
            if done < rise:
                return self.learning_rate * done / rise
            share = (done - rise) / (self.epochs - rise)
            return _on_cosine(self.learning_rate, self.learning_rate_end, share)
        done = (epoch + (step + 0.5) / steps) / self.epochs
        return self.learning_rate * min(done / _RISE, (1 - done) / (1 - _RISE))

    def weight_decay_at(self, epoch: int, step: int, steps: int) -> float:
        """The weight decay of an update, as ``learning_rate_at`` counts them."""
        if self.weight_decay_end is None:
            return self.weight_decay
        share = (epoch + step / steps) / self.epochs
        return _on_cosine(self.weight_decay, self.weight_decay_end, share)

    def record(self) -> dict[str, Any]:
        """The fields that decide the weights: ``epochs``, which a resumed run may raise, only if
        the schedule uses it.
        """
        fields = asdict(self)
        if self.learning_rate_shape == "step" and self.weight_decay_end is None:
            del fields["epochs"]
        if self.learning_rate_shape != "cosine":
            del fields["learning_rate_rise"], fields["learning_rate_end"]
        return fields


def _on_cosine(start: float, end: float, share: float) -> float:
    """From ``start`` to ``end`` by half a cosine, of which a share is done."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


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
        images = len(steps) * schedule.batch
        rounds = range(-(-images // pseudo_labelled))
        drawn = torch.cat([torch.randperm(pseudo_labelled, generator=generator) for _ in rounds])
        steps += [Step(1, indices) for indices in drawn[:images].split(schedule.batch)]
        mixed = torch.randperm(len(steps), generator=generator).tolist()
        steps = [steps[number] for number in mixed]
    return [step for step in steps if len(step.indices) >= smallest][: schedule.steps_per_epoch]


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether updates can be CUDA graphs there."""
    return device.type == "cuda"


def optimizer_of(
    schedule: Schedule, model: torch.nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that the schedule names, of a model on the device, where its learning rates are
    too if there are CUDA graphs.
    """
    has_graphs = has_cuda_graphs(device)
    groups = layer_groups(model, schedule.layer_decay)
    decay = schedule.weight_decay
    for group in groups:
        rate = group.get("lr_scale", 1.0) * schedule.learning_rate
        group["lr"] = torch.full((), rate, device=device) if has_graphs else rate
        group["weight_decay"] = decay * group.get("decays", True)
    if schedule.optimizer == "adamw":
        return torch.optim.AdamW(groups, weight_decay=decay, capturable=has_graphs)
    kind = SGD if has_graphs else torch.optim.SGD
    return kind(groups, schedule.learning_rate, schedule.momentum, weight_decay=decay)


def layer_groups(model: torch.nn.Module, decay: float | None) -> list[dict[str, Any]]:
    """The weights of a model, in their order, in groups whose learning rate is ``lr_scale`` times
    that of training: decay^k in the k-th layer before the last one (Clark et al., 2020), by the
    layers that timm knows of its networks; UserError for others. Only ``decays`` groups have weight
    decay: biases, norms and positions have none. None: all in one group.
    """
    if decay is None:
        return [{"params": list(model.parameters())}]
    networks = [part for part in model.modules() if hasattr(type(part), "group_matcher")]
    if not networks:
        raise UserError(
            "--layer-decay needs the layers of a network of timm, like timm:resnet18: leave it out"
        )
    from timm.optim import param_groups_layer_decay

    positions: Any = getattr(networks[0], "no_weight_decay", tuple)
    known = param_groups_layer_decay(networks[0], 1.0, positions(), layer_decay=decay)
    kinds = {
        id(weight): (group["lr_scale"], group["weight_decay"] > 0)
        for group in known
        for weight in group["params"]
    }
    runs = groupby(model.parameters(), lambda weight: kinds.get(id(weight), (1.0, True)))
    return [
        {"params": list(weights), "lr_scale": scale, "decays": decays}
        for (scale, decays), weights in runs
    ]


class SGD(torch.optim.SGD):
    """torch.optim.SGD with a learning rate that is a tensor [] on the device of the weights, and is
    not read there.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            if self.state[weight].get("momentum_buffer") is None:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        decayed = torch._foreach_add(
            [weight.grad for weight in weights], weights, alpha=group["weight_decay"]
        )
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, decayed)
        torch._foreach_sub_(weights, torch._foreach_mul(momenta, group["lr"]))
