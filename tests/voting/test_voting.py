"""Counting votes: stages, packing, batch and depth change no vote, compared with a slow counter of
one draw at a time; what happens where memory runs out or a classifier is broken.

The classifiers compute in whole numbers, so that equal means equal.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count, islice
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.base import devices
from smoothadv.base.errors import NonFiniteError, UserError
from smoothadv.noise import GaussianNoise, NoiseStream, RoundedGaussianNoise
from smoothadv.statistics import ABSTAIN, Draws, Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.prediction import predict
from smoothadv.voting import counter as voting
from smoothadv.voting.classifier import optimized_for_inference
from smoothadv.voting.counter import Poll, VoteCounter, check_repeatable
from support.fragile_models import OUT_OF_MEMORY, Forgetful
from support.models import ConstantClassifier, Recorder
from support.operators import Operators
from support.slow_votes import (
    CLASSES,
    WholeNumbers,
    ask,
    counter_of,
    image_of,
    on_stages,
    outcome_one_by_one,
)
from support.votes import more_misses

CPU = torch.device("cpu")
CLASSIFIER = WholeNumbers(seed=38)  # the leading class has 41 % of one image and 76 % of another
STAGES = [CLASSIFIER, WholeNumbers(seed=0), WholeNumbers(seed=1)]
NOISES = {
    kind.__name__: [kind(sigma, 7) for sigma in (0.25, 0.5, 1.0)]
    for kind in (GaussianNoise, RoundedGaussianNoise)
}
IMAGES = 6
# A voting is spent when it returns: each poll makes its own.
VOTINGS = {
    "exact": lambda: Exact(Smoothing(0.25, 7, 60, 0.01)).run(0),
    "exact, of which few are needed": lambda: Exact(Smoothing(0.25, 30, 250, 0.05)).run(0),
    "adaptive": lambda: Adaptive(Smoothing(0.25, 10, 400, 0.01), radii=(0.05, 0.15)).run(0),
    "predict": lambda: predict(45, 0.001),
    "one draw": lambda: ask([Draws(1)]),
    "no draws": lambda: ask([Draws(0), Draws(5), Draws(0), Draws(0)]),
    "no misses allowed": lambda: ask(
        [Draws(20, more_misses(1, 0)), Draws(20, more_misses(3, 0)), Draws(33)]
    ),
    "some misses allowed": lambda: ask(
        [Draws(40, more_misses(candidate, misses)) for candidate in (1, 0) for misses in (3, 9, 40)]
    ),
}
many = settings(max_examples=30)
specifications = st.tuples(st.sampled_from(list(NOISES)), st.integers(1, 3)).flatmap(
    lambda of_all: st.lists(
        st.tuples(
            st.sampled_from(list(VOTINGS)), st.integers(0, IMAGES - 1), *map(st.just, of_all)
        ),
        max_size=10,
    )
)


def streams_of(number: int, noise: str = "GaussianNoise") -> tuple[NoiseStream, ...]:
    return tuple(each.stream(number, CPU) for each in NOISES[noise])


def poll_of(voting: str, number: int, noise: str = "GaussianNoise", stages: int = 1) -> Poll:
    """With separate streams and voting, and a tag to recognize it by."""
    asked = on_stages(VOTINGS[voting](), stages, number)
    return Poll(image_of(number), streams_of(number, noise), asked, (voting, number, noise, stages))


@cache
def expected(*specification):
    return outcome_one_by_one(STAGES, poll_of(*specification))


def asking(number: int, *requests: Draws, tag: object = None) -> Poll:
    """A poll on one of the images that makes these requests whatever the answers."""
    return Poll(image_of(number), streams_of(number), ask(requests), tag)


@many
@given(specifications, st.integers(2, 150) | st.sampled_from([1, 999]), st.sampled_from([1, 2]))
def test_outcomes_are_those_of_a_slow_counter_in_the_order_of_the_polls(chosen, batch, depth):
    stages = STAGES[: chosen[0][-1] if chosen else 1]
    results = list(counter_of(stages, batch, depth).run(poll_of(*each) for each in chosen))
    assert [result.tag for result in results] == chosen
    assert [result.outcome for result in results] == [expected(*each) for each in chosen]


def test_the_comparison_covers_certificates_and_abstentions_cut_short():
    exact = [expected("exact, of which few are needed", number) for number in range(IMAGES)]
    assert any(certificate.radius > 0 for certificate in exact)
    assert any(
        certificate.prediction == ABSTAIN and 0 < certificate.trials < 250 for certificate in exact
    )
    adaptive = [expected("adaptive", number) for number in range(IMAGES)]
    assert len({certificate.trials for certificate in adaptive}) >= 3
    answers = expected("some misses allowed", 0)
    counted = [sum(answer) for answer in answers]
    assert min(counted) < 40 == max(counted)


@many
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9),
    st.integers(1, 60),
    st.sampled_from([1, 2]),
)
def test_every_forward_pass_has_the_one_shape_and_there_are_as_few_as_possible(sizes, batch, depth):
    recorder = Recorder(ConstantClassifier(3, CLASSES))
    polls = [asking(number, Draws(size, stage=number % 3)) for number, size in enumerate(sizes)]
    counted, counter = [], counter_of([recorder] * 3, batch, depth)
    counter.on_batch = counted.append
    results = list(counter.run(polls))
    assert {tuple(each.shape) for each in recorder.batches} == {(batch, 1, 4, 4)}
    assert len(recorder.batches) == sum(-(-sum(sizes[stage::3]) // batch) for stage in range(3))
    # Rows that only fill up cast no vote, and are not counted as draws.
    assert [result.outcome for result in results] == [[[0, 0, 0, size]] for size in sizes]
    assert sum(counted) == sum(sizes) and max(counted) <= batch
    rows = (row for batch in recorder.batches for row in batch)
    assert len({row.contiguous().numpy().tobytes() for row in rows}) == sum(sizes)


def test_waiting_for_an_answer_lets_later_polls_go_first():
    """A poll that asks for one draw at a time leaves the rest of each batch to the others, and is
    the first result.
    """
    recorder = Recorder(CLASSIFIER)
    slow = asking(0, *[Draws(1)] * 10, tag="slow")
    others = [asking(i, Draws(90), tag=f"other {i}") for i in (1, 2)]
    results = list(counter_of(recorder, 19).run([slow, *others]))
    assert [result.tag for result in results] == ["slow", "other 1", "other 2"]
    assert len(recorder.batches) == 10


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("batch", "draws"), [(10, 25), (25, 10), (8, 8), (100, 7)])
def test_polls_are_asked_for_only_when_there_is_room(batch, draws, depth):
    taken, at_passes = [], []

    def polls() -> Iterator[Poll]:
        for number in count():  # without end
            taken.append(number)
            yield asking(number, Draws(draws), tag=number)

    def classifier(images: torch.Tensor) -> torch.Tensor:
        at_passes.append(len(taken))
        return torch.ones(len(images), CLASSES)

    results = list(islice(counter_of(classifier, batch, depth).run(polls()), 20))
    assert [result.tag for result in results] == list(range(20))
    # The p-th pass needs draws from as many polls as p full batches hold.
    assert at_passes == [-(-(p * batch) // draws) for p in range(1, len(at_passes) + 1)]
    # The last result came as early as it could.
    assert len(at_passes) <= -(-(20 * draws) // batch) + depth - 1


def test_an_image_at_a_rare_stage_waits_for_few_others():
    """And none is lost among many that ask for nothing."""
    taken = []

    def polls() -> Iterator[Poll]:
        for number in range(300):
            taken.append(number)
            requests = [[Draws(1, stage=1)], *[[Draws(10)]] * 99, *[[]] * 200][number]
            yield asking(number, *requests, tag=number)

    results = counter_of(STAGES, 40).run(polls())
    assert next(results).tag == 0 and len(taken) <= 64
    assert [result.tag for result in results] == list(range(1, 300))


def test_images_of_several_shapes_are_refused():
    other = replace(asking(1, Draws(3)), image=torch.zeros(1, 4, 1))
    with pytest.raises(ValueError, match="images of shapes"):
        list(counter_of(CLASSIFIER, 8).run([asking(0, Draws(3)), other]))


def test_a_batch_takes_six_operators_beside_the_network_and_its_noise(monkeypatch):
    """Each is a launch on a GPU. Those of inference mode would be counted as if they were whole."""
    forward = torch.no_grad()(VoteCounter._forward.__wrapped__)
    monkeypatch.setattr(VoteCounter, "_forward", forward)
    monkeypatch.setattr(GaussianNoise, "fill", lambda noise, out, batch: None)
    logits = torch.zeros(10, CLASSES)

    def operators(batches: int) -> int:
        with Operators() as seen:
            one_vote(lambda images: logits, draws=10 * batches)
        return len(seen.calls)

    assert operators(3) - operators(2) <= 6


def test_the_time_of_a_batch_is_shared_by_its_draws(monkeypatch):
    """Every forward pass takes one second of a clock that stands still otherwise."""
    recorder = Recorder(CLASSIFIER)
    clock = SimpleNamespace(perf_counter=lambda: float(len(recorder.batches)))
    monkeypatch.setattr(voting, "time", clock)
    polls = [asking(i, Draws(size)) for i, size in enumerate((30, 10, 20))]
    results = list(counter_of(recorder, 40).run(polls))
    assert [result.seconds for result in results] == pytest.approx([0.75, 0.25, 1.0])


def digest_of(classifier, batch: int = 100, shape: tuple[int, ...] = (1, 8, 8)) -> str:
    return VoteCounter([classifier], [2], batch, torch.device("cpu")).logits_digest(shape)


def test_digest_of_logits_tells_functions_batches_and_shapes_apart():
    """Also functions that differ by one unit in the last place of the logits of one image, the last
    one.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 2)

    def linear(images: torch.Tensor) -> torch.Tensor:
        return layer(images.flatten(1)).detach()

    def next_to_it(images: torch.Tensor) -> torch.Tensor:
        logits = linear(images)
        logits[-1, 1] = torch.nextafter(logits[-1, 1], torch.tensor(9.0))
        return logits

    assert digest_of(linear) == digest_of(linear)
    others = [digest_of(next_to_it), digest_of(linear, 99), digest_of(linear, shape=(1, 4, 16))]
    assert digest_of(linear) not in others[:2] and len(set(others)) == 3
    with torch.no_grad():
        layer.bias[0] += 1e-3
    assert digest_of(linear) not in [*others, digest_of(next_to_it)]


def test_digest_of_logits_sees_grey_levels_of_the_whole_range():
    seen = []
    digest_of(lambda images: seen.append(images.clone()) or images.flatten(1)[:, :2])
    grey = seen[0] * 255
    assert torch.equal(grey.round() / 255, seen[0]) and len(grey.round().unique()) == 256
    assert not torch.equal(seen[0][0], seen[0][64]), "no image twice"


def test_votes_are_sent_before_the_next_batch_and_counted_after_their_copy(
    monkeypatch,
):
    """In the order in which an accelerator is told: its work is queued, and only ``waited`` waits
    for it.
    """
    told = []

    def to_host(votes: torch.Tensor):
        number = sum(step == "sent" for step, _ in told)
        told.append(("sent", number))
        return lambda: told.append(("waited", number)) or votes

    def classifier(images: torch.Tensor) -> torch.Tensor:
        told.append(("launched", sum(step == "launched" for step, _ in told)))
        return CLASSIFIER(images)

    monkeypatch.setattr(voting, "to_host", to_host)
    counter = counter_of(classifier, 10, depth=2)
    counter.on_batch = lambda draws: told.append(
        ("counted", sum(step == "counted" for step, _ in told))
    )
    (result,) = counter.run([asking(0, Draws(40))])
    assert sum(result.outcome[0]) == 40
    started = [[("launched", number), ("sent", number)] for number in range(4)]
    ended = [[("waited", number), ("counted", number)] for number in range(4)]
    assert told == sum(
        [started[0], started[1], ended[0], started[2], ended[1], started[3], ended[2], ended[3]], []
    )


def test_waiting_for_values_of_a_gpu_waits_for_their_copy_and_not_for_its_stream(monkeypatch):
    """With stand-ins for CUDA: the copy is queued into pinned memory, and an event behind it on the
    same stream.
    """
    told = Mock()
    monkeypatch.setattr(torch, "empty", told.empty)
    monkeypatch.setattr(torch.cuda, "Event", told.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", told.stream)
    values = Mock(device=torch.device("cuda:1"), shape=(3,), dtype=torch.int32)
    waited = devices.to_host(values)
    queued = [
        call.empty((3,), dtype=torch.int32, device="cpu", pin_memory=True),
        call.empty().copy_(values, non_blocking=True),
    ]
    recorded = [call.Event(), call.stream(values.device), call.Event().record(told.stream())]
    assert told.mock_calls[:-1] == [*queued, *recorded] and values.mock_calls == []
    assert waited() is told.empty() and told.mock_calls[-2] == call.Event().synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", list(NOISES))
def test_sums_of_image_and_noise_are_rounded_to_the_type_of_the_votes(noise, dtype):
    """To the very images that a voter would make of the sums in float32, also of those that fill up
    a batch.
    """
    recorder, rounded = Recorder(CLASSIFIER), Recorder(lambda images: CLASSIFIER(images.float()))
    list(counter_of(recorder, 30).run([poll_of("predict", 1, noise)]))
    list(counter_of(rounded, 30, dtype=dtype).run([poll_of("predict", 1, noise)]))
    assert len(recorder.batches) == len(rounded.batches) == 2
    for whole, found in zip(recorder.batches, rounded.batches):
        assert found.dtype == dtype and torch.equal(whole.to(dtype), found)


def polls() -> list[Poll]:
    """Polls of all kinds, some with rounds that end early, of two stages."""
    votings = [
        Exact(Smoothing(0.25, 10, 100, 0.01)).run(0),
        ask([Draws(40, more_misses(1, 5)), Draws(40)]),
        predict(70, 0.01),
        Exact(Smoothing(0.25, 5, 90, 0.2)).run(0),
    ]
    return [
        Poll(image_of(number), streams_of(number), on_stages(voting, 2, number))
        for number, voting in enumerate(votings)
    ]


def outcomes(counter: VoteCounter) -> list:
    return [result.outcome for result in counter.run(polls())]


UNDISTURBED = outcomes(counter_of(STAGES[:2], 64))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_the_batch_is_halved_until_it_fits_and_no_count_changes(error, depth):
    batches = []
    counter = counter_of(
        [STAGES[0], Forgetful(STAGES[1], 10, error)], 100, depth, on_smaller_batch=batches.append
    )
    assert outcomes(counter) == UNDISTURBED
    assert batches == [50, 25, 12, 6] and counter.batch == 6


@many
@given(st.integers(1, 130), st.sets(st.integers(1, 12), max_size=4), st.sampled_from([1, 2]))
def test_memory_that_runs_out_at_any_time_changes_no_count(batch, fails, depth):
    batches = []
    classifier = Forgetful(CLASSIFIER, fails=fails if batch >= 16 else set())
    stages = [classifier, STAGES[1]]
    counter = counter_of(stages, batch, depth, on_smaller_batch=batches.append)
    assert outcomes(counter) == UNDISTURBED
    assert batches == [batch >> halving for halving in range(1, len(batches) + 1)]


def test_no_draw_is_lost_or_repeated_where_memory_runs_out():
    """Votes may be equal where draws are not: here the draws themselves are compared."""
    recorder = Recorder(ConstantClassifier(2, CLASSES))
    list(counter_of(Forgetful(recorder, 16), 100).run([asking(0, Draws(96), Draws(160))]))
    stream = streams_of(0)[0]
    expected = {row.numpy().tobytes() for row in stream.noisy(256, image_of(0))}
    # 12 rows at a time: the last batch of each round is padded.
    assert {*map(len, recorder.batches)} == {12}
    seen = {row.contiguous().numpy().tobytes() for batch in recorder.batches for row in batch}
    assert seen == expected


def test_a_batch_that_must_be_kept_is_an_error_instead():
    """Certificates for the executed arithmetic are of one shape."""
    batches = []
    counter = counter_of(
        [Forgetful(CLASSIFIER, 10)] * 2, 64, keep_batch=True, on_smaller_batch=batches.append
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
        counter = counter_of(Forgetful(CLASSIFIER, 0, error), 5, on_smaller_batch=batches.append)
        list(counter.run([asking(0, Draws(9))]))
    assert batches == [2, 1]


def one_vote(classifier: Callable, batch: int = 10, draws: int = 25) -> list:
    return list(counter_of(classifier, batch).run([asking(0, Draws(draws))]))


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
        VoteCounter([CLASSIFIER], [CLASSES], batch, CPU)


def check(classifier: Callable, batch: int = 16, shape: tuple[int, ...] = (1, 4, 4)) -> None:
    image = torch.full(shape, 0.5)
    check_repeatable(counter_of(classifier, batch), image, GaussianNoise(0.25, 7).stream(0, "cpu"))


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

    passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return torch.ones(len(images), CLASSES) + 2**-23 * self.passes


class ByCompany(nn.Module):
    """The logits depend on the other images of the batch: batch normalization without running
    statistics.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (
            CLASSIFIER.last.weight[:, 0]
            * F.batch_norm(images, None, None, training=True).flatten(1)[:, :1]
        )


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
