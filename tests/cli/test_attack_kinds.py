"""attack --gradient, --restarts and --target: each option gives another attack, and changes only
what its name says.
"""

from pathlib import Path

import pytest

from support.attack_runs import SIGMA, SMALL, archive, assert_same_attack, l2_norms
from support.commands import call, header, manifest_of, refused, rows, snapshot


@pytest.fixture
def attack(checkpoint, workplace, capsys):
    """The log of an attack on the shared classifier at epsilon 0.5; options given later win."""

    def run(outdir: str, *options: object) -> Path:
        words = ["digits", checkpoint, SIGMA, outdir, *SMALL, "--epsilon", 0.5, *options]
        outcome = call(capsys, "attack", *words)
        assert (outcome.code, outcome.err) == (0, "")
        return workplace / outdir / "epsilon_0.5.tsv"

    return run


def test_the_papers_settings_are_the_default(attack):
    options = ["--gradient", "plug-in", "--beta", 1, "--restarts", 1]
    assert_same_attack(attack("one", *options), attack("two"))


KINDS = [
    *("--gradient plug-in", "--gradient expected-loss", "--gradient stein"),
    *("--gradient hard-stein", "--beta 4", "--gradient stein --restarts 3"),
    *("--target runner-up", "--target least-likely", "--target random", "--target every"),
]


def test_no_two_kinds_make_the_same_examples(attack):
    logs = {kind: attack(kind, *kind.split()) for kind in KINDS}
    images = {kind: archive(log)["adversarial"] for kind, log in logs.items()}
    for first in KINDS:
        for second in KINDS[: KINDS.index(first)]:
            assert (images[first] != images[second]).any((1, 2, 3)).sum() >= 2, (first, second)
    described = [
        [manifest_of(log)["settings"].get(name) for name in ("attack", "restarts", "target")]
        for log in logs.values()
    ]
    assert len(set(map(str, described))) == len(KINDS), "the manifests tell them apart"


def test_log_names_the_class_wanted_whose_own_images_are_left_alone(attack):
    log, every = attack("out", "--target", 2), attack("every", "--target", "every", "--max", 2)
    arrays = archive(log)
    assert header(log) == [*header(every), "target"] and "target" not in archive(every)
    assert {row["target"] for row in rows(log)} == {"2"} and set(arrays["target"]) == {2}
    its_own = arrays["label"] == 2
    assert its_own.any() and ((l2_norms(arrays) == 0) == its_own).all()


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
    (["--alpha", 0.01], "alpha was 0.001, now 0.01"),
    (["--N", 51], "N was 50, now 51"),
]


def test_log_of_another_attack_is_not_continued(attack, checkpoint, workplace, capsys):
    attack("out", "--max", 2)
    before = snapshot(workplace)
    for change, field in CHANGES:
        command = ["digits", checkpoint, SIGMA, "out", *SMALL, "--epsilon", 0.5, *change]
        assert refused(call(capsys, "attack", *command), "epsilon_0.5.tsv", field, "--overwrite")
    assert snapshot(workplace) == before
