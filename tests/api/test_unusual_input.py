"""The Python face on what callers really hand over: arrays of any layout, numbers of NumPy, modules
of all kinds.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, SubsetRandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smoothadv
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import DoubtfulWarning, UserError
from smoothadv.models.checkpoint import digest_of
from smoothadv.objectives.distillation import Distillation
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv

COUNT, CLASSES = 6, 2
IMAGES = np.random.default_rng(0).random((COUNT, 1, 6, 6), dtype=np.float32)
LABELS = np.arange(COUNT) % CLASSES
LEVELS = np.round(IMAGES * 255).astype(np.uint8)
QUICK = {"sigma": 0.25, "n0": 10, "n": 50, "device": "cpu"}
TRAINING = {
    "objective": Gaussian(noise_sd=0.25),
    "schedule": {"epochs": 1, "batch": 3},
    "device": "cpu",
    "quiet": True,
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def certify(model=None, images=IMAGES, labels=LABELS, **options) -> pd.DataFrame:
    return smoothadv.certify(model or network(), images, labels, **{**QUICK, **options})


@pytest.fixture(scope="module")
def expected() -> pd.DataFrame:
    return certify()


class Items(Dataset):
    """The images one by one, as NumPy arrays, with these items in place of some; and with
    ``other`` in place of image 5 every second time that it is read.
    """

    def __init__(self, replaced: dict[int, object], other: object = None) -> None:
        self.items = {index: (IMAGES[index], LABELS[index]) for index in range(COUNT)} | replaced
        self.other = other

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int):
        if index == COUNT - 1 and self.other is not None:
            self.items[index], self.other = self.other, self.items[index]
        return self.items[index]


class Reused(Items):
    """Puts each image into the memory of the one before."""

    memory = np.empty_like(IMAGES[0])

    def __getitem__(self, index: int):
        self.memory[:] = IMAGES[index]
        return self.memory, LABELS[index]


PAIRS = TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS))
SAME = {
    "float64": lambda: (IMAGES.astype(np.float64), LABELS.tolist()),
    "tensors": lambda: PAIRS.tensors,
    "loader": lambda: (DataLoader(PAIRS, batch_size=4),),
    "read-only images": lambda: (
        np.frombuffer(IMAGES.tobytes(), np.float32).reshape(IMAGES.shape),
        LABELS,
    ),
    "images reversed twice": lambda: (np.ascontiguousarray(IMAGES[:, :, ::-1])[:, :, ::-1], LABELS),
    "images in Fortran's order": lambda: (np.asfortranarray(IMAGES), LABELS),
    "labels as bool": lambda: (IMAGES, LABELS.astype(bool)),
    "labels as bool tensor": lambda: (IMAGES, torch.tensor(LABELS).bool()),
    "labels as uint8 tensor": lambda: (IMAGES, torch.tensor(LABELS).to(torch.uint8)),
    "labels as uint16": lambda: (IMAGES, LABELS.astype(np.uint16)),
    "labels as uint64": lambda: (IMAGES, LABELS.astype(np.uint64)),
    "loader of one memory": lambda: (
        DataLoader(
            Reused({}),
            collate_fn=lambda pairs: [torch.as_tensor(part)[None] for part in pairs[0]],
        ),
    ),
    "loader in order": lambda: (DataLoader(PAIRS, batch_size=4, sampler=[*range(COUNT)]),),
    "loader of a share": lambda: (
        DataLoader(PAIRS, sampler=DistributedSampler(PAIRS, 1, 0, shuffle=False)),
    ),
    "of other processors": lambda: (IMAGES.astype(">f4"), LABELS.astype(">i8")),
}


@pytest.mark.parametrize("kind", SAME)
def test_images_and_labels_of_any_kind_are_the_same(kind, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = smoothadv.certify(network(), *SAME[kind](), **QUICK)
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize(
    "item",
    [
        lambda image, label: (image, label),
        lambda image, label: {"label": label, "id": 7, "image": image},
        lambda image, label: {"pixels": image, "width": 6, "target": torch.tensor(label)},
    ],
)
def test_pictures_of_pillow_in_pairs_or_dicts_are_images_of_8_bits(item):
    levels = [*zip(LEVELS / np.float32(255), LABELS.tolist())]
    pictures = [
        item(Image.fromarray(LEVELS[index, 0]), label) for index, (_, label) in enumerate(levels)
    ]
    found, expected = (
        certify(images=Items(dict(enumerate(items))), labels=None) for items in (pictures, levels)
    )
    pd.testing.assert_frame_equal(found, expected)


def test_a_dataset_may_put_each_image_into_the_memory_of_the_one_before():
    found, expected = (certify(images=kind({}), labels=None) for kind in (Reused, Items))
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize("function", [smoothadv.certify, smoothadv.predict])
@pytest.mark.parametrize(
    "other", [(IMAGES[5, ..., ::-1].copy(), LABELS[5]), (IMAGES[5], 1 - LABELS[5])]
)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (11, 3)])
def test_images_or_labels_that_change_are_refused(function, other, before, after, tmp_path):
    changing = ConcatDataset([*[PAIRS] * before, Items({}, other), *[PAIRS] * after])
    options, place = {"sigma": 0.25, "n": 50, "log": tmp_path / "log.tsv"}, COUNT * before + 5
    for images, one in (
        (changing, f"image {place} of 'images'"),
        (DataLoader(changing), f"batch {place} of the"),
    ):
        with pytest.raises(UserError, match=f"{one}.* is another one each time it is read"):
            function(network(), images, **options, device="cpu")
    assert not list(tmp_path.iterdir())


def test_training_images_may_change_and_the_run_is_continued(tmp_path):
    for epochs in (1, 2):
        options = {**TRAINING, "schedule": {"epochs": epochs, "batch": 3}, "outdir": tmp_path}
        with pytest.warns(DoubtfulWarning, match="a resumed run ends with other weights"):
            result = smoothadv.train(network(), Items({}, PAIRS[0]), **options)
        assert len(result.history) == epochs


def test_numbers_of_numpy_and_whole_floats_are_numbers(tmp_path, expected):
    given = {
        "n": 5e1,
        "n0": np.int64(10),
        "sigma": np.float32(0.25),
        "seed": np.int32(0),
        "skip": np.int64(1),
    }
    log = tmp_path / "log.tsv"
    pd.testing.assert_frame_equal(certify(log=log, **given), expected)
    before = log.read_bytes()
    certify(log=log)
    assert log.read_bytes() == before, "the same settings"


@pytest.mark.parametrize("labels", [["cat", "dog"], [], 3, None, {"a": 1}, [[1], [2, 3]]])
def test_a_dataset_may_call_anything_its_labels(labels):
    dataset = TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS))
    dataset.labels = labels
    assert len(certify(images=dataset, labels=None, limit=2)) == 2


SORTED = np.sort(LABELS)


@pytest.mark.parametrize(
    ("labels", "options", "warned"),
    [
        (SORTED, {"limit": 3}, False),
        (np.repeat(0, COUNT), {"limit": 3}, False),
        (np.array([0] * 5 + [1]), {}, False),
        (np.array([0, 0, 0, 1, 1, 1]), {"limit": 4}, False),
        (np.array([0, 0, 0, 1, 2, 3]), {"limit": 3}, True),
        (np.array([0, 0, 0, 1, 2, 3]), {"limit": 3, "skip": 2}, False),
    ],
)
def test_the_first_images_of_sorted_classes_are_warned_of(labels, options, warned):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        certify(model, labels=labels, **options)
    words = "--max takes 3 images of 1 of 4 classes: --skip 2 takes as many"
    assert any(words in str(one.message) for one in caught) == warned


REFUSED = {
    "uint8": ((IMAGES * 255).astype(np.uint8), LABELS, "found uint8, expected float32 in"),
    "grey levels": (IMAGES * 255, LABELS, "expected \\[0, 1\\].*divide grey levels by 255"),
    "standardized": ((IMAGES - 0.5) / 0.25, LABELS, "put normalization into the model"),
    "not a number": (np.where(IMAGES > 0.9, np.nan, IMAGES), LABELS, "values from nan to nan"),
    "one image": (IMAGES[0], None, "shape \\[1, 6, 6\\]: give a batch"),
    "channels last": (IMAGES.transpose(0, 2, 3, 1), LABELS, "channels last"),
    "no images": (IMAGES[:0], LABELS[:0], "there are no images"),
    "smaller images": (
        IMAGES[:, :, :5],
        LABELS,
        "cannot be applied to images of shape \\[1, 5, 6\\]",
    ),
    "list": ([1, 2], None, "images are a list"),
    "generator": (iter(IMAGES), None, "images are a"),
    "no labels": (IMAGES, None, "images without labels"),
    "fewer labels": (IMAGES, LABELS[:3], "labels are torch.int64 \\[3\\], expected 6 whole"),
    "labels between": (IMAGES, LABELS + 0.5, "labels are torch.float64"),
    "label above": (IMAGES, LABELS + 1, "image 1 has the label 2, .* from 0 to 1"),
    "label below": (IMAGES, LABELS - 1, "image 0 has the label -1"),
    "words": (
        IMAGES,
        list("abcdef"),
        "labels: found a list, expected a tensor or array of numbers",
    ),
    "labels beside a loader": (DataLoader(PAIRS), LABELS, "a DataLoader has its own labels"),
    "shuffling": (DataLoader(PAIRS, shuffle=True), None, "shuffle=False"),
    "shuffling shares": (
        DataLoader(PAIRS, sampler=DistributedSampler(PAIRS, 2, 0)),
        None,
        "the DataLoader shuffles",
    ),
    "random subset": (
        DataLoader(PAIRS, sampler=SubsetRandomSampler([1, 2])),
        None,
        "the DataLoader shuffles",
    ),
    "masked images": (np.ma.masked_equal(IMAGES, IMAGES.max()), LABELS, "a masked array"),
    "masked labels": (IMAGES, np.ma.masked_equal(LABELS, LABELS[0]), "a masked array"),
    "empty loader": (
        DataLoader(TensorDataset(torch.tensor(IMAGES[:0]), torch.tensor(LABELS[:0]))),
        None,
        "the DataLoader has no batches",
    ),
    "no batches": (
        DataLoader(PAIRS, batch_size=None),
        None,
        "batches of the DataLoader cannot be joined",
    ),
    "dict": (
        Items({0: {"image": 0, "label": 0}}),
        None,
        "item 0 of the dataset is a dict of image, label, expected \\(image, label\\), or a dict",
    ),
    "dict of two labels": (Items({2: {"img": IMAGES[2], "target": 0, "y": 1}}), None, "item 2"),
    "dict of two labels and no image": (Items({2: {"class": 0, "y": 1}}), None, "item 2"),
    "dict of a width": (Items({2: {"img": IMAGES[2], "width": 1}}), None, "of img, width, exp"),
    "dict of bytes": (Items({0: {"image": b"", "label": 0}}), None, "bytes in 'image': .*cast_col"),
    "dict of a file": (Items({0: {"png": {"bytes": b""}, "label": 0}}), None, "bytes in 'png'"),
    "table": (pd.DataFrame({"image": [b""], "label": [0]}), LABELS, "a DataFrame: give an array"),
    "dict of splits": ({"test": Items({})}, None, "images are a dict: give its 'test', a"),
    "picture of floats": (
        Items({0: (Image.fromarray(IMAGES[0, 0]), 0)}),
        None,
        "image 0: found a Image",
    ),
    "image alone": (Items({4: IMAGES[4]}), None, "item 4 of the dataset is a ndarray"),
    "another size": (Items({2: (IMAGES[2][:, 1:], 0)}), None, "image 2 has shape"),
    "grey levels in a dataset": (Items({3: (IMAGES[3] * 255, 0)}), None, "image 3: found values"),
    "label between": (Items({0: (IMAGES[0], 0.5)}), None, "image 0 has the label 0.5"),
    "infinite label": (Items({0: (IMAGES[0], float("inf"))}), None, "image 0 has the label inf"),
    "one-hot": (Items({0: (IMAGES[0], torch.eye(2)[0])}), None, "expected a whole number"),
}


@pytest.mark.parametrize(("images", "labels", "message"), REFUSED.values(), ids=REFUSED)
def test_images_and_labels_that_are_none_are_refused_in_one_line(images, labels, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        certify(images=images, labels=labels, log=tmp_path / "log.tsv")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_refused_call_leaves_the_log_open_to_the_next_one(tmp_path):
    log = tmp_path / "log.tsv"
    certify(log=log, limit=4)
    with pytest.raises(
        UserError, match="it holds example 3"
    ) as kept:  # and with it the frames of the call
        certify(log=log, limit=3)
    assert len(certify(log=log)) == COUNT and kept


class Stochastic(nn.Module):
    """Drops pixels, also in eval mode; its ``train`` does not return it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(nn.functional.dropout(images, 0.5))

    def train(self, mode: bool = True) -> None:
        super().train(mode)


class Casting(Stochastic):
    """Chooses its type itself."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images.double())


def test_modules_that_are_no_function_of_one_image_are_warned_about():
    batch_statistics = nn.Sequential(
        nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten(), nn.Linear(36, 2)
    )
    for module in (Stochastic(), batch_statistics):
        with pytest.warns(
            DoubtfulWarning, match="depend on the other images in a batch, or on chance"
        ) as told:
            certify(module, limit=1)
        assert {one.filename for one in told} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certify(limit=1)


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(network().eval(), torch.tensor(IMAGES[:1]))


def exported() -> nn.Module:
    return torch.export.export(network(), (torch.tensor(IMAGES[:2]),)).module()


FROZEN = "cannot be put in eval mode without gradients: give"
NO_VOTERS = {
    "casting": (
        lambda: Casting().double(),
        "Casting does not run with weights and images of torch.float32",
    ),
    "half": (lambda: network().half(), r"float32 in \[0, 1\]: .*: call its \.float\(\)"),
    "traced": (traced, "is TorchScript"),
    "scripted": (lambda: torch.jit.script(network()), FROZEN),
    "exported": (exported, FROZEN),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), FROZEN),
    "one logit": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 1)),
        "returns one logit; votes .* let it return two",
    ),
}


@pytest.mark.parametrize(("make", "message"), NO_VOTERS.values(), ids=NO_VOTERS)
def test_modules_that_cannot_vote_are_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message):
        certify(make())


def test_a_module_that_cannot_be_copied_is_trained_and_else_refused(tmp_path):
    model = network()
    model.lock = Lock()
    smoothadv.train(model, IMAGES, LABELS, outdir=tmp_path / "run", **TRAINING)
    with pytest.raises(UserError, match="Sequential cannot be copied: .*lock.*; make it in a"):
        certify(model)


MODES = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "on meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    assert torch.get_default_dtype() == dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_notebook_has_set_changes_nothing(mode):
    def rows(model) -> pd.DataFrame:
        attacked = smoothadv.attack(model, IMAGES, LABELS, attack=PGD(0.5, 2), sigma=0.25, n=50)
        return pd.concat([attacked, certify(model, n=2000)])

    model = network()
    expected = rows(model)
    with MODES[mode]():
        found = rows(network() if mode == "inference" else model)
    pd.testing.assert_frame_equal(found, expected)


class WithState(nn.ReLU):
    """Prints its address and has a state that is no tensor."""

    def __init__(self, state: str) -> None:
        super().__init__()
        self.state = state

    def extra_repr(self) -> str:
        return object.__repr__(self)

    def get_extra_state(self) -> dict[str, str]:
        return {"state": self.state}


def test_the_digest_of_a_module_is_that_of_its_content():
    modules = [WithState(state) for state in ("a", "a", "b")]
    one, same, other = (digest_of([repr(module), module.state_dict()]) for module in modules)
    assert one == same != other


@dataclass
class Output:
    logits: torch.Tensor


class Wrapped(nn.Module):
    """A network in a submodule called module, as DataParallel has one, whose logits are wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.module = network()

    def forward(self, images: torch.Tensor) -> Output:
        return Output(self.module(images))


def test_a_module_that_returns_an_object_is_trained_and_continued(tmp_path):
    objective = SmoothAdv(attack=PGD(0.5, 2), noise_sd=0.25, num_noise_vec=2, warmup=0)

    def trained(folder: str, epochs: int, kind: type = Wrapped, **further: str) -> Wrapped:
        model, schedule = kind(), {"epochs": epochs, "batch": 3}
        options = {**TRAINING, "objective": objective, "schedule": schedule, **further}
        result = smoothadv.train(model, IMAGES, LABELS, outdir=tmp_path / folder, **options)
        assert result.model is not None and len(result.history) == epochs
        return model

    weights = trained("at once", 2).state_dict()
    trained("continued", 1)
    continued = trained("continued", 2)
    assert all(value.equal(weights[name]) for name, value in continued.state_dict().items())
    assert not weights["module.0.weight"].equal(network()[0].weight), "it has learned something"
    assert isinstance(continued(torch.tensor(IMAGES)), Output)
    checkpoint = tmp_path / "continued" / "checkpoint.pth.tar"
    Wrapped().load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    with pytest.raises(UserError, match="load its state_dict into that module"):
        certify(checkpoint)
    log = (tmp_path / "continued" / "log.txt").read_text().splitlines()
    assert len(log) == 3 and log[0].startswith("epoch\t")
    with pytest.raises(UserError, match="cannot resume: the checkpoint is of another module"):
        trained("at once", 3, kind=_RenamedWrapped)
    with pytest.raises(UserError, match='add existing="resume" to .*, existing="overwrite" to'):
        trained("at once", 3, existing="refuse")


class _RenamedWrapped(Wrapped):
    """Another network under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))


_RenamedWrapped.__qualname__ = Wrapped.__qualname__


def test_an_architecture_is_trained_on_arrays_and_certified(tmp_path):
    """A constant channel is not divided by its deviation."""
    images = np.random.default_rng(1).random((COUNT, 2, 8, 8), dtype=np.float32)
    images[:, 1] = 0.25
    about = {"num_classes": CLASSES, "outdir": tmp_path, **TRAINING}
    smoothadv.train("digits_resnet8", images, LABELS, **about)
    path = tmp_path / "checkpoint.pth.tar"
    saved = torch.load(path, weights_only=True)
    assert saved["mean"] == pytest.approx([images[:, 0].mean(), 0.25])
    assert saved["std"] == pytest.approx([images[:, 0].std(), 1.0])
    assert len(certify(path, images, LABELS)) == COUNT


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"objective": "Gaussian"},
            UserError,
            "found 'Gaussian', expected an object like smoothadv.objectives",
        ),
        ({"schedule": {"lr": 1}}, UserError, "schedule: found 'lr', expected epochs, batch"),
        ({"epoks": 3}, TypeError, "unexpected keyword argument 'epoks'"),
        ({"input_layer": "center"}, UserError, "leave pretrained_model, input_layer and lora out"),
        ({"model": nn.Flatten()}, UserError, "there is nothing to train"),
        (
            {"model": torch.inference_mode()(network)()},
            UserError,
            "or was made in inference mode: there is nothing to train",
        ),
        ({"images": "digits"}, UserError, "labels and test images of its own"),
        ({"test_labels": LABELS}, UserError, "test_labels without test"),
        ({"schedule": {5: 1, "lr": 1}}, UserError, "schedule: found 5, expected epochs"),
        ({"model": 5}, UserError, "the model is a int"),
        (
            {"device": 2**70},
            UserError,
            "found 1180591620717411303424, '\\d+' is no device",
        ),
        ({"arguments": {}}, TypeError, "unexpected keyword argument 'arguments'"),
    ],
)
def test_trainings_that_make_no_sense_are_refused(options, error, message, tmp_path):
    given = {
        "model": network(),
        "images": IMAGES,
        "labels": LABELS,
        "outdir": tmp_path / "run",
        **TRAINING,
        **options,
    }
    with pytest.raises(error, match=message):
        smoothadv.train(**given)
    assert not (tmp_path / "run").exists()


def test_a_training_does_not_replace_its_teacher(checkpoints, tmp_path):
    teacher = tmp_path / "checkpoint.pth.tar"
    teacher.write_bytes(checkpoints["gaussian"].read_bytes())
    with pytest.raises(UserError, match="is what this training writes: name another folder"):
        smoothadv.train(
            "digits_resnet8",
            "digits",
            objective=Distillation(noise_sd=0.25),
            teacher=teacher,
            outdir=tmp_path,
            existing="overwrite",
        )
    assert teacher.read_bytes() == checkpoints["gaussian"].read_bytes()
