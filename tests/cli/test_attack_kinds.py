"""attack --gradient, --restarts and --target: each option gives another attack, and changes only
what its name says.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from smoothadv.noise import Purpose
from support.attack_runs import (
    DRAWS,
    SIGMA,
    SMALL,
    archive,
    assert_same_attack,
    l2_norms,
    noisy_logits,
)
from support.commands import call, header, manifest_of, refused, rows, snapshot

OWN_COLUMNS = [
    "idx",
    "label",
    "predict",
    "basePredict",
    "correct",
    "time",
    "attack_norm",
    "epsilon",
    "abstain",
]


@pytest.fixture
def attack(checkpoint, workplace, capsys):
    """The log of an attack on the shared classifier at epsilon 0.5; options given later win."""

    def run(outdir: str, *options: object) -> Path:
        outcome = call(
            capsys,
            "attack",
            "digits",
            checkpoint,
            SIGMA,
            outdir,
            *SMALL,
            "--epsilon",
            0.5,
            *options,
        )
        assert (outcome.code, outcome.err) == (0, "")
        return workplace / outdir / "epsilon_0.5.tsv"

    return run


def mean_probabilities(classifier: torch.nn.Module, images: np.ndarray) -> torch.Tensor:
    """The averaged softmax [B, K] on the draws that the attacks of images 0, 1, ... see."""
    logits = [
        noisy_logits(classifier, image, i, Purpose.ATTACK_NOISE, DRAWS)
        for i, image in enumerate(images)
    ]
    return F.softmax(torch.stack(logits).double(), dim=-1).mean(1)


def of_label(probabilities: torch.Tensor, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    return probabilities[range(len(probabilities)), torch.from_numpy(arrays["label"])]


PLUG_IN = ["--gradient", "plug-in"]


@pytest.mark.parametrize("options", [PLUG_IN, [*PLUG_IN, "--beta", 1], ["--restarts", 1]], ids=str)
def test_plug_in_at_the_papers_beta_and_a_single_restart_are_the_default(attack, options):
    assert_same_attack(attack("one", *options), attack("two"))


def test_no_two_gradients_make_the_same_examples(attack):
    kinds = ["plug-in", "expected-loss", "stein", "hard-stein", "plug-in --beta 4"]
    logs = {kind: attack(kind, "--gradient", *kind.split()) for kind in kinds}
    images = {kind: archive(log)["adversarial"] for kind, log in logs.items()}
    for first in kinds:
        for second in kinds[: kinds.index(first)]:
            assert (images[first] != images[second]).any((1, 2, 3)).sum() >= 6, (first, second)
    described = {str(manifest_of(log)["settings"]["attack"]) for log in logs.values()}
    assert len(described) == len(kinds), "the manifests tell them apart"


def test_restarts_never_make_a_label_more_probable(attack, classifier):
    """The first of several runs equals the run without restarts; where another run won, there was
    more than one.
    """
    weak = ["--gradient", "stein", "--num-steps", 1]
    one, five = (archive(attack(f"{count}", "--restarts", count, *weak)) for count in (1, 5))
    labels = [
        of_label(mean_probabilities(classifier, arrays["adversarial"]), arrays)
        for arrays in (one, five)
    ]
    assert (labels[1] <= labels[0] * (1 + 1e-4)).all()
    changed = (one["adversarial"] != five["adversarial"]).any((1, 2, 3))
    assert changed.any() and (labels[1] < labels[0])[torch.from_numpy(changed)].all()
    assert (l2_norms(five) <= 0.5 * (1 + 1e-5)).all()


def test_class_wanted_becomes_more_probable_and_its_own_images_are_left_alone(attack, classifier):
    log = attack("out", "--target", 2)
    arrays = archive(log)
    assert header(log) == [*OWN_COLUMNS, "target"] and set(arrays["target"]) == {2}
    before, after = (
        mean_probabilities(classifier, arrays[name])[:, 2] for name in ("image", "adversarial")
    )
    its_own = arrays["label"] == 2
    assert its_own.any() and not its_own.all()
    assert (after > before)[torch.from_numpy(~its_own)].all()
    assert l2_norms(arrays)[its_own].tolist() == [0.0] * its_own.sum()
    assert [float(row["attack_norm"]) for row in rows(log) if row["label"] == "2"] == [
        0.0
    ] * its_own.sum()


@pytest.mark.parametrize("rule", ["runner-up", "least-likely", "random"])
def test_rule_picks_the_class_that_it_says_and_never_the_label(attack, classifier, rule):
    log = attack("out", "--target", rule)
    arrays = archive(log)
    assert [int(row["target"]) for row in rows(log)] == arrays["target"].tolist()
    assert not (arrays["target"] == arrays["label"]).any()
    probabilities = mean_probabilities(classifier, arrays["image"])
    for row, label in enumerate(arrays["label"].tolist()):
        order = [c for c in probabilities[row].argsort(descending=True).tolist() if c != label]
        if rule != "random":
            assert arrays["target"][row] == order[0 if rule == "runner-up" else -1]
    wanted = torch.from_numpy(arrays["target"])[:, None]
    after = mean_probabilities(classifier, arrays["adversarial"]).gather(1, wanted)
    assert (after > probabilities.gather(1, wanted)).all()


def test_every_class_in_turn_is_at_least_as_good_as_one_of_them(attack, classifier):
    """And the log has no column for a single target."""
    log, one = (attack(f"{target}", "--target", target, "--max", 4) for target in ("every", 6))
    assert header(log) == OWN_COLUMNS and "target" not in archive(log)
    best, of_one = (
        of_label(mean_probabilities(classifier, a["adversarial"]), a)
        for a in map(archive, (log, one))
    )
    assert (best <= of_one * (1 + 1e-4)).all() and (best < of_one).any()


CHANGES = [
    (["--gradient", "stein"], "attack.estimator"),
    (["--beta", 4], "attack.estimator.beta was None, now 4.0"),
    (["--restarts", 2], "restarts was 1, now 2"),
    (["--target", "random"], "target was None, now 'random'"),
    (["--num-steps", 4], "attack.num_steps was 3, now 4"),
    (["--num-noise-vec", 5], "num_noise_vec was 4, now 5"),
    (["--attack", "DDN"], "attack.name was 'PGD', now 'DDN'"),
    (["--attack-batch", 8], "attack_batch was 16, now 8"),
    (["--random-start"], "attack.random_start"),
    (["--seed", 1], "seed was 0, now 1"),
]


def test_log_of_another_attack_is_not_continued(attack, checkpoint, workplace, capsys):
    attack("out", "--max", 2)
    before = snapshot(workplace)
    for change, field in CHANGES:
        command = ["digits", checkpoint, SIGMA, "out", *SMALL, "--epsilon", 0.5, *change]
        assert refused(call(capsys, "attack", *command), "epsilon_0.5.tsv", field, "--overwrite")
    assert snapshot(workplace) == before
