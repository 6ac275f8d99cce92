"""predict: the smoothed classifier's classes, on clean or on attacked images."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.attacks import SmoothedAttack
from smoothadv.certification import ABSTAIN, Draws
from smoothadv.certification.prediction import predict
from smoothadv.commands.attacking import (
    AttackedBallots,
    add_evaluation_attack,
    attack_settings,
    base_prediction,
    compose_evaluation_attack,
    fit_to_job,
    given_evaluation_flags,
    shared_with,
)
from smoothadv.commands.evaluating import Evaluation, evaluate, merge_main, told_of_shard
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import (
    PREDICTION_DRAWS,
    SmoothingJob,
    add_smoothing,
    prepare,
    warn_of_few_draws,
)
from smoothadv.evaluation import Example
from smoothadv.readers import read_prediction_log
from smoothadv.records import PREDICTION_COLUMNS
from smoothadv.voting import Poll

_EXAMPLES = """examples:
  python code/predict.py digits models/digits_gaussian/checkpoint.pth.tar 0.25 logs/predictions.tsv --N 10000
  python code/predict.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/attacked.tsv --skip 20 \\
      --N 10000 --attack PGD --epsilon 0.5 --num-steps 20 --num-noise-vec 128
"""


def main(arguments: list[str] | None = None) -> int:
    """The command ``predict``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    if arguments and arguments[0] == "merge":
        return merge_main("predict", arguments[1:])
    parser = Parser(
        prog="predict",
        epilog=_EXAMPLES,
        description="Predict with a smoothed classifier (Cohen et al., 2019), or "
        "abstain; with --attack, on attacked images (Salman et al., 2019).",
    )
    add_smoothing(parser, outfile="log to write (TSV)", n_help=f"draws per prediction (default: {PREDICTION_DRAWS:,})")
    add_evaluation_attack(parser)
    return run(
        parser,
        lambda options: _predict(parser, options),
        arguments,
        interrupted="every finished example is in the log; run the same command again to continue",
    )


def _predict(parser: Parser, options: argparse.Namespace) -> None:
    attack = _attack(parser, options)
    options.N = options.N or PREDICTION_DRAWS
    warn_of_few_draws(options)
    job = prepare(options)
    if attack is not None:
        fit_to_job(parser, attack, job, options)
    ballots = _clean_ballots(job, options) if attack is None else AttackedBallots(job, attack, options.N, options.alpha)
    evaluation = Evaluation(
        PREDICTION_COLUMNS if attack is None else ballots.columns,
        {"N": options.N, **attack_settings(attack)},
        ballots,
        "predicting",
        "correct",
        lambda row: bool(row["correct"]),
        **({} if attack is None else shared_with(attack, job)),
    )
    if evaluate(options, job, evaluation):
        table = read_prediction_log(options.outfile)
        print(
            f"{options.outfile}: {len(table)} examples, accuracy {table.correct.mean():.1%}, "
            f"abstained {(table.predict == ABSTAIN).mean():.1%}"
        )
    elif options.shard is not None:
        print(told_of_shard(options, "predict"))


def _attack(parser: Parser, options: argparse.Namespace) -> SmoothedAttack | None:
    if options.attack is not None:
        return compose_evaluation_attack(parser, options)
    given = given_evaluation_flags(options)
    if given:
        parser.error(f"{given[0]} is only read together with --attack: add --attack NAME or leave it out")
    return None


def _clean_ballots(job: SmoothingJob, options: argparse.Namespace) -> Callable[[list[Example]], Iterator[Poll]]:
    def ballots(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            voting = _voting(options, base_prediction(job, example.image.to(job.device)))
            yield Poll(example.image, job.stream(example.index), voting)

    return ballots


def _voting(options: argparse.Namespace, base: int) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """PREDICT at work on one image; returns the columns of its row."""
    prediction = yield from predict(options.N, options.alpha)
    return {"predict": prediction, "basePredict": base}
