"""Preparations: what their text means, and that their pixels are those of torchvision, timm and
transformers.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from smoothadv.datasets import get_dataset
from smoothadv.datasets.preparation import (
    INTERPOLATIONS,
    SQUASH,
    Preparation,
    split_location,
)
from support.image_files import random_image, save_image
from support.refusals import refusal

SHAPES = [(50, 70), (71, 48), (20, 33), (40, 40)]  # height and width; one is enlarged


def picture(height: int, width: int) -> Image.Image:
    """Large shapes with sharp edges and some noise, as photographs have."""
    blocks = np.kron(
        random_image(1, 5, 5), np.ones((height // 5 + 1, width // 5 + 1, 1), dtype=np.uint8)
    )
    return Image.fromarray(blocks[:height, :width] // 2 + random_image(2, height, width) // 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("resize", [36, 40, SQUASH])
def test_pixels_are_those_of_torchvision_and_timm(shape, interpolation, resize):
    create_transform = pytest.importorskip(
        "timm.data", reason="timm is not installed"
    ).create_transform
    image, mode = picture(*shape), InterpolationMode(interpolation)
    found = Preparation(32, resize, interpolation).evaluation(image)
    steps = [
        v2.Resize((32, 32) if resize == SQUASH else resize, mode),
        v2.CenterCrop(32),
        v2.PILToTensor(),
    ]
    assert found.dtype == torch.uint8 and torch.equal(found, v2.Compose(steps)(image))
    crop = (
        {"crop_mode": "squash", "crop_pct": 1.0}
        if resize == SQUASH
        else {"crop_pct": {36: 0.875, 40: 0.8}[resize]}
    )
    of_timm = create_transform(
        32, is_training=False, interpolation=interpolation, normalize=False, **crop
    )
    assert torch.equal(found, of_timm(image))


MEANT = {
    "224": Preparation(224, None),
    "224,235": Preparation(224, 235),
    "224,235,bicubic": Preparation(224, 235, "bicubic"),
    "224,squash": Preparation(224, SQUASH),
}


@pytest.mark.parametrize("text", MEANT)
def test_name_and_preparation_are_each_others_inverse(text):
    assert split_location(f"photos@{text}") == ("photos", MEANT[text])
    assert str(MEANT[text]) == text
    assert Preparation(224).shorter_side == 256 and MEANT["224,squash"].shorter_side is None


@pytest.mark.parametrize(
    "text", ["0", "224,200", "224,235,cubic", "224,,bicubic", "224x224", "100000"]
)
def test_preparation_that_cannot_be_meant_is_refused(text):
    assert "224,256,bicubic" in refusal(split_location, f"photos@{text}", names=f"'{text}'")


@pytest.mark.parametrize("path", ["me@home", "backup@2/photos", "plain", "photos@224"])
def test_paths_are_no_preparations(path, workplace):
    (workplace / "photos@224").mkdir()
    assert split_location(path) == (path, None)


def test_line_of_pixels_that_would_fill_the_memory_is_refused(tmp_path):
    thin = save_image(tmp_path / "ant" / "thin.png", np.zeros((1, 9000, 3), dtype=np.uint8))
    dataset = get_dataset(f"imagefolder:{tmp_path}@224", "test")
    assert "9000x1 pixels" in refusal(dataset.__getitem__, 0, names=thin)
    assert get_dataset(f"imagefolder:{tmp_path}@224,squash", "test")[0][0].shape == (3, 224, 224)
