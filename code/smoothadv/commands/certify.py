"""certify: radii of a smoothed classifier on test images."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.analysis.shared.log_statistics import average_certified_radius, certified_accuracy, default_radii
from smoothadv.bounds import minimum_trials_to_certify, squared_grey_radius
from smoothadv.certification import PROCEDURES, Draws, Procedure, Smoothing
from smoothadv.commands.components import (
    add_settings,
    compose,
    name_in,
    refuse_foreign_settings,
    settings_record,
    warn,
)
from smoothadv.commands.evaluating import Evaluation, evaluate, merge_main, told_of_shard
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import add_smoothing, prepare
from smoothadv.datasets.images import DatasetDescription
from smoothadv.evaluation import Example
from smoothadv.readers import read_certification_log
from smoothadv.records import CERTIFICATION_COLUMNS, format_radius
from smoothadv.settings import positive_int, settings_of
from smoothadv.voting import Poll

_EXAMPLES = """examples:
  python code/certify.py digits models/digits_gaussian/checkpoint.pth.tar 0.25 logs/digits.tsv --N 10000
  python code/certify.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/cifar10.tsv --skip 20
  python code/certify.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/all.tsv --method adaptive
  python code/certify.py imagenet released/checkpoint.pth.tar 0.5 logs/imagenet.tsv --skip 100 \\
      --input-layer center --data-dir /datasets/imagenet
on several GPUs, or machines:
  torchrun --nproc-per-node 8 -- code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv
  python code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv --shard 0/4    # ... 3/4
  python code/certify.py merge logs/cifar10.tsv
The same command again continues what was interrupted. docs/guarantee.md says what a radius guarantees.
"""
_SOUND_COLUMN = "squared_radius"


def main(arguments: list[str] | None = None) -> int:
    """The command ``certify``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    if arguments and arguments[0] == "merge":
        return merge_main("certify", arguments[1:])
    parser = make_parser()
    return run(
        parser,
        lambda options: _certify(parser, options),
        arguments,
        interrupted="every finished example is in the log; run the same command again to continue",
    )


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
        n_help="draws that estimate the class's probability; for adaptive, at most that many (default: "
        + ", ".join(f"{PROCEDURES[name].default_n:,} for {name}" for name in PROCEDURES)
        + ")",
    )
    parser.add_argument("--N0", type=positive_int, default=100, help="draws that select the class (default: 100)")
    group = parser.add_argument_group("procedure")
    group.add_argument(
        "--method",
        type=name_in(PROCEDURES),
        default="exact",
        metavar="NAME",
        help=f"certification procedure, one of {', '.join(PROCEDURES)} (default: exact)",
    )
    add_settings(group, [setting for name in PROCEDURES for setting in settings_of(PROCEDURES[name])])
    group.add_argument(
        "--sound",
        action="store_true",
        help="noise in whole grey levels and deterministic kernels: certificates that hold for the executed "
        "arithmetic, on 8-bit images",
    )
    return parser


def refuse_foreign_procedures(parser: Parser, options: argparse.Namespace) -> None:
    """A usage error, before anything is loaded, for options of another procedure than the one named."""
    everything, chosen = [PROCEDURES[name] for name in PROCEDURES], PROCEDURES[options.method]
    refuse_foreign_settings(parser, options, everything, [chosen], f"--method {options.method}")


def compose_procedure(
    parser: Parser, options: argparse.Namespace, description: DatasetDescription, noise_distance: float
) -> Procedure:
    """The procedure that the options describe; ``options.N`` gets its default.

    ``noise_distance`` is how far the noise drawn is from a Gaussian.
    """
    refuse_foreign_procedures(parser, options)
    chosen = PROCEDURES[options.method]
    options.N = options.N or chosen.default_n
    given: dict[str, Any] = {
        "smoothing": Smoothing(options.sigma, options.N0, options.N, options.alpha, noise_distance)
    }
    if "radii" in {field.name for field in dataclasses.fields(chosen)}:
        given["radii"] = description.radii
    return compose(parser, chosen, options, f"--method {options.method}", **given)


def _certify(parser: Parser, options: argparse.Namespace) -> None:
    refuse_foreign_procedures(parser, options)
    job = prepare(options, options.sound)
    procedure = compose_procedure(parser, options, job.dataset.description, job.noise_distance)
    if procedure.largest_radius is None:
        least = (
            f"at least --N {minimum_trials_to_certify(options.alpha)}" if options.method == "exact" else "a larger --N"
        )
        warn(
            f"--N {options.N} can certify nothing at --alpha {options.alpha:g}, every image will abstain: "
            f"{least} is needed"
        )

    def ballots(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            job.check_image(example.index, example.image)
            yield Poll(example.image, job.stream(example.index), _voting(procedure, example.label, options.sound))

    columns = (*CERTIFICATION_COLUMNS, *procedure.columns, *((_SOUND_COLUMN,) if options.sound else ()))
    evaluation = Evaluation(
        columns,
        procedure_settings(options, procedure),
        ballots,
        "certifying",
        f"certified at {options.sigma:g}:",
        lambda row: bool(row["correct"]) and float(row["radius"]) >= options.sigma,
    )
    if evaluate(options, job, evaluation):
        _summarise(options, [radius for radius in getattr(procedure, "radii", ()) if radius > 0])
    elif options.shard is not None:
        print(told_of_shard(options, "certify"))


def procedure_settings(options: argparse.Namespace, procedure: Procedure) -> dict[str, Any]:
    """What the procedure adds to the settings that decide the numbers."""
    own = {name: value for name, value in settings_record(procedure).items() if name not in ("name", "smoothing")}
    return {
        "N0": options.N0,
        "N": options.N,
        "method": options.method,
        "sound": options.sound,
        **own,
        **procedure.settings,
    }


def _voting(procedure: Procedure, label: int, sound: bool) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """The procedure at work on one image; returns the columns of its row."""
    certificate = yield from procedure.votes(label)
    row = {
        "predict": certificate.prediction,
        "radius": format_radius(certificate.radius),
        "successes": certificate.successes,
        "trials": certificate.trials,
        **certificate.details,
    }
    return {**row, _SOUND_COLUMN: squared_grey_radius(certificate.radius)} if sound else row


def _summarise(options: argparse.Namespace, decided: list[float]) -> None:
    """Say in a line what the log says; at the radii ``decided``, where only those are."""
    table = read_certification_log(options.outfile)
    radii = decided or default_radii([table])
    accuracies = ", ".join(f"{certified_accuracy(table, radius):.1%} at {radius:g}" for radius in [0.0, *radii][:6])
    on_the_grid = "" if options.method == "exact" else " on the grid of radii"
    print(
        f"{options.outfile}: {len(table)} examples, certified accuracy {accuracies}; "
        f"average certified radius{on_the_grid} {average_certified_radius(table):.3f}"
    )
