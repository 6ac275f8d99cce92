"""Adversarial examples on the disk: a spool while the log is written, then a compressed archive;
pictures. No torch.

While a log is written, its spool (``records.spool_path``), a file beside it, grows by one record
per row: the index, the image and the adversarial image, float32. From the spool of a whole log
``pack`` makes ``records.examples_path``, a compressed NumPy archive of arrays with one entry per
row, in the order of the indices.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from smoothadv.base.errors import UserError
from smoothadv.base.files import append_whole, read_array_header, write_atomically
from smoothadv.records.logs import examples_path, pictures_folder, spool_path
from smoothadv.records.readers import read_examples, read_prediction_log

if TYPE_CHECKING:
    from PIL import Image

_LONGEST_HEADER = 1000
_SMALLEST_SIDE = 128
_MARGIN = 6
_CAPTION = 30
_COPIED = ("label", "predict", "epsilon", "attack_norm", "target", "certified", "radius", "flipped")


class Spool:
    """Saves the images of a log that is being written; ``done`` are the examples whose rows the log
    has.

    The file is opened at the first ``append``. UserError where the log has rows whose images are
    missing.
    """

    def __init__(self, log: Path, shape: Sequence[int], done: set[int]) -> None:
        self.log, self.path, self.dtype, self.done = log, spool_path(log), _record_type(shape), done
        self._header = (json.dumps({"shape": list(shape)}) + "\n").encode()
        self._file: IO[bytes] | None = None
        if done and not self.path.exists() and not examples_path(log).exists():
            raise UserError(
                f"cannot resume {log}: its adversarial examples, {examples_path(log)}, are "
                "missing; --overwrite starts anew"
            )

    def append(self, index: int, image: np.ndarray, adversarial: np.ndarray) -> None:
        """Write one example, two images float32 [C, H, W], to the disk."""
        if self._file is None:
            self._file = self._opened()
        record = np.array([(index, image, adversarial)], dtype=self.dtype)
        append_whole(self._file, record.tobytes(), self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        """The open file, with the records of ``done`` and no others."""
        if not self.done:
            examples_path(self.log).unlink(missing_ok=True)
            self._rewrite([])
        elif not self.path.exists():
            self._rewrite(_archived_records(examples_path(self.log), self.dtype))
        found = _records(self.path, self.dtype)["idx"].tolist()
        kept = len(found)
        while kept and found[kept - 1] not in self.done:
            kept -= 1  # its row was never written, or torn
        os.truncate(self.path, len(self._header) + kept * self.dtype.itemsize)
        if set(found[:kept]) != self.done:
            raise UserError(
                f"cannot resume {self.log}: {self.path} does not fit it; --overwrite starts anew"
            )
        return self.path.open("ab", buffering=0)

    def _rewrite(self, records: Iterable[bytes]) -> None:
        write_atomically(
            self.path, lambda file: file.writelines(itertools.chain([self._header], records))
        )


def _record_type(shape: Sequence[int]) -> np.dtype:
    image = ("<f4", tuple(shape))
    return np.dtype([("idx", "<i8"), ("image", *image), ("adversarial", *image)])


def _records(path: Path, dtype: np.dtype | None = None) -> np.ndarray:
    """The complete records of a spool, mapped into memory; UserError if they are of another type
    than ``dtype``.
    """
    with path.open("rb") as file:
        header = file.readline(_LONGEST_HEADER)
    try:
        found = _record_type(json.loads(header)["shape"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # it is no such header
        found = None
    if found is None or (dtype is not None and found != dtype):
        raise UserError(
            f"{path} holds no adversarial examples of this log: remove it and use --overwrite"
        )
    count = (path.stat().st_size - len(header)) // found.itemsize
    # NumPy maps no empty file.
    return np.memmap(path, found, "r", len(header), (count,)) if count else np.empty(0, found)


def pack(log: Path, parts: Sequence[Path]) -> Path | None:
    """Make the archive of a whole ``log`` from the spools of the logs ``parts``: its shards, or the
    log itself.

    Returns the archive's path; None if there are neither spools nor an archive. An archive that an
    earlier run has completed is kept. Images are copied one by one, never all in memory. UserError
    where a row has no images.
    """
    spools = [spool_path(part) for part in parts if spool_path(part).exists()]
    archive = examples_path(log)
    if not spools:
        return archive if archive.exists() else None
    table = read_prediction_log(log)
    small = {name: table[name].to_numpy() for name in ("idx", *_COPIED) if name in table}
    if not _is_complete(archive, small):
        records = [_records(path) for path in spools]
        places = {
            index: (some, row) for some in records for row, index in enumerate(some["idx"].tolist())
        }
        missing = [index for index in table.idx.tolist() if index not in places]
        if missing:
            raise UserError(
                f"{log} has {len(table)} rows, of which {len(missing)} have no adversarial example"
            )
        ordered = [places[index] for index in table.idx.tolist()]
        shape = (len(table), *records[0].dtype["image"].shape)
        write_atomically(archive, lambda file: _write_archive(file, small, ordered, shape))
    for path in spools:
        path.unlink()
    return archive


def _is_complete(archive: Path, rows: dict[str, np.ndarray]) -> bool:
    """Whether an archive exists, can be read and has the same columns as the log's ``rows``."""
    try:
        found = read_examples(archive, ()) if archive.exists() else {}
    except UserError:
        return False
    return all(
        name in found and np.array_equal(found[name], column) for name, column in rows.items()
    )


def _write_archive(
    file: IO[bytes],
    small: dict[str, np.ndarray],
    ordered: Sequence[tuple[np.ndarray, int]],
    shape: tuple[int, ...],
) -> None:
    """Write what ``numpy.savez_compressed`` would write, with one image in memory at a time."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in small.items():
            with archive.open(f"{name}.npy", "w") as member:
                npy.write_array(member, array)
        for name in ("image", "adversarial"):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array_header_1_0(
                    member, {"descr": "<f4", "fortran_order": False, "shape": shape}
                )
                for records, row in ordered:
                    member.write(records[name][row].tobytes())


def _archived_records(path: Path, dtype: np.dtype) -> Iterator[bytes]:
    """The records in the archive of a finished log, to which further examples will be added."""
    arrays = read_examples(path, ())
    if arrays["image"].shape[1:] != dtype["image"].shape:
        raise UserError(f"{path} holds images of another shape: remove it and use --overwrite")
    size = 4 * math.prod(dtype["image"].shape)
    with (
        zipfile.ZipFile(path) as archive,
        archive.open("image.npy") as images,
        archive.open("adversarial.npy") as adversarial,
    ):
        (
            read_array_header(archive, images, "image.npy"),
            read_array_header(archive, adversarial, "adversarial.npy"),
        )
        for index in arrays["idx"].astype("<i8"):
            yield index.tobytes() + images.read(size) + adversarial.read(size)


def write_pictures(log: Path, count: int) -> list[Path]:
    """PNGs of the first ``count`` examples of a finished log: image, adversarial image,
    perturbation magnified.
    """
    arrays = read_examples(examples_path(log), range(count))
    if not {"label", "predict"} <= arrays.keys():
        raise UserError(
            f"{examples_path(log)} lacks label or predict: no pictures can be made of it"
        )
    written = []
    for row in range(min(count, len(arrays["idx"]))):
        values = {name: array[row] for name, array in arrays.items()}
        picture = _picture(values)
        path = pictures_folder(log) / f"{int(values['idx']):05d}.png"
        write_atomically(path, partial(picture.save, format="PNG"))
        written.append(path)
    for other in set(pictures_folder(log).glob("*.png")).difference(written):
        if other.stem.isdigit():  # of an earlier attack
            other.unlink()
    return written


def _picture(example: dict[str, Any]) -> Image.Image:
    """Three panels side by side, with captions."""
    from PIL import Image, ImageDraw

    perturbation = example["adversarial"].astype(np.float64) - example["image"]
    largest = float(np.abs(perturbation).max())
    magnified = 0.5 + (0.5 * perturbation / largest if largest else perturbation)
    panels = [_panel(pixels) for pixels in (example["image"], example["adversarial"], magnified)]
    width, height = panels[0].size
    canvas = Image.new("RGB", (3 * width + 4 * _MARGIN, height + 2 * _MARGIN + _CAPTION), "white")
    for number, panel in enumerate(panels):
        canvas.paste(panel, (_MARGIN + number * (width + _MARGIN), _MARGIN))
    predicted = "abstains" if example["predict"] == -1 else f"predicts {example['predict']}"
    factor = f"x{0.5 / largest:.3g}" if largest else "none"
    shown = f"image {example['idx']}, class {example['label']}"
    lines = [shown, predicted, f"{factor}, l2 {np.linalg.norm(perturbation):.3f}"]
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        draw.text((_MARGIN + number * (width + _MARGIN), height + 2 * _MARGIN), line, fill="black")
    return canvas


def _panel(pixels: np.ndarray) -> Image.Image:
    """Pixels [C, H, W] in [0, 1] as an image, enlarged to whole multiples where it is small."""
    from PIL import Image

    grey_levels = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    channels, height, width = grey_levels.shape
    image = Image.fromarray(
        grey_levels[0] if channels != 3 else grey_levels.transpose(1, 2, 0)
    ).convert("RGB")
    scale = max(1, -(-_SMALLEST_SIDE // min(height, width)))
    return image.resize((width * scale, height * scale), Image.Resampling.NEAREST)
