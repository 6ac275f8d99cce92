"""An ensemble of checkpoints in the commands and functions: one classifier, whose logs name all its
members.
"""

import json
from pathlib import Path

import pytest

import smoothadv
from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.tables import model_of
from smoothadv.base.files import file_digest
from support.attack_runs import SIGMA
from support.commands import call, manifest_of, refused, rows, succeed

FEW = ["--device", "cpu", "--N", 400, "--skip", 24]


@pytest.fixture(scope="module")
def members(checkpoints) -> list[Path]:
    return [checkpoints[name] for name in ("gaussian", "PGD", "DDN")]


@pytest.fixture(scope="module")
def names(members, tmp_path_factory) -> dict[str, str]:
    """How the ensemble is named, by the way of its mean."""
    path = tmp_path_factory.mktemp("described") / "three.toml"
    path.write_text(f'members = {json.dumps(list(map(str, members)))}\nmean = "probabilities"\n')
    return {"logits": "+".join(map(str, members)), "probabilities": str(path)}


@pytest.fixture(scope="module")
def certified(names, tmp_path_factory) -> dict[str, Path]:
    """Certificates of 15 images by each mean."""
    logs = {mean: tmp_path_factory.mktemp("certified") / f"{mean}.tsv" for mean in names}
    for mean, log in logs.items():
        sound = ["--sound"] if mean == "probabilities" else []
        succeed("certify", "digits", names[mean], SIGMA, log, *FEW, *sound)
    return logs


@pytest.mark.parametrize("mean", ["logits", "probabilities"])
def test_certificates_of_an_ensemble_withstand_attacks(certified, names, mean, workplace, capsys):
    """False alarms, whatever the members: 0.001 of all runs, as the command judges flips."""
    log = certified[mean]
    assert sum(float(row["radius"]) > 0 for row in rows(log)) > 5
    few = "--device cpu --N 200 --num-steps 3 --num-noise-vec 4 --against".split()
    outcome = call(capsys, "attack", "digits", names[mean], SIGMA, "out", *few, log)
    assert outcome.code == 0, outcome
    assert all(float(row["attack_norm"]) > 0 for row in rows(Path("out/against.tsv"))), (
        "it has gradients"
    )


def test_manifest_names_all_members_and_the_mean(certified, members, names):
    digests = [file_digest(member) for member in members]
    for mean, log in certified.items():
        settings, runs = (manifest_of(log)[part] for part in ("settings", "runs"))
        assert (
            settings["checkpoint_sha256"] == {mean: digests}
            and runs[0]["checkpoint"] == names[mean]
        )
        assert settings["arch"] == f"digits_resnet8+digits_resnet8+digits_resnet8 (mean of {mean})"
        assert settings["input_layer"] == ["normalize"] * 3 and settings["folded"] is True
        assert [recipe["objective"]["name"] for recipe in settings["training"]][0] == "Gaussian"
    keys = {manifest_of(log)["settings"]["classifier_sha256"] for log in certified.values()}
    assert len(keys) == 2, "the mean keys the noise"
    logs = read_logs(
        [str(log) for log in certified.values()], ("certification",), {}, print
    ).certification
    assert len({model_of(log) for log in logs}) == 2


def test_another_ensemble_neither_continues_a_log_nor_is_attacked_by_it(
    certified, members, names, workplace, capsys
):
    for other in (names["logits"], "+".join(map(str, members[:2])), members[0]):
        again = call(
            capsys, "certify", "digits", other, SIGMA, certified["probabilities"], *FEW, "--sound"
        )
        assert refused(again, "cannot resume", "checkpoint_sha256")
        against = ["--against", certified["probabilities"], "--device", "cpu", "--N", 100]
        assert refused(
            call(capsys, "attack", "digits", other, SIGMA, "out", *against),
            "certifies something else",
        )


def test_functions_take_an_ensemble_and_members_warn_of_another_sigma(
    certified, names, workplace, capsys
):
    predicted = smoothadv.predict(
        names["logits"], "digits", sigma=SIGMA, n=100, limit=3, device="cpu"
    )
    assert len(predicted) == 3
    outcome = call(
        capsys, "predict", "digits", names["logits"], 0.5, "log.tsv", "--N", 100, "--max", 1
    )
    assert (
        outcome.code == 0
        and outcome.err.count("was trained with noise 0.25; here it gets noise 0.5") == 3
    )
