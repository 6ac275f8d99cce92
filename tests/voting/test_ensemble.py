"""An ensemble is the mean of its members, and votes as that mean does where members are left
out.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smoothadv.architectures import get_architecture
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.noise import GaussianNoise
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference
from smoothadv.voting.counter import VoteCounter, check_repeatable
from support.models import LinearClassifier, Recorder
from support.networks import settle_batch_norms

CPU = torch.device("cpu")


@pytest.mark.parametrize("mean", ["logits", "probabilities"])
def test_gradients_go_through_the_mean(mean):
    torch.manual_seed(0)
    members = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double() for _ in range(3)]
    images = torch.rand(5, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    logits = Ensemble(members, mean)(images)
    outputs = [member(images) for member in members]
    if mean == "probabilities":
        expected = (sum(output.softmax(1) for output in outputs) / 3).log()
        torch.testing.assert_close(logits.exp().sum(1), torch.ones(5, dtype=torch.float64))
    else:
        expected = sum(outputs) / 3
    torch.testing.assert_close(logits, expected)
    each = [
        torch.autograd.grad(value[:, 1].sum(), images, retain_graph=True)[0]
        for value in (logits, expected)
    ]
    torch.testing.assert_close(*each)


def test_gradients_survive_where_probabilities_are_zero_in_float32():
    members = [LinearClassifier([300.0, 300.0], bias, torch.float32) for bias in (0.0, 10.0)]
    images = torch.ones(1, 1, 1, 2, requires_grad=True)
    logits = Ensemble(members, "probabilities")(images)
    (gradient,) = torch.autograd.grad(logits[0, 0], images)
    assert logits.isfinite().all() and (gradient < -200).all()


class Table(nn.Module):
    """Logits [N, K] by number: an image holds the number of its row."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def numbered(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).reshape(count, 1, 1, 1)


_NEAR_TIES = st.sampled_from([0.0, 1e-7, -1e-7, 2**-23, 1e-3, 5.0, 40.0, 200.0, -40.0])


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 50))
def test_consensus_votes_like_all_members_also_at_ties(data, count, classes, rows):
    """Members answer certainly or nearly alike, so that sums tie, nearly tie, or are decided with
    members left.
    """
    logits = st.lists(_NEAR_TIES, min_size=classes, max_size=classes)
    table = torch.tensor(data.draw(st.lists(logits, min_size=count * 4, max_size=count * 4)))
    chosen = table.reshape(count, 4, classes)[:, torch.arange(rows) % 4]
    voter = VotingClassifier(
        Ensemble([Table(one) for one in chosen], "probabilities"), torch.float32, False
    )
    full, few = (voter.scores(numbered(rows), consensus) for consensus in (False, True))
    assert torch.equal(full.argmax(1), few.argmax(1))
    expected = chosen[0].softmax(1)
    for one in chosen[1:]:
        expected = expected + one.softmax(1)
    torch.testing.assert_close(full, expected)


def test_a_lead_of_exactly_the_members_left_decides_nothing():
    """After three of four members that are certain of a class, image 0 leads by 3, image 1 by 1,
    and 1 is left.
    """
    certain = torch.tensor([[200.0, 0.0], [0.0, 200.0]])
    answers = ((0, 0), (0, 0), (0, 1), (1, 1))  # by member, of the images 0 and 1
    asked = [Recorder(Table(certain[list(answer)])) for answer in answers]
    total = Ensemble(asked, "probabilities").summed_probabilities(numbered(2), consensus=True)
    assert total.tolist() == [[3.0, 0.0], [2.0, 2.0]]
    assert [len(member.batches) for member in asked] == [1, 1, 1, 1]
    assert asked[3].batches[0].flatten().tolist() == [1.0, 1.0], (
        "image 0 is decided, and its place is padding"
    )


def test_rounding_cannot_decide_a_vote_that_the_whole_sum_does_not():
    """Class 1 leads by about 2 after three members, and two are certain of class 0: all sums nearly
    tie.
    """
    torch.manual_seed(0)
    rivals = 0.1 + 0.02 * torch.rand(3, 100_000)
    first = 0.78 + 0.02 * torch.rand(2, 100_000)
    leaders = torch.cat([first, 2 + rivals.sum(0, keepdim=True) - first.sum(0, keepdim=True)])
    unsure = torch.stack([rivals, leaders, 1 - rivals - leaders], dim=2).log()
    members = [
        Table(one) for one in (*unsure, *torch.tensor([200.0, 0.0, 0.0]).expand(2, 100_000, 3))
    ]
    ensemble, images = Ensemble(members, "probabilities"), numbered(100_000)
    full, few = (
        ensemble.summed_probabilities(images, consensus).argmax(1) for consensus in (False, True)
    )
    assert torch.equal(full, few)
    begun = unsure[0].softmax(1) + unsure[1].softmax(1) + unsure[2].softmax(1)
    assert ((begun[:, 1] - begun[:, 0] > 2) & (full == 0)).any(), (
        "without a margin some votes would be others"
    )


@pytest.fixture(scope="module")
def voter() -> VotingClassifier:
    """Three networks with random weights, sharpened so that many votes are clear."""
    torch.manual_seed(0)
    members = [get_architecture("digits_resnet8", "digits").eval() for _ in range(3)]
    for member in members:
        settle_batch_norms(member, torch.rand(64, 1, 8, 8))
        member[1].fc.weight.data *= 20
    return optimized_for_inference(Ensemble(members, "probabilities"), CPU, torch.rand(1, 8, 8))


def test_members_are_folded_and_fewer_are_asked_in_passes_of_one_shape(voter):
    assert voter.is_folded and not any(isinstance(part, nn.BatchNorm2d) for part in voter.modules())
    images = torch.rand(200, 1, 8, 8).to(memory_format=torch.channels_last)
    shapes: list[tuple[int, ...]] = []
    hooks = [
        member.register_forward_hook(
            lambda module, inputs, logits: shapes.append(tuple(inputs[0].shape))
        )
        for member in voter.classifier.members
    ]
    few = voter.scores(images)
    passes = len(shapes)
    assert torch.equal(few.argmax(1), voter.scores(images, consensus=False).argmax(1))
    assert shapes[:2] == [(200, 1, 8, 8)] * 2 and set(shapes[2:passes]) == {(32, 1, 8, 8)}
    assert 2 < passes < 9 == len(shapes) - passes
    for hook in hooks:
        hook.remove()


def test_votes_are_those_of_the_whole_sum_however_draws_are_packed(voter):
    """The spot check of --sound passes, and the digest of the logits needs all members."""
    noise, image = GaussianNoise(0.25, 0), torch.rand(1, 8, 8)
    counter = VoteCounter([voter.scores], [10], 64, CPU)
    check_repeatable(counter, image, noise.stream(0, CPU))
    full = VoteCounter([lambda images: voter.scores(images, consensus=False)], [10], 64, CPU)
    assert full.logits_digest((1, 8, 8)) != counter.logits_digest((1, 8, 8))


def test_a_logit_that_is_not_finite_makes_no_vote():
    infinite = Table(torch.tensor([[0.0, -math.inf], [0.0, 1.0]]))
    ensemble = Ensemble([Table(torch.eye(2)), infinite], "probabilities")
    total = ensemble.summed_probabilities(numbered(2), consensus=True)
    assert total.isfinite().all(1).tolist() == [False, True]
