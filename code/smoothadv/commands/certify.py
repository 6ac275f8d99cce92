"""certify: radii of a smoothed classifier on test images."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from smoothadv.analysis.quantities import average_certified_radius, certified_accuracy, default_radii
from smoothadv.bounds import maximum_radius, minimum_trials_to_certify
from smoothadv.certification import PROCEDURES
from smoothadv.commands.components import name_in, warn
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import add_smoothing, prepare
from smoothadv.evaluation import evaluate_examples
from smoothadv.readers import read_certification_log
from smoothadv.records import CERTIFICATION_COLUMNS, format_radius
from smoothadv.settings import positive_int

_EXAMPLES = """examples:
  python code/certify.py digits models/digits_gaussian/checkpoint.pth.tar 0.25 logs/digits.tsv --N 10000
  python code/certify.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/cifar10.tsv --skip 20
  python code/certify.py imagenet released/checkpoint.pth.tar 0.5 logs/imagenet.tsv --skip 100 \\
      --input-layer center --data-dir /datasets/imagenet
"""


def main(arguments: list[str] | None = None) -> int:
    """The command ``certify``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    parser = Parser(
        prog="certify",
        epilog=_EXAMPLES,
        description="Certify a smoothed classifier (Cohen et al., 2019): for each "
        "image a class and an l2 radius within which it cannot change, or an abstention.",
    )
    add_smoothing(parser, outfile="log to write (TSV)", n=100_000, n_help="draws that estimate the class's probability")
    parser.add_argument("--N0", type=positive_int, default=100, help="draws that select the class (default: 100)")
    parser.add_argument(
        "--method",
        type=name_in(PROCEDURES),
        default="exact",
        metavar="NAME",
        help=f"certification procedure, one of {', '.join(PROCEDURES)} (default: exact)",
    )
    return run(
        parser,
        _certify,
        arguments,
        interrupted="every finished example is in the log; run the same command with --resume to continue",
    )


def _certify(options: argparse.Namespace) -> None:
    if maximum_radius(options.N, options.sigma, options.alpha) == 0:
        warn(
            f"--N {options.N} can certify nothing at --alpha {options.alpha:g}, every image will abstain: "
            f"at least --N {minimum_trials_to_certify(options.alpha)} is needed"
        )
    job = prepare(options)

    def certify(index: int, image: torch.Tensor, label: int) -> dict[str, Any]:
        certificate = job.smooth.certificate(
            image.to(job.device),
            options.N0,
            options.N,
            options.alpha,
            job.batch,
            stream=job.noise.stream(index, job.device),
            method=options.method,
        )
        return {
            "predict": certificate.prediction,
            "radius": format_radius(certificate.radius),
            "successes": certificate.successes,
            "trials": certificate.trials,
        }

    with job.open_log(options, CERTIFICATION_COLUMNS, {"N0": options.N0, "method": options.method}) as log:
        evaluate_examples(job.dataset, job.indices, certify, log, "certifying")
    _summarise(options)


def _summarise(options: argparse.Namespace) -> None:
    table = read_certification_log(options.outfile)
    accuracies = ", ".join(
        f"{certified_accuracy(table, radius):.1%} at {radius:g}" for radius in default_radii([table])[:5]
    )
    print(
        f"{options.outfile}: {len(table)} examples, certified accuracy {accuracies}; "
        f"average certified radius {average_certified_radius(table):.3f}"
    )
