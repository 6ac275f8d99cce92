"""predict: the smoothed classifier's classes, on clean or on attacked images."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from smoothadv.attacks import Attack
from smoothadv.bounds import minimum_trials_to_predict
from smoothadv.certification import ABSTAIN, Draws
from smoothadv.certification.prediction import predict
from smoothadv.commands.components import settings_record, warn
from smoothadv.commands.evaluating import evaluate, merge_main, told_of_shard
from smoothadv.commands.options import add_attack, compose_attack, given_attack_flags
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import SmoothingJob, add_smoothing, prepare
from smoothadv.noise import Purpose, derive_generator
from smoothadv.readers import read_prediction_log
from smoothadv.records import PREDICTION_COLUMNS
from smoothadv.settings import positive_int
from smoothadv.voting import Poll

_DEFAULT_N = 100_000

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
        "abstain; with --attack, on images attacked through the plug-in gradient (Salman et al., 2019).",
    )
    add_smoothing(parser, outfile="log to write (TSV)", n_help=f"draws per prediction (default: {_DEFAULT_N:,})")
    add_attack(parser)
    parser.add_argument(
        "--num-noise-vec",
        type=positive_int,
        default=None,
        metavar="M",
        help="noise draws that the attack averages over (default: 1; paper: up to 512)",
    )
    parser.add_argument("--base-attack", action="store_true", help="attack the base classifier, without noise")
    return run(
        parser,
        lambda options: _predict(parser, options),
        arguments,
        interrupted="every finished example is in the log; run the same command again to continue",
    )


def _predict(parser: Parser, options: argparse.Namespace) -> None:
    attack = _compose_attack(parser, options)
    copies, options.N = options.num_noise_vec or 1, options.N or _DEFAULT_N
    if options.N < minimum_trials_to_predict(options.alpha):
        warn(
            f"--N {options.N} can decide nothing at --alpha {options.alpha:g}, every image will abstain: "
            f"at least --N {minimum_trials_to_predict(options.alpha)} is needed"
        )
    job = prepare(options)

    def poll(index: int, image: torch.Tensor, label: int) -> Poll:
        image = image.to(job.device)
        if attack is not None:
            image = _attacked(job, attack, image, label, index, copies, options)
        with torch.inference_mode():
            base = int(job.classifier(image.unsqueeze(0)).argmax())
        return Poll(image, job.stream(index), _voting(options, base))

    settings = {
        "N": options.N,
        "attack": attack and settings_record(attack),
        "num_noise_vec": copies if attack else None,
        "base_attack": options.base_attack,
    }
    whole = evaluate(
        options, job, PREDICTION_COLUMNS, settings, poll, "predicting", "correct", lambda row: bool(row["correct"])
    )
    if whole:
        table = read_prediction_log(options.outfile)
        print(
            f"{options.outfile}: {len(table)} examples, accuracy {table.correct.mean():.1%}, "
            f"abstained {(table.predict == ABSTAIN).mean():.1%}"
        )
    elif options.shard is not None:
        print(told_of_shard(options, "predict"))


def _voting(options: argparse.Namespace, base: int) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """PREDICT at work on one image; returns the columns of its row."""
    prediction = yield from predict(options.N, options.alpha)
    return {"predict": prediction, "basePredict": base}


def _compose_attack(parser: Parser, options: argparse.Namespace) -> Attack | None:
    given = (
        given_attack_flags(options)
        + ["--num-noise-vec"] * (options.num_noise_vec is not None)
        + ["--base-attack"] * options.base_attack
    )
    if options.attack is None:
        if given:
            parser.error(f"{given[0]} is only read together with --attack: add --attack NAME or leave it out")
        return None
    if options.base_attack and options.num_noise_vec is not None:
        parser.error("--num-noise-vec is not read with --base-attack, which attacks without noise: leave one out")
    return compose_attack(parser, options, 0.0 if options.base_attack else options.sigma)


def _attacked(
    job: SmoothingJob,
    attack: Attack,
    image: torch.Tensor,
    label: int,
    index: int,
    copies: int,
    options: argparse.Namespace,
) -> torch.Tensor:
    """The adversarial image [C, H, W]; its noise is drawn apart from the prediction's, which must be fresh."""
    noise = None
    if not options.base_attack:
        noise = job.stream(index, Purpose.ATTACK_NOISE).draw(copies, image).unsqueeze(0)
    choices = derive_generator(job.device, options.seed, index, Purpose.ATTACK_CHOICES)
    labels = torch.tensor([label], device=job.device)
    return attack(job.classifier, image.unsqueeze(0), labels, noise, choices).squeeze(0)
