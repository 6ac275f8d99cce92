"""Options that certify, predict and attack share, and the fields of a request that they set."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoothadv.base.choices import INPUT_LAYER_NAMES, PRECISION_NAMES
from smoothadv.base.settings import (
    batch_size,
    output_file,
    output_folder,
    positive_int,
    positive_noise_level,
    probability,
)
from smoothadv.cli.options.components import add_options, fields_given
from smoothadv.cli.options.shared import add_dataset, add_running, check_dataset
from smoothadv.cli.runner import Parser
from smoothadv.datasets import SPLITS
from smoothadv.evaluation.shards import Shard
from smoothadv.evaluation.specs import EvaluationRequest


def shard(text: str) -> Shard:
    """argparse type: K/N with 0 <= K < N."""
    match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no shard: write K/N, K from 0 to N-1, as in 0/8, 1/8, ... 7/8 for eight "
            "shards"
        )
    return Shard(int(match[1]), int(match[2]))


def _maximum(text: str) -> int | None:
    return None if text == "-1" else positive_int(text)


_WHAT = {
    "checkpoint CHECKPOINT": (
        Path,
        "checkpoint.pth.tar of a trained or released model, or an ensemble: A.pth.tar+B.pth.tar, "
        "the mean of the logits, or a TOML file with members = ['A.pth.tar', 'B.pth.tar'] and mean "
        "= 'logits' or 'probabilities'; or a network by name: torchvision:NAME, timm:NAME, "
        "hf:PATH_OR_NAME, onnx:FILE, FILE.py:FUNCTION (docs/networks.md)",
    ),
    "sigma SIGMA": (
        positive_noise_level,
        "standard deviation of the smoothing noise on images in [0, 1]",
    ),
}
_SPEED = {
    "--batch B": (
        batch_size,
        "noisy images per forward pass (default: 16 to 200 on a CPU, by free memory on an "
        "accelerator); it does not change the noise, but may change the rounding of the logits",
    ),
    "--precision": (
        PRECISION_NAMES,
        "precision of weights and activations; a lower one is a different base classifier "
        "(default: fp32; its convolutions use TF32 on GPUs that have it, which is PyTorch's "
        "default)",
        "fp32",
    ),
    "--compile": (None, "compile the classifier first: takes a minute, then runs faster"),
    "--shard K/N": (
        shard,
        "evaluate only the K-th of N shares of the examples, K from 0; `merge OUTFILE` joins the "
        "shares",
    ),
}
_IMAGES = {
    "--split": (SPLITS, "images to use (default: test)", "test"),
    "--skip K": (positive_int, "take every K-th image (default: 1, all)", 1),
    "--max M": (_maximum, "stop after M images; -1, the default, takes all"),
}


def add_smoothing(parser: Parser, outfile: str, n_help: str, output: str = "outfile") -> None:
    """DATASET CHECKPOINT SIGMA OUTFILE and the options that certify, predict and attack share."""
    add_dataset(parser)
    add_options(
        parser,
        {
            **_WHAT,
            f"{output} {output.upper()}": (
                output_file if output == "outfile" else output_folder,
                outfile,
            ),
        },
    )
    group = parser.add_argument_group("smoothing")
    alpha = "probability of a false statement per image (default: 0.001)"
    add_options(group, {"--N": (positive_int, n_help), "--alpha": (probability, alpha, 0.001)})
    layer = (
        "first layer of a model whose checkpoint does not record it (released checkpoints do not)"
    )
    random = "random weights, drawn from --seed, for a network by name: to try things out"
    add_options(
        parser, {"--input-layer": (INPUT_LAYER_NAMES, layer), "--no-pretrained": (None, random)}
    )
    denoiser = (
        "the denoiser before it: a checkpoint of train_denoiser, or diffusers:PATH, a diffusion "
        "model"
    )
    add_options(parser, {"--denoiser CHECKPOINT": (str, denoiser)})
    add_options(parser.add_argument_group("images"), _IMAGES)
    add_running(parser, existing="resume")
    add_options(parser.add_argument_group("speed"), _SPEED)


def request_fields(
    request: type[EvaluationRequest], options: argparse.Namespace, command: Sequence[str]
) -> dict[str, Any]:
    """The fields of a request that options set, which have the same names; ``command`` is the
    command line.
    """
    check_dataset(options, options.checkpoint)
    renamed = {
        "classifier": options.checkpoint,
        "images": options.dataset,
        "draws": options.N,
        "maximum": options.max,
    }
    renamed["pretrained"] = not options.no_pretrained
    return {**renamed, "command": tuple(command), **fields_given(request, options)}
