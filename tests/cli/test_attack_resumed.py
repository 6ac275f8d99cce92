"""No attack is lost: one that was stopped anywhere and started again has the rows and images of an
undisturbed run.
"""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.base.files import lock
from smoothadv.evaluation import saved_examples
from smoothadv.voting.classifier import VotingClassifier
from smoothadv.voting.counter import VoteCounter
from support import fragile_models
from support.attack_runs import LINEAR, SIGMA, archive, assert_same_attack
from support.commands import (
    call,
    refused,
    rows,
    script,
    snapshot,
    succeed,
    timeless,
    wait_until,
)
from support.sharding import manifest_of

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
]
USUAL += ["--attack-batch", 128]
WAYS = {
    "PGD": [],
    "DDN": ["--attack", "DDN"],
    "random": ["--random-start", "--restarts", 2, "--target", "random"],
    "parts": ["--gradient", "stein", "--attack-batch", 1],
    "pairs": ["--attack-batch", 5],
}
LOG = "out/epsilon_0.5.tsv"
RECORD = 8 + 2 * 4 * 64  # bytes of an index and two images of 8 x 8 pixels


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The log of an undisturbed run in each way."""
    folder = tmp_path_factory.mktemp("whole")
    for way, options in WAYS.items():
        succeed("attack", "digits", checkpoint, SIGMA, folder / way, *USUAL, *options)
    return {way: folder / way / "epsilon_0.5.tsv" for way in WAYS}


@pytest.fixture
def attack(checkpoint, workplace, capsys) -> Callable:
    """Attack the shared classifier into out/; options given later win."""
    return lambda *options: call(
        capsys, "attack", "digits", checkpoint, SIGMA, "out", *USUAL, *options
    )


@pytest.mark.parametrize("way", ["PGD", "random"])
def test_finished_log_is_extended_to_that_of_one_run(attack, workplace, whole, way):
    """The archive is unpacked again, and further images are added."""
    for images in (1, 8):
        assert attack(*WAYS[way], "--max", images).code == 0
        assert archive(workplace / LOG)["idx"].tolist() == list(range(images))
    assert attack(*WAYS[way]).code == 0
    assert_same_attack(workplace / LOG, whole[way])


def stop_at_pass(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the classifier raise ``error`` at its pass with this number, of votes and attacks, not of
    their digest.
    """
    forward, digest, passes = (
        VotingClassifier.forward,
        VoteCounter.logits_digest,
        iter(range(1, 10**9)),
    )

    def stopping(self: VotingClassifier, images: torch.Tensor) -> torch.Tensor:
        if next(passes) == number:
            raise error
        return forward(self, images)

    def undisturbed(self: VoteCounter, shape: tuple[int, ...]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VotingClassifier, "forward", forward)
            return digest(self, shape)

    monkeypatch.setattr(VotingClassifier, "forward", stopping)
    monkeypatch.setattr(VoteCounter, "logits_digest", undisturbed)


SLOW = {"DDN", "pairs"}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW else way for way in WAYS]
)
def test_interrupted_at_any_pass_it_is_continued_by_the_same_command(
    attack, workplace, whole, way, monkeypatch
):
    """Stopped a little later each time until it is done: finished rows are kept, unfinished ones
    are made again.
    """
    kept: list[bytes] = []
    for number in range(2, 200, 3):
        with monkeypatch.context() as patch:
            stop_at_pass(patch, number, KeyboardInterrupt())
            outcome = attack(*WAYS[way])
        if outcome.code == 0:
            break
        assert outcome.code == 130 and "run the same command again" in outcome.err
        lines = (workplace / LOG).read_bytes() if (workplace / LOG).exists() else b""
        assert not kept or lines.startswith(kept[-1]), "no row is computed again"
        kept.append(lines)
    assert outcome.code == 0 and len(kept) >= 2
    assert_same_attack(workplace / LOG, whole[way])


def whole_rows(log: Path) -> int:
    return max(0, log.read_bytes().count(b"\n") - 1) if log.exists() else 0


def test_killed_six_times_at_random_it_is_finished_by_the_same_command(checkpoint, warm, tmp_path):
    """By kill -9, in attacks and in votes; half of the time the power fails as well and leaves half
    a row or image.
    """
    options = ["--num-noise-vec", 8, "--N", 100, "--max"]
    command = ["digits", checkpoint, SIGMA]
    log, moments, left = tmp_path / LOG, random.Random(11), []
    for kill in range(6):
        process = warm.start(script("attack", *command, "out", *USUAL, *options, -1), tmp_path)
        # At least one more row: it then has cut off what was torn before.
        earliest = max(moments.randrange(15 * kill, 15 * kill + 10), whole_rows(log) + bool(kill))
        try:
            wait_until(lambda row=earliest: whole_rows(log) >= row, process)
            time.sleep(moments.uniform(0, 0.05))
        finally:
            process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it must not have finished before"
        left.append(log.read_bytes() if log.exists() else b"")
        for path, torn in [
            (log, b"358\t8\t8\t0\t0"),
            (log.with_name(log.name + ".examples"), bytes(515)),
        ]:
            if path.exists() and moments.random() < 0.5:
                with path.open("ab") as file:
                    file.write(torn[: moments.randrange(1, len(torn))])
    # The last image is set only when the kills are over: of all 359 many are left, however late a
    # kill comes.
    count = whole_rows(log) + 10
    for folder in ("out", "whole"):
        succeed("attack", *command, tmp_path / folder, *USUAL, *options, count)
    assert_same_attack(log, tmp_path / "whole/epsilon_0.5.tsv")
    assert len(rows(log)) == count > 80 and all(
        log.read_bytes().startswith(lines) for lines in left
    )


@pytest.mark.parametrize("moment", ["before the archive", "after the archive"])
def test_stopped_between_its_last_row_and_the_end_it_is_finished_without_work(
    attack, workplace, whole, monkeypatch, moment
):
    unlink = Path.unlink

    def stop(path: Path, **options: bool) -> None:
        if path.name.endswith(".examples"):
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        if moment == "after the archive":
            patch.setattr(Path, "unlink", stop)
        else:
            patch.setattr(
                saved_examples, "_write_archive", lambda *arguments: stop(Path("log.examples"))
            )
        assert attack().code == 130
    log = (workplace / LOG).read_bytes()
    stop_at_pass(monkeypatch, 1, AssertionError("nothing is left to be computed"))
    assert attack().code == 0
    assert (workplace / LOG).read_bytes() == log
    assert_same_attack(workplace / LOG, whole["PGD"])


@pytest.fixture
def stopped(attack, workplace, monkeypatch) -> Path:
    """A log of six images of nine, with the images so far."""
    with monkeypatch.context() as patch:
        # Two passes of two steps for the images of the first group, then 50 draws each in batches
        # of 50.
        stop_at_pass(patch, 2 + 6 + 1, KeyboardInterrupt())
        assert attack("--batch", 50).code == 130
    assert len(rows(workplace / LOG)) == 6
    return workplace / LOG


@pytest.mark.parametrize(
    "damage",
    [
        lambda spool: spool.unlink(),
        lambda spool: spool.write_bytes(spool.read_bytes()[:-1]),
        lambda spool: spool.write_bytes(b'{"shape": [1, 8, 8]}\n' + bytes(3 * RECORD)),
    ],
    ids=["missing", "last torn", "of other images"],
)
def test_rows_without_their_images_are_an_error_and_starting_anew_helps(
    attack, stopped, whole, damage
):
    damage(stopped.with_name(stopped.name + ".examples"))
    log = stopped.read_bytes()
    outcome = attack()
    assert refused(outcome, str(stopped.relative_to(stopped.parents[1])), "--overwrite")
    assert stopped.read_bytes() == log, "no row is lost"
    assert attack("--overwrite", "--batch", 50).code == 0
    assert timeless(stopped) == timeless(whole["PGD"])
    assert (
        archive(stopped)["adversarial"].tobytes() == archive(whole["PGD"])["adversarial"].tobytes()
    )


def test_finished_log_whose_archive_is_damaged_or_lost_is_refused(attack, workplace, whole):
    attack()
    path = workplace / "out/epsilon_0.5.npz"
    path.write_bytes(path.read_bytes()[:-30])
    for words in (["out/epsilon_0.5.npz"], ["epsilon_0.5.npz", "missing", "--overwrite"]):
        before = snapshot(workplace)
        assert refused(attack("--max", 12), *words) and snapshot(workplace) == before
        path.unlink(missing_ok=True)
    assert attack("--overwrite").code == 0
    assert_same_attack(workplace / LOG, whole["PGD"])


def test_overwriting_that_is_stopped_never_leaves_old_images_to_new_rows(
    attack, workplace, whole, monkeypatch
):
    attack("--seed", 1)
    for number in (1, 4):
        with monkeypatch.context() as patch:
            stop_at_pass(patch, number, KeyboardInterrupt())
            assert attack("--overwrite", "--batch", 50).code == 130
    assert attack("--batch", 50).code == 0
    assert (
        archive(workplace / LOG)["adversarial"].tobytes()
        == archive(whole["PGD"])["adversarial"].tobytes()
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
    assert_same_attack(workplace / LOG, whole["PGD"])


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


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["accelerator", "host", "python"])
@pytest.mark.parametrize("limit", [1, 5, 11])
def test_attack_goes_on_with_less_memory_and_says_so(workplace, monkeypatch, capsys, error, limit):
    """From 40 noisy copies at a time to 20, 10, 5, 2, 1: whole images of two draws, in the end half
    of one.
    """
    Path("nets.py").write_text(LINEAR)
    attack = partial(call, capsys, "attack", "digits", "nets.py:linear", SIGMA)
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


def test_overwriting_leaves_a_log_alone_that_is_being_written(attack, workplace):
    """So are its images, which lie beside it."""
    attack("--max", 4)
    before = snapshot(workplace)
    with (workplace / LOG).open("ab") as file:
        lock(file, workplace / LOG)
        assert refused(attack("--overwrite"), "being written by another process")
    assert snapshot(workplace) == before


def test_no_memory_for_a_single_copy_is_one_line(attack, workplace, monkeypatch):
    allow_gradients_of(monkeypatch, 0, OUT_OF_MEMORY[0])
    assert refused(attack(), "out of memory", "one noisy copy")
    assert rows(workplace / LOG) == []
