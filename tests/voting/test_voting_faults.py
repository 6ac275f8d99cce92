"""Counting votes where memory runs out, a classifier is broken, or its logits depend on more than
one image.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from smoothadv.architectures import get_architecture
from smoothadv.base.errors import NonFiniteError, UserError
from smoothadv.noise import GaussianNoise
from smoothadv.statistics import Draws, Smoothing
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.prediction import predict
from smoothadv.voting.classifier import optimized_for_inference
from smoothadv.voting.counter import Poll, VoteCounter, check_repeatable
from support.fragile_models import OUT_OF_MEMORY, Forgetful
from support.models import ConstantClassifier, Recorder
from support.slow_votes import CLASSES, WholeNumbers, ask, counter_of, image_of
from support.votes import more_misses

CPU = torch.device("cpu")
NOISE = GaussianNoise(0.25, 7)
CLASSIFIER = WholeNumbers(seed=38)
many = settings(max_examples=60)


def polls() -> list[Poll]:
    """Polls of all kinds, some with rounds that end early."""
    votings = [
        Exact(Smoothing(0.25, 10, 100, 0.01)).votes(0),
        ask([Draws(40, more_misses(1, 5)), Draws(40)]),
        predict(70, 0.01),
        Exact(Smoothing(0.25, 5, 90, 0.2)).votes(0),
    ]
    return [
        Poll(image_of(number), NOISE.stream(number, CPU), voting)
        for number, voting in enumerate(votings)
    ]


def outcomes(counter: VoteCounter) -> list:
    return [result.outcome for result in counter.run(polls())]


UNDISTURBED = outcomes(counter_of(CLASSIFIER, 64))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_the_batch_is_halved_until_it_fits_and_no_count_changes(error, depth):
    batches = []
    counter = counter_of(
        Forgetful(CLASSIFIER, 10, error), 100, depth, on_smaller_batch=batches.append
    )
    assert outcomes(counter) == UNDISTURBED
    assert batches == [50, 25, 12, 6] and counter.batch == 6


@many
@given(st.integers(1, 130), st.sets(st.integers(1, 12), max_size=4), st.sampled_from([1, 2]))
def test_memory_that_runs_out_at_any_time_changes_no_count(batch, fails, depth):
    batches = []
    classifier = Forgetful(CLASSIFIER, fails=fails if batch >= 16 else set())
    counter = counter_of(classifier, batch, depth, on_smaller_batch=batches.append)
    assert outcomes(counter) == UNDISTURBED
    assert batches == [batch >> halving for halving in range(1, len(batches) + 1)]


def test_no_draw_is_lost_or_repeated_where_memory_runs_out():
    recorder = Recorder(ConstantClassifier(2, CLASSES))
    counter = counter_of(Forgetful(recorder, 16), 100)
    list(counter.run([Poll(image_of(0), NOISE.stream(0, CPU), ask([Draws(96), Draws(160)]))]))
    seen = Counter(
        row.numpy().tobytes() for batch in recorder.batches for row in batch.contiguous()
    )
    expected = {row.numpy().tobytes() for row in NOISE.stream(0, CPU).noisy(256, image_of(0))}
    assert seen.keys() == expected
    # 12 rows at a time: both rounds end with a batch that is filled up by its own first row.
    assert {len(batch) for batch in recorder.batches} == {12}
    assert sorted(seen.values())[:-1] == [1] * 255 and max(seen.values()) == 1 + (
        12 * len(recorder.batches) - 256
    )


def test_a_batch_that_must_be_kept_is_an_error_instead():
    """Certificates for the executed arithmetic are of one shape."""
    batches = []
    counter = counter_of(
        Forgetful(CLASSIFIER, 10), 64, keep_batch=True, on_smaller_batch=batches.append
    )
    with pytest.raises(
        UserError, match="out of memory with --batch 64: give a smaller one .*CUDA out of memory"
    ):
        outcomes(counter)
    assert batches == [] and counter.batch == 64


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_no_memory_for_a_single_image_is_an_error(error):
    batches = []
    with pytest.raises(UserError, match="out of memory with --batch 1:"):
        outcomes(counter_of(Forgetful(CLASSIFIER, 0, error), 5, on_smaller_batch=batches.append))
    assert batches == [2, 1]


def one_vote(classifier: Callable, batch: int = 10, draws: int = 25) -> list:
    poll = Poll(image_of(0), NOISE.stream(0, CPU), ask([Draws(draws)]))
    return list(counter_of(classifier, batch).run([poll]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, CLASSES - 1])
def test_logits_that_are_not_finite_are_an_error_and_no_vote(value, place):
    def classifier(images: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(images), CLASSES)
        logits[3:5, place] = value
        return logits

    with pytest.raises(NonFiniteError, match="not finite for 2 of 10 noisy images") as caught:
        one_vote(classifier)
    assert isinstance(caught.value, UserError)


def test_rows_that_only_fill_up_raise_no_alarm():
    def classifier(images: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(images), CLASSES)
        logits[5:] = float("nan")
        return logits

    (result,) = one_vote(classifier, draws=5)
    assert sum(result.outcome[0]) == 5


@pytest.mark.parametrize(
    "shape", [(10, CLASSES - 1), (10, CLASSES + 1), (9, CLASSES), (10,), (10, CLASSES, 1)]
)
def test_logits_of_another_shape_are_an_error(shape):
    with pytest.raises(ValueError, match="for 10 images and 4 classes"):
        one_vote(lambda images: torch.zeros(shape))


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_no_images_is_refused(batch):
    with pytest.raises(ValueError, match="batch"):
        VoteCounter(CLASSIFIER, CLASSES, batch, CPU)


def check(classifier: Callable, batch: int = 16, shape: tuple[int, ...] = (1, 4, 4)) -> None:
    image = torch.full(shape, 0.5)
    check_repeatable(counter_of(classifier, batch), image, NOISE.stream(0, "cpu"))


@pytest.mark.parametrize("batch", [1, 2, 16, 100])
def test_an_ordinary_classifier_is_repeatable(batch):
    check(CLASSIFIER, batch)
    torch.manual_seed(0)
    network = optimized_for_inference(get_architecture("digits_resnet8", "digits"), CPU)
    if batch % 16 == 0:
        check(network, batch, (1, 8, 8))


@pytest.mark.parametrize("batch", [1, 16])
def test_repeatability_is_that_of_batches_in_the_layout_that_votes(batch, monkeypatch):
    """Also where rolling returns channels first, as on CUDA."""
    roll, layouts = torch.Tensor.roll, set()
    monkeypatch.setattr(
        torch.Tensor, "roll", lambda images, *where: roll(images, *where).contiguous()
    )

    def classifier(images: torch.Tensor) -> torch.Tensor:
        layouts.add(images.stride())
        return CLASSIFIER(images.mean(1, keepdim=True))

    check(classifier, batch, (3, 4, 4))
    assert layouts == {(48, 1, 12, 3)}


class ByRow(nn.Module):
    """The last digit of the logits depends on the row, as where a kernel works in blocks."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = torch.ones(len(images), CLASSES)
        logits[0, 2] += 2**-23
        return logits


class ByTime(nn.Module):
    """The last digit of the logits depends on earlier calls, as where threads add in a random
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return torch.ones(len(images), CLASSES) + 2**-23 * self.passes


class ByCompany(nn.Module):
    """The logits depend on the other images of the batch: batch normalization without running
    statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, track_running_stats=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return CLASSIFIER.last.weight[:, 0] * self.norm(images).flatten(1)[:, :1]


@pytest.mark.parametrize(
    ("classifier", "message"),
    [
        (ByCompany(), "depend on the other images in a batch"),
        (ByRow(), "depend on an image's row in the batch at --batch 16: choose another"),
        (ByTime(), "different logits for the same batch"),
        (nn.Sequential(CLASSIFIER, nn.Dropout(0.5)), "different logits for the same batch"),
    ],
)
def test_a_classifier_that_is_no_function_of_an_image_is_refused(classifier, message):
    with pytest.raises(UserError, match=message):
        check(classifier.train())
