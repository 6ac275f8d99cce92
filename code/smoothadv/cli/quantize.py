"""quantize: a network of integers, which is one function on all machines, of a trained one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from smoothadv.base.choices import INPUT_LAYER_NAMES
from smoothadv.base.settings import any_seed, output_file, positive_int, positive_noise_level
from smoothadv.cli.options.components import add_options, fields_given
from smoothadv.cli.options.shared import THREADS, add_dataset, check_dataset, use_threads
from smoothadv.cli.runner import Parser, run

_EXAMPLES = """examples:
  python code/quantize.py digits models/gaussian/checkpoint.pth.tar 0.25 \\
      models/gaussian/integers.pth.tar
  python code/certify.py digits models/gaussian/integers.pth.tar 0.25 logs/integers.tsv --sound
  python code/quantize.py export models/gaussian/integers.pth.tar models/gaussian/integers.onnx
Whoever has the checkpoint of integers can repeat that log bit for bit: docs/integer.md.
"""
_OPTIONS = {
    "checkpoint CHECKPOINT": (Path, "checkpoint.pth.tar of a trained or released model"),
    "sigma SIGMA": (
        positive_noise_level,
        "standard deviation of the smoothing noise on images in [0, 1]",
    ),
    "outfile OUTFILE": (output_file, "checkpoint of integers to write"),
    "--calibration M": (
        positive_int,
        "noisy training images that decide the ranges of values (default: 512)",
        512,
    ),
    "--held-out M": (
        positive_int,
        "other training images on which the votes are compared (default: 200)",
        200,
    ),
    "--draws N": (positive_int, "draws for each of these (default: 200)", 200),
    "--input-layer": (
        INPUT_LAYER_NAMES,
        "first layer of a model whose checkpoint does not record it",
    ),
    "--data-dir DIR": (
        str,
        "folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)",
    ),
    **THREADS,
    "--seed": (any_seed, "seed of the noise (default: 0)", 0),
    "--overwrite": (None, "replace OUTFILE if it exists"),
}
_EXPORT = {
    "checkpoint CHECKPOINT": (Path, "checkpoint of integers, as quantize writes it"),
    "outfile OUTFILE": (output_file, "ONNX model to write"),
    "--overwrite": (None, "replace OUTFILE if it is such a model"),
}
_WELL = 0.99  # digits have more, CIFAR-10 after a few epochs less


def make_parser() -> Parser:
    """The parser of the command ``quantize``."""
    parser = Parser(
        prog="quantize",
        epilog=_EXAMPLES,
        description="Make a network of integers of a trained one. All its sums are proven to be "
        "exact, so that every machine computes the same logits, and certificates of certify "
        "--sound can be repeated bit for bit.",
    )
    add_dataset(parser)
    add_options(parser, _OPTIONS)
    return parser


def _quantize(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    check_dataset(options, options.checkpoint)
    from smoothadv.exact.quantize import QuantizeRequest, quantize  # imports torch

    request = QuantizeRequest(**fields_given(QuantizeRequest, options), command=tuple(command))
    use_threads(options)
    network, comparison = quantize(request)
    bound = max(getattr(layer, "largest_sum", 0.0) for layer in network.layers)
    print(
        f"{request.outfile}: {len(network.layers)} layers of integers; no sum exceeds "
        f"{bound:,.0f}\n"
        f"{comparison.agreement:.2%} of votes are those of the float network, on "
        f"{comparison.images} training images with {comparison.draws} draws each; certified "
        "accuracy there:"
    )
    for radius, of_float, of_integers in comparison.certified:
        print(f"  at {radius:<6.4g} float {of_float:6.1%}   integers {of_integers:6.1%}")
    if comparison.agreement < _WELL:
        print(
            f"train --pretrained-model {request.outfile} --finetune-quantized, an epoch or two, "
            "may mend what was lost"
        )


def export_parser() -> Parser:
    """The parser of the subcommand ``export``."""
    parser = Parser(
        prog="quantize export",
        description="Write a network of integers as an ONNX model, whose logits are the same "
        "integers, so that what is certified is what is deployed. It takes float32 images [batch, "
        "C, H, W] in [0, 1].",
        epilog="examples:\n  python code/quantize.py export models/gaussian/integers.pth.tar "
        "integers.onnx\n",
    )
    add_options(parser, _EXPORT)
    return parser


def _export(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    from smoothadv.exact.export import OPSET, export  # imports torch

    version = export(options.checkpoint, options.outfile, options.overwrite)
    found = (
        f"ONNX Runtime {version} computes the probe's logits exactly"
        if version
        else "onnxruntime is not installed"
    )
    print(
        f"{options.outfile}: ONNX, opset {OPSET}; "
        f"{found}{'' if version else ', so no logits were compared'}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command ``quantize``, or its subcommand ``export``, with these ``arguments``; returns
    the exit code.
    """
    if arguments[:1] == ["export"]:
        return run("quantize export", export_parser, _export, arguments[1:])
    return run("quantize", make_parser, _quantize, arguments)
