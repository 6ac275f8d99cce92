"""attack: a smoothed classifier's accuracy under attack, its adversarial examples, and attempts on its certificates."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path
from typing import Any

from smoothadv.attacks import SmoothedAttack
from smoothadv.bounds import binomial_interval
from smoothadv.certification import ABSTAIN
from smoothadv.commands.against import (
    DEFAULT_FALSE_ALARM,
    DEFAULT_FRACTION,
    OUTDIR,
    CertificateBallots,
    Certificates,
    read_certificates,
    report,
)
from smoothadv.commands.attacking import (
    AttackedBallots,
    add_evaluation_attack,
    attack_settings,
    compose_evaluation_attack,
    fit_to_job,
    shared_with,
)
from smoothadv.commands.components import retyped
from smoothadv.commands.evaluating import Evaluation, evaluate, merge_main, told_of_shard
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import (
    PREDICTION_DRAWS,
    SmoothingJob,
    add_smoothing,
    prepare,
    recorded_number,
    warn_of_few_draws,
)
from smoothadv.errors import UserError
from smoothadv.readers import read_prediction_log
from smoothadv.records import (
    ATTACK_COLUMNS,
    FALSIFICATION_COLUMNS,
    attacked_log,
    examples_path,
    falsification_log,
    pictures_folder,
)
from smoothadv.saved_examples import write_pictures
from smoothadv.settings import Setting, non_negative_int, number, positive_int, probability

_STEPS, _DRAWS = 20, 64
_PLACE = "\0"  # no path
_fraction = number(float, "a number above 0 and below 1, like 0.999", lambda v: 0 < v < 1)

_EXAMPLES = """examples:
  python code/attack.py digits models/quickstart/smoothadv/checkpoint.pth.tar 0.25 logs/attacked \\
      --epsilon 0.25 0.5 --N 10000
  python code/attack.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/cifar10/attacked --skip 20 \\
      --epsilon 0.25 0.5 0.75 1.0 --num-noise-vec 128 --restarts 5 --png 20
  python code/attack.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/cifar10/free --skip 20 \\
      --epsilon 0.5 --gradient stein --num-noise-vec 512
try to falsify every certificate of a log:
  python code/attack.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 logs/cifar10/falsified \\
      --against logs/cifar10/pgd_0.25.tsv
The same command again continues what was interrupted. docs/attacks.md tells what the attacks are and what they found.
"""


def main(arguments: list[str] | None = None) -> int:
    """The command ``attack``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    if arguments and arguments[0] == "merge":
        return merge_main("attack", arguments[1:])
    parser = make_parser()
    return run(
        parser,
        lambda options: _attack(parser, options),
        arguments,
        interrupted="every finished example is in the log; run the same command again to continue",
    )


def make_parser() -> Parser:
    """The parser of the command ``attack``."""
    parser = Parser(
        prog="attack",
        epilog=_EXAMPLES,
        description="Attack a smoothed classifier on test images (Salman et al., 2019): a prediction log and the "
        "adversarial examples for each epsilon; or, --against a certification log, try to make its certificates false.",
    )
    add_smoothing(
        parser,
        outfile="folder for the logs (TSV), adversarial examples (NPZ) and pictures (PNG)",
        n_help=f"draws per prediction of an attacked image (default: {PREDICTION_DRAWS:,})",
        output="outdir",
    )
    add_evaluation_attack(parser, _several_sizes, default="PGD", default_draws=_DRAWS)
    parser.add_argument("--only", type=non_negative_int, nargs="+", metavar="IDX", help="take just these images")
    parser.add_argument(
        "--png", type=positive_int, metavar="COUNT", help="save pictures of the first COUNT images, before and after"
    )
    _add_falsification(parser)
    return parser


def _several_sizes(setting: Setting) -> Setting:
    """The attack's settings as this command has them."""
    if setting.flag == "--epsilon":
        return dataclasses.replace(setting, many=True, help=f"{setting.help}; each makes a log of its own")
    return dataclasses.replace(setting, default=_STEPS) if setting.flag == "--num-steps" else setting


def _add_falsification(parser: Parser) -> None:
    group = parser.add_argument_group("falsification")
    group.add_argument(
        "--against",
        type=Path,
        metavar="LOG",
        help="attack each image of this certification log within its certified radius, away from the certified class; "
        "fails if more certificates prove false than alpha allows",
    )
    group.add_argument(
        "--fraction",
        type=_fraction,
        default=None,
        help=f"of the radius, how far attacks may go (default: {DEFAULT_FRACTION:g})",
    )
    group.add_argument(
        "--false-alarm",
        type=probability,
        default=None,
        help=f"probability to fail although every certificate holds its alpha (default: {DEFAULT_FALSE_ALARM:g})",
    )


def _attack(parser: Parser, options: argparse.Namespace) -> None:
    plans = attacks_planned(parser, options)
    if options.only is not None and (options.skip != 1 or options.max is not None):
        parser.error("--only is not read with --skip or --max: leave one of them out")
    warn_of_few_draws(options)
    attack_all(parser, options, plans)


def attack_all(parser: Parser, options: argparse.Namespace, plans: list[tuple[Path, SmoothedAttack]]) -> None:
    """Bring every log of the ``plans`` to its end."""
    if options.outdir.is_file():
        raise UserError(f"{options.outdir} is a file: name a folder for the logs")
    options.outfile = next((path for path, _ in plans if path.exists()), plans[0][0])
    certificates = None if options.against is None else read_certificates(options)
    job = prepare(options, sound=certificates is not None and certificates.sound)
    if certificates is not None:
        certificates.check_job(job)
        certificates = certificates.among(options.skip, options.max)
    job = dataclasses.replace(job, indices=_indices(options, job, certificates))
    fit_to_job(parser, plans[0][1], job, options)
    batches = {"batch": job.batch, "attack_batch": plans[0][1].batch}
    for path, attack in plans:
        options.outfile = path
        # A log that was begun with others goes on with them.
        own = {name: getattr(options, name) or recorded_number(options, name) or batches[name] for name in batches}
        attack.batch = own["attack_batch"]
        if _one_log(options, _with_batch(job, own["batch"]), path, attack, certificates):
            _finish(options, certificates, _again(parser, options, **own))
        elif options.shard is not None:
            print(told_of_shard(options, "attack"))


def attacks_planned(parser: Parser, options: argparse.Namespace) -> list[tuple[Path, SmoothedAttack]]:
    """Which log is made by which attack; the default for ``options.N``."""
    options.N = options.N or PREDICTION_DRAWS
    sizes = getattr(options, "--epsilon", None)
    if (sizes is None) == (options.against is None):
        parser.error(
            "give either --epsilon, the l2 norms of the attack, or --against, the log of certificates to attack"
        )
    for flag, value in (("--fraction", options.fraction), ("--false-alarm", options.false_alarm)):
        if value is not None and options.against is None:
            parser.error(f"{flag} is only read together with --against: leave it out")
    for flag, value in (("--png", options.png), ("--false-alarm", options.false_alarm)):
        if value is not None and options.shard is not None:
            parser.error(f"{flag} is not read with --shard: give it to the same command without, once they are merged")
    if len(set(sizes or ())) < len(sizes or ()):
        parser.error("--epsilon names a size twice")

    def attack(epsilon: float) -> SmoothedAttack:
        given = copy.copy(options)
        setattr(given, "--epsilon", epsilon)
        setattr(given, "--num-steps", getattr(options, "--num-steps", _STEPS))
        return compose_evaluation_attack(parser, given, _DRAWS)

    if sizes is None:
        return [(falsification_log(options.outdir), attack(0.0))]
    return [(attacked_log(options.outdir, epsilon), attack(epsilon)) for epsilon in sizes]


def _indices(options: argparse.Namespace, job: SmoothingJob, certificates: Certificates | None) -> Any:
    """The examples to attack; UserError where there are none of those asked for."""
    if options.only is None:
        return job.indices if certificates is None else certificates.indices
    known = range(len(job.dataset)) if certificates is None else set(certificates.indices)
    missing = [index for index in options.only if index not in known]
    if missing:
        where = f"{options.dataset} has no image" if certificates is None else f"{options.against} certifies no image"
        raise UserError(f"--only {missing[0]}: {where} {missing[0]}")
    return sorted(set(options.only))


def _with_batch(job: SmoothingJob, batch: int) -> SmoothingJob:
    return dataclasses.replace(job, batch=batch, settings={**job.settings, "batch": batch})


def _one_log(
    options: argparse.Namespace,
    job: SmoothingJob,
    path: Path,
    attack: SmoothedAttack,
    certificates: Certificates | None,
) -> bool:
    """Bring a log to its end, or this process's share of it; whether it is whole now."""
    if job.workers is not None:
        job = dataclasses.replace(job, workers=job.workers.apart(path.name))
    settings = {"N": options.N, **attack_settings(attack)}
    if certificates is None:
        ballots = AttackedBallots(job, attack, options.N, options.alpha)
        columns, title, scores = ballots.columns, "correct", lambda row: bool(row["correct"])
    else:
        ballots = CertificateBallots(job, attack, options.N, options.alpha, certificates)
        columns = (*FALSIFICATION_COLUMNS, *ballots.columns[len(ATTACK_COLUMNS) :])
        title, scores = "falsified", lambda row: bool(row["flipped"])
        settings["attack"]["epsilon"], settings["against"] = None, certificates.record
    what = f"attacking {options.against.name}" if options.against else f"attacking, epsilon {attack.attack.epsilon:g}"
    evaluation = Evaluation(
        columns, settings, ballots, what, title, scores, keeps_images=True, **shared_with(attack, job)
    )
    return evaluate(options, job, evaluation)


def _again(parser: Parser, options: argparse.Namespace, batch: int, attack_batch: int) -> list[Any]:
    """The words of a command that does the same again, wherever it is typed; ``OUTDIR`` is where."""
    given = copy.copy(options)
    given.batch, given.attack_batch, given.outdir = batch, attack_batch, _PLACE
    words = retyped(parser, given, without=("only", "skip", "max", "shard", "existing", "png", "debug"))
    return ["python", "code/attack.py", *(OUTDIR if word == _PLACE else word for word in words)]


def _finish(options: argparse.Namespace, certificates: Certificates | None, again: list[Any]) -> None:
    """Say in a line what the log says, make the pictures, and fail where certificates did."""
    table = read_prediction_log(options.outfile)
    if options.png is not None:
        pictures = write_pictures(options.outfile, options.png)
        print(f"{pictures_folder(options.outfile)}: {len(pictures)} pictures")
    if certificates is not None:
        report(options, certificates, table, again)
        return
    hits = int(table.correct.sum())
    low, high = binomial_interval(hits, len(table), 0.95)
    print(
        f"{options.outfile}: {len(table)} examples, empirical accuracy {hits / len(table):.1%} (95 % interval "
        f"{low:.1%} to {high:.1%}), abstained {(table.predict == ABSTAIN).mean():.1%}; "
        f"adversarial examples in {examples_path(options.outfile).name}"
    )
