"""A missing, damaged, dangerous or unsuitable file gives an error of one line; a failed save loses nothing."""

import pickle

import pytest
import torch

from smoothadv.checkpoints import file_digest, load_classifier, read_checkpoint, save_checkpoint
from smoothadv.errors import UserError
from support import refusals
from support.released import cifar_classifier, save_released_checkpoint
from support.traps import Trap


def refusal(path, dataset: str = "cifar10") -> str:
    return refusals.refusal(load_classifier, path, dataset, "center", names=path)


def small_checkpoint(path, zipped: bool = True, **changes):
    """A released checkpoint of a ResNet-20 for CIFAR-10, with the given entries replaced."""
    save_released_checkpoint(path, cifar_classifier(20, 10, "center"), "cifar_resnet20", zipped)
    if changes:
        torch.save({**torch.load(path, weights_only=True), **changes}, path)
    return path


def test_missing_file_or_folder_is_named(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing.pth.tar")
    assert str(tmp_path / "checkpoint.pth.tar") in refusal(tmp_path), "the file that is meant"


CONTENTS = {
    "empty": b"",
    "text": b"epoch\ttime\tlr\n0\t1.5\t0.1\n" * 10,
    "binary": bytes(range(256)) * 10,
    "HTML of a failed download": b"<!DOCTYPE html>\n<html>\n<body>404</body>\n</html>\n",
    "pickled dict without tensors": pickle.dumps({"a": 1}),
    "pickled object": pickle.dumps(UserError("x")),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_file_that_is_no_checkpoint(tmp_path, content):
    (tmp_path / "checkpoint.pth.tar").write_bytes(content)
    refusal(tmp_path / "checkpoint.pth.tar")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_truncated_file(tmp_path, zipped, share):
    path = small_checkpoint(tmp_path / "checkpoint.pth.tar", zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoint_that_would_run_a_command_is_refused_before_it_runs(tmp_path, zipped):
    path, sprung = tmp_path / "checkpoint.pth.tar", tmp_path / "sprung"
    content = torch.load(small_checkpoint(path), weights_only=True)
    torch.save({**content, "history": [Trap(sprung)]}, path, _use_new_zipfile_serialization=zipped)
    refusal(path)
    assert not sprung.exists()
    # The file is no dud: loading it without the precaution runs the command.
    torch.load(path, weights_only=False)
    assert sprung.exists()


def test_whole_model_instead_of_weights_is_refused(tmp_path):
    content = {"epoch": 1, "arch": "cifar_resnet20", "state_dict": cifar_classifier(20, 10, "center"), "optimizer": {}}
    torch.save(content, tmp_path / "checkpoint.pth.tar")
    refusal(tmp_path / "checkpoint.pth.tar")


@pytest.mark.parametrize("key", ["epoch", "arch", "state_dict"])
def test_missing_entry_is_named(tmp_path, key):
    path = small_checkpoint(tmp_path / "checkpoint.pth.tar")
    content = torch.load(path, weights_only=True)
    del content[key]
    torch.save(content, path)
    assert f"lacks {key}" in refusal(path)


@pytest.mark.parametrize(
    "content", [{"net": {}, "epoch": 1}, [1, 2], torch.zeros(3), {}], ids=["MACER's", "list", "tensor", "nothing"]
)
def test_something_else_saved_by_torch(tmp_path, content):
    torch.save(content, tmp_path / "checkpoint.pth.tar")
    assert "arch" in refusal(tmp_path / "checkpoint.pth.tar").partition("lacks")[2]


def test_deeper_weights_than_the_architecture_has(tmp_path):
    path = tmp_path / "checkpoint.pth.tar"
    save_released_checkpoint(path, cifar_classifier(26, 10, "center"), "cifar_resnet20")
    assert "36 unknown" in refusal(path)


MISFITS = [
    # ResNet-110 has 3 x 15 blocks more, of 12 entries each.
    ({"arch": "cifar_resnet110"}, "cifar10", ["not a cifar_resnet110", "540 weights missing"]),
    ({"arch": "wide_resnet"}, "cifar10", ["'wide_resnet'", "cifar_resnet110"]),
    ({}, "imagenet32", ["1000 classes", "fc.weight", "[10, 64]"]),
    ({}, "digits", ["1x8x8", "conv1.weight", "[16, 3, 3, 3]"]),
    ({"input_layer": "center", "mean": [0.5] * 3, "std": [0.5] * 3}, "digits", ["1x8x8"]),
    # The weights would fit: the classes are only in another order, and the network takes images of any size.
    ({"classes": ["cat", "dog"]}, "cifar10", ["classes", "cat, dog", "cifar10"]),
    ({"image_shape": [3, 16, 16]}, "cifar10", ["image_shape", "3, 16, 16", "cifar10"]),
]


@pytest.mark.parametrize(("changes", "dataset", "words"), MISFITS)
def test_checkpoint_of_other_networks_or_images_is_refused_with_what_differs(tmp_path, changes, dataset, words):
    message = refusal(small_checkpoint(tmp_path / "checkpoint.pth.tar", **changes), dataset)
    assert all(word in message for word in words)


def test_save_of_something_unsavable_leaves_the_old_file(tmp_path):
    path = small_checkpoint(tmp_path / "checkpoint.pth.tar")
    before = path.read_bytes()
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save_checkpoint(path, {**torch.load(path, weights_only=True), "history": lambda: None})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pth.tar"]


def test_save_replaces_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    path = small_checkpoint(tmp_path / "checkpoint.pth.tar")
    save_checkpoint(path, {**read_checkpoint(path), "epoch": 151})
    assert read_checkpoint(path)["epoch"] == 151
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pth.tar"]


def test_digest_of_a_file_is_its_sha256(tmp_path):
    # FIPS 180-2, appendix B.3: one million times the letter a, which is more than one read.
    (tmp_path / "file").write_bytes(b"a" * 1_000_000)
    assert file_digest(tmp_path / "file") == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    # Two megabytes and one byte: more than two blocks of whatever power of two.
    (tmp_path / "file").write_bytes(b"\0" * (2**21 + 1))
    first = file_digest(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"\0" * 2**21 + b"\1")
    assert file_digest(tmp_path / "file") != first
