"""The real commands on CIFAR-10 in its published form, and on its other test sets."""

import pytest

from support.commands import call, manifest_of, refused, rows
from support.published import DOWNLOADED, arrays_of_images

FEW = ("--N", 20, "--max", 2, "--device", "cpu")


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """The folder of the images, and a checkpoint of a short training."""
    DOWNLOADED["cifar10"](tmp_path, monkeypatch)
    options = ["--noise", 0.25, "--recipe", "smoke", "--data-dir", tmp_path, "--device", "cpu"]
    outcome = call(capsys, "train", "cifar10", "cifar_resnet20", tmp_path / "run", *options)
    assert outcome.code == 0, outcome.err
    return tmp_path, tmp_path / "run/checkpoint.pth.tar"


def test_classifiers_of_cifar10_are_certified_on_its_other_test_sets(trained, capsys):
    folder, checkpoint = trained
    files = [folder / f"cifar10.1_v6_{part}.npy" for part in ("data", "labels")]
    others = {"cifar10.1": arrays_of_images(*files, 2000, "int32")[1]}
    files = folder / "CIFAR-10-C/fog.npy", folder / "CIFAR-10-C/labels.npy"
    others["cifar10-c:fog/3"] = arrays_of_images(*files, 50_000, "uint8")[1][20_000:]
    for number, (name, labels) in enumerate(others.items()):
        log = folder / f"{number}.tsv"
        options = [checkpoint, 0.25, log, "--data-dir", folder, *FEW]
        assert call(capsys, "certify", name, *options).code == 0
        assert manifest_of(log)["settings"]["dataset"] == name
        assert [int(row["label"]) for row in rows(log)] == labels[:2].tolist()
        options = ["cifar_resnet20", folder / "other", "--noise", 0.25, "--data-dir", folder]
        assert refused(call(capsys, "train", name, *options), name, "test images only")
