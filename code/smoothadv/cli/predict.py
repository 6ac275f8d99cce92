"""predict: the smoothed classifier's classes, on clean or on attacked images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from smoothadv.base.settings import positive_int
from smoothadv.cli.merging import evaluation_main, is_finished
from smoothadv.cli.options.attack import (
    add_evaluation_attack,
    attack_plan_of,
    given_attack_flags,
)
from smoothadv.cli.options.components import add_options
from smoothadv.cli.options.shared import use_threads
from smoothadv.cli.options.smoothing import add_smoothing, request_fields
from smoothadv.cli.runner import Parser
from smoothadv.evaluation.predict import predict
from smoothadv.evaluation.specs import PREDICTION_DRAWS, PredictRequest
from smoothadv.records.readers import read_prediction_log
from smoothadv.statistics import ABSTAIN

_EXAMPLES = """examples:
  python code/predict.py digits models/digits_gaussian/checkpoint.pth.tar 0.25 \\
      logs/predictions.tsv --N 10000
  python code/predict.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 \\
      logs/attacked.tsv --skip 20 \\
      --N 10000 --attack PGD --epsilon 0.5 --num-steps 20 --num-noise-vec 128
"""


def make_parser() -> Parser:
    """The parser of the command ``predict``."""
    parser = Parser(
        prog="predict",
        epilog=_EXAMPLES,
        description="Predict with a smoothed classifier (Cohen et al., 2019), or "
        "abstain; with --attack, on attacked images (Salman et al., 2019).",
    )
    add_smoothing(
        parser,
        outfile="log to write (TSV)",
        n_help=f"draws per prediction (default: {PREDICTION_DRAWS:,})",
    )
    add_options(
        parser, {"--top-k K": (positive_int, "predict the set of the K most probable classes", 1)}
    )
    add_evaluation_attack(parser)
    return parser


def request_of(
    parser: Parser, options: argparse.Namespace, command: Sequence[str]
) -> PredictRequest:
    """The request that the options describe; a usage error for options of an attack without
    --attack.
    """
    given = given_attack_flags(parser, options)
    if given and options.attack is None:
        parser.error(
            f"{given[0]} is only read together with --attack: add --attack NAME or leave it out"
        )
    fields = request_fields(PredictRequest, options, command)
    plan = attack_plan_of(parser, options) if options.attack is not None else None
    return PredictRequest(**{**fields, "attack": plan})


def _predict(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    request = request_of(parser, options, command)
    use_threads(options)
    log = predict(request)
    if is_finished(log, request.shard, "predict"):
        table = read_prediction_log(log.path)
        print(
            f"{log.path}: {len(table)} examples, accuracy {table.correct.mean():.1%}, "
            f"abstained {(table.predict == ABSTAIN).mean():.1%}"
        )


main = partial(evaluation_main, "predict", make_parser, _predict)
