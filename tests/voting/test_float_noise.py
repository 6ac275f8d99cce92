"""A network that reads the last bits of its input gets false certificates from float noise: see
docs/guarantee.md.
"""

import pytest
import torch
from torch import nn

from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise, Noise, RoundedGaussianNoise

SIGMA, ALPHA = 0.25, 1e-3
BLACK, GREY = torch.zeros(3, 32, 32), torch.full((3, 32, 32), 3 / 255)


class ReadsLastBits(nn.Module):
    """Class 0 where some pixel y with |y| < 2^-9 is no multiple of 2^-30: as noise is, but not
    3/255 plus noise.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pixels = inputs.flatten(1)
        fine = (pixels.abs() < 2**-9) & ((pixels * 2**30).frac() != 0)
        return nn.functional.one_hot((~fine.any(1)).long(), 2).float()


SMOOTH = Smooth(ReadsLastBits(), 2, SIGMA)


def certified(noise: Noise, draws: int) -> tuple[int, float]:
    return SMOOTH.certify(BLACK, 10, draws, ALPHA, 500, stream=noise.stream(0, "cpu"))


def predicted(noise: Noise, image: torch.Tensor) -> int:
    return SMOOTH.predict(
        image, 50, ALPHA, 50, stream=noise.stream(1, "cpu")
    )  # draws that no certificate used


@pytest.mark.parametrize(
    "draws, radius", [(2_000, 0.6754), pytest.param(10_000, 0.7996, marks=pytest.mark.slow)]
)
def test_float_noise_certifies_it_falsely(draws, radius):
    """What docs/guarantee.md says of certificates without --sound: this one is false for every
    seed.
    """
    noise, distance = GaussianNoise(SIGMA, 0), (GREY - BLACK).double().norm().item()
    label, found = certified(noise, draws)
    assert (label, found) == (0, pytest.approx(radius, abs=1e-4))
    assert found > distance == pytest.approx(0.652, abs=1e-3)
    assert predicted(noise, GREY) == 1


def test_noise_in_whole_grey_levels_certifies_only_what_is_true():
    noise = RoundedGaussianNoise(SIGMA, 0)
    levels = torch.arange(-noise.clip, 256 + noise.clip, dtype=torch.float32) / 255
    # One class on all that can be seen: the classifier asks of each pixel alone whether it is class
    # 0's.
    assert ReadsLastBits()(levels[:, None]).argmax(1).tolist() == [1] * len(levels)
    for image in (BLACK, GREY):
        assert torch.isin(noise.stream(2, "cpu").noisy(20, image), levels).all()
        assert predicted(noise, image) == 1
    assert certified(noise, 100) == (1, pytest.approx(0.375, abs=1e-3))
