"""Gaussian noise in float32, and the noise of training."""

import math
from types import ModuleType

import torch

from smoothadv.noise.streams import Noise


class GaussianNoise(Noise):
    """N(0, sigma^2 I) by the method of Box and Muller (1958), from uniforms of 32 bits.

    The random bits are the same on every device; the float32 logarithms and cosines may differ in
    the last place. Where the radius is close to 0 they lose digits: of 2 * 10^7 draws the worst was
    4.5e-5 sigma from a float64 Box-Muller of the same words, 96 % are within 4e-7.
    ``noise.kernels``, on CUDA, lose none. The largest value is 6.8 sigma. Certificates treat it as
    an exact Gaussian, as in nearly all published code, and do not account for its rounding.
    """

    def distance(self, dimension: int) -> float:
        return 0.0

    def check_image(self, image: torch.Tensor, name: str = "the image") -> None:
        """Accepts every image."""

    def _fill_plainly(
        self, out: torch.Tensor, image: torch.Tensor, example: int, first: int, purpose: int
    ) -> None:
        dimension = image.numel()
        image = image.to(out.device)
        chunks = self.words(out.device, -(-dimension // 4), len(out), example, first, purpose)
        for part, (w0, w1, w2, w3) in chunks:
            normals = torch.cat([*self._pair(w0, w1), *self._pair(w2, w3)], dim=1)[:, :dimension]
            torch.add(image, normals.view(-1, *image.shape), out=out[part])

    def _launch(self, kernels: ModuleType, out: torch.Tensor, plan: torch.Tensor) -> None:
        kernels.launch(kernels.gaussian, out, plan, 4)

    def _pair(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two independent normals of standard deviation sigma from two words."""
        # (w + 1/2) / 2^32 is never 0; a word that rounds up to 2^32 gives a radius of 0.
        radius = (
            first.to(torch.float32).add_(0.5).mul_(2.0**-32).log_().mul_(-2 * self.sigma**2).sqrt_()
        )
        angle = second.to(torch.float32).mul_(2 * math.pi * 2.0**-32)
        return angle.cos() * radius, angle.sin_().mul_(radius)


def training_noise(
    images: torch.Tensor, copies: int, sigma: float, generator: torch.Generator
) -> torch.Tensor:
    """``copies`` independent draws for each image [B, C, H, W]: [B, copies, C, H, W], of the
    images' dtype.

    sigma = 0 gives zeros: training or attacking without noise. Drawn on the images' device, also
    the generator's.
    """
    batch, *shape = images.shape
    noise = torch.empty((batch, copies, *shape), dtype=images.dtype, device=images.device)
    return noise.normal_(0.0, sigma, generator=generator) if sigma > 0 else noise.zero_()
