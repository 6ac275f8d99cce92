"""Smoothing noise: every draw is a function of its address and of nothing else.

Noise is N(0, sigma^2 I) on images in [0, 1] (SmoothAdv, eq. 1; Cohen et al. eq. 1); sigma is its
standard deviation per coordinate, on the same scale as the images. ``gaussian`` draws it in
float32; ``rounded`` draws integer grey levels, for certificates that hold for the executed
arithmetic.
"""

from smoothadv.noise.gaussian import GaussianNoise, training_noise
from smoothadv.noise.rounded import RoundedGaussianNoise
from smoothadv.noise.streams import (
    Noise,
    NoiseKey,
    NoiseStream,
    Purpose,
    Rows,
    derive_generator,
    kernels_on,
)

__all__ = [
    "GaussianNoise",
    "Noise",
    "NoiseKey",
    "NoiseStream",
    "Purpose",
    "RoundedGaussianNoise",
    "Rows",
    "derive_generator",
    "kernels_on",
    "training_noise",
]
