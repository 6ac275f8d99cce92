"""Gradient estimators: functions from which an attack on a smoothed classifier gets its directions.

An estimator maps (model, points [B, ...], labels [B], noise [B, m, ...]) to an ``Estimate``: the
direction of steepest ascent of the attacker's objective at each point, and the logits that it
computed. ``ESTIMATORS`` lists those that a command line can name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch
from torch.nn import functional as F

from smoothadv.base.errors import UserError
from smoothadv.base.settings import Checked, number, positive_noise_level, setting


@dataclass(frozen=True)
class Estimate:
    """``gradient`` [B, ...] of the objective to ascend; ``logits`` [B, m, K], detached.

    Where the m copies are divided into parts, the gradient over all copies is the mean of the
    parts' gradients with weights exp(``log_weight()`` [B]); None, of objectives that are means over
    copies, stands for the number of copies.
    """

    gradient: torch.Tensor
    logits: torch.Tensor
    log_weight: Callable[[], torch.Tensor] | None = None


Model = Callable[[torch.Tensor], torch.Tensor]
"""Maps inputs [B, ...] to logits [B, K]; often a ``torch.nn.Module``."""
_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


GradientEstimator = Callable[[Model, torch.Tensor, torch.Tensor, torch.Tensor], Estimate]
"""Of a model, points, labels and noise: a function, or a frozen dataclass whose fields decide the
estimate.
"""


def no_noise(inputs: torch.Tensor) -> torch.Tensor:
    """The "noise" of the base classifier: one copy of zeros, [B, 1, ...]."""
    return torch.zeros_like(inputs).unsqueeze(1)


def noisy_logits(model: Model, points: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Logits [B, m, K] of all m noisy copies of each point, in one batch, sample-major."""
    copies = (points.unsqueeze(1) + noise).flatten(0, 1)
    return model(copies).unflatten(0, noise.shape[:2])


def log_true_probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[label] of every copy: logits [B, m, K] and labels [B] give [B, m]."""
    return (
        F.log_softmax(logits, dim=-1)
        .gather(-1, labels[:, None, None].expand(-1, logits.shape[1], 1))
        .squeeze(-1)
    )


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """J = -log of the mean over copies of softmax(logits)[label]: [B, m, K] and [B] give [B]
    (SmoothAdv, eq. 6).

    In log-sum-exp form, so that its gradient does not vanish however improbable the label is.
    """
    return math.log(logits.shape[1]) - _log_sum(log_true_probability(logits, labels))


def _log_sum(values: torch.Tensor) -> torch.Tensor:
    """log(sum_i exp(values_i)): [B, m] gives [B]; of a single value it is that value, without nine
    kernels.
    """
    return values.squeeze(1) if values.shape[1] == 1 else torch.logsumexp(values, dim=1)


def estimator_of(loss: _Loss, log_weight: _Loss | None = None) -> GradientEstimator:
    """The estimator that differentiates a loss [B] of logits [B, m, K] and labels [B] with respect
    to the points; ``log_weight`` [B] is that of its estimates, of the same arguments.
    """

    @wraps(loss)
    def estimate(
        model: Model, points: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Estimate:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            logits = noisy_logits(model, points, noise)
            gradient = differentiated(loss(logits, labels).sum(), points)
        logits = logits.detach()
        return Estimate(gradient, logits, log_weight and partial(log_weight, logits, labels))

    return estimate


@partial(
    estimator_of,
    log_weight=lambda logits, labels: _log_sum(log_true_probability(logits, labels)),
)
def plug_in(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The gradient of the plug-in loss J over the given noise (SmoothAdv, eq. 6); m = 1 is
    cross-entropy.
    """
    return smoothed_loss(logits, labels)


@dataclass(frozen=True)
class PlugIn(Checked):
    """``plug_in`` with softmax(beta * logits) as the probabilities (SmoothAdv, appendix B).

    The larger ``beta``, the closer their mean is to the share of votes. The gradients have another
    length, which neither vanishes nor overflows however large beta is. SettingError unless beta is
    positive and finite.
    """

    beta: float = setting(parse=number(float, "a finite number above 0", lambda v: v > 0))

    def __call__(
        self, model: Model, points: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Estimate:
        def ascent(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            odds, log_slopes = self._odds(logits, labels)
            return (log_slopes.detach().softmax(1) * odds).sum(1) / self.beta

        def log_weight(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return _log_sum(self._odds(logits, labels)[1])

        return estimator_of(ascent, log_weight)(model, points, labels, noise)

    def sharpened(self, logits: torch.Tensor) -> torch.Tensor:
        """beta * logits, shifted so that the largest is 0 and none overflows: [..., K] gives
        float64 [..., K].
        """
        return ((logits - logits.amax(-1, keepdim=True)).double() * self.beta).clamp(min=-1e300)

    def _odds(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log((1 - p) / p), where p is the label's probability in a copy, and log(p (1 - p)):
        float64 [B, m] each.
        """
        index, sharp = labels[:, None, None].expand(-1, logits.shape[1], 1), self.sharpened(logits)
        odds = torch.logsumexp(
            (sharp - sharp.gather(-1, index)).scatter(-1, index, -math.inf), dim=-1
        )
        return odds, F.logsigmoid(odds) + F.logsigmoid(-odds)


@estimator_of
def expected_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean over copies of their cross-entropies (Cohen et al., 2019, appendix
    G.3).

    It is the expectation of the loss; SmoothAdv, section 2.2, argues for the loss of the
    expectation.
    """
    return -log_true_probability(logits, labels).mean(dim=1)


def differentiated(loss: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The gradient of a ``loss`` [] with respect to ``points``; UserError where the model cut it
    off.
    """
    gradient = (
        torch.autograd.grad(loss, points, allow_unused=True)[0] if loss.requires_grad else None
    )
    if gradient is None:
        raise UserError(
            "the model's logits have no gradient with respect to the images: let its forward "
            "compute them without detach, no_grad or argmax, or attack with "
            "attacks.estimators.Stein, which needs none"
        )
    return gradient


@dataclass(frozen=True)
class Stein(Checked):
    """The gradient-free estimator (SmoothAdv, section 3.1): by Stein's lemma grad G_y = E[F_y(x +
    d) d] / sigma^2.

    Ascends -G_y: minus (1 / (m sigma^2)) sum_i F(x + d_i)_y d_i. ``sigma`` > 0 is the noise's
    standard deviation. F is the softmax, or with ``hard`` the indicator that the base classifier
    answers y.
    """

    sigma: float = setting(parse=positive_noise_level)
    hard: bool = setting(False)

    @torch.no_grad()
    def __call__(
        self, model: Model, points: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Estimate:
        logits = noisy_logits(model, points, noise)
        if self.hard:
            scores = (logits.argmax(-1) == labels[:, None]).to(noise.dtype)
        else:
            scores = log_true_probability(logits, labels).exp()
        return Estimate(-stein_gradient(scores, noise, self.sigma), logits)


def stein_gradient(scores: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """(1 / (m sigma^2)) sum_i scores_i d_i: scores [B, m] of the noisy copies and noise [B, m, ...]
    give [B, ...].
    """
    with torch.autocast(
        noise.device.type, enabled=False
    ):  # low precision would spoil a sum over draws
        return torch.einsum("bm,bm...->b...", scores, noise) / (noise.shape[1] * sigma**2)


ESTIMATORS: dict[str, tuple[Callable[[float], GradientEstimator], str]] = {
    "plug-in": (lambda sigma: plug_in, "of the loss of the averaged softmax (SmoothAdv, eq. 6)"),
    "expected-loss": (
        lambda sigma: expected_loss,
        "of the average of the losses (Cohen et al., 2019, appendix G.3)",
    ),
    "stein": (Stein, "estimated from probabilities, without gradients (SmoothAdv, section 3.1)"),
    "hard-stein": (lambda sigma: Stein(sigma, hard=True), "the same from decisions alone"),
}
"""Those that a command line can name: each makes one for noise of a standard deviation, and what it
is, for people.
"""
