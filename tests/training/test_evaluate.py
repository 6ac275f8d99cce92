"""Evaluation during training agrees with a slow loop, is on evenly spaced images, and changes
nothing.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.noise import Purpose, derive_generator
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.training.execution import Execution, folded_form
from smoothadv.training.spec import EvaluationSchedule
from smoothadv.training.update import TEST_COLUMNS, Address, Update
from support.models import Recorder
from support.released import randomise_batch_norms

CPU = torch.device("cpu")
SIGMA, EPSILON = 0.25, 0.5
ADDRESS = Address(seed=3, epoch=2, step=17)
PGD = ATTACKS["PGD"](EPSILON, 3)
OBJECTIVES = {
    "gaussian": Gaussian(SIGMA),
    "smoothadv": SmoothAdv(PGD, SIGMA, 1),
    "copies": SmoothAdv(PGD, SIGMA, 4),
}


def random_digits(count: int = 23) -> InMemoryImages:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return InMemoryImages(
        images, torch.randint(10, (count,), generator=generator), describe_dataset("digits")
    )


def network() -> nn.Module:
    """As after the updates of an epoch: in train mode. It has no kinks, at which rounding could
    change an attack.
    """
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Softplus(5),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(144, 10),
    ]
    model = nn.Sequential(nn.Identity(), nn.Sequential(*layers))
    randomise_batch_norms(model)
    return model.train()


def answers_of(model: nn.Module, images: InMemoryImages, indices: torch.Tensor) -> None:
    """Label four of five images as the model does, so that many are classified correctly."""
    with torch.no_grad():
        labels = copy.deepcopy(model).eval()(images.images.float() / 255).argmax(1)
    images.labels = torch.where(torch.arange(len(images)) % 5 == 0, images.labels, labels)


def looked_at(
    model, attacked, objective, images, indices, address=ADDRESS, execution=None
) -> dict[str, float]:
    parts = {
        "model": model,
        "folded_uncompiled": attacked,
        "attacked": attacked,
        "_seen": lambda batch: batch,
        "objective": objective,
        "execution": execution or Execution(),
        "teacher": None,
        "refresh_folded": getattr(attacked, "refresh", lambda: None),
    }
    update = SimpleNamespace(**parts, processes=Processes(), device=CPU)
    return Update.evaluate(update, images, indices, 8, address)


def obvious(model, objective, images, indices, batch=8) -> dict[str, float]:
    """Image by image, with the model itself under attack."""
    model = copy.deepcopy(model).eval()
    loss, noisy_hits, clean_hits, hits = 0.0, 0, 0, 0
    for number, part in enumerate(indices.split(batch)):
        generator = derive_generator("cpu", 3, 2, 17, number, Purpose.EVALUATION)
        shape = (len(part), objective.copies, 1, 8, 8)
        noise = torch.empty(shape).normal_(0, SIGMA, generator=generator)
        for draws, index in zip(noise, part.tolist()):
            image, label = images[index]
            with torch.no_grad():
                noisy, clean = model((image + draws[0])[None])[0], model(image[None])[0]
            loss += float(torch.logsumexp(noisy, 0) - noisy[label])
            noisy_hits += int(noisy.argmax() == label)
            clean_hits += int(clean.argmax() == label)
            if objective.epsilon(math.inf):
                adversarial = PGD(model, image[None], torch.tensor([label]), draws[None])
                with torch.no_grad():
                    hits += int(model(adversarial + draws[0])[0].argmax() == label)
    count = len(indices)
    attacked = hits / count if objective.epsilon(math.inf) else math.nan
    return dict(
        zip(TEST_COLUMNS, [loss / count, noisy_hits / count, clean_hits / count, attacked, count])
    )


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("form", ["folded", "model"])
def test_everything_is_that_of_a_slow_obvious_loop(objective, form):
    model, images = network(), random_digits()
    indices = torch.arange(1, 23, 2)
    answers_of(model, images, indices)
    expected = obvious(model, objective, images, indices)
    attacked = model if form == "model" else folded_form(model, images[0][0][None])
    ours = looked_at(model, attacked, objective, images, indices)
    assert ours == pytest.approx(expected, abs=2e-6, nan_ok=True)
    # The columns have different values.
    assert expected["test_clean_accuracy"] > expected["test_accuracy"] > 0
    if objective.epsilon(math.inf):
        assert expected["test_adversarial_accuracy"] < expected["test_accuracy"]
    assert ours["test_images"] == 11


@pytest.mark.parametrize("epoch", [0, 1, 40])
def test_the_attack_is_at_full_strength_in_every_epoch(epoch):
    """Also in the first epoch of a warm-up, whose updates have none."""
    objective = SmoothAdv(ATTACKS["PGD"](EPSILON, 2), SIGMA, 1, warmup=10)
    model, images = network(), random_digits()
    recorder = Recorder(model)
    looked_at(recorder, recorder, objective, images, torch.arange(8), address=Address(3, epoch, 17))
    noisy, _, *steps, adversarial = recorder.batches
    assert len(steps) == 2 and not any(recorder.modes)
    lengths = (adversarial - noisy).flatten(1).norm(dim=1)
    # The box keeps some of random pixels from the border of the ball.
    assert 0.8 * EPSILON < lengths.max() <= EPSILON * (1 + 1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_nothing_about_the_model_changes(objective):
    model, images = network(), random_digits()
    before = copy.deepcopy(model.state_dict())
    attacked = folded_form(model, images[0][0][None])
    folded = copy.deepcopy(attacked.state_dict())
    looked_at(model, attacked, objective, images, torch.arange(23))
    for module, state in [(model, before), (attacked, folded)]:
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(each.requires_grad and each.grad is None for each in model.parameters())
    # Negative control: a pass in train mode would have changed the statistics.
    model.train()(images[0][0][None])
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_look_is_a_function_of_its_address():
    def look(address: Address, seed: int) -> dict[str, float]:
        torch.manual_seed(seed)
        model, images = network(), random_digits()
        torch.manual_seed(seed)
        return looked_at(
            model, model, OBJECTIVES["copies"], images, torch.arange(23), address=address
        )

    assert look(ADDRESS, 1) == look(ADDRESS, 2)
    losses = {
        look(Address(*key), 1)["test_loss"]
        for key in [(3, 2, 17), (3, 2, 18), (3, 3, 17), (4, 2, 17)]
    }
    assert len(losses) == 4


def test_evaluation_computes_in_the_precision_of_training():
    model, images, of_one = network(), random_digits(), OBJECTIVES["smoothadv"]
    fine, coarse = (
        looked_at(model, model, of_one, images, torch.arange(23), execution=Execution(precision))[
            "test_loss"
        ]
        for precision in ("fp32", "bf16")
    )
    assert 1e-6 < abs(fine - coarse) < 0.05


# ---- when, and at which images ----


@pytest.mark.parametrize("images", [None, 1, 7, 100, 1000])
@pytest.mark.parametrize("available", [1, 6, 7, 8, 100, 359, 10_000, 50_000])
def test_chosen_images_are_evenly_spaced(images, available):
    chosen = EvaluationSchedule(images=images).chosen(available)
    assert chosen.dtype == torch.int64
    assert len(chosen) == (available if images is None else min(images, available))
    assert chosen[0] == 0 and chosen[-1] < available
    gaps = torch.diff(torch.cat([chosen, torch.tensor([available])]))
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1, "distinct, up to the end"
