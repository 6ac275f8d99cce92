"""Adversarial examples on the disk, beside the log of the attack. No torch.

While a log is written, its spool (``records.spool_path``) grows by one record before each row: the
index, the image and the adversarial image, float32. From the spool of a whole log
``finish_images`` makes ``records.examples_path``, a compressed NumPy archive of arrays with one
entry per row, in the order of the indices.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.base.files import write_atomically
from smoothadv.records.logs import IMAGES, examples_path, recorded_settings, spool_path
from smoothadv.records.readers import read_examples, read_prediction_log

_COPIED = (
    *("idx", "label", "predict", "epsilon", "attack_norm", "target"),
    *("certified", "radius", "flipped"),
)


def image_record(index: int, image: np.ndarray, adversarial: np.ndarray) -> bytes:
    """One record of a spool, from two images float32 [C, H, W]."""
    return np.array((index, image, adversarial), _record_type(image.shape)).tobytes()


def forget_images(log: Path) -> None:
    """Remove the spool and the archive of a log, if its manifest says that it has one."""
    if recorded_settings(log).get(IMAGES):
        examples_path(log).unlink(missing_ok=True)
        spool_path(log).unlink(missing_ok=True)


def open_images(log: Path, shape: Sequence[int], done: Collection[int]) -> IO[bytes]:
    """The spool of a log, open for further records; it has a record for each of the examples
    ``done``.
    """
    spool = spool_path(log)
    if not done:
        examples_path(log).unlink(missing_ok=True)
        spool.unlink(missing_ok=True)
    elif not spool.exists() or (
        # Records of some order or of other examples.
        {*_spooled_records(log, shape)["idx"][: len(done)].tolist()} != {*done}
    ):
        write_images(log, saved_images(log, shape, done))
    else:
        # What follows is an image whose row was never written, or torn.
        os.truncate(spool, len(done) * _record_type(shape).itemsize)
    return spool.open("ab", buffering=0)


def saved_images(log: Path, shape: Sequence[int], examples: Iterable[int]) -> dict[int, Any]:
    """The records of these examples, from the spool or the archive of a log; UserError where one
    has none.
    """
    archive, examples = examples_path(log), list(examples)
    records = np.empty(0, _record_type(shape))
    if spool_path(log).exists():
        records = _spooled_records(log, shape)
    elif archive.exists():
        arrays = read_examples(archive)
        if arrays["image"].shape[1:] != tuple(shape):
            raise UserError(
                f"{archive} holds images of another shape: remove it and use --overwrite"
            )
        records = np.empty(len(arrays["idx"]), _record_type(shape))
        for name in records.dtype.names or ():
            records[name] = arrays[name]
    found = dict(zip(records["idx"][::-1].tolist(), records[::-1]))  # the first of two counts
    if missing := [index for index in examples if index not in found]:
        raise UserError(
            f"{log} has {len(examples)} rows, of which {len(missing)} have no adversarial example: "
            f"{archive} is missing or incomplete; --overwrite starts anew"
        )
    return {index: found[index] for index in examples}


def write_images(log: Path, records: dict[int, Any]) -> None:
    """Write the spool of a log, with one image in memory at a time."""
    lines = (record.tobytes() for record in records.values())
    write_atomically(spool_path(log), lambda file: file.writelines(lines))


def finish_images(log: Path, shape: Sequence[int]) -> None:
    """Make the archive of a whole log from its spool, which is removed; UserError where there is
    neither.
    """
    spool, archive = spool_path(log), examples_path(log)
    if not spool.exists():
        if not archive.exists():
            raise UserError(f"{archive}, the images of {log}, is missing; --overwrite starts anew")
        return
    table = read_prediction_log(log)
    order = table.idx.tolist()
    if (records := _spooled_records(log, shape))["idx"].tolist() != order:
        write_images(log, saved_images(log, shape, order))
        records = _spooled_records(log, shape)
    arrays = {name: table[name].to_numpy() for name in _COPIED if name in table}
    arrays |= {name: records[name] for name in ("image", "adversarial")}
    write_atomically(archive, lambda file: np.savez_compressed(file, **arrays))
    spool.unlink()


def _record_type(shape: Sequence[int]) -> np.dtype:
    image = ("<f4", tuple(shape))
    return np.dtype([("idx", "<i8"), ("image", *image), ("adversarial", *image)])


def _spooled_records(log: Path, shape: Sequence[int]) -> np.ndarray:
    """The complete records of a spool, mapped into memory."""
    spool, kind = spool_path(log), _record_type(shape)
    count = spool.stat().st_size // kind.itemsize
    # NumPy maps no empty file.
    return np.memmap(spool, kind, "r", shape=(count,)) if count else np.empty(0, kind)
