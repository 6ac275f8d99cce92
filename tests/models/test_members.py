"""Names of ensembles: what they stand for, and how faulty ones are refused."""

import os

import pytest
import torch

from smoothadv.architectures import get_architecture
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.checkpoints import load_classifier, save_checkpoint
from smoothadv.models.name import members_of
from support.refusals import refusal


def save(path, seed: int, **changes: object) -> None:
    torch.manual_seed(seed)
    weights = get_architecture("digits_resnet8", "digits", "center").state_dict()
    facts = {
        "input_layer": "center",
        "image_shape": [1, 8, 8],
        "mean": [0.5],
        "std": [0.5],
        **changes,
    }
    save_checkpoint(
        path,
        {"epoch": 1, "arch": "digits_resnet8", "state_dict": weights, "optimizer": {}, **facts},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensembles")
    for name, seed in (("a", 1), ("b", 2), ("a+b", 3), ("twin", 1)):
        save(folder / name, seed)
    (folder / "link").symlink_to("a")
    save(folder / "unrecorded", 4, input_layer=None, mean=None, std=None)
    save(folder / "letters", 5, classes=list("abcdefghij"))
    save(folder / "large", 6, image_shape=[3, 32, 32])
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("a", ["a"]),
        ("a+b", ["a+b"]),
        ("b+a", ["b", "a"]),
        ("b+a+twin", ["b", "a", "twin"]),
        ("twin+a+nothing", ["twin", "a", "nothing"]),
        ("nothing+a", ["nothing", "a"]),
        ("nothing+none", ["nothing+none"]),
        ("a+", ["a", "."]),
    ],
)
def test_a_plus_sign_separates_files_unless_it_belongs_to_one(name, paths):
    members = members_of(name)
    assert [str(path) for path in members.paths] == paths and members.mean == (
        None if len(paths) == 1 else "logits"
    )


def test_paths_and_the_input_layer_of_a_description_of_an_ensemble(folder, tmp_path):
    description = tmp_path / "both.toml"
    paths = [os.path.relpath(folder / name, tmp_path) for name in ("a", "unrecorded")]
    description.write_text(
        f'members = {paths}\nmean = "probabilities"\ninput_layer = "normalize"\n'
    )
    images = torch.rand(4, 1, 8, 8)
    ensemble = load_classifier(description, "digits")
    assert isinstance(ensemble, Ensemble) and not ensemble.training
    each = [
        load_classifier(folder / "a", "digits"),
        load_classifier(folder / "unrecorded", "digits", "normalize"),
    ]
    with torch.no_grad():
        expected = sum(one(images).softmax(1) for one in each) / 2
        torch.testing.assert_close(ensemble(images).exp(), expected)
        asked = load_classifier(description, "digits", "center")
        assert not torch.allclose(asked(images).exp(), expected), (
            "what the caller asks for comes first"
        )


@pytest.mark.parametrize("name", ["a", "b+a"])
def test_an_input_layer_that_contradicts_every_record_is_refused(name):
    reason = (
        f"checkpoint {name[0]} was trained with input layer 'center', not 'normalize': leave "
        "--input-layer out"
    )
    refusal(load_classifier, name, "digits", "normalize", names=reason)
    assert not load_classifier(name, "digits", "center").training, "it may be repeated"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a+nothing", "checkpoint nothing does not exist"),
        (
            "a+letters",
            "checkpoint letters does not fit dataset 'digits': it was trained with classes [a, b,",
        ),
        (
            "a+large",
            "checkpoint large does not fit dataset 'digits': it was trained with image_shape [3, "
            "32, 32]",
        ),
        ("a+unrecorded", "checkpoint unrecorded does not record its input layer"),
        ("a+x.toml", "ensemble a+x.toml: x.toml is an ensemble too: name its checkpoints"),
        ("b+a+./b", "ensemble b+a+./b: b is there twice: name each checkpoint once"),
        ("hf-hub:o/n+hf-hub:o/n", "hf-hub:o/n is there twice"),
        ("members = ['a', 'link']", "link is there twice: name each checkpoint once"),
        ("missing.toml", "ensemble missing.toml is no TOML file: No such file or directory"),
        ("members = [", "is no TOML file: "),
        ("member = 'a'", "members is None, expected a list of two or more paths of checkpoints"),
        ("members = ['a']", "members is ['a'], expected a list of two or more"),
        ("members = 'ab'", "members is 'ab', expected a list"),
        ("members = ['a', 1]", "members is ['a', 1], expected a list"),
        (
            "members = ['a', 'b']\nmean = 'median'",
            "mean is 'median', expected one of logits, probabilities",
        ),
        ("members = ['a', 'b']\nmean = ['logits']", "mean is ['logits'], expected one of"),
        (
            "members = ['a', 'b']\ninput_layer = 1",
            "input_layer is 1, expected the name of an input layer",
        ),
        (
            "members = ['a', 'b']\nweights = [1, 2]",
            "weights is [1, 2], expected no other keys than members, mean,",
        ),
        ("members = ['a', 'y.toml']", "y.toml is an ensemble too: name its checkpoints"),
    ],
)
def test_a_faulty_ensemble_is_refused_in_one_line(folder, name, words):
    if "=" in name:
        (folder / "x.toml").write_text(name)
        name = "x.toml"
    else:
        (folder / "x.toml").unlink(missing_ok=True)
    refusal(load_classifier, name, "digits", names=words)


def test_an_ensemble_that_is_no_text_is_refused_in_words(folder):
    (folder / "binary.toml").write_bytes(b"members = '\xff'")
    words = "ensemble binary.toml is no TOML file: it is no text"
    assert refusal(members_of, "binary.toml") == words
