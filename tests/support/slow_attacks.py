"""PGD, estimators and target rules one example and one copy at a time: what the package's must
equal.

SmoothAdv, sections 2.2 and 3.1. Nothing of the package under test is used but the noise of an
example.
"""

from collections.abc import Callable

import torch
from torch import nn

from smoothadv.attacks.estimators import Stein, expected_loss, plug_in
from smoothadv.noise import GaussianNoise, Purpose


def smooth_network(
    dimension: int,
    num_classes: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
    scale: float = 2.0,
) -> nn.Module:
    """A random network of two layers with a curved boundary and no rounding of its own worth
    mentioning.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = nn.Linear(dimension, 12), nn.Linear(12, num_classes)
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_(0, scale / layer.in_features**0.5, generator=generator)
            layer.bias.normal_(0, 0.3, generator=generator)
    return nn.Sequential(nn.Flatten(), layers[0], nn.Tanh(), layers[1]).to(dtype)


def example_noise(
    sigma: float, seed: int, index: int, copies: int, image: torch.Tensor
) -> torch.Tensor:
    """The draws [m, ...] that an attack on the example with this index gets, of the image's
    dtype.
    """
    stream = GaussianNoise(sigma, seed).stream(index, "cpu", Purpose.ATTACK_NOISE)
    return stream.draw(copies, image).to(image.dtype)


def batch_noise(
    sigma: float, seed: int, indices, copies: int, inputs: torch.Tensor
) -> torch.Tensor:
    """``example_noise`` of every example: [B, m, ...]"""
    return torch.stack(
        [example_noise(sigma, seed, index, copies, x) for index, x in zip(indices, inputs)]
    )


def copy_probabilities(model: Callable, point: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """softmax of each copy's logits: point [...] and noise [m, ...] give [m, K]."""
    with torch.no_grad():
        return torch.stack([model((point + draw)[None])[0].softmax(0) for draw in noise])


def slow_loss(model: Callable, point: torch.Tensor, label: int, noise: torch.Tensor) -> float:
    """-log of the mean over copies of the label's probability."""
    return -copy_probabilities(model, point, noise)[:, label].mean().log().item()


def _each_copy(model: Callable, point: torch.Tensor, label: int, noise: torch.Tensor):
    """(log p, grad log p) of every copy."""
    for draw in noise:
        leaf = (point + draw).clone().requires_grad_()
        log_p = model(leaf[None]).log_softmax(1)[0, label]
        (gradient,) = torch.autograd.grad(log_p, leaf)
        yield log_p.detach(), gradient


def slow_plug_in(
    model: Callable, point: torch.Tensor, label: int, noise: torch.Tensor
) -> torch.Tensor:
    """-sum_i w_i grad log p_i with w_i = p_i / sum_j p_j."""
    logs, gradients = zip(*_each_copy(model, point, label, noise))
    weights = torch.stack(logs).softmax(0)
    return -sum(weight * gradient for weight, gradient in zip(weights, gradients))


def slow_expected_loss(
    model: Callable, point: torch.Tensor, label: int, noise: torch.Tensor
) -> torch.Tensor:
    """-(1 / m) sum_i grad log p_i."""
    gradients = [gradient for _, gradient in _each_copy(model, point, label, noise)]
    return -sum(gradients) / len(gradients)


def slow_stein(sigma: float, hard: bool) -> Callable:
    """-(1 / (m sigma^2)) sum_i F_i d_i, F the label's probability or whether it is answered."""

    def gradient(
        model: Callable, point: torch.Tensor, label: int, noise: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(point)
        for probabilities, draw in zip(copy_probabilities(model, point, noise), noise):
            score = float(probabilities.argmax() == label) if hard else probabilities[label].item()
            total = total + score * draw
        return -total / (len(noise) * sigma**2)

    return gradient


def slow_pgd(
    model: Callable,
    x: torch.Tensor,
    label: int,
    noise: torch.Tensor,
    epsilon: float,
    steps: int,
    gradient: Callable = slow_plug_in,
    targeted: bool = False,
) -> torch.Tensor:
    """PGD for one example: step of 2 epsilon / T, clip to the pixels, scale into the ball."""
    v = torch.zeros_like(x)
    for _ in range(steps):
        g = gradient(model, x + v, label, noise)
        if g.norm() > 0:
            v = v + (-1 if targeted else 1) * 2 * epsilon / steps * g / g.norm()
        v = (x + v).clamp(0, 1) - x
        if v.norm() > epsilon:
            v = v * (epsilon / v.norm())
    return x + v


def slow_target(
    rule: str, model: Callable, x: torch.Tensor, label: int, noise: torch.Tensor
) -> int:
    """The class that "runner-up" or "least-likely" names, by sorting the mean probabilities."""
    means = copy_probabilities(model, x, noise).mean(0).tolist()
    others = sorted((p, k) for k, p in enumerate(means) if k != label)
    return others[-1 if rule == "runner-up" else 0][1]


def estimators_and_slow_ones(sigma: float) -> dict[str, tuple]:
    """Each estimator for noise of this standard deviation, and the same computed copy by copy."""
    return {
        "plug_in": (plug_in, slow_plug_in),
        "expected_loss": (expected_loss, slow_expected_loss),
        "stein": (Stein(sigma), slow_stein(sigma, hard=False)),
        "hard_stein": (Stein(sigma, hard=True), slow_stein(sigma, hard=True)),
    }
