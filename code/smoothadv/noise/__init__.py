"""Smoothing noise: every draw is a function of its address and of nothing else.

Noise is N(0, sigma^2 I) on images in [0, 1] (SmoothAdv, eq. 1; Cohen et al. eq. 1); sigma is its
standard deviation per coordinate, on the same scale as the images. ``gaussian`` draws it in
float32; ``rounded`` draws integer grey levels, for certificates that hold for the executed
arithmetic.
"""

from smoothadv.noise.gaussian import GaussianNoise as GaussianNoise
from smoothadv.noise.gaussian import training_noise as training_noise
from smoothadv.noise.rounded import RoundedGaussianNoise as RoundedGaussianNoise
from smoothadv.noise.streams import Noise as Noise
from smoothadv.noise.streams import NoiseKey as NoiseKey
from smoothadv.noise.streams import NoiseStream as NoiseStream
from smoothadv.noise.streams import Purpose as Purpose
from smoothadv.noise.streams import Rows as Rows
from smoothadv.noise.streams import derive_generator as derive_generator
from smoothadv.noise.streams import kernels_on as kernels_on
