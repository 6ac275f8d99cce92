"""No attack is lost: one that was stopped anywhere and started again has the rows and images of an
undisturbed run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.voting.classifier import VotingClassifier
from support import fragile_models
from support.attack_runs import LINEAR, SIGMA, archive, assert_same_attack
from support.commands import (
    call,
    manifest_of,
    rows,
    snapshot,
    succeed,
)
from support.evaluations import stop_at_pass

# Images of two draws each: 64 share a pass, so that stopped runs continue in groups of other
# images.
USUAL = [
    "--device",
    "cpu",
    "--epsilon",
    0.5,
    "--N",
    50,
    "--max",
    9,
    "--num-steps",
    2,
    "--num-noise-vec",
    2,
    "--attack-batch",
    128,
]
LOG = "out/epsilon_0.5.tsv"


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory) -> Path:
    """The log of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    succeed("attack", "digits", checkpoint, SIGMA, folder, *USUAL)
    return folder / "epsilon_0.5.tsv"


@pytest.fixture
def attack(checkpoint, workplace, capsys) -> Callable:
    """Attack the shared classifier into out/; options given later win."""
    return lambda *options: call(
        capsys, "attack", "digits", checkpoint, SIGMA, "out", *USUAL, *options
    )


def test_the_second_of_two_sizes_is_continued_and_the_first_left_alone(
    attack, workplace, whole, monkeypatch
):
    sizes = ["--epsilon", 0.25, 0.5]
    with monkeypatch.context() as patch:
        stop_at_pass(patch, 7, KeyboardInterrupt())
        assert attack(*sizes).code == 130
    first = {
        name: content
        for name, content in snapshot(workplace / "out").items()
        if name.startswith("epsilon_0.25")
    }
    assert "epsilon_0.25.npz" in first and not (workplace / "out/epsilon_0.5.npz").exists()
    assert attack(*sizes).code == 0
    assert first.items() <= snapshot(workplace / "out").items()
    assert_same_attack(workplace / LOG, whole)


OUT_OF_MEMORY = [make() for make in fragile_models.OUT_OF_MEMORY.values()]


def allow_gradients_of(monkeypatch: pytest.MonkeyPatch, limit: int, error: Exception) -> None:
    """Let the classifier run out of memory with more than ``limit`` images of which it must keep
    activations.
    """
    forward = VotingClassifier.forward

    def limited(self: VotingClassifier, images: torch.Tensor) -> torch.Tensor:
        if images.requires_grad and len(images) > limit:
            raise error
        return forward(self, images)

    monkeypatch.setattr(VotingClassifier, "forward", limited)


@pytest.mark.parametrize(
    ("error", "limit"), [*zip(OUT_OF_MEMORY, (1, 5, 11))], ids=[*fragile_models.OUT_OF_MEMORY]
)
def test_attack_goes_on_with_less_memory_and_says_so(workplace, monkeypatch, capsys, error, limit):
    """From 40 noisy copies at a time to 20, 10, 5, 2, 1: whole images of two draws, in the end half
    of one.
    """
    attack = partial(call, capsys, "attack", "digits", LINEAR, SIGMA)
    assert attack("whole", *USUAL).code == 0
    with monkeypatch.context() as patch:
        allow_gradients_of(patch, limit, error)
        outcome = attack("out", *USUAL, "--attack-batch", 40)
    assert (outcome.code, outcome.err) == (0, "")
    whole, log = Path("whole/epsilon_0.5.tsv"), Path(LOG)
    manifest = manifest_of(log)
    assert manifest["settings"]["attack_batch"] == 40
    # Passes of whole images: a batch of 5 or 11 is one of 4 or 10 copies.
    assert manifest["runs"][-1]["attack_batch"] == {1: 1, 5: 5, 11: 10}[limit]
    assert [row["predict"] for row in rows(log)] == [row["predict"] for row in rows(whole)]
    np.testing.assert_allclose(
        archive(log)["adversarial"], archive(whole)["adversarial"], rtol=0, atol=1e-5
    )


def test_less_memory_for_one_size_does_not_stand_in_the_way_of_the_next(
    checkpoint, workplace, monkeypatch, capsys
):
    """Each log begins with the batch that was chosen first, and continues with its recorded
    batch.
    """
    usual = USUAL[: USUAL.index("--attack-batch")]
    attack = partial(call, capsys, "attack", "digits", checkpoint, SIGMA, "out", *usual)
    sizes = ["--epsilon", 0.25, 0.5]
    with monkeypatch.context() as patch:
        allow_gradients_of(patch, 11, OUT_OF_MEMORY[0])
        assert attack(*sizes, "--max", 5).code == 0
    manifests = [manifest_of(workplace / f"out/epsilon_{size}.tsv") for size in sizes[1:]]
    assert len({manifest["settings"]["attack_batch"] for manifest in manifests}) == 1
    assert manifests[0]["runs"][-1]["attack_batch"] < manifests[0]["settings"]["attack_batch"]
    assert attack(*sizes).code == 0
    assert attack("--epsilon", 0.75, "--attack-batch", 6).code == 0
    assert attack("--epsilon", 0.25, 0.75, 0.5).code == 0, (
        "finished with different ones, and nothing to do"
    )
