"""npz:FILE and hf-dataset:PATH: the images and labels that were stored, of one size or prepared,
or what is wrong.
"""

import io
import os
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from smoothadv.base.errors import DoubtfulWarning
from smoothadv.datasets import SPLITS, get_dataset
from smoothadv.datasets.preparation import Preparation
from smoothadv.datasets.sources.hf_dataset import _rows
from smoothadv.datasets.sources.npz import _levels, _Pictures
from support.image_files import assert_holds
from support.refusals import refusal

COLOURS = np.random.default_rng(1).integers(0, 256, (6, 12, 10, 3), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 2, 0, 1])
FORMS = {
    "channels last": (COLOURS, LABELS),
    "channels first, as floats": ((COLOURS / 255).astype(np.float32).transpose(0, 3, 1, 2), LABELS),
    "grey, a column of labels": (COLOURS[..., 0], LABELS[:, None].astype(np.uint8)),
}


@pytest.mark.parametrize("images, labels", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("names", ["x_{}:y_{}", "{}_images:{}_labels"])
def test_npz_has_the_images_and_labels_that_were_stored(tmp_path, images, labels, names):
    train, test = (names.replace("{}", split).split(":") for split in SPLITS)
    np.savez_compressed(tmp_path / "a.npz", **dict(zip(train + test, [images, labels] * 2)))
    expected = COLOURS[..., :1] if images.ndim == 3 else COLOURS
    for split in SPLITS:
        dataset = get_dataset(f"npz:{tmp_path}/a.npz", split)
        assert_holds(dataset, expected.transpose(0, 3, 1, 2), LABELS)
        assert dataset.description.mean == pytest.approx((expected / 255).mean((0, 1, 2)), abs=1e-4)
        assert dataset.description.class_names == ("0", "1", "2")
    prepared = get_dataset(f"npz:{tmp_path}/a.npz@8", "test")
    pixels = np.broadcast_to(expected[3], (12, 10, 3))
    assert torch.equal(
        prepared[3][0] * 255, Preparation(8).evaluation(Image.fromarray(pixels.copy())).float()
    )
    assert prepared.fingerprint() != dataset.fingerprint()


def test_floating_point_pixels_are_rounded_to_levels():
    assert _levels(np.float32([0, 0.4, 0.6, 253.6, 255]) / 255).tolist() == [0, 0, 1, 254, 255]
    # However they were divided: on GPUs by a product with the rounded 1/255.
    assert 1 == len(
        {
            _Pictures(images, LABELS, 3).digest()
            for images in (COLOURS, COLOURS / np.float32(255), COLOURS * np.float32(1 / 255))
        }
    )


UNFIT = {
    "no such names": ({"pixels": COLOURS}, "pixels"),
    "no labels": ({"images": COLOURS}, "labels"),
    "labels of other images": ({"images": COLOURS, "labels": LABELS[:5]}, "expected 6"),
    "labels below 0": ({"images": COLOURS, "labels": LABELS - 1}, "it has values from -1 to 1"),
    "no class": ({"images": COLOURS, "labels": LABELS + 10**9}, "to 99999"),
    "levels as floats": (
        {"images": COLOURS.astype(np.float32), "labels": LABELS},
        f"it has values from {COLOURS.min()} to {COLOURS.max()}",
    ),
    "five channels": (
        {"images": np.zeros((6, 5, 8, 8), np.uint8), "labels": LABELS},
        "[6, 5, 8, 8]",
    ),
    "objects": ({"images": np.array([{}] * 6), "labels": LABELS}, "Object arrays"),
}


@pytest.mark.parametrize("arrays, names", UNFIT.values(), ids=UNFIT)
def test_npz_that_does_not_fit_is_refused(tmp_path, arrays, names):
    np.savez(tmp_path / "a.npz", **arrays)
    assert names in refusal(get_dataset, f"npz:{tmp_path}/a.npz", "test", names=tmp_path / "a.npz")


def test_npz_that_is_none_or_has_no_training_images_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("text.npz", "missing.npz", "."):
        refusal(get_dataset, f"npz:{tmp_path / name}", "test", names=tmp_path / name)
    np.savez_compressed(
        tmp_path / "a.npz", images=np.zeros((90, 99, 99), np.uint8), labels=np.zeros(90, int)
    )
    assert len(get_dataset(f"npz:{tmp_path}/a.npz", "test")) == 90
    assert "x_train or train_images" in refusal(get_dataset, f"npz:{tmp_path}/a.npz", "train")


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Saves images and labels as the package datasets does, in splits of these names; returns
    the dataset's name.
    """
    # This folder can be imported as `datasets` too.
    pytest.importorskip("datasets.features", reason="the package datasets is not installed")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def save(*splits: str, images=COLOURS, label=None, image=None) -> str:
        columns = {
            "picture": image or datasets.Image(),
            "label": label or datasets.ClassLabel(names=["x", "y", "z"]),
        }
        rows = {"picture": [Image.fromarray(each) for each in images], "label": LABELS.tolist()}
        table = datasets.Dataset.from_dict(rows, features=datasets.Features(columns))
        (datasets.DatasetDict(dict.fromkeys(splits, table)) if splits else table).save_to_disk(
            tmp_path / "saved"
        )
        return f"hf-dataset:{tmp_path / 'saved'}"

    yield save
    _rows.cache_clear()


def test_hf_dataset_has_the_images_that_were_saved(saved):
    name = saved("train", "validation")
    for split in SPLITS:
        dataset = get_dataset(name, split)
        assert_holds(dataset, COLOURS.transpose(0, 3, 1, 2), LABELS)
    assert _rows(name.partition(":")[2])["test"].name.endswith("split validation, row ")
    description = dataset.description
    assert description.class_names == ("x", "y", "z") and description.image_shape == (3, 12, 10)
    assert description.mean == pytest.approx((COLOURS / 255).mean((0, 1, 2)), abs=1e-4)
    prepared = get_dataset(f"{name}@8", "test")
    assert torch.equal(
        prepared[3][0] * 255, Preparation(8).evaluation(Image.fromarray(COLOURS[3])).float()
    )
    assert (
        prepared.fingerprint()
        == get_dataset(f"{name}@8", "train").fingerprint()
        != dataset.fingerprint()
    )


def test_hf_dataset_of_several_sizes_is_prepared_and_one_table_is_for_testing(saved):
    name = saved(images=[COLOURS[0], *COLOURS[1:, :9]])
    images = get_dataset(f"{name}@8", "test")
    assert images[1][0].shape == (3, 8, 8) and len(images) == 6
    assert "write @224 behind" in refusal(get_dataset(name, "test").__getitem__, 1, names="row 1")
    assert "no train images" in refusal(get_dataset, name, "train")


def test_hf_dataset_prefers_test_images_and_each_has_a_label(saved, monkeypatch):
    assert _rows(saved("test", "validation").partition(":")[2])["test"].name.endswith(
        "split test, row "
    )
    _rows.cache_clear()
    monkeypatch.setitem(globals(), "LABELS", np.array([0, 2, -1, 2, 0, 1]))
    assert "no label" in refusal(get_dataset, saved("test"), "test", names="row 2")


@pytest.mark.parametrize("labels", [[-1] * 6, None])
def test_hf_dataset_whose_test_images_have_no_labels_is_tested_on_others(saved, tmp_path, labels):
    import datasets

    tables = datasets.load_from_disk(saved("train", "validation").partition(":")[2])
    tables["test"] = tables["train"].remove_columns("label")
    if labels:
        tables["test"] = tables["test"].add_column("label", labels).cast(tables["train"].features)
    name = f"hf-dataset:{tmp_path / 'hub'}"
    tables.save_to_disk(tmp_path / "hub")
    assert get_dataset(name, "test").labels.tolist() == LABELS.tolist()
    if labels:
        tables.pop("validation")
        tables.save_to_disk(tmp_path / "two")
        name = f"hf-dataset:{tmp_path / 'two'}"
        assert get_dataset(name, "train").labels.tolist() == LABELS.tolist()
        assert "no label" in refusal(get_dataset, name, "test", names="split test, row 0")


PIXELS = torch.tensor(COLOURS).permute(0, 3, 1, 2)


def png(pixels: np.ndarray) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


COLUMNS = {
    "numbers": (LABELS.tolist(), ("0", "1", "2"), LABELS),
    "numbers with gaps": ([0, 11, 2, 11, 0, 2], tuple(map(str, range(12))), [0, 11, 2, 11, 0, 2]),
    "texts": (["b", "c", "a", "c", "b", "a"], ("a", "b", "c"), [1, 2, 0, 2, 1, 0]),
}


@pytest.mark.parametrize("image", [png, lambda pixels: {"bytes": png(pixels), "path": None}])
@pytest.mark.parametrize("values, names, labels", COLUMNS.values(), ids=COLUMNS)
def test_file_of_parquet_without_types_of_the_package(
    saved, tmp_path, image, values, names, labels
):
    columns = {"image": [image(each) for each in COLOURS], "label": values, "kind": values}
    pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    for name in ("a.parquet", "a.parquet:kind"):
        dataset = get_dataset(f"hf-dataset:{tmp_path}/{name}", "test")
        assert dataset.description.class_names == names and dataset.labels.tolist() == list(labels)
        assert torch.equal(dataset[4][0] * 255, PIXELS[4])


@pytest.mark.parametrize("is_folder", [False, True])
def test_content_of_the_same_time_is_read_anew(saved, tmp_path, is_folder):
    file = tmp_path / "new" / "test.parquet"
    file.parent.mkdir()
    for labels in (LABELS, LABELS[::-1]):
        pd.DataFrame({"image": [*map(png, COLOURS)], "label": labels}).to_parquet(file)
        os.utime(file, (10**9, 10**9))
        _rows.cache_clear()
        dataset = get_dataset(f"hf-dataset:{file.parent if is_folder else file}", "test")
        assert [*dataset.labels] == labels.tolist()


def test_labels_that_begin_at_1_are_doubted_where_the_user_asked(tmp_path):
    np.savez(tmp_path / "a.npz", images=COLOURS, labels=LABELS + 1)
    with pytest.warns(DoubtfulWarning, match="no image is of class 0 among 4 classes") as caught:
        get_dataset(f"npz:{tmp_path}/a.npz", "test")
    assert caught[0].filename == __file__


def test_repository_of_the_hub_with_several_columns_of_labels(saved, tmp_path):
    import datasets

    fine, coarse = (datasets.ClassLabel(names=names) for names in ("xyz", "pqr"))
    table = datasets.load_from_disk(saved("test").partition(":")[2])["test"]
    table = table.rename_column("label", "fine_label").cast_column("fine_label", fine)
    table = table.add_column("coarse_label", [*LABELS[::-1].tolist()]).cast_column(
        "coarse_label", coarse
    )
    root = tmp_path / "clone"
    for split in SPLITS:
        table.to_parquet(root / f"data/{split}-00000-of-00001.parquet")
    (root / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "coarse_label: ClassLabel" in refusal(get_dataset, f"hf-dataset:{root}", "test")
    for column, names, labels in (("fine", "xyz", LABELS), ("coarse", "pqr", LABELS[::-1])):
        for split in SPLITS:
            dataset = get_dataset(f"hf-dataset:{root}:{column}_label@8", split)
            assert dataset.description.class_names == tuple(names)
            assert dataset.labels == labels.tolist() and dataset[1][0].shape == (3, 8, 8)


def test_hf_dataset_that_does_not_fit_is_refused(saved, tmp_path, monkeypatch):
    import datasets

    name = saved("test", label=datasets.Value("float64"))
    for column in ("", ":picture", ":other"):
        message = refusal(get_dataset, name + column, "test", names=name)
        assert "label: Value('float64')" in message and "hf-dataset:PATH:COLUMN" in message
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    _rows.cache_clear()
    refusal(get_dataset, name, "test", names=name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'smoothadv[datasets]'" in refusal(get_dataset, "hf-dataset:other", "test")
