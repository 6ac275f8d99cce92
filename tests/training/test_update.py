"""An update is the same in micro-batches, and counts what evaluating the model counts."""

import pytest
import torch
from torch import nn

from smoothadv.attacks import ATTACKS
from smoothadv.objectives.consistency import Consistency
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.macer import Macer
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.objectives.stability import Stability
from smoothadv.training.execution import Execution
from smoothadv.training.processes import Processes
from smoothadv.training.update import Address, Update
from support.models import Recorder

CPU = torch.device("cpu")
SIGMA, EPSILON, STEPS = 0.25, 0.5, 3
RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-2
ADDRESS = Address(seed=3, epoch=20, step=5)
EVERYTHING = slice(0, 7)
LOSS, CORRECT, EXAMPLES, UNATTACKED_CORRECT, UNATTACKED_EXAMPLES = range(5)


def network(normalization: type[nn.Module] | None = None, seed: int = 0) -> nn.Module:
    """A small smooth network in float64: at the kinks of ReLU a rounding error could become a large difference."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 4, 3, bias=False), *([normalization(4)] if normalization else []), nn.Softplus()]
    layers += [nn.Conv2d(4, 4, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(nn.Identity(), nn.Sequential(*layers)).double()


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven images and their labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(7, 3, 6, 6, dtype=torch.float64, generator=generator), torch.randint(3, (7,), generator=generator)


def smoothadv(copies: int = 1, **settings) -> SmoothAdv:
    return SmoothAdv(ATTACKS["PGD"](EPSILON, STEPS), SIGMA, copies, **{"warmup": 10, **settings})


def updater(model: nn.Module, objective, micro_batch: int = 7) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    return Update(model, objective, optimizer, Execution(), Processes(), CPU, batch(99)[0][:2], micro_batch)


def sums_of(update: Update, address: Address = ADDRESS, weight: float = 1.0, seed: int = 0) -> list[float]:
    return update(*batch(seed), 7, EVERYTHING, address, weight).tolist()


def state(model: nn.Module) -> torch.Tensor:
    """All weights, and the gradients of the last update, one after the other."""
    return torch.cat([part.detach().flatten() for each in model.parameters() for part in (each, each.grad)])


def state_after(objective, micro_batch: int, normalization: type[nn.Module] | None = None) -> torch.Tensor:
    model = network(normalization)
    update = updater(model, objective, micro_batch)
    for step in range(2):
        sums_of(update, Address(3, 20, step))
    return state(model)


OBJECTIVES = {"gaussian": Gaussian(SIGMA), "one copy": smoothadv(1), "four copies": smoothadv(4)}
OBJECTIVES |= {kind.__name__: kind(noise_sd=SIGMA) for kind in (Consistency, Macer, Stability)}
OBJECTIVES["attacked"] = Consistency(noise_sd=SIGMA, attack=ATTACKS["PGD"](EPSILON, STEPS), regularization=2)
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


@every_objective
@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_micro_batches_give_the_gradients_of_one_batch(objective, micro_batch):
    """Seven images in micro-batches of three are two of them and one of one."""
    whole, ours = (state_after(objective, size) for size in (7, micro_batch))
    assert (ours - whole).abs().max() < 1e-10
    assert whole.abs().max() > 0.1


@every_objective
def test_micro_batches_have_statistics_of_their_own(objective):
    """Negative control of the above: where batches matter, the comparison notices."""
    whole, ours = (state_after(objective, size, nn.BatchNorm2d) for size in (7, 3))
    assert (ours - whole).abs().max() > 1e-4
    assert torch.equal(state_after(objective, 100, nn.BatchNorm2d), whole)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_are_counted_alike(micro_batch):
    """Micro-batches count the same: losses and correct classifications before the update."""
    expected, ours = (sums_of(updater(network(), smoothadv(4), size)) for size in (7, micro_batch))
    assert ours == pytest.approx(expected, rel=1e-12)
    assert ours[EXAMPLES] == ours[UNATTACKED_EXAMPLES] == 28


@pytest.mark.parametrize("weight", [0.0, 0.25, 3.0])
def test_the_weight_multiplies_the_gradient_and_nothing_else(weight):
    plain, weighted = network(), network()
    expected = sums_of(updater(plain, smoothadv()))
    assert sums_of(updater(weighted, smoothadv(), 3), weight=weight) == pytest.approx(expected, rel=1e-12)
    for ours, theirs in zip(weighted.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, weight * theirs.grad, rtol=1e-10, atol=1e-12)
        assert theirs.grad.abs().max() > 1e-4


# ---- what is counted ----


def test_the_attack_hits_harder_than_noise():
    """This shows that the two counts are not exchanged: the attack changes the class of some memorized copies."""
    model = network()
    update = updater(model, smoothadv(4))
    for step in range(60):
        sums = sums_of(update, Address(3, 0 if step < 59 else 20, step), seed=1)
    assert sums[UNATTACKED_CORRECT] >= sums[CORRECT] + 4


def test_statistics_see_each_micro_batch_once_and_no_attack():
    model = network(nn.BatchNorm2d)
    update = updater(model, smoothadv(2), micro_batch=3)
    update.forward = recorder = Recorder(update.forward)
    first, norm = model[1][0], model[1][1]
    weight = first.weight.detach().clone()
    sums_of(update)
    assert norm.num_batches_tracked == 3 and [len(each) for each in recorder.batches] == [6, 6, 2]
    expected = torch.zeros(4, dtype=torch.float64)
    for noisy in recorder.batches:
        expected = 0.9 * expected + 0.1 * nn.functional.conv2d(noisy, weight).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, expected)


def test_a_model_that_was_looked_at_in_eval_mode_is_updated_in_train_mode():
    usual, looked_at = network(nn.BatchNorm2d), network(nn.BatchNorm2d).eval()
    for model in (usual, looked_at):
        sums_of(updater(model, smoothadv(2)))
    assert torch.equal(state(looked_at), state(usual))
    assert usual[1][1].num_batches_tracked == looked_at[1][1].num_batches_tracked == 1
