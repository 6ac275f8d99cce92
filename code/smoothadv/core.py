"""Smooth: a base classifier under Gaussian noise, its predictions and its certificates.

``voting`` counts votes; ``statistics`` decides what the counts certify. The commands count by the
same ``voting``, but write logs: see ``evaluation``.
"""

from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
import torch

from smoothadv.architectures.logits import explained, logits_in
from smoothadv.base.devices import device_of
from smoothadv.base.files import kept_rows
from smoothadv.base.settings import checked, positive_int, positive_noise_level
from smoothadv.noise import GaussianNoise, NoiseStream
from smoothadv.noise.scale import SLACK, check_scale, with_exact_levels
from smoothadv.statistics import ABSTAIN, PROCEDURES, Certificate, Draws, Procedure, Smoothing
from smoothadv.statistics.bounds import failure_upper_bound, radius_of
from smoothadv.statistics.error_spending import rows_of
from smoothadv.statistics.prediction import predict
from smoothadv.statistics.ranges import check
from smoothadv.statistics.votes import NO_LABEL
from smoothadv.voting.counter import Poll, VoteCounter

Answer = TypeVar("Answer")


class Smooth:
    """The smoothed classifier g(x) = argmax_c P[f(x + noise) = c], noise ~ N(0, sigma^2 I) (Cohen
    et al., eq. 1).

    ``base_classifier`` maps images [B, C, H, W], float32 in [0, 1] plus noise, to logits [B,
    num_classes]; a module is put in eval mode before it votes. ``sigma`` > 0 is on the images'
    scale.
    """

    ABSTAIN = ABSTAIN

    def __init__(self, base_classifier: torch.nn.Module, num_classes: int, sigma: float) -> None:
        if not callable(base_classifier):
            kind = type(base_classifier).__name__
            raise ValueError(f"base_classifier is a {kind}: give a module, like load_classifier's")
        self.base_classifier = base_classifier
        self.num_classes = checked("num_classes", num_classes, positive_int)
        self.sigma = checked("sigma", sigma, positive_noise_level)

    def certify(
        self,
        x: torch.Tensor,
        n0: int,
        n: int,
        alpha: float,
        batch_size: int,
        *,
        stream: NoiseStream | None = None,
    ) -> tuple[int, float]:
        """The class at ``x`` [C, H, W] and the radius of the closed l2 ball where it is certified;
        else (ABSTAIN, 0.0).

        This is CERTIFY of Cohen et al., section 3.2.2, with abstention where p_lower < 1/2, or as
        soon as more than n / 2 votes are against the class. ``n0`` draws select the class, ``n``
        fresh ones estimate its probability, ``alpha`` is the probability of a false statement,
        ``batch_size`` the draws per forward pass. ``stream`` supplies the noise: by default a new
        one seeded by torch's global generator, so that every call draws new noise.
        ``statistics.exact`` has the guarantee.
        """
        x, stream, smoothing = self._smoothed(x, stream, n0, n, alpha)
        n0, n, alpha = smoothing.n0, smoothing.n, smoothing.alpha

        def voting() -> Generator[Draws, np.ndarray, tuple[int, float]]:
            candidate = int((yield Draws(n0)).argmax())  # select
            votes = yield Draws(n, lambda votes: votes.sum() - votes[candidate] > n / 2)  # estimate
            q = failure_upper_bound(int(votes[candidate]), n, alpha)  # bound: q = 1 - p_lower
            radius = radius_of(q, self.sigma, smoothing.noise_distance)  # sigma * Phi^-1(p_lower)
            return (ABSTAIN, 0.0) if radius is None else (candidate, radius)

        return self._run(x, voting(), min(batch_size, max(n0, n)), stream)

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
        **settings: Any,
    ) -> Certificate:
        """As ``certify``, with the counts behind the statement.

        ``method`` names a certification procedure, ``settings`` are its fields. An adaptive one
        draws at most n.
        """
        x, stream, smoothing = self._smoothed(x, stream, n0, n, alpha)
        rows_of.set(kept_rows)
        procedure: Procedure = PROCEDURES[method](smoothing, **settings)
        procedure.require_one_classifier()
        return self._run(x, procedure.run(NO_LABEL), min(batch_size, max(n0, n)), stream)

    def predict(
        self,
        x: torch.Tensor,
        n: int,
        alpha: float,
        batch_size: int,
        *,
        stream: NoiseStream | None = None,
    ) -> int:
        """The smoothed classifier's class at ``x`` [C, H, W] from ``n`` draws, or ABSTAIN.

        Wrong with probability at most ``alpha``: the guarantee of ``statistics.prediction``.
        """
        check(n=n, alpha=alpha)
        x = _image(x, self.base_classifier, stream)
        classes = self._run(x, predict(n, alpha), min(batch_size, n), self._stream(stream, x))
        return classes[0] if classes else ABSTAIN

    def _run(
        self,
        x: torch.Tensor,
        voting: Generator[Draws, np.ndarray, Answer],
        batch_size: int,
        stream: NoiseStream,
    ) -> Answer:
        if isinstance(self.base_classifier, torch.nn.Module):
            self.base_classifier.eval()
        counter = VoteCounter(
            [lambda images: logits_in(self.base_classifier(images))],
            [self.num_classes],
            batch_size,
            x.device,
        )
        with explained(self.base_classifier, x):
            (result,) = counter.run([Poll(x, (stream,), voting)])
        return result.outcome

    def _smoothed(
        self, x: torch.Tensor, stream: NoiseStream | None, n0: int, n: int, alpha: float
    ) -> tuple[torch.Tensor, NoiseStream, Smoothing]:
        """The image, its stream of noise, and what procedures need to know of both."""
        x = _image(x, self.base_classifier, stream)
        stream = self._stream(stream, x)
        distance = stream.noise.distance(x.numel())
        return x, stream, Smoothing(self.sigma, n0, n, alpha, distance)

    def _stream(self, stream: NoiseStream | None, x: torch.Tensor) -> NoiseStream:
        """The stream given, or a fresh one; ValueError where its noise is not this classifier's."""
        if stream is not None:
            if stream.noise.sigma != self.sigma:
                raise ValueError(
                    f"the stream's sigma is {stream.noise.sigma}, the smoothed classifier's "
                    f"{self.sigma}"
                )
            return stream
        seed = int(torch.randint(2**62, (1,)))
        return GaussianNoise(self.sigma, seed).stream(0, x.device)


def _image(
    x: torch.Tensor | np.ndarray, classifier: Any, stream: NoiseStream | None
) -> torch.Tensor:
    """``x`` as a float32 tensor on the device of the classifier, or of the noise beside a function;
    ValueError unless it is one image [C, H, W] of floats, UserError where they are not on the scale
    of [0, 1].
    """
    if not isinstance(x, (torch.Tensor, np.ndarray)):
        raise ValueError(f"x is a {type(x).__name__}: give one image [C, H, W]")
    image = torch.as_tensor(x if isinstance(x, torch.Tensor) else np.ascontiguousarray(x))
    if image.dim() != 3:
        raise ValueError(f"x has shape {list(image.shape)}: give one image [C, H, W]")
    if not image.is_floating_point():
        raise ValueError(f"x is {image.dtype}: give float32 in [0, 1], grey levels divided by 255")
    check_scale(image, "x", SLACK)
    exact = with_exact_levels(image.float())
    return exact.to(device_of(classifier, image.device if stream is None else stream.device))
