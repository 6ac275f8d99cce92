"""Smooth: a base classifier under Gaussian noise, its predictions and its certificates.

This module owns the sampling; what the counts mean is decided in ``certification`` and ``bounds``.
"""

from __future__ import annotations

import numpy as np
import torch

from smoothadv.bounds import check_alpha
from smoothadv.certification import ABSTAIN, PROCEDURES, Certificate
from smoothadv.certification.prediction import predict_from_votes
from smoothadv.errors import NonFiniteError
from smoothadv.noise import GaussianNoise, NoiseStream, derive_generator


class Smooth:
    """The smoothed classifier g(x) = argmax_c P[f(x + noise) = c], noise ~ N(0, sigma^2 I) (Cohen et al., eq. 1).

    ``base_classifier`` maps images [B, C, H, W], float32 in [0, 1] plus noise, to logits
    [B, num_classes]; a module is put in eval mode before it votes. ``sigma`` > 0 is on the images' scale.
    """

    ABSTAIN = ABSTAIN

    def __init__(self, base_classifier: torch.nn.Module, num_classes: int, sigma: float) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        GaussianNoise(sigma, 0)  # raises on a sigma that cannot smooth
        self.base_classifier = base_classifier
        self.num_classes = num_classes
        self.sigma = sigma

    def certify(
        self, x: torch.Tensor, n0: int, n: int, alpha: float, batch_size: int, *, stream: NoiseStream | None = None
    ) -> tuple[int, float]:
        """The class at ``x`` [C, H, W] and the l2 radius within which it is certified; (ABSTAIN, 0.0) if none.

        ``n0`` draws select the class, ``n`` fresh ones estimate its probability, ``alpha`` is the probability
        of a false statement, ``batch_size`` the draws per forward pass. ``stream`` supplies the noise:
        by default a new one seeded by torch's global generator, so that every call draws afresh.
        The guarantee is that of ``certification.exact``.
        """
        certificate = self.certificate(x, n0, n, alpha, batch_size, stream=stream)
        return certificate.prediction, certificate.radius

    def certificate(
        self,
        x: torch.Tensor,
        n0: int,
        n: int,
        alpha: float,
        batch_size: int,
        *,
        stream: NoiseStream | None = None,
        method: str = "exact",
    ) -> Certificate:
        """As ``certify``, with the counts behind the statement; ``method`` names a certification procedure."""
        if n0 < 1 or n < 1 or batch_size < 1:
            raise ValueError(f"n0, n and batch_size must be at least 1, got {n0}, {n} and {batch_size}")
        check_alpha(alpha)
        stream = stream or self._fresh_stream(x)

        def count_votes(*sizes: int) -> np.ndarray:
            return self.count_votes(x, sizes, batch_size, stream)

        return PROCEDURES[method](count_votes, sigma=self.sigma, n0=n0, n=n, alpha=alpha)

    def predict(
        self, x: torch.Tensor, n: int, alpha: float, batch_size: int, *, stream: NoiseStream | None = None
    ) -> int:
        """The smoothed classifier's class at ``x`` [C, H, W] from ``n`` draws, or ABSTAIN.

        Wrong with probability at most ``alpha``: the guarantee of ``certification.prediction``.
        """
        if n < 1 or batch_size < 1:
            raise ValueError(f"n and batch_size must be at least 1, got {n} and {batch_size}")
        check_alpha(alpha)
        votes = self.count_votes(x, (n,), batch_size, stream or self._fresh_stream(x))
        return predict_from_votes(votes[0], alpha)

    @torch.inference_mode()
    def count_votes(self, x: torch.Tensor, sizes: tuple[int, ...], batch_size: int, stream: NoiseStream) -> np.ndarray:
        """Votes of the base classifier on fresh noisy copies of ``x`` [C, H, W]: int64 [len(sizes), num_classes].

        Row i holds sizes[i] votes. Everything stays on the stream's device until one transfer at the end.
        NonFiniteError if a logit is NaN or infinite; ValueError if the classifier's number of classes
        is not num_classes.
        """
        if isinstance(self.base_classifier, torch.nn.Module):
            self.base_classifier.eval()
        x = x.to(stream.generator.device)
        # One bin more than classes: it counts the outputs that are no vote because a logit is not finite.
        counts = torch.zeros((len(sizes), self.num_classes + 1), dtype=torch.int64, device=x.device)
        for row, size in zip(counts, sizes):
            for start in range(0, size, batch_size):
                noise = stream.draw(min(batch_size, size - start), x)
                votes = self._votes(noise.add_(x))
                # Not bincount: on CUDA it waits for the device.
                row.scatter_add_(0, votes, torch.ones_like(votes))
        counts = counts.cpu().numpy()
        if counts[:, -1].any():
            raise NonFiniteError(
                f"the base classifier returned logits that are not finite for {counts[:, -1].sum()} "
                f"of {sum(sizes)} noisy images: its weights are broken or training diverged"
            )
        return counts[:, :-1]

    def _votes(self, noisy_images: torch.Tensor) -> torch.Tensor:
        """The class of each noisy image [B, C, H, W], or num_classes where a logit is not finite: int64 [B]."""
        logits = self.base_classifier(noisy_images)
        if logits.shape != (len(noisy_images), self.num_classes):
            raise ValueError(
                f"the base classifier returned shape {tuple(logits.shape)} for {len(noisy_images)} images "
                f"and {self.num_classes} classes"
            )
        return logits.argmax(1).where(logits.isfinite().all(1), self.num_classes)

    def _fresh_stream(self, x: torch.Tensor) -> NoiseStream:
        key = int(torch.randint(2**62, (1,)))
        return NoiseStream(self.sigma, derive_generator(x.device, key))
