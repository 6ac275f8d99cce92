"""Without a file, Python gets the rows that it would read from one: the same columns and types."""

import numpy as np
import pandas as pd
import pytest
import torch

import smoothadv
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import UserError

IMAGES = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1])
USUAL = {"sigma": 0.25, "n": 60, "batch": 32, "device": "cpu", "num_classes": 3}
ATTACK = {"attack": PGD(0.5, 2), "num_noise_vec": 2}
CALLS = {
    "exact": (smoothadv.certify, {"n0": 20}, "log"),
    "adaptive": (smoothadv.certify, {"n0": 20, "method": "adaptive"}, "log"),
    "sequential": (smoothadv.certify, {"n0": 20, "method": "sequential"}, "log"),
    "top-k": (smoothadv.certify, {"n0": 20, "method": "top-k", "settings": {"top_k": 2}}, "log"),
    "predict": (smoothadv.predict, {"top_k": 2}, "log"),
    "targeted": (smoothadv.predict, {**ATTACK, "target": "random"}, "log"),
    "attack": (smoothadv.attack, {**ATTACK, "epsilons": [0.25, 0.5]}, "outdir"),
}


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))


@pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
@pytest.mark.parametrize("kind", CALLS)
def test_rows_in_memory_are_those_of_a_file(tmp_path, kind):
    function, options, place = CALLS[kind]
    arguments = (network(), IMAGES, LABELS)
    in_memory = function(*arguments, **USUAL, **options)
    from_file = function(*arguments, **USUAL, **options, **{place: tmp_path / "new"})
    pd.testing.assert_frame_equal(in_memory, from_file, rtol=0, atol=0)
    assert in_memory.attrs == from_file.attrs


@pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
@pytest.mark.parametrize("kind", ["exact", "top-k", "predict"])
def test_images_without_labels_have_rows_without_what_labels_say(kind):
    function, options = CALLS[kind][0], {**USUAL, **CALLS[kind][1]}
    rows = function(network(), IMAGES, **options)
    zeros = function(network(), IMAGES, np.zeros(5, int), **options)
    assert [*rows] == [name for name in zeros if name not in ("label", "correct")]
    if kind == "exact":  # the others choose the class 0 where it is among the first ones
        pd.testing.assert_frame_equal(rows, zeros[[*rows]], rtol=0, atol=0)
    elif kind == "predict":
        assert (rows.predict == rows.class_1).all() and (zeros.predict != zeros.class_1).any()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (smoothadv.certify, {"log": "log.tsv"}),
        (smoothadv.certify, {"method": "adaptive", "settings": {"label_aware": True}}),
        (smoothadv.predict, ATTACK),
        (smoothadv.attack, ATTACK),
    ],
)
def test_what_needs_labels_is_refused_without_them(function, options):
    with pytest.raises(UserError, match="images without labels: .* only certify and predict do"):
        function(network(), IMAGES, **USUAL, **options)


def test_no_images_are_refused():
    with pytest.raises(UserError):
        smoothadv.certify(network(), np.zeros((0, 1, 4, 4), "f4"), np.zeros(0, int), **USUAL)
