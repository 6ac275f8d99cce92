"""The base class of all gradient attacks: it checks, freezes the model, and projects the result to
the ball.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from smoothadv.architectures.logits import frozen
from smoothadv.attacks.estimators import (
    Estimate,
    GradientEstimator,
    Model,
    no_noise,
    noisy_logits,
    plug_in,
)
from smoothadv.attacks.geometry import Randomness, project_ball, project_box
from smoothadv.base.settings import (
    Checked,
    l2_norm,
    perturbation_size,
    positive_int,
    setting,
)


@dataclass(frozen=True)
class Problem:
    """The optimization problem of an attack, for B examples with m noise draws each.

    ``inputs`` [B, ...], ``labels`` int64 [B], ``noise`` [B, m, ...], ``epsilon`` float64 [B]. The
    search begins at the perturbations ``start`` [B, ...], with inputs + start in [0, 1]; None: at
    the inputs.
    """

    model: Model
    inputs: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    epsilon: torch.Tensor
    start: torch.Tensor | None
    generator: Randomness
    estimator: GradientEstimator

    def estimate(self, v: torch.Tensor) -> Estimate:
        """The gradient estimate at inputs + v."""
        return self.estimator(self.model, self.inputs + v, self.labels, self.noise)

    @torch.no_grad()
    def logits(self, v: torch.Tensor) -> torch.Tensor:
        """The logits [B, m, K] at inputs + v, where no gradient is needed."""
        return noisy_logits(self.model, self.inputs + v, self.noise)


@dataclass(frozen=True)
class GradientAttack(Checked, ABC):
    """``num_steps`` steps of some method within the l2 ball of radius ``epsilon``, on images in [0,
    1].

    ``estimator`` supplies gradients. The labels are the classes that the attack leads away from or,
    if ``targeted``, those that it aims at. A subclass defines ``perturbation``. SettingError where
    a setting is out of its range.
    """

    EXAMPLE = "an object like smoothadv.attacks.pgd.PGD(0.5, 20)"
    epsilon: float = setting(
        parse=perturbation_size,
        check=l2_norm,
        help="l2 norm of the attack on images in [0, 1], like 0.25 or 64/255",
    )
    num_steps: int = setting(
        parse=positive_int,
        help="steps of the attack (paper: 1 to 10 in training, 20 in evaluation)",
    )
    estimator: GradientEstimator = setting(plug_in)
    targeted: bool = setting(False)

    @torch.inference_mode(
        False
    )  # callers are often in inference mode, where there are no gradients
    def __call__(
        self,
        model: Model,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor | None = None,
        generator: Randomness = None,
        *,
        epsilon: float | torch.Tensor | None = None,
        start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adversarial inputs [B, ...] for inputs [B, ...] and labels int64 [B]; see the package's
        docstring.

        ``epsilon`` replaces that of the attack: a number, a tensor [] that is finite and at least
        0, or one for each example, [B]; ValueError where these are not finite and at least 0.
        ``start`` [B, ...] holds the perturbations with which the search begins.
        """
        epsilon = self.epsilon if epsilon is None else epsilon
        if len(inputs) == 0 or (not isinstance(epsilon, torch.Tensor) and not epsilon > 0):
            return inputs.detach().clone()
        if not isinstance(epsilon, torch.Tensor):
            # Made on the device: a copy to it would wait, as would a look at its value.
            epsilon = torch.full((), epsilon, dtype=torch.float64, device=inputs.device)
        elif epsilon.dim() and (
            epsilon.shape != labels.shape or not ((epsilon >= 0) & epsilon.isfinite()).all()
        ):
            raise ValueError(
                f"epsilon must hold {len(inputs)} finite numbers of at least 0, one for each "
                "example"
            )
        epsilon = epsilon.to(inputs.device, torch.float64).expand(len(inputs))
        inputs, labels = (
            values.clone() if values.is_inference() else values
            for values in (inputs.detach(), labels)
        )
        if start is not None:
            start = project_ball(project_box(inputs, start), epsilon)
        noise = no_noise(inputs) if noise is None else noise
        problem = Problem(model, inputs, labels, noise, epsilon, start, generator, self.estimator)
        with frozen(model):
            v = self.perturbation(problem)
        if v.shape != inputs.shape:
            raise ValueError(f"a perturbation {[*v.shape]} was found for inputs {[*inputs.shape]}")
        v = project_ball(v, epsilon)
        # The sum is in [0, 1] but for its rounding, which the clamp corrects. Pixels that were
        # rounded further away from the input than v are moved back: many of them together could
        # leave a small ball.
        adversarial = (inputs + v).clamp(0, 1)
        too_far = (adversarial - inputs).abs() > v.abs()
        return torch.where(too_far, torch.nextafter(adversarial, inputs), adversarial).detach()

    @abstractmethod
    def perturbation(self, problem: Problem) -> torch.Tensor:
        """A perturbation v [B, ...] with inputs + v in [0, 1]; the caller projects it to the
        ball.
        """

    @property
    def direction(self) -> int:
        """1 to increase the loss of the labels, -1 to decrease it if ``targeted``."""
        return -1 if self.targeted else 1
