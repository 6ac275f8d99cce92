"""Smooth: against classifiers whose smoothed version is known exactly, and against a slow, obvious
loop; what float noise certifies falsely.

Random checks have a false-alarm probability of 1e-6 over the seeds
(``support.statistical_checks``).
"""

import pytest
import torch
from scipy.stats import norm

from smoothadv.base.errors import UserError
from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise, Noise, NoiseStream, RoundedGaussianNoise
from smoothadv.smoothed_module import SmoothedModule
from smoothadv.statistics.bounds import certified_radius, maximum_radius
from support.models import (
    BIAS,
    MARGIN,
    POINT,
    WEIGHT,
    ConstantClassifier,
    Recorder,
    linear_classifier,
    network_with_state,
)
from support.statistical_checks import is_binomial_count, too_many

ALPHA = 1e-3


def image(*values: float) -> torch.Tensor:
    """[1, 1, d]"""
    return torch.tensor([[values]], dtype=torch.float32)


def stream(seed: int, sigma: float = 0.5) -> NoiseStream:
    return GaussianNoise(sigma, seed).stream(0, "cpu")


def smooth_linear(sigma: float, weight=WEIGHT, bias: float = BIAS) -> Smooth:
    return Smooth(linear_classifier(weight, bias, torch.float32), 2, sigma)


@pytest.mark.parametrize("sigma, p_a", [(0.25, 0.999313), (0.5, 0.945201), (1.0, 0.788145)])
def test_votes_on_a_linear_classifier_follow_the_closed_form(sigma, p_a):
    assert norm.cdf(MARGIN / (5 * sigma)) == pytest.approx(p_a, abs=5e-7)
    found = smooth_linear(sigma).certificate(
        image(*POINT), 100, 200_000, ALPHA, 10_000, stream=stream(0, sigma)
    )
    assert (found.prediction, found.trials) == (1, 200_000)
    assert is_binomial_count(found.successes, 200_000, p_a)
    # Noise 5 % too large would be noticed.
    assert not is_binomial_count(found.successes, 200_000, norm.cdf(MARGIN / (5 * sigma * 1.05)))


# Where p = Phi(z), the expected shortfall is 3.1 standard errors of p, divided by the density
# phi(z): 4 % at z = 0.3, 1.3 % at 1.5 and 3 % at 3. The tolerance adds 4 standard errors: false
# alarms 3e-5 each. Above: alpha.
@pytest.mark.parametrize("z, tolerance", [(0.3, 0.1), (1, 0.035), (3, 0.065)])
def test_radius_is_close_to_the_distance_at_the_sample_size_of_the_paper(z, tolerance):
    sigma = 0.5
    smooth = smooth_linear(sigma, weight=(1.0, 0.0), bias=0.0)
    prediction, radius = smooth.certify(
        image(z * sigma, 0.0), 100, 100_000, ALPHA, 10_000, stream=stream(1, sigma)
    )
    assert prediction == 1
    assert (1 - tolerance) * z * sigma <= radius <= z * sigma


def repeated_certificates(alpha: float, repetitions: int):
    """Certificates from 200 draws each of a linear classifier at distance 0.3, and this
    distance.
    """
    sigma, distance = 0.5, 0.3
    smooth = smooth_linear(sigma, weight=(0.6, 0.8), bias=-0.2)
    x = image(0.1 + 0.6 * distance, 0.175 + 0.8 * distance)
    noise = GaussianNoise(sigma, seed=0)
    streams = (noise.stream(example, "cpu") for example in range(repetitions))
    certificates = [smooth.certificate(x, 20, 200, alpha, 200, stream=each) for each in streams]
    return certificates, distance, sigma


@pytest.mark.parametrize("alpha", [1e-3, 0.05])
def test_certificates_are_false_with_probability_at_most_alpha(alpha):
    certificates, distance, sigma = repeated_certificates(alpha, 600)
    # The true class is 1, and its radius is the distance, where two classes tie: a ball that
    # reaches it is false.
    false = sum(c.prediction == 0 or c.radius >= distance for c in certificates)
    assert not too_many(false, len(certificates), alpha)
    assert sum(c.prediction == 1 for c in certificates) > len(certificates) / 3

    estimates = [sigma * norm.ppf(c.successes / c.trials) for c in certificates]
    assert too_many(sum(r > distance for r in estimates), len(certificates), alpha)


def test_certificate_check_notices_a_level_that_is_too_large():
    certificates, distance, _ = repeated_certificates(0.15, 600)
    assert too_many(sum(c.radius > distance for c in certificates), len(certificates), 0.05)


def test_predictions_on_the_boundary_are_made_with_probability_at_most_alpha():
    smooth = smooth_linear(0.5, weight=(1.0, 0.0), bias=0.0)
    noise = GaussianNoise(0.5, seed=0)

    def answers(alpha: float) -> int:
        streams = (noise.stream(example, "cpu") for example in range(500))
        return sum(
            smooth.predict(image(0.0, 0.0), 201, alpha, 201, stream=each) != Smooth.ABSTAIN == -1
            for each in streams
        )

    assert not too_many(answers(0.05), 500, 0.05)
    assert too_many(answers(0.15), 500, 0.05)


@pytest.mark.parametrize("bias", [BIAS, -4.5, -5.0])
def test_the_same_stream_gives_the_same_certificate(bias):
    """By the steps of CERTIFY, too, also where two classes tie or nearly do."""
    smooth = smooth_linear(0.5, bias=bias)
    x = image(*POINT)
    first, again, other = (
        smooth.certificate(x, 10, 500, ALPHA, 100, stream=stream(seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    found = smooth.certify(x, 10, 500, ALPHA, 100, stream=stream(1))
    assert found == (first.prediction, first.radius)


def test_without_a_stream_every_call_draws_afresh_from_the_global_seed():
    smooth = smooth_linear(0.5)

    def three_certificates() -> list:
        torch.manual_seed(11)
        return [smooth.certificate(image(*POINT), 10, 500, ALPHA, 100) for _ in range(3)]

    certificates = three_certificates()
    assert len({c.successes for c in certificates}) > 1
    assert certificates == three_certificates()


def test_without_a_stream_the_noise_is_that_of_sigma():
    recorder, x = Recorder(ConstantClassifier(0, 2)), torch.arange(9).view(1, 3, 3) / 255
    torch.manual_seed(11)
    # One place off the grey levels of x, which it stands for.
    Smooth(recorder, 2, 0.25).predict(x.nextafter(torch.ones(())).where(x > 0, x), 50, ALPHA, 50)
    torch.manual_seed(11)
    expected = GaussianNoise(0.25, int(torch.randint(2**62, (1,)))).stream(0, "cpu").noisy(50, x)
    assert torch.equal(torch.cat(recorder.batches), expected)


class FarFromGaussian(GaussianNoise):
    """Noise that says that it is no Gaussian."""

    def distance(self, dimension: int) -> float:
        return 1e-4 * dimension


def test_certificates_count_the_distance_of_the_noise_from_a_gaussian():
    far = FarFromGaussian(0.25, 0).stream(0, "cpu")
    smooth = Smooth(ConstantClassifier(0, 2), 2, 0.25)
    certificate = smooth.certificate(image(0.5, 0.5), 10, 500, ALPHA, 100, stream=far)
    assert (
        certificate.radius
        == smooth.certify(image(0.5, 0.5), 10, 500, ALPHA, 100, stream=far)[1]
        == certified_radius(500, 500, 0.25, ALPHA, 2e-4)
        < maximum_radius(500, 0.25, ALPHA)
    )


def test_the_classifier_votes_in_eval_mode():
    network = network_with_state(num_classes=2).train()
    before = network[0].running_mean.clone()
    Smooth(network, 2, 0.25).predict(torch.rand(1, 4, 4), 20, ALPHA, 10)
    assert torch.equal(network[0].running_mean, before)


@pytest.mark.parametrize(
    ("classifier", "num_classes", "sigma", "words"),
    [
        (ConstantClassifier(0, 2), 0, 0.25, "num_classes"),
        *(
            (ConstantClassifier(0, 2), 2, sigma, "sigma")
            for sigma in (0.0, -1.0, float("nan"), float("inf"))
        ),
        ("checkpoint.pth.tar", 2, 0.25, "base_classifier is a str: give a module"),
    ],
)
def test_what_cannot_be_smoothed_is_refused(classifier, num_classes, sigma, words):
    with pytest.raises(ValueError, match=words):
        Smooth(classifier, num_classes, sigma)


@pytest.mark.parametrize("far", [-1.0, 2.6, 255.0, float("nan")])
def test_values_far_outside_of_the_scale_are_refused(far):
    smooth = Smooth(ConstantClassifier(0, 2), 2, 0.25)
    module = SmoothedModule(ConstantClassifier(0, 2), 0.25, 2)
    uses = (
        lambda x: smooth.certify(x, 10, 100, ALPHA, 50),
        lambda x: smooth.predict(x, 100, ALPHA, 50),
        lambda x: module(x[None]),
    )
    for use in uses:
        with pytest.raises(UserError, match=r"found values from .*, expected \[0, 1\]; noise and"):
            use(image(far, 0.5))
        use(image(-0.5, 1.5))


@pytest.mark.parametrize("n0, n, batch_size", [(10, 0, 10), (10, 100, 0)])
def test_sizes_that_mean_nothing_are_refused(n0, n, batch_size):
    with pytest.raises(ValueError):
        smooth_linear(0.5).certify(image(*POINT), n0, n, ALPHA, batch_size)


BLACK, GREY = torch.zeros(3, 32, 32), torch.full((3, 32, 32), 3 / 255)


class ReadsLastBits(torch.nn.Module):
    """A network that reads the last bits of its input gets false certificates from float noise: see
    docs/guarantee.md.

    Class 0 where some pixel y with |y| < 2^-9 is no multiple of 2^-30: as noise is, but not
    3/255 plus noise.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pixels = inputs.flatten(1)
        fine = (pixels.abs() < 2**-9) & ((pixels * 2**30).frac() != 0)
        return torch.nn.functional.one_hot((~fine.any(1)).long(), 2).float()


READER = Smooth(ReadsLastBits(), 2, 0.25)


def certified(noise: Noise, draws: int) -> tuple[int, float]:
    return READER.certify(BLACK, 10, draws, ALPHA, 500, stream=noise.stream(0, "cpu"))


def predicted(noise: Noise, image: torch.Tensor) -> int:
    return READER.predict(
        image, 50, ALPHA, 50, stream=noise.stream(1, "cpu")
    )  # draws that no certificate used


@pytest.mark.parametrize(
    "draws, radius", [(2_000, 0.6754), pytest.param(10_000, 0.7996, marks=pytest.mark.slow)]
)
def test_float_noise_certifies_it_falsely(draws, radius):
    """What docs/guarantee.md says of certificates without --sound: this one is false for every
    seed.
    """
    noise, distance = GaussianNoise(0.25, 0), (GREY - BLACK).double().norm().item()
    label, found = certified(noise, draws)
    assert (label, found) == (0, pytest.approx(radius, abs=1e-4))
    assert found > distance == pytest.approx(0.652, abs=1e-3)
    assert predicted(noise, GREY) == 1


def test_noise_in_whole_grey_levels_certifies_only_what_is_true():
    noise = RoundedGaussianNoise(0.25, 0)
    levels = torch.arange(-noise.clip, 256 + noise.clip, dtype=torch.float32) / 255
    # One class on all that can be seen: the classifier asks of each pixel alone whether it is class
    # 0's.
    assert ReadsLastBits()(levels[:, None]).argmax(1).tolist() == [1] * len(levels)
    for image in (BLACK, GREY):
        assert torch.isin(noise.stream(2, "cpu").noisy(20, image), levels).all()
        assert predicted(noise, image) == 1
    assert certified(noise, 100) == (1, pytest.approx(0.375, abs=1e-3))
