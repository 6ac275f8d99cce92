"""What the functions and classes for Python say of arguments that cannot be: one line each."""

import numpy as np
import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.objectives.gaussian import Gaussian

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)
LEVELS = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
DIGITS = describe_dataset("digits")


def attacked(inputs=IMAGES, labels=LABELS, attack=None):
    return SmoothedAttack(attack or PGD(0.5, 2), 0.25, 2)(MODEL, inputs, labels)


def smoothed(image, model=MODEL):
    return smoothadv.Smooth(model, 10, 0.25).certify(image, 10, 50, 0.001, 50)


WRONG = {
    "attack of an array": (lambda: attacked(IMAGES.numpy()), "inputs: found a ndarray of float32"),
    "attack of a number": (lambda: attacked(torch.tensor(0.5)), "inputs: found tensor"),
    "labels in a list": (lambda: attacked(labels=[0, 1, 2, 3]), "labels: found .0, 1, 2, 3."),
    "one label": (lambda: attacked(labels=LABELS[0]), "labels: found tensor"),
    "labels of floats": (lambda: attacked(labels=LABELS.float()), "labels: found a Tensor of"),
    "images of doubles": (
        lambda: attacked(IMAGES.double()),
        r"Sequential cannot be applied to images of shape \[1, 8, 8\], float64",
    ),
    "name of an attack": (lambda: attacked(attack="PGD"), "attack: found 'PGD', expected an obj"),
    "sigma in text": (lambda: smoothadv.Smooth(MODEL, 10, "0.25"), "sigma: found '0.25', expected"),
    "large sigma": (lambda: smoothadv.Smooth(MODEL, 10, 64), "sigma: found 64, expected a stand"),
    "classes in text": (lambda: smoothadv.Smooth(MODEL, "10", 0.25), "num_classes: found '10'"),
    "path of an image": (lambda: smoothed("cat.png"), "x is a str: give one image"),
    "weights of doubles": (
        lambda: smoothed(IMAGES[0], nn.Sequential(nn.Flatten(), nn.Linear(64, 10).double())),
        "Sequential cannot be applied to images of shape .*: call its .float()",
    ),
    "images of floats": (
        lambda: InMemoryImages(IMAGES, LABELS, DIGITS),
        "images of digits: found a Tensor of torch.float32, .*, expected grey levels",
    ),
    "images of another size": (
        lambda: InMemoryImages(LEVELS[:, :, 1:], LABELS[:3], DIGITS),
        r"images of digits: .*\[3, 1, 7, 8\], expected grey levels .* \[N, 1, 8, 8\]",
    ),
    "labels for other images": (
        lambda: InMemoryImages(LEVELS, LABELS, DIGITS),
        r"labels of digits: found .* \[4\], expected int64 \[3\]",
    ),
    "label of no class": (
        lambda: InMemoryImages(LEVELS, torch.tensor([0, 10, 3]), DIGITS),
        "labels of digits: found 0 to 10, expected 0 to 9",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_argument_that_cannot_be_is_one_line(name):
    call, words = WRONG[name]
    with pytest.raises((UserError, ValueError), match=rf"\A{words}[^\n]*\Z"):
        call()


class InMapping(nn.Module):
    """The logits of a module, in a dict."""

    def forward(self, images):
        return {"logits": MODEL(images)}


def test_logits_in_a_mapping_are_attacked():
    attack = SmoothedAttack(PGD(0.5, 2), 0.25, 2)
    assert attacked().equal(attack(InMapping(), IMAGES, LABELS))


class OneMemory(nn.Module):
    """The logits of a module, in the same tensor each time."""

    def forward(self, images):
        logits = MODEL(images)
        self.found = getattr(self, "found", torch.empty_like(logits)).detach().copy_(logits)
        return self.found


def test_passes_whose_logits_share_memory_count_apart():
    attack = SmoothedAttack(PGD(0.5, 2), 0.25, 6, batch=4)
    shares = attack.shares(MODEL, IMAGES, LABELS)
    assert shares.equal(attack.shares(OneMemory(), IMAGES, LABELS))


def test_images_with_strides_backwards_are_those_in_order():
    backwards = IMAGES[0].numpy()[:, :, ::-1]
    torch.manual_seed(1)
    found = smoothed(backwards)
    torch.manual_seed(1)
    assert found == smoothed(np.ascontiguousarray(backwards))


@pytest.mark.parametrize(
    "call",
    [
        lambda path: smoothadv.certify(MODEL, IMAGES, LABELS, sigma=0.25, n=20, log=path / "a.tsv"),
        lambda path: smoothadv.attack(
            MODEL, IMAGES, LABELS, sigma=0.25, attack=PGD(0.5, 2), epsilons=[0.5], outdir=path
        ),
        lambda path: smoothadv.train(MODEL, IMAGES, LABELS, objective=Gaussian(0.25), outdir=path),
    ],
    ids=["certify", "attack", "train"],
)
def test_folder_below_a_file_is_one_line(tmp_path, call):
    path = tmp_path / "file"
    path.touch()
    for folder in (path, path / "below"):
        with pytest.raises(UserError, match=r"\A.*file.*: this is a file: name a folder\Z"):
            call(folder)
