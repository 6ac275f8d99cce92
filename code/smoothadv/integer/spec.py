"""Specifications of the command ``quantize`` and its subcommand ``export``. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.settings import (
    INPUT_LAYER_NAMES,
    Checked,
    number,
    output_file,
    positive_int,
    positive_noise_level,
    setting,
)
from smoothadv.models.spec import RunSpec

_seven_or_eight = number(int, "7 or 8", lambda bits: bits in (7, 8))


@dataclass(frozen=True, kw_only=True)
class QuantizeSpec(RunSpec):
    """Make the checkpoint of integers ``outfile`` of the trained ``checkpoint``, for noise of
    ``sigma``.

    ``command`` is the command line that the checkpoint records (None: that of this process).
    """

    checkpoint: Path = setting(
        parse=Path, flag="checkpoint", help="checkpoint.pth.tar of a trained or released model"
    )
    sigma: float = setting(
        parse=positive_noise_level,
        flag="sigma",
        help="standard deviation of the smoothing noise on images in [0, 1]",
    )
    outfile: Path = setting(
        parse=output_file, flag="outfile", help="checkpoint of integers to write"
    )
    calibration: int = setting(
        512,
        parse=positive_int,
        metavar="M",
        help="noisy training images that decide the ranges of values",
    )
    held_out: int = setting(
        200,
        parse=positive_int,
        metavar="M",
        help="other training images on which the votes are compared",
    )
    draws: int = setting(200, parse=positive_int, metavar="N", help="draws for each of these")
    weight_bits: int = setting(
        7,
        parse=_seven_or_eight,
        metavar="BITS",
        help="of weights: with 7, CPUs compute in bytes, which is fast; or 8",
    )
    input_layer: str | None = setting(
        None,
        choices=INPUT_LAYER_NAMES,
        help="first layer of a model whose checkpoint does not record it",
    )
    overwrite: bool = setting(False, help="replace OUTFILE if it exists")
    device: Any = None
    existing: str = "refuse"
    command: Sequence[str] | None = None

    def missing_plugin(self) -> str:
        from smoothadv.models.checkpoint import missing_dataset_plugin  # imports torch

        return missing_dataset_plugin(self.checkpoint, self.dataset)


@dataclass(frozen=True, kw_only=True)
class ExportSpec(Checked):
    """Write the network in ``checkpoint`` as the ONNX model ``outfile``."""

    checkpoint: Path = setting(
        parse=Path, flag="checkpoint", help="checkpoint of integers, as quantize writes it"
    )
    outfile: Path = setting(parse=output_file, flag="outfile", help="ONNX model to write")
    overwrite: bool = setting(False, help="replace OUTFILE if it is such a model")
