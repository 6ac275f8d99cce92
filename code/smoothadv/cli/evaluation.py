"""How certify, predict and attack run, and subcommands that several have: ``merge``, by which the
shards of a log become the log, and ``images``, for single image files, without labels and without a
log.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Any

from smoothadv.base.errors import counted, escape
from smoothadv.base.settings import Checked, options_of, output_file, setting
from smoothadv.cli.runner import Options, Parser, add_settings, given_settings, invocation
from smoothadv.evaluation.shards import Shard, merge
from smoothadv.evaluation.specs import EvaluationSpec, Spec
from smoothadv.models.spec import say_what_is_certified, use_threads
from smoothadv.records.logs import shards_of
from smoothadv.records.writer import WrittenLog

_IMAGE_FIELDS = (
    "dataset model sigma n n0 alpha sound arch weights input_layer pretrained denoiser timestep "
    "resize local_noise data_dir batch precision compile seed device tf32 threads"
).split()
"""The settings that the subcommand ``images`` has."""
CONTINUED = "every finished example is in the log; run the same command again to continue"
"""What an interrupted command says."""


@dataclass(frozen=True, kw_only=True)
class MergeSpec(Checked):
    """Merge ``shards`` into the log ``outfile``."""

    outfile: Path = setting(
        parse=output_file,
        flag="outfile",
        help="log to write: the OUTFILE for which the shards were made",
    )
    shards: tuple[Path, ...] = setting(
        (),
        parse=Path,
        flag="shards",
        metavar="SHARD",
        help="shard logs (default: those in OUTFILE.shards)",
    )
    overwrite: bool = setting(False, help="replace OUTFILE if it exists")


def spec_from(kind: type[Spec], options: Options, command: Sequence[str], **further: Any) -> Spec:
    """The spec that the options and the fields ``further`` describe; UsageError where they
    contradict each other.
    """
    spec = kind(**{**given_settings(kind, options), **further}, command=tuple(command))
    say_what_is_certified(spec.dataset)
    return spec


def is_finished(log: WrittenLog, shard: Shard | None, command: str) -> bool:
    """Whether a log is whole; says what to do next if only a ``shard`` of it is."""
    if shard is not None:
        print(
            f"shard {shard} is done: {shard.path(log.path)}; when all shards are done, "
            f"`{invocation(f'{command} merge')} {log.path}` joins them, and then this command "
            "without --shard prints a summary"
        )
    return log.is_whole


def merge_parser(command: str) -> Parser:
    """The parser of the subcommand ``merge`` of ``command``."""
    return Parser(
        prog=f"{command} merge",
        kinds=[MergeSpec],
        description="Join the shards of a log. Refuses gaps, overlaps, unfinished shards and mixed "
        "settings.",
        epilog=f"examples:\n  python code/{command}.py merge logs/cifar10.tsv\n"
        f"  python code/{command}.py merge logs/cifar10.tsv node1/*.tsv node2/*.tsv\n",
    )


def merge_shards(parser: Parser, options: Options, command: Sequence[str]) -> None:
    """The subcommand ``merge``."""
    spec = MergeSpec(**given_settings(MergeSpec, options))
    shards = spec.shards or shards_of(spec.outfile)
    rows = merge(spec.outfile, shards, spec.overwrite)
    print(
        f"{spec.outfile}: {counted(rows, 'example')} from {counted(len(shards), 'shard')}, which "
        "can be removed now"
    )


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
    add_settings(parser, [one for one in options_of(kind) if one.field in _IMAGE_FIELDS])
    parser.add_argument(
        "images", type=Path, nargs="+", metavar="IMAGE", help="image files, or folders of them"
    )
    return parser


def evaluate_images(
    kind: type[EvaluationSpec],
    evaluate: Callable[[Any], WrittenLog],
    parser: Parser,
    options: Options,
    command: Sequence[str],
) -> None:
    """The subcommand ``images``; ``evaluate`` returns the rows for a specification, in memory."""
    from smoothadv.models.load import loose_images  # imports torch

    spec = kind(**given_settings(kind, options))
    use_threads(spec)
    files, images, changes = loose_images(spec, options["images"])
    if changes:
        print(f"{changes}: classes and radii are those of the changed images", file=sys.stderr)
    names = ["abstains", *images.description.class_names]
    log = evaluate(kind(**{**given_settings(kind, options), "dataset": images}))
    rows = log.table
    table = [["image", "class", *["radius"] * ("radius" in rows)]]
    for row in rows.to_dict("records"):
        entry = [escape(str(files[row["idx"]])), escape(names[row["predict"] + 1])]
        if "radius" in row:
            entry.append(str(Decimal(row["radius"]).quantize(Decimal("0.001"), ROUND_DOWN)))
        table.append(entry)
    widths = [max(map(len, column)) for column in zip(*table)]
    for entry in table:
        print("  ".join(text.ljust(width) for text, width in zip(entry, widths)).rstrip())
