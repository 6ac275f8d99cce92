"""SmoothedModule: the smoothed classifier as a torch module, for the attacks of other libraries."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smoothadv.architectures.logits import logits_in
from smoothadv.noise import GaussianNoise, Purpose


class SmoothedModule(nn.Module):
    """Maps images [B, C, H, W] in [0, 1] to log((1/m) sum_i softmax(model(x + d_i))), [B, K].

    These are the logits of the plug-in estimate of the soft smoothed classifier (SmoothAdv, eqs. 3
    and 6): their cross-entropy is the loss J that SmoothAdv's attack ascends, and they have
    gradients with respect to the images. ``model`` maps images to logits [B, K], or to an object
    or dict with ``logits``; it stays in eval mode. ``sigma`` > 0 is the noise's standard deviation.

    The same ``m`` >= 1 draws, a function of ``seed``, serve all images and calls: one function,
    whatever the batch. With ``fresh``, each call has new draws for each image. ``batch`` limits the
    noisy images in a pass of ``model``, which then computes them twice for a gradient. ValueError
    on impossible values.
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: float,
        m: int = 32,
        seed: int = 0,
        *,
        fresh: bool = False,
        batch: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("m", m), ("batch", 1 if batch is None else batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.noise = GaussianNoise(sigma, seed)
        self.m, self.fresh, self.batch = m, fresh, batch
        self._used = 0
        self.model = model.eval()

    def train(self, mode: bool = True) -> SmoothedModule:
        """Sets this module's mode; the classifier stays in eval mode."""
        self.training = mode
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """ValueError unless they are floats [B, C, H, W]."""
        if images.dim() != 4 or not images.is_floating_point():
            found = f"{images.dtype} of shape {list(images.shape)}"
            raise ValueError(f"images are {found}: give floats [B, C, H, W] in [0, 1]")
        parts = images.split(self.batch or max(len(images), 1))
        return torch.cat([self._smoothed(part) for part in parts])

    def _smoothed(self, images: torch.Tensor) -> torch.Tensor:
        noise = self._draws(images)
        if self.batch is None:
            each = self._log_probabilities(images, noise)
        else:
            passes = noise.split(max(1, self.batch // max(len(images), 1)))
            # Activations of one pass at a time: they are computed again for the gradient.
            some = [
                checkpoint(self._log_probabilities, images, part, use_reentrant=False)
                for part in passes
            ]
            each = torch.cat(some)
        return torch.logsumexp(each, 0) - math.log(self.m)

    def _draws(self, images: torch.Tensor) -> torch.Tensor:
        """Noise [m, 1, C, H, W], or [m, B, C, H, W] with ``fresh``."""
        each, first = (len(images), self._used) if self.fresh else (1, 0)
        stream = self.noise.stream(0, images.device, Purpose.ATTACK_NOISE)
        shape = images.shape[1:]
        out = torch.empty((self.m * each, *shape), device=images.device)
        if len(out):
            stream.fill(out, torch.zeros(shape, device=images.device), first)
        self._used += len(out) * self.fresh
        return out.unflatten(0, (self.m, each)).to(images.dtype)

    def _log_probabilities(self, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """log softmax of the noisy copies: [r, B, K] of noise [r, B or 1, C, H, W]."""
        noisy = images + noise
        logits = logits_in(self.model(noisy.flatten(0, 1)))
        return F.log_softmax(logits, dim=-1).unflatten(0, noisy.shape[:2])
