"""Perturbations in the l2 ball and the pixel box: all shapes [B, ...], all operations per
example.
"""

from collections.abc import Callable, Sequence

import torch

Randomness = torch.Generator | Sequence[torch.Generator] | None
"""One generator for a batch, or one for each of its examples, so that these do not depend on each
other.
"""


def per_example(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values [B] shaped [B, 1, ...] so that they broadcast against ``like`` [B, ...]."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def l2_norm(v: torch.Tensor) -> torch.Tensor:
    """The l2 norm of each example of v [B, ...]: [B]. Squares neither overflow nor underflow."""
    flat = v.flatten(1)
    scale = flat.abs().amax(1)
    safe = torch.where(scale > 0, scale, 1)
    return scale * (flat / safe[:, None]).norm(dim=1)


def unit(g: torch.Tensor) -> torch.Tensor:
    """g / ||g|| per example, and 0 where g = 0: a zero gradient gives no direction."""
    # First by the largest entry: the norm of a gradient of size 1e-30 would underflow.
    scale = per_example(g.flatten(1).abs().amax(1), g)
    scaled = g / torch.where(scale > 0, scale, 1)
    norm = per_example(scaled.flatten(1).norm(dim=1), g)
    return scaled / torch.where(norm > 0, norm, 1)


def project_box(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The perturbation nearest to v for which x + v stays in [0, 1]."""
    return (x + v).clamp(0, 1) - x


def project_ball(v: torch.Tensor, epsilon: float | torch.Tensor) -> torch.Tensor:
    """v * min(1, epsilon / ||v||) per example, for one ``epsilon`` or one per example [B]."""
    if not isinstance(epsilon, torch.Tensor):  # divided alike, to the last bit
        epsilon = torch.full((), epsilon, dtype=torch.float64, device=v.device)
    norm = l2_norm(v)
    return v * per_example(
        torch.where(norm > epsilon, epsilon / norm.clamp_min(1e-38), 1.0).to(v.dtype), v
    )


def uniform_in_ball(
    x: torch.Tensor, epsilon: float | torch.Tensor, generator: Randomness
) -> torch.Tensor:
    """A perturbation for each x [B, ...], uniform in the l2 ball of radius ``epsilon`` (one, or
    [B]).
    """
    direction = unit(gaussian_like(x, generator))
    share = _draw(x.flatten(1)[:, 0], generator, torch.Tensor.uniform_) ** (1 / x[0].numel())
    return direction * per_example((epsilon * share).to(x.dtype), x)


def gaussian_like(x: torch.Tensor, generator: Randomness) -> torch.Tensor:
    """Standard normals of the shape and dtype of x [B, ...]."""
    return _draw(x, generator, torch.Tensor.normal_)


def _draw(
    x: torch.Tensor, generator: Randomness, fill: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Random numbers of the shape, dtype and device of x [B, ...], drawn on the device of the
    generator.
    """
    if generator is None or isinstance(generator, torch.Generator):
        device = x.device if generator is None else generator.device
        return fill(torch.empty(x.shape, dtype=x.dtype, device=device), generator=generator).to(
            x.device
        )
    if len(generator) != len(x):
        raise ValueError(f"{len(generator)} generators for {len(x)} examples")
    rows = [
        fill(torch.empty(row.shape, dtype=x.dtype, device=g.device), generator=g)
        for row, g in zip(x, generator)
    ]
    return torch.stack(rows).to(x.device)


def in_grey_levels(
    x: torch.Tensor, adversarial: torch.Tensor, epsilon: torch.Tensor
) -> torch.Tensor:
    """Images of 256 grey levels near ``adversarial``, at an l2 distance below ``epsilon`` [B] from
    x (also of 256).

    Rounding to the nearest level may leave the ball; the perturbation is then shortened until its
    rounding does not.
    """
    levels, moves = (x.double() * 255).round(), (adversarial.double() - x.double()) * 255
    limit = (epsilon.to(x.device) * 255) ** 2
    best = torch.zeros_like(moves)
    for share in torch.linspace(0.01, 1, 100, dtype=torch.float64).tolist():
        rounded = (levels + share * moves).round().clamp(0, 255) - levels
        inside = rounded.flatten(1).square().sum(1) < limit
        best = torch.where(per_example(inside, rounded), rounded, best)
    return ((levels + best) / 255).to(x.dtype)
