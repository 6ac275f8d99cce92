"""The subcommand ``verify`` of certify: rows of a log, drawn again."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from smoothadv.commands.options.components import add_options, fields_given
from smoothadv.commands.options.shared import device
from smoothadv.commands.runner import Parser, run
from smoothadv.errors import UserError
from smoothadv.settings import non_negative_int, positive_int

_OPTIONS = {
    "log LOG": (Path, "certification log, with its manifest beside it"),
    "--rows K": (positive_int, "random rows to draw again (default: 20)", 20),
    "--classifier CHECKPOINT": (Path, "the checkpoint (default: where the manifest says it was)"),
    "--data-dir DIR": (str, "folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)"),
    "--device": (device, "torch device like cpu or cuda:1 (default: cuda if there is one)"),
    "--seed": (non_negative_int, "seed that chooses the rows (default: another one each time)"),
}


def make_parser() -> Parser:
    """The parser of the subcommand ``verify``."""
    parser = Parser(
        prog="certify verify",
        description="Draw random rows of a certification log again, and compare all columns but the time. A log made "
        "with --sound of a checkpoint of integers can be repeated on any machine, another one where it was made.",
        epilog="examples:\n  python code/certify.py verify logs/integers.tsv --rows 100\n",
    )
    add_options(parser, _OPTIONS)
    return parser


def _verify(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    from smoothadv.evaluation.verifying import VerifyRequest, verify  # imports torch

    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    found = verify(VerifyRequest(**{**fields_given(VerifyRequest, options), "seed": seed}))
    rows = f"{found.repeated} of {found.of} rows of {options.log}, chosen by --seed {seed}, were drawn again"
    for index, difference in found.differences.items():
        print(f"image {index}: {difference}", flush=True)
    if found.differences:
        raise UserError(f"{rows}: {len(found.differences)} differ")
    print(f"{rows}: all are equal")


def verify_main(arguments: Sequence[str]) -> int:
    """Run ``certify verify`` with these ``arguments``; returns the exit code: 1 where a row differs."""
    return run("certify verify", make_parser, _verify, arguments)
