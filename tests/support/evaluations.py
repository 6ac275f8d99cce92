"""Small runs of all evaluations, whose logs are compared to the last bit but for times."""

import itertools
from pathlib import Path

import pytest
import torch

from smoothadv.noise import NoiseKey
from smoothadv.voting.classifier import VotingClassifier
from smoothadv.voting.counter import VoteCounter
from support.attack_runs import archive, assert_same_attack
from support.commands import header, rows, settings_of, timeless

_SMALL = ["--num-steps", 2, "--num-noise-vec", 2]
_ATTACK = [*_SMALL, "--N", 50]
# The command, its options, and its log; ``falsify`` needs --against as well.
EVALUATIONS: dict[str, tuple[str, list[object], str]] = {
    "exact": ("certify", ["--N", 300], "log.tsv"),
    "named": ("certify", ["--N", 300, "--max", -1, "--images", "300-303,7,40-55"], "log.tsv"),
    "adaptive": ("certify", ["--method", "adaptive", "--N", 800, "--radii", 0, 0.25], "log.tsv"),
    "predict": ("predict", [*_ATTACK, "--attack", "PGD", "--epsilon", 0.5], "log.tsv"),
    "attack": ("attack", [*_ATTACK, "--epsilon", 0.5], "out/epsilon_0.5.tsv"),
    "restarts": (
        "attack",
        [
            *(*_ATTACK, "--epsilon", 0.5, "--random-start", "--restarts", 2),
            *("--target", "random", "--attack-batch", 5),
        ],
        "out/epsilon_0.5.tsv",
    ),
    "stein": (
        "attack",
        [*_ATTACK, "--epsilon", 0.5, "--gradient", "stein", "--attack-batch", 1],
        "out/epsilon_0.5.tsv",
    ),
    "ddn": ("attack", [*_ATTACK, "--attack", "DDN", "--epsilon", 0.5], "out/epsilon_0.5.tsv"),
    "falsify": ("attack", _ATTACK, "out/against.tsv"),
    "sets": (
        "sets",
        [*_SMALL, "--attack", "PGD", "--epsilon", 0.1, "--attack-batch", 4],
        "log.tsv",
    ),
}
IMAGES = 21


def arguments_of(kind: str, checkpoint: Path, certified: Path, *options: object) -> list[object]:
    """The arguments of a command that evaluates some images; options given later win."""
    command, usual, log = EVALUATIONS[kind]
    against = ["--against", certified] if kind == "falsify" else []
    selected = ["--device", "cpu", "--max", IMAGES]
    output = "out" if command == "attack" else log
    return ["digits", checkpoint, 0.25, output, *selected, *usual, *against, *options]


def assert_equal(folder: Path, expected: Path, kind: str) -> None:
    """The log of an evaluation in a folder is that in another one but for times, and nothing else
    is there.
    """
    log, whole = (each / EVALUATIONS[kind][2] for each in (folder, expected))
    assert header(log) == header(whole) and timeless(log) == timeless(whole)
    assert settings_of(log) == settings_of(whole)
    if EVALUATIONS[kind][0] == "attack":
        assert_same_attack(log, whole)
        assert archive(log)["idx"].tolist() == sorted(int(row["idx"]) for row in rows(log))
    files = {name.relative_to(folder) for name in folder.rglob("*") if name.is_file()}
    assert files == {name.relative_to(expected) for name in expected.rglob("*") if name.is_file()}


def key_of_log(log: Path) -> NoiseKey:
    """The key of the draws behind a log, from what its manifest records."""
    settings = settings_of(log)
    return NoiseKey(
        *(settings[name] for name in ("classifier_sha256", "dataset_fingerprint", "sigma", "seed"))
    )


def stop_at_pass(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the classifier raise ``error`` at its pass with this number, of votes and attacks, not of
    their digest.
    """
    forward, digest = VotingClassifier.forward, VoteCounter.logits_digest
    passes = itertools.count(1)

    def stopping(self: VotingClassifier, images: torch.Tensor) -> torch.Tensor:
        if next(passes) == number:
            raise error
        return forward(self, images)

    def undisturbed(self: VoteCounter, shape: tuple[int, ...], stage: int) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VotingClassifier, "forward", forward)
            return digest(self, shape, stage)

    monkeypatch.setattr(VotingClassifier, "forward", stopping)
    monkeypatch.setattr(VoteCounter, "logits_digest", undisturbed)
