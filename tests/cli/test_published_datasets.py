"""The real commands on datasets in their published form: a training of a few steps, and
certificates of its classifier.
"""

import pytest

from support.commands import call, manifest_of, refused, rows
from support.published import DOWNLOADED, arrays_of_images, tiny_imagenet

NETWORKS = {
    "mnist": "lenet",
    "fashion-mnist": "lenet",
    "svhn": "cifar_resnet20",
    "cifar100": "wide_resnet28_2",
    "tiny-imagenet": "cifar_resnet20",
    "cifar10": "cifar_resnet20",
}
FEW = ("--N", 20, "--max", 2, "--device", "cpu")


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Publishes a dataset and trains on it; returns its folder and the checkpoint."""

    def train(name: str):
        if name in DOWNLOADED:
            DOWNLOADED[name](tmp_path, monkeypatch)
        else:
            tiny_imagenet(tmp_path)
        options = ["--noise", 0.25, "--recipe", "smoke", "--data-dir", tmp_path, "--device", "cpu"]
        outcome = call(capsys, "train", name, NETWORKS[name], tmp_path / "run", *options)
        assert outcome.code == 0, outcome.err
        return tmp_path, tmp_path / "run/checkpoint.pth.tar"

    return train


@pytest.mark.parametrize("name", NETWORKS)
def test_training_and_certification(name, trained, capsys):
    folder, checkpoint = trained(name)
    log = folder / "log.tsv"
    outcome = call(capsys, "certify", name, checkpoint, 0.25, log, "--data-dir", folder, *FEW)
    assert outcome.code == 0, outcome.err
    assert len(rows(log)) == 2 and manifest_of(log)["settings"]["dataset"] == name


def test_classifiers_of_cifar10_are_certified_on_its_other_test_sets(trained, capsys):
    folder, checkpoint = trained("cifar10")
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
