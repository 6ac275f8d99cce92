"""SmoothedModule: against closed forms and a slow, obvious loop, and attacked by the libraries that
docs/attack_libraries.md names.
"""

import copy
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import smoothadv
from smoothadv.base.errors import UserError
from support.commands import CODE
from support.models import (
    BIAS,
    WEIGHT,
    Recorder,
    linear_classifier,
    network_with_state,
    probit_classifier,
)
from support.slow_attacks import copy_probabilities, example_noise, slow_plug_in, smooth_network

SIGMA, COPIES, CLASSES = 0.25, 7, 4


def module(model=None, m: int = COPIES, sigma: float = SIGMA, **settings):
    model = smooth_network(6, CLASSES, seed=3) if model is None else model
    return smoothadv.SmoothedModule(model, sigma, m, **settings)


@pytest.fixture
def images() -> torch.Tensor:
    """[5, 1, 2, 3], of which gradients are wanted."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(5, 1, 2, 3, dtype=torch.float64, generator=generator).requires_grad_()


def test_logits_and_gradient_are_those_of_the_gaussian_average():
    """E Phi(w.(x + d) + b) = Phi(z) with z = (w.x + b) / sqrt(1 + sigma^2 |w|^2)."""
    x = torch.tensor([[[[0.3, 0.1]]]], dtype=torch.float64, requires_grad=True)
    logits = module(probit_classifier(), m=100_000, batch=50_000)(x)
    (gradient,) = torch.autograd.grad(logits[0, 1], x)
    scale = math.sqrt(1 + SIGMA**2 * 25)
    z = (WEIGHT[0] * 0.3 + WEIGHT[1] * 0.1 + BIAS) / scale
    # Six standard errors of a probability, of which the gradient's are at most |w| times as many.
    error = 6 * 0.5 / math.sqrt(100_000)
    assert logits.exp().tolist()[0] == pytest.approx([norm.cdf(-z), norm.cdf(z)], abs=error)
    expected = np.array(WEIGHT) / scale * norm.pdf(z) / norm.cdf(z)
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=10 * error)


@pytest.mark.parametrize("batch", [1, 3, 7, 20, 256])
def test_every_batch_gives_the_values_and_gradients_of_a_slow_loop(images, batch):
    """Parts of an image's copies, one image, two, and all."""
    recorder = Recorder(smooth_network(6, CLASSES, seed=3))
    logits = module(recorder, seed=11, batch=batch)(images)
    passes = len(recorder.batches)
    (gradients,) = torch.autograd.grad(logits[:, 2].sum(), images)
    points = images.detach()
    noise = example_noise(SIGMA, 11, 0, COPIES, points[0])
    for x, found, gradient in zip(points, logits, gradients):
        slow = copy_probabilities(recorder.model, x, noise).mean(0).log()
        torch.testing.assert_close(found, slow, rtol=0, atol=1e-12)
        slow = -slow_plug_in(recorder.model, x, 2, noise)
        torch.testing.assert_close(gradient, slow, rtol=0, atol=1e-12)
    assert max(map(len, recorder.batches)) <= batch
    # All but a single pass are computed again for the gradients, and not kept for them.
    assert len(recorder.batches) == passes * (1 if passes == 1 else 2)


def test_probabilities_that_round_to_zero_have_logits_and_gradients(images):
    """Of class 0, log p = -score, whose gradient is the weight."""
    logits = module(linear_classifier([1e3] * 6, bias=1e4))(images)
    (gradients,) = torch.autograd.grad(logits[:, 0].sum(), images)
    assert (logits[:, 0].exp() == 0).all() and logits.isfinite().all()
    torch.testing.assert_close(gradients, torch.full_like(gradients, -1e3))


@torch.no_grad()
def test_fixed_draws_are_the_same_in_every_call_whichever_images_are_in_it(images):
    smoothed = module()
    logits = smoothed(images)
    assert torch.equal(smoothed(images), logits)
    order = [3, 0, 4]
    torch.testing.assert_close(smoothed(images[order]), logits[order], rtol=0, atol=1e-12)
    assert smoothed(images[:0]).shape == (0, CLASSES)
    assert (module(seed=1)(images) - logits).abs().max() > 1e-3


@torch.no_grad()
def test_fresh_draws_continue_a_stream_that_the_seed_decides(images):
    smoothed, again = module(fresh=True), module(fresh=True)
    first, second = smoothed(images), smoothed(images)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(again(images), first) and torch.equal(again(images), second)
    assert torch.equal(first, module()(images)), "the first call has the fixed draws"
    whole = module(m=2 * COPIES)(images).exp()
    torch.testing.assert_close((first.exp() + second.exp()) / 2, whole, rtol=0, atol=1e-12)
    assert torch.equal(copy.deepcopy(smoothed)(images), smoothed(images))


def test_model_runs_in_eval_mode_and_stays_as_it_is():
    model = nn.Sequential(network_with_state(), nn.Dropout(0.5)).train()
    model[0][3].bias.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    weights = copy.deepcopy(model.state_dict())
    recorder = Recorder(model)
    smoothed = module(recorder, batch=2)
    x = torch.rand(3, 1, 4, 4, requires_grad=True)
    smoothed(x).sum().backward()
    assert x.grad is not None and not any(recorder.modes) and model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert smoothed.state_dict().keys() == {f"model.model.{name}" for name in weights}
    assert not smoothed.training


def test_logits_have_the_type_of_the_images_and_may_come_in_a_mapping(images):
    network = smooth_network(6, CLASSES, seed=3, dtype=torch.float32)
    found = module(lambda copies: {"logits": network(copies)})(images.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, module(network)(images.float()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sigma": 0}, "sigma: found 0, "),
        ({"sigma": math.nan}, "sigma: found nan, "),
        ({"m": 0}, "m: found 0, expected a whole number from 1"),
        ({"seed": -1}, "seed: found -1, expected a whole number from 0"),
        ({"fresh": 1}, "fresh: found 1, expected True or False"),
        ({"batch": 0.5}, "batch: found 0.5, expected a whole number from 1"),
        ({"model": "x.pth.tar"}, "the model is a str: give a module, like load_classifier's"),
        ({"model": lambda images: "cat"}, "the classifier returns a str; it must return logits"),
    ],
)
def test_bad_setting_is_one_clear_line(images, settings, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}[^\n]*$"):
        module(**settings)(images)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.rand(1, 8, 8), r"found a Tensor of torch.float32, \[1, 8, 8\], expected a tensor"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "found a Tensor of torch.uint8, .*, expected"),
        (np.zeros((2, 1, 8, 8), "f"), "found a ndarray of float32, .*, expected a tensor"),
        (torch.rand(2, 1, 8, 8).double(), "Sequential cannot be applied to .*, float64 in"),
    ],
    ids=["one", "grey", "array", "double"],
)
def test_what_is_no_batch_of_images_is_refused(images, words):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(UserError, match=f"^[^\n]*{words}[^\n]*$"):
        module(network)(images)


@pytest.mark.parametrize("library", ["foolbox", "torchattacks", "art", "pyautoattack"])
def test_example_of_each_library_keeps_to_its_budget(library, checkpoints, workplace):
    """A budget of 3 is as long as a digit, one of 0.001 is nothing; four images and four draws are
    enough.

    AutoAttack leaves out the images of which its first draws are wrong.
    """
    pytest.importorskip(library, reason=f"{library} is not installed")
    place = Path("models/quickstart/smoothadv/checkpoint.pth.tar")
    place.parent.mkdir(parents=True)
    place.symlink_to(checkpoints["PGD"])
    setup, *examples, judge = re.findall(
        r"(?ms)^```python\n(.*?)^```$", (CODE.parent / "docs/attack_libraries.md").read_text()
    )
    (example,) = [text for text in examples if text.startswith(f"from {library}")]
    assert len(examples) == 4 and setup.count("0.5") == setup.count("batch_size=8") == 1
    accuracies = []
    for epsilon in (0.001, 3.0):
        names = {}
        text = setup.replace("0.5", f"{epsilon}").replace("batch_size=8", "batch_size=4")
        text = (text + example + judge).replace("m=16", "m=4").replace("n_iter = 5", "n_iter = 2")
        exec(text, names)
        found = torch.as_tensor(names["adversarial"])
        norms = (found - names["images"]).flatten(1).norm(dim=1)
        assert norms.max() <= epsilon + 1e-5 and 0 <= found.min() and found.max() <= 1
        accuracies.append(names["rows"].correct.mean())
    assert accuracies[0] >= 0.75 and accuracies[1] <= 0.25
