"""certify: radii of a smoothed classifier on test images."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.base.settings import any_seed, positive_int
from smoothadv.cli.merging import evaluation_main, is_finished
from smoothadv.cli.options.components import (
    add_components,
    add_options,
    fields_given,
    given_settings,
    refuse_foreign_settings,
)
from smoothadv.cli.options.shared import THREADS, device, use_threads
from smoothadv.cli.options.smoothing import add_smoothing, request_fields
from smoothadv.cli.runner import Parser, run
from smoothadv.evaluation.specs import CertifyRequest
from smoothadv.records.readers import read_certification_log
from smoothadv.statistics import PROCEDURES, Procedure

_EXAMPLES = """examples:
  python code/certify.py digits models/digits_gaussian/checkpoint.pth.tar 0.25 logs/digits.tsv \\
      --N 10000
  python code/certify.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 \\
      logs/cifar10.tsv --skip 20
  python code/certify.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/all.tsv \\
      --method adaptive
  python code/certify.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/top3.tsv \\
      --method top-k --top-k 3
  python code/certify.py imagenet released/checkpoint.pth.tar 0.5 logs/imagenet.tsv --skip 100 \\
      --input-layer center --data-dir /datasets/imagenet
on several GPUs, or machines:
  torchrun --nproc-per-node 8 \\
      -- code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv
  python code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv \\
      --shard 0/4    # ... 3/4
  python code/certify.py merge logs/cifar10.tsv
rows of a log drawn again, and compared:
  python code/certify.py verify logs/cifar10.tsv --rows 20
The same command again continues what was interrupted. docs/guarantee.md says what a radius
guarantees.
"""

_VERIFY = {
    "log LOG": (Path, "certification log, with its manifest beside it"),
    "--rows K": (positive_int, "random rows to draw again (default: 20)", 20),
    "--classifier CHECKPOINT": (Path, "the checkpoint (default: where the manifest says it was)"),
    "--denoiser CHECKPOINT": (str, "the denoiser before it, if there is one (default: likewise)"),
    "--data-dir DIR": (
        str,
        "folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)",
    ),
    "--device": (device, "torch device like cpu or cuda:1 (default: cuda if there is one)"),
    **THREADS,
    "--seed": (any_seed, "seed that chooses the rows (default: another one each time)"),
}


def make_parser() -> Parser:
    """The parser of the command ``certify``."""
    parser = Parser(
        prog="certify",
        epilog=_EXAMPLES,
        description="Certify a smoothed classifier (Cohen et al., 2019): for each "
        "image a class and an l2 radius within which it cannot change, or an abstention.",
    )
    add_smoothing(
        parser,
        outfile="log to write (TSV)",
        n_help="draws that estimate the class's probability; for adaptive, at most that many "
        "(default: "
        + ", ".join(f"{procedure.default_n:,} for {name}" for name, procedure in PROCEDURES.items())
        + ")",
    )
    add_options(parser, {"--N0": (positive_int, "draws that select the class (default: 100)", 100)})
    group = parser.add_argument_group("procedure")
    names = f"certification procedure, one of {', '.join(sorted(PROCEDURES))} (default: exact)"
    add_components(group, "--method", PROCEDURES, names, "exact")
    sound = (
        "noise in whole grey levels and deterministic kernels: certificates that hold for the "
        "executed arithmetic"
    )
    add_options(group, {"--sound": (None, f"{sound}, on 8-bit images")})
    return parser


def request_of(
    parser: Parser, options: argparse.Namespace, command: Sequence[str]
) -> CertifyRequest:
    """The request that the options describe; a usage error for options of another procedure than
    --method's.
    """
    refuse_foreign_settings(parser, options, PROCEDURES, "--method")
    chosen, name = PROCEDURES[options.method], f"--method {options.method}"
    settings = given_settings(parser, chosen, options, name)
    fields = request_fields(CertifyRequest, options, command)
    return CertifyRequest(**fields, n0=options.N0, procedure_settings=settings)


def _certify(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    request = request_of(parser, options, command)
    from smoothadv.evaluation.certify import (
        certify,
    )  # imports torch, for which a usage error need not wait

    use_threads(options)
    log, procedure = certify(request)
    if is_finished(log, request.shard, "certify"):
        _summarise(log.path, procedure)


def _summarise(log: Path, procedure: Procedure) -> None:
    """Print one line with the results in the log; where radii lie on a grid, the accuracies at the
    grid's radii.
    """
    from smoothadv.analysis.shared.log_statistics import (
        average_certified_radius,
        certified_accuracy,
        default_radii,
    )

    table = read_certification_log(log)
    grid = [radius for radius in getattr(procedure, "radii", ()) if radius > 0]
    radii = grid or default_radii([table])
    accuracies = ", ".join(
        f"{certified_accuracy(table, radius):.1%} at {radius:g}" for radius in [0.0, *radii][:6]
    )
    on_the_grid = " on the grid of radii" if procedure.on_grid else ""
    print(
        f"{log}: {len(table)} examples, certified accuracy {accuracies}; "
        f"average certified radius{on_the_grid} {average_certified_radius(table):.3f}"
    )


def verify_parser() -> Parser:
    """The parser of the subcommand ``verify``."""
    parser = Parser(
        prog="certify verify",
        description="Draw random rows of a certification log again, and compare all columns but "
        "the time. A log made with --sound of a checkpoint of integers can be repeated on any "
        "machine, another one where it was made.",
        epilog="examples:\n  python code/certify.py verify logs/integers.tsv --rows 100\n",
    )
    add_options(parser, _VERIFY)
    return parser


def _verify(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    from smoothadv.evaluation.verify import VerifyRequest, verify  # imports torch

    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    use_threads(options)
    found = verify(VerifyRequest(**{**fields_given(VerifyRequest, options), "seed": seed}))
    rows = (
        f"{found.repeated} of {found.of} rows of {options.log}, chosen by --seed {seed}, were "
        "drawn again"
    )
    for index, difference in found.differences.items():
        print(f"image {index}: {difference}", flush=True)
    if found.differences:
        raise UserError(f"{rows}: {len(found.differences)} differ")
    if found.missing:
        some = ", ".join(map(str, found.missing[:8])) + ", ..." * (len(found.missing) > 8)
        count = len(found.missing) + found.of
        raise UserError(
            f"{rows}, and are equal; unfinished: {len(found.missing)} of {count} images are "
            f"missing, {some}"
        )
    print(f"{rows}: all are equal")


def main(arguments: Sequence[str]) -> int:
    """Run the command, or one of its subcommands, with these ``arguments``; returns the exit
    code.
    """
    if arguments and arguments[0] == "verify":
        return run("certify verify", verify_parser, _verify, arguments[1:])
    return evaluation_main("certify", make_parser, _certify, arguments)
