"""Adversarial examples on the disk: one by one while a log is written, then compressed, and as pictures. No torch.

While rows are still written, a file beside the log (``records.spool_path``) grows by one record per row: the index,
the image and the adversarial image, float32. When the log is whole it becomes ``records.examples_path``, a compressed
NumPy archive of arrays with one entry per row, in the order of the indices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageDraw

from smoothadv.errors import UserError
from smoothadv.readers import read_prediction_log
from smoothadv.records import examples_path, pictures_folder, spool_path, write_atomically

_SMALLEST_SIDE = 128
_MARGIN = 6
_CAPTION = 30
_COPIED = ("label", "predict", "epsilon", "attack_norm", "target", "certified", "radius", "flipped")


class Spool:
    """The images of a log that is being written; ``done`` are the examples whose rows it has.

    Nothing is opened before the first ``append``. UserError where rows have no images to go with them.
    """

    def __init__(self, log: Path, shape: Sequence[int], done: set[int]) -> None:
        self.log, self.path, self.dtype, self.done = log, spool_path(log), _record_type(shape), done
        self._header = (json.dumps({"shape": list(shape)}) + "\n").encode()
        self._file: IO[bytes] | None = None
        if done and not self.path.exists() and not examples_path(log).exists():
            raise UserError(
                f"cannot resume {log}: its adversarial examples, {examples_path(log)}, are missing; --overwrite "
                "starts anew"
            )

    def append(self, index: int, image: np.ndarray, adversarial: np.ndarray) -> None:
        """Put one example, float32 [C, H, W] twice, on the disk."""
        if self._file is None:
            self._file = self._opened()
        left = np.array([(index, image, adversarial)], dtype=self.dtype).tobytes()
        try:
            while left:  # a write may take a part and say so
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        """The file, with the records of ``done`` and no others."""
        if not self.done:
            examples_path(self.log).unlink(missing_ok=True)
            self._rewrite(np.empty(0, self.dtype))
        elif not self.path.exists():
            self._rewrite(_unpacked(self.log, self.dtype))
        records = _records(self.path, self.dtype)
        kept = len(records)
        while kept and int(records["idx"][kept - 1]) not in self.done:
            kept -= 1  # its row was never written, or torn
        os.truncate(self.path, len(self._header) + kept * self.dtype.itemsize)
        if set(records["idx"][:kept].tolist()) != self.done:
            raise UserError(f"cannot resume {self.log}: {self.path} does not fit it; --overwrite starts anew")
        return self.path.open("ab", buffering=0)

    def _rewrite(self, records: np.ndarray) -> None:
        write_atomically(self.path, lambda file: file.write(self._header + records.tobytes()))


def _record_type(shape: Sequence[int]) -> np.dtype:
    image = ("<f4", tuple(shape))
    return np.dtype([("idx", "<i8"), ("image", *image), ("adversarial", *image)])


def _records(path: Path, dtype: np.dtype | None = None) -> np.ndarray:
    """The whole records of a spool; UserError if they are of another type than ``dtype``."""
    content = path.read_bytes()
    header, _, body = content.partition(b"\n")
    try:
        found = _record_type(json.loads(header)["shape"])
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found is None or (dtype is not None and found != dtype):
        raise UserError(f"{path} holds no adversarial examples of this log: remove it and use --overwrite")
    return np.frombuffer(body, dtype=found, count=len(body) // found.itemsize)


def _unpacked(log: Path, dtype: np.dtype) -> np.ndarray:
    """The records of a finished log's archive, which more examples are to join."""
    arrays = read_examples(examples_path(log))
    if arrays["image"].shape[1:] != dtype["image"].shape:
        raise UserError(f"{examples_path(log)} holds images of another shape: remove it and use --overwrite")
    records = np.empty(len(arrays["idx"]), dtype)
    for name in ("idx", "image", "adversarial"):
        records[name] = arrays[name]
    return records


def read_examples(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive of adversarial examples; UserError where it is missing, damaged or something else."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged file can raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read as adversarial examples: {reason}") from error
    shapes = {name: array.shape for name, array in arrays.items()}
    idx, image = shapes.get("idx", ()), shapes.get("image", ())
    whole = len(idx) == 1 and len(image) == 4 and image == shapes.get("adversarial")
    if not whole or arrays["idx"].dtype.kind != "i" or {shape[:1] for shape in shapes.values()} != {idx}:
        raise UserError(
            f"{path} holds no adversarial examples: idx [N], image and adversarial [N, C, H, W] are missing"
        )
    return arrays


def pack(log: Path, written_as: Sequence[Path]) -> Path | None:
    """Make the archive of a whole ``log`` from the spools of the logs it was ``written_as``; None if there are none.

    An archive that is whole already is left alone. UserError where a row has no images.
    """
    spools = [spool_path(part) for part in written_as if spool_path(part).exists()]
    if not spools:
        return examples_path(log) if examples_path(log).exists() else None
    records = np.concatenate([_records(path) for path in spools])
    order = np.unique(records["idx"], return_index=True)[1]  # of equal ones the first; all are equal
    table = read_prediction_log(log)
    records = records[order][np.isin(records["idx"][order], table.idx)]
    if len(records) != len(table):
        raise UserError(
            f"{log} has {len(table)} rows, of which {len(table) - len(records)} have no adversarial example"
        )
    arrays: dict[str, Any] = {name: records[name] for name in ("idx", "image", "adversarial")}
    arrays |= {name: table[name].to_numpy() for name in _COPIED if name in table}
    write_atomically(examples_path(log), lambda file: np.savez_compressed(file, **arrays))
    for path in spools:
        path.unlink()
    return examples_path(log)


def write_pictures(log: Path, count: int) -> list[Path]:
    """PNGs of the first ``count`` examples of a finished log: image, adversarial image, perturbation magnified."""
    arrays = read_examples(examples_path(log))
    if not {"label", "predict"} <= arrays.keys():
        raise UserError(f"{examples_path(log)} lacks label or predict: no pictures can be made of it")
    written = []
    for row in range(min(count, len(arrays["idx"]))):
        values = {name: array[row] for name, array in arrays.items()}
        picture = _picture(values)
        path = pictures_folder(log) / f"{int(values['idx']):05d}.png"
        write_atomically(path, lambda file, picture=picture: picture.save(file, format="PNG"))
        written.append(path)
    return written


def _picture(example: dict[str, Any]) -> Image.Image:
    """Three panels and what they show."""
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
    lines = [
        f"image {example['idx']}, class {example['label']}",
        predicted,
        f"{factor}, l2 {np.linalg.norm(perturbation):.3f}",
    ]
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        draw.text((_MARGIN + number * (width + _MARGIN), height + 2 * _MARGIN), line, fill="black")
    return canvas


def _panel(pixels: np.ndarray) -> Image.Image:
    """Pixels [C, H, W] in [0, 1] as an image, enlarged to whole multiples where it is small."""
    grey_levels = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    channels, height, width = grey_levels.shape
    image = Image.fromarray(grey_levels[0] if channels != 3 else grey_levels.transpose(1, 2, 0)).convert("RGB")
    scale = max(1, -(-_SMALLEST_SIDE // min(height, width)))
    return image.resize((width * scale, height * scale), Image.Resampling.NEAREST)
