"""SmoothedModule: a smoothed classifier as a torch module with gradients, for attack libraries."""

import math
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from smoothadv.architectures.logits import explained, frozen, logits_in
from smoothadv.attacks.estimators import Model, noisy_logits
from smoothadv.attacks.micro_batches import rows_per_pass
from smoothadv.base.errors import UserError
from smoothadv.base.settings import (
    any_seed,
    batch_size,
    checked,
    found_value,
    positive_noise_level,
    up_to_a_million,
)
from smoothadv.noise import GaussianNoise, Purpose
from smoothadv.noise.scale import SLACK, check_scale


class SmoothedModule(torch.nn.Module):
    """The soft smoothed classifier, its expectation replaced by the mean of m noise draws
    (SmoothAdv, section 2.2).

        smoothed = SmoothedModule(load_classifier(path, "digits"), sigma=0.25, m=64)
        logits = smoothed(images)  # log of mean_i softmax(f(x + d_i))

    Maps images [B, C, H, W], of any float type, in [0, 1], to logits [B, K]: their softmax is the
    mean of probabilities, and their cross-entropy the loss J of SmoothAdv's eq. 6. ``model`` is
    what ``Smooth`` takes; ``sigma`` > 0 is the standard deviation of the noise on [0, 1].

    All images of a call share the m draws, so that an image's logits depend neither on its place
    nor on the other images: attack libraries drop images that are broken already. Every call has
    the same draws; with ``fresh`` each has the next m of the stream. ``seed`` decides the draws,
    and no prediction or certificate uses them.

    ``batch`` is the largest number of noisy copies in a pass. Where there are several passes, each
    is computed again for the gradients, so that memory is needed for one alone. The model runs in
    eval mode and its parameters get no gradients; its modes and flags stay as they are.

    SettingError on a bad setting, UserError where the model or the images cannot be taken.
    """

    def __init__(
        self,
        model: Model,
        sigma: float,
        m: int = 64,
        *,
        seed: int = 0,
        fresh: bool = False,
        batch: int = 256,
    ) -> None:
        super().__init__()
        if not callable(model):
            raise UserError(
                f"the model is a {type(model).__name__}: give a module, like load_classifier's"
            )
        self.model = model
        self.m = checked("m", m, up_to_a_million)
        self.fresh = checked("fresh", fresh, None)
        self.batch = checked("batch", batch, batch_size)
        sigma = checked("sigma", sigma, positive_noise_level)
        self.noise = GaussianNoise(sigma, checked("seed", seed, any_seed))
        self._calls = 0
        self.training = False  # of this module alone, as foolbox warns of modules that train

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        is_tensor = isinstance(images, torch.Tensor)
        if not is_tensor or images.dim() != 4 or not images.is_floating_point():
            raise UserError(
                f"images: {found_value(images)}, expected a tensor of floats in [0, 1], "
                "[B, C, H, W]"
            )
        check_scale(images, "images", SLACK)
        stream = self.noise.stream(0, images.device, Purpose.ATTACK_NOISE)
        stream.reserve(self._calls * self.m)
        self._calls += self.fresh
        noise = stream.draw(self.m, images.new_empty(images.shape[1:])).to(images.dtype)
        rows = rows_per_pass(self.m, self.batch)
        groups = images.split(max(1, rows // self.m))
        compute = self._log_sum
        if len(groups) > 1 or rows < self.m:
            compute = partial(checkpoint, self._log_sum, use_reentrant=False)
        with explained(self.model, images.new_zeros(images.shape[1:])):
            sums = [
                torch.stack([compute(group, draws) for draws in noise.split(rows)]).logsumexp(0)
                for group in groups
            ]
        return torch.cat(sums) - math.log(self.m)

    def _log_sum(self, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """log sum_i softmax(f(x + d_i)): images [B, ...] and draws [n, ...] give [B, K]."""
        # Frozen here: a pass that is computed again must have the same graph.
        with frozen(self.model):
            logits = noisy_logits(
                lambda copies: logits_in(self.model(copies)),
                images,
                noise.expand(len(images), *noise.shape),
            )
        return logits.log_softmax(-1).logsumexp(1)
