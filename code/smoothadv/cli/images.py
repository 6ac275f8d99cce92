"""The subcommand ``images`` of certify and predict: single image files, without labels and without
a log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, Decimal
from functools import partial
from pathlib import Path
from typing import Any

from smoothadv.base.errors import escape
from smoothadv.base.settings import options_of
from smoothadv.cli.options.shared import use_threads
from smoothadv.cli.runner import Options, Parser, add_settings, given_settings, run
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.records.writer import WrittenLog

_FIELDS = (
    "dataset model sigma n n0 alpha sound arch input_layer pretrained denoiser "
    "data_dir batch precision compile seed device threads"
).split()
Evaluate = Callable[[Any], WrittenLog]
"""From a specification to the rows of the images, in memory."""


def images_parser(command: str, kind: type[EvaluationSpec]) -> Parser:
    """The parser of the subcommand ``images`` of ``command``."""
    makes = (
        "the class, and the radius where it is certified" if command == "certify" else "the class"
    )
    parser = Parser(
        prog=f"{command} images",
        description=f"For single images, prints {makes}. DATASET is what the model was trained on: "
        "it has the classes and the size of the images, to which others are resized and cropped. "
        "Radii are about the images of that size.",
        epilog="examples:\n"
        f"  python code/{command}.py images cifar10 models/pgd/checkpoint.pth.tar 0.25 cat.png\n"
        f"  python code/{command}.py images imagenet timm:resnet18 0.25 photos/ --N 10000\n",
    )
    add_settings(parser, [one for one in options_of(kind) if one.field in _FIELDS])
    parser.add_argument(
        "images", type=Path, nargs="+", metavar="IMAGE", help="image files, or folders of them"
    )
    return parser


def images_main(
    command: str, kind: type[EvaluationSpec], evaluate: Evaluate, arguments: Sequence[str]
) -> int:
    """Run the subcommand with these ``arguments``; returns the exit code."""
    parser = partial(images_parser, command, kind)
    return run(f"{command} images", parser, partial(_images, kind, evaluate), arguments)


def _images(
    kind: type[EvaluationSpec],
    evaluate: Evaluate,
    parser: Parser,
    options: Options,
    command: Sequence[str],
) -> None:
    from smoothadv.evaluation.model import loose_images  # imports torch

    spec = kind(**given_settings(kind, options))
    use_threads(spec)
    images = loose_images(spec, options["images"])
    names = ["abstains", *images.description.class_names]
    log = evaluate(kind(**{**given_settings(kind, options), "dataset": images}))
    rows = sorted(log.rows or (), key=lambda row: row["idx"])
    table = [["image", "class", *["radius"] * ("radius" in rows[0])]]
    for file, row in zip(images.files, rows):
        entry = [escape(str(file)), escape(names[row["predict"] + 1])]
        if "radius" in row:
            entry.append(str(Decimal(row["radius"]).quantize(Decimal("0.001"), ROUND_DOWN)))
        table.append(entry)
    widths = [max(map(len, column)) for column in zip(*table)]
    for entry in table:
        print("  ".join(text.ljust(width) for text, width in zip(entry, widths)).rstrip())
