"""Perturbations in the l2 ball and the pixel box: all shapes [B, ...], all operations per example."""

from __future__ import annotations

import torch


def per_example(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values [B] shaped [B, 1, ...] so that they broadcast against ``like`` [B, ...]."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def l2_norm(v: torch.Tensor) -> torch.Tensor:
    """The l2 norm of each example of v [B, ...]: [B]. No overflow or underflow of squares."""
    flat = v.flatten(1)
    scale = flat.abs().amax(1)
    safe = torch.where(scale > 0, scale, 1)
    return scale * (flat / safe[:, None]).norm(dim=1)


def unit(g: torch.Tensor) -> torch.Tensor:
    """g / ||g|| per example, and 0 where g = 0: a zero gradient is no reason to move."""
    # Two divisions: the norm of a gradient of size 1e-30 underflows, that of its scaled copy does not.
    scale = per_example(g.flatten(1).abs().amax(1), g)
    scaled = g / torch.where(scale > 0, scale, 1)
    norm = per_example(scaled.flatten(1).norm(dim=1), g)
    return scaled / torch.where(norm > 0, norm, 1)


def project_box(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The perturbation nearest to v for which x + v stays in [0, 1]."""
    return (x + v).clamp(0, 1) - x


def project_ball(v: torch.Tensor, epsilon: float) -> torch.Tensor:
    """v scaled down to norm ``epsilon`` where it is longer: v * min(1, epsilon / ||v||)."""
    norm = l2_norm(v)
    return v * per_example(torch.where(norm > epsilon, epsilon / norm.clamp_min(1e-38), 1.0), v)


def uniform_in_ball(x: torch.Tensor, epsilon: float, generator: torch.Generator | None) -> torch.Tensor:
    """A perturbation for each x [B, ...], uniform in the l2 ball of radius ``epsilon``."""
    direction = unit(torch.empty_like(x).normal_(generator=generator))
    dimension = x[0].numel()
    share = torch.rand(len(x), dtype=x.dtype, device=x.device, generator=generator) ** (1 / dimension)
    return direction * per_example(epsilon * share, x)


def quantize(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Images [B, ...] in [0, 1] rounded to ``levels`` equidistant values, 0 and 1 among them."""
    return (x * (levels - 1)).round() / (levels - 1)
