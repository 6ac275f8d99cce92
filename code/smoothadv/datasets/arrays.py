"""Images and labels in arrays, as files hold them: checked, and in one layout."""

import numpy as np

from smoothadv.datasets import DatasetDescription

MOST_CLASSES = 100_000


def checked_arrays(
    images: np.ndarray, labels: np.ndarray, *names: str, of: DatasetDescription | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 or float32 [N, C, H, W], and labels, int64 [N]; ValueError where they cannot be
    meant, or are not uint8 images of the shape and labels of the classes in ``of``. Labels may be a
    column, as those of MedMNIST.
    """
    shape, kind = list(images.shape), images.dtype
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    is_level = kind == np.uint8 or (
        kind == np.float32 and images.size and images.min() >= 0 and images.max() <= 1
    )
    if not (is_level and images.size and images.ndim == 4 and images.shape[1] in (1, 3)):
        raise ValueError(
            f"{names[0]} is {kind} {shape}, expected [N, H, W, C] or [N, C, H, W] of 1 or 3 "
            f"channels, uint8 or float32 in [0, 1]{_range(images)}"
        )
    is_number = labels.shape in ((len(images),), (len(images), 1)) and labels.dtype.kind in "iu"
    if not (is_number and 0 <= labels.min() <= labels.max() < MOST_CLASSES):
        raise ValueError(
            f"{names[1]} is {labels.dtype} {list(labels.shape)}, expected "
            f"{len(images)} whole numbers from 0 to {MOST_CLASSES - 1}{_range(labels)}"
        )
    if of is not None and (kind != np.uint8 or images.shape[1:] != of.image_shape):
        raise ValueError(
            f"{names[0]} is {kind} {list(images.shape)}, [N, C, H, W]; {of.name} needs uint8 "
            f"[N, {', '.join(map(str, of.image_shape))}]"
        )
    if of is not None and labels.max() >= of.num_classes:
        raise ValueError(
            f"{names[1]} has the label {labels.max()}; {of.name} has the classes 0 to "
            f"{of.num_classes - 1}"
        )
    return np.ascontiguousarray(images), labels.reshape(-1).astype(np.int64)


def _range(values: np.ndarray) -> str:
    if not values.size or values.dtype.kind not in "iuf":
        return ""
    return f"; it has values from {values.min():g} to {values.max():g}"
