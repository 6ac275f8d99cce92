"""A checkpoint whose fields are not as they must be is refused in one line, and takes no memory to
speak of.
"""

import io
import math
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.architectures import get_architecture
from smoothadv.base.errors import UserError
from smoothadv.checkpoints import load_classifier
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.records.readers import read_examples
from support import refusals
from support.read_elsewhere import messages

WEIGHT = "1.conv1.weight"
SHAPE = (16, 1, 3, 3)
SPREAD = torch.zeros(1).expand(SHAPE)
# Thirty lists, each of which holds the one before it twice.
DOUBLED: list = [0]
for _ in range(30):
    DOUBLED = [DOUBLED, DOUBLED]


def content_of(**changes: object) -> dict:
    """A checkpoint of a network for digits, as training writes it, with changes; ``weight`` is one
    of its weights.
    """
    weights = dict(get_architecture("digits_resnet8", "digits", "center").state_dict())
    if "weight" in changes:
        weights[WEIGHT] = changes.pop("weight")
    facts = {
        "input_layer": "center",
        "dataset": "digits",
        "image_shape": [1, 8, 8],
        "mean": [0.5],
        "std": [0.5],
    }
    content = {
        "epoch": 1,
        "arch": "digits_resnet8",
        "state_dict": weights,
        "optimizer": {},
        **facts,
        **changes,
    }
    return {name: value for name, value in content.items() if value != "absent"}


def refusal(path: Path) -> str:
    message = refusals.refusal(load_classifier, path, "digits", "center", names=path)
    assert message.count(str(path)) == 1 and len(message) < 600
    return message


FIELDS = {
    "weights are a tensor": ({"state_dict": torch.zeros(3)}, "its state_dict is a tensor"),
    **{
        f"no {name}": ({name: "absent"}, f"lacks {name}")
        for name in ("epoch", "arch", "state_dict")
    },
    "weights are None": ({"state_dict": None}, "lacks state_dict"),
    "weights are a model": (
        {"state_dict": nn.Linear(1, 1)},
        "it asks to load torch.nn.modules.linear.Linear",
    ),
    "a weight is a number": ({"weight": 5}, f"its state_dict['{WEIGHT}'] is 5, expected a tensor"),
    "keys that are numbers": (
        {"state_dict": {1: torch.zeros(3)}},
        "key in state_dict is 1, expected text",
    ),
    "mean is text": ({"mean": "abc"}, "its mean is 'abc', expected a list"),
    "means are text": ({"mean": ["a"]}, r"its mean[0] is 'a', expected a finite number"),
    "a mean too many": ({"mean": [0.5] * 2}, "a mean of 2 and a std of 1 channels"),
    "too many means": (
        {"mean": [0.5] * 100_001, "std": [0.5] * 100_001},
        "its mean is a list of 100001",
    ),
    "many means": ({"mean": [0.5] * 9_999, "std": [0.5] * 9_999}, "a mean of 9999 and"),
    "a mean that is no number": ({"mean": [math.nan]}, "its mean[0] is nan"),
    "mean without std": ({"std": "absent"}, "only one of mean and std"),
    "std without mean": ({"mean": None}, "only one of mean and std"),
    "std of 0": ({"std": [0]}, "its std[0] is 0, expected a finite number above 0"),
    "classes are a number": ({"classes": 10}, "its classes is 10, expected a list"),
    "classes are numbers": ({"classes": list(range(10))}, "its classes[0] is 0, expected text"),
    "image_shape is a number": ({"image_shape": 8}, "its image_shape is 8, expected a list of 3"),
    "image_shape of two": (
        {"image_shape": [8, 8]},
        "its image_shape is a list of 2, expected a list of 3",
    ),
    "epoch is a fraction": ({"epoch": 1.5}, "its epoch is 1.5, expected a whole number"),
    "epoch is nan": ({"epoch": math.nan}, "its epoch is nan"),
    "epoch is true": ({"epoch": True}, "its epoch is True"),
    "epoch is beyond any file": ({"epoch": 1 << 1_000}, "its epoch is a int, expected"),
    "arch is a list": ({"arch": ["digits_resnet8"]}, "its arch is a list of 1, expected text"),
    "input layer is a number": ({"input_layer": 1}, "its input_layer is 1, expected text"),
    "dataset is a list": ({"dataset": []}, "its dataset is a list of 0"),
    "noise is text": (
        {"noise_sd": "0.25"},
        "its noise_sd is '0.25', expected a finite number from 0",
    ),
    "noise is infinite": ({"noise_sd": math.inf}, "its noise_sd is inf"),
    "recipe is a list": ({"recipe": [1]}, "its recipe is a list of 1, expected a dict"),
    "recipe has a tensor": (
        {"recipe": {"a": torch.zeros(1)}},
        "its recipe is a dict of 1, expected a dict of text",
    ),
    "recipe beyond any memory": ({"recipe": {"a": DOUBLED}}, "its recipe is a dict of 1"),
    "sparse": (
        {"weight": torch.zeros(SHAPE).to_sparse()},
        "torch.sparse_coo, on cpu, expected a tensor: dense",
    ),
    "without memory": ({"weight": torch.zeros(SHAPE, device="meta")}, "on meta, expected"),
    "spread": ({"weight": SPREAD}, "with a place for each value"),
    "spread over 4 TB": ({"weight": torch.zeros(1).expand(2**40)}, "with a place for each value"),
    "quantized": (
        {
            "weight": torch._empty_affine_quantized(
                SHAPE, scale=1.0, zero_point=0, dtype=torch.qint8
            )
        },
        "quantized",
    ),
    "complex": (
        {"weight": torch.zeros(SHAPE, dtype=torch.complex64)},
        f"{WEIGHT} is of type torch.complex64",
    ),
    "int8": (
        {"weight": torch.zeros(SHAPE, dtype=torch.int8)},
        "torch.int8, expected torch.float32",
    ),
    "bool": (
        {"weight": torch.zeros(SHAPE, dtype=torch.bool)},
        "torch.bool, expected torch.float32",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes, words", FIELDS.values(), ids=FIELDS)
def test_field_that_is_not_as_it_must_be_is_named(tmp_path, changes, words):
    torch.save(content_of(**changes), tmp_path / "file")
    assert words in refusal(tmp_path / "file")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_another_precision_are_loaded(tmp_path, dtype):
    torch.save(content_of(weight=torch.full(SHAPE, 0.5, dtype=dtype)), tmp_path / "file")
    assert torch.equal(
        load_classifier(tmp_path / "file", "digits").state_dict()[WEIGHT], torch.full(SHAPE, 0.5)
    )


def test_attributes_of_a_tensor_do_not_replace_its_methods(tmp_path):
    weight = torch.zeros(SHAPE)
    weight.numel = weight.detach = weight.copy_ = [1]
    torch.save(content_of(weight=weight), tmp_path / "file")
    assert not load_classifier(tmp_path / "file", "digits").state_dict()[WEIGHT].any()


def test_what_cannot_be_read_is_told_without_advice_of_pytorch(tmp_path):
    path = tmp_path / "file"
    for content in (pickle.dumps({"epoch": 1, "mean": np.float64}), b"PK\3\4", b"\x80\x02}", None):
        torch.save({"epoch": UserError("1")}, path) if content is None else path.write_bytes(
            content
        )
        message = refusal(path)
        assert not any(
            word in message for word in ("weights_only", "torch.load", "Re-running", "safe_globals")
        )
        assert "damaged or no PyTorch checkpoint" in message
    assert message.endswith("(it asks to load smoothadv.base.errors.UserError)")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder in which a small network was trained for one epoch of two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, 1)
    return folder


def train(folder: Path, epochs: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2))
    images = np.random.default_rng(0).random((6, 1, 6, 6), dtype=np.float32)
    options = {
        "objective": Gaussian(noise_sd=0.25),
        "device": "cpu",
        "quiet": True,
        "outdir": folder,
    }
    smoothadv.train(
        model, images, np.arange(6) % 2, schedule={"epochs": epochs, "batch": 3}, **options
    )


MOMENTUM = torch.zeros(2, 1, 3, 3)
WITHIN = {"epoch": 0, "history": [], "step": 1, "seconds": 1.0, "sums": [1.0] * 5}
RESUMED = {
    "no history": ({"history": "absent"}, "lacks history"),
    "no runs": ({"runs": "absent"}, "lacks runs"),
    "no optimizer": ({"optimizer": "absent"}, "lacks optimizer"),
    "no step": ({"step": "absent"}, "lacks step"),
    "no sums": ({**WITHIN, "sums": "absent"}, "lacks sums"),
    "no seconds": ({**WITHIN, "seconds": None}, "lacks seconds"),
    "two sums": ({**WITHIN, "sums": [1.0] * 2}, "its sums is a list of 2, expected a list of 5"),
    "sums of a classifier that are nan": (
        {**WITHIN, "sums": [1.0] * 4 + [float("nan")]},
        "its sums[4] is nan",
    ),
    "sums of text": ({**WITHIN, "sums": "abcde"}, "its sums is 'abcde'"),
    "a step that is text": ({**WITHIN, "step": "1"}, "its step is '1'"),
    "several steps": ({**WITHIN, "step": torch.ones(3)}, "its step is a tensor"),
    "seconds of a list": ({**WITHIN, "seconds": []}, "its seconds is a list of 0"),
    "recipe is a list": ({"recipe": []}, "its recipe is a list of 0, expected a dict"),
    "history is text": ({"history": "abc"}, "its history is 'abc', expected a list"),
    "history of numbers": ({"history": [1]}, "its history[0] is 1, expected a dict"),
    "history without columns": ({"history": [{"epoch": 0}]}, "its history[0] is a dict of 1"),
    "history of another epoch": ({"epoch": 2}, "its history has 1 entries, expected 2"),
    "no run at all": ({"runs": []}, "its runs is a list of 0, expected a list of 1"),
    "runs of text": ({"runs": ["a"]}, "its runs[0] is 'a', expected a dict"),
    "optimizer is a list": ({"optimizer": []}, "its optimizer is a list of 0"),
    "optimizer without state": ({"optimizer": {}}, "expected a dict with a 'state'"),
    "state of text": ({"optimizer": {"state": {0: "a"}}}, "expected a dict with a 'state'"),
    "momentum of text": (
        {"optimizer": {"state": {0: {"momentum_buffer": "a"}}}},
        "expected a dict with a 'state'",
    ),
    "momentum in one place": (
        {"optimizer": {"state": {0: {"momentum_buffer": SPREAD}}}},
        "a dict with a 'state'",
    ),
    "weights of another shape": ({"0.weight": torch.zeros(2, 1, 3, 2)}, "has shape [2, 1, 3, 2]"),
    "complex weights": (
        {"0.weight": MOMENTUM.to(torch.complex64)},
        "torch.complex64, expected torch.float32",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes, words", RESUMED.values(), ids=RESUMED)
def test_run_with_a_doctored_checkpoint_is_not_resumed(run, tmp_path, changes, words):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    content = {**torch.load(folder / "checkpoint.pth.tar", weights_only=True), **changes}
    content["state_dict"].update(
        {name: content.pop(name) for name in list(content) if name == "0.weight"}
    )
    content = {
        name: value
        for name, value in content.items()
        if not isinstance(value, str) or value != "absent"
    }
    torch.save(content, folder / "checkpoint.pth.tar")
    with pytest.raises(UserError) as error:
        train(folder, 2)
    message = str(error.value)
    assert words in message and str(folder / "checkpoint.pth.tar") in message
    assert "\n" not in message and len(message) < 600


READERS = ["checkpoint", "examples", "pseudo-labels"]


def with_deep_tuple(path: Path, zipped: bool) -> None:
    """A checkpoint with a key of a million tuples within each other, which Python cannot hash."""
    torch.save({"epoch": 1}, path, _use_new_zipfile_serialization=zipped)
    deep = b"\x80\x02}" + b"N" + b"\x85" * 1_000_000 + b"Ns."
    if not zipped:
        return path.write_bytes(path.read_bytes().replace(pickle.dumps({"epoch": 1}, 2), deep))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, deep if name.endswith("data.pkl") else member)


@pytest.mark.parametrize("zipped", [True, False])
def test_tuples_too_deep_for_python_are_refused(warm, tmp_path, zipped):
    with_deep_tuple(tmp_path / "file", zipped)
    assert all("file" in message for message in messages(warm, tmp_path, *READERS))


@pytest.mark.parametrize("is_honest", [True, False], ids=["stated", "understated"])
def test_small_file_that_unpacks_to_gigabytes_is_refused(warm, tmp_path, is_honest):
    """The size in the directory of a zip file may be a lie: then a type of 1.2 GB makes NumPy ask
    for that much.
    """
    path, size = tmp_path / "file.npz", 1200 * 2**20
    header = io.BytesIO()
    shape, kind = ((size,), "|u1") if is_honest else ((1,), f"|S{size}")
    np.lib.format.write_array_header_1_0(
        header, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("data.npy", "a/data.pkl"):
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(header.getvalue())
                for _ in range(0, size if name == "data.npy" else 0, 2**20):
                    member.write(bytes(2**20))
        if not is_honest:
            archive.infolist()[0].file_size = 1000
    assert path.stat().st_size < 6_000_000
    lines = messages(warm, tmp_path, *READERS)
    assert all(str(path) in line for line in lines)
    if is_honest:
        assert all("SMOOTHADV_MAX_UNPACKED_GIB" in line and "1.17 GiB" in line for line in lines)


def test_limit_can_be_raised_and_a_wrong_one_is_named(tmp_path, monkeypatch):
    path = tmp_path / "file.npz"
    shown = np.zeros((99, 1, 64, 64), np.float32)
    np.savez_compressed(path, idx=np.arange(99), image=shown, adversarial=shown)
    assert len(read_examples(path)["idx"]) == 99, "more than twenty times its size, but little"
    monkeypatch.setenv("SMOOTHADV_MAX_UNPACKED_GIB", "0.001")
    with pytest.raises(UserError, match="unpacks to 0.00302 GiB, more than 0.001 GiB"):
        read_examples(path)
    monkeypatch.setenv("SMOOTHADV_MAX_UNPACKED_GIB", "much")
    with pytest.raises(UserError, match="is 'much', expected a number"):
        read_examples(path)
