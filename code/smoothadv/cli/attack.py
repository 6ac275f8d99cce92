"""attack: a smoothed classifier's accuracy under attack, its adversarial examples, and attempts on
its certificates.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from smoothadv.base.errors import UserError
from smoothadv.base.settings import Setting, non_negative_int, number, positive_int, probability
from smoothadv.cli.merging import evaluation_main, is_finished
from smoothadv.cli.options.attack import add_evaluation_attack, attack_plan_of
from smoothadv.cli.options.components import add_options, command_line_of
from smoothadv.cli.options.shared import use_threads
from smoothadv.cli.options.smoothing import add_smoothing, request_fields
from smoothadv.cli.runner import Parser
from smoothadv.evaluation import attack as attacking
from smoothadv.evaluation import specs as requests
from smoothadv.evaluation.pictures import write_pictures
from smoothadv.evaluation.specs import AttackRequest, FalsifyRequest
from smoothadv.records.logs import CLASS, examples_path, numbered, pictures_folder
from smoothadv.records.readers import read_prediction_log
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import ABSTAIN
from smoothadv.statistics.bounds import binomial_interval

if TYPE_CHECKING:
    from smoothadv.evaluation.falsify import Verdict

_STEPS, _DRAWS = 20, 64

_FALSIFICATION = {
    "--against LOG": (
        Path,
        "attack each image of this certification log within its certified radius, away from the "
        "certified class; fails if more certificates prove false than alpha allows",
    ),
    "--fraction": (
        number(float, "a number above 0 and below 1, like 0.999", lambda v: 0 < v < 1),
        "largest norm of an attack, as a fraction of the radius (default: "
        f"{requests.DEFAULT_FRACTION:g})",
    ),
    "--false-alarm": (
        probability,
        "probability of failing although every certificate holds its alpha (default: "
        f"{requests.DEFAULT_FALSE_ALARM:g})",
    ),
}
_CHOICES = {
    "--only IDX...": (non_negative_int, "attack only the images with these indices"),
    "--png COUNT": (
        positive_int,
        "save pictures of the first COUNT images, before and after the attack",
    ),
}
_EXAMPLES = """examples:
  python code/attack.py digits models/quickstart/smoothadv/checkpoint.pth.tar 0.25 logs/attacked \\
      --epsilon 0.25 0.5 --N 10000
  python code/attack.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 \\
      logs/cifar10/attacked --skip 20 \\
      --epsilon 0.25 0.5 0.75 1.0 --num-noise-vec 128 --restarts 5 --png 20
  python code/attack.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 \\
      logs/cifar10/free --skip 20 \\
      --epsilon 0.5 --gradient stein --num-noise-vec 512
try to falsify every certificate of a log:
  python code/attack.py cifar10 models/cifar10/pgd_0.25/checkpoint.pth.tar 0.25 \\
      logs/cifar10/falsified \\
      --against logs/cifar10/pgd_0.25.tsv
The same command again continues what was interrupted. docs/attacks.md describes the attacks and
their results.
"""


def make_parser() -> Parser:
    """The parser of the command ``attack``."""
    parser = Parser(
        prog="attack",
        epilog=_EXAMPLES,
        description="Attack a smoothed classifier on test images (Salman et al., 2019): a "
        "prediction log and the adversarial examples for each epsilon; or, with --against, try to "
        "falsify the certificates of a log.",
    )
    add_smoothing(
        parser,
        outfile="folder for the logs (TSV), adversarial examples (NPZ) and pictures (PNG)",
        n_help="draws per prediction of an attacked image (default: "
        f"{requests.PREDICTION_DRAWS:,})",
        output="outdir",
    )
    add_evaluation_attack(parser, _adapted, default="PGD", default_draws=_DRAWS)
    add_options(parser, _CHOICES)
    add_options(parser.add_argument_group("falsification"), _FALSIFICATION)
    return parser


def _adapted(setting: Setting) -> Setting:
    """An attack's setting as this command offers it: several epsilons, and a default number of
    steps.
    """
    if setting.flag == "--epsilon":
        return dataclasses.replace(
            setting, many=True, help=f"{setting.help}; each makes a log of its own"
        )
    return (
        dataclasses.replace(setting, default=_STEPS) if setting.flag == "--num-steps" else setting
    )


def request_of(
    parser: Parser, options: argparse.Namespace, command: Sequence[str]
) -> AttackRequest | FalsifyRequest:
    """The request that the options describe; a usage error where they contradict each other."""
    sizes = getattr(options, "--epsilon", None)
    _refuse_contradictions(parser, options, sizes)
    steps = getattr(options, "--num-steps", _STEPS)
    fields = {
        **request_fields(FalsifyRequest if sizes is None else AttackRequest, options, command),
        # Each log, or each certificate, sets its own epsilon.
        "attack": attack_plan_of(parser, options, _DRAWS, epsilon=0.0, num_steps=steps),
        "only": None if options.only is None else tuple(options.only),
    }
    return (
        FalsifyRequest(**fields)
        if sizes is None
        else AttackRequest(**fields, epsilons=tuple(sizes))
    )


def _refuse_contradictions(
    parser: Parser, options: argparse.Namespace, sizes: Sequence[float] | None
) -> None:
    if (sizes is None) == (options.against is None):
        parser.error(
            "give either --epsilon, the l2 norms of the attack, or --against, the log of "
            "certificates to attack"
        )
    for flag, value in (("--fraction", options.fraction), ("--false-alarm", options.false_alarm)):
        if value is not None and options.against is None:
            parser.error(f"{flag} is only read together with --against: leave it out")
    for flag, value in (("--png", options.png), ("--false-alarm", options.false_alarm)):
        if value is not None and options.shard is not None:
            parser.error(
                f"{flag} is not read with --shard: give it without --shard, after the shards are "
                "merged"
            )
    if len(set(sizes or ())) < len(sizes or ()):
        parser.error("--epsilon names a size twice")
    if options.only is not None and (options.skip != 1 or options.max is not None):
        parser.error("--only is not read with --skip or --max: leave one of them out")


def _attack(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    request = request_of(parser, options, command)
    use_threads(options)
    if isinstance(request, FalsifyRequest):
        from smoothadv.evaluation import falsify as falsifying  # imports the analyses and pandas

        log, certificates = falsifying.falsify(request)
        if is_finished(log, request.shard, "attack"):
            _save_pictures(log.path, options.png)
            repeat = partial(_repeating_command, parser, options, log)
            _print_verdict(falsifying.verdict(request, certificates), request, repeat)
        return
    for log in attacking.attack(request):
        if is_finished(log, request.shard, "attack"):
            _save_pictures(log.path, options.png)
            _summarise(log.path)


def _save_pictures(log: Path, count: int | None) -> None:
    """Make pictures of the first images of a log (None: of none)."""
    if count is not None:
        print(f"{pictures_folder(log)}: {len(write_pictures(log, count))} pictures")


def _repeating_command(
    parser: Parser, options: argparse.Namespace, log: WrittenLog, outdir: str, index: int
) -> str:
    """The command line that repeats the attack on one certificate, with its log in ``outdir``."""
    changes = {"batch": log.batch, "attack_batch": log.attack_batch, "outdir": outdir}
    without = ("only", "skip", "max", "shard", "existing", "png", "debug")
    words = command_line_of(parser, options, without, changes)
    return shlex.join([*parser.prog.split(), *words, "--only", str(index)])


def _print_verdict(
    verdict: Verdict, request: FalsifyRequest, repeat: Callable[[str, int], str]
) -> None:
    """Print each flip with the command that repeats its attack; UserError if the log holds false
    certificates.
    """
    columns = numbered(verdict.flips.columns, CLASS) or ["predict"]
    for row in verdict.flips.itertuples():
        found = ", ".join(str(getattr(row, name)) for name in columns)
        print(
            f"flipped: image {row.idx} (class {row.label}), certified as {row.certified} within "
            f"{row.radius:.6g}, is predicted as {found} at a distance of {row.attack_norm:.6g}; "
            "again with\n"
            f"  {repeat(f'{request.outdir}_{row.idx}', row.idx)}"
        )
    if verdict.refutes:
        raise UserError(f"{request.against} holds false certificates: {verdict.sentence}")
    print(verdict.sentence)


def _summarise(log: Path) -> None:
    table = read_prediction_log(log)
    hits = int(table.correct.sum())
    low, high = binomial_interval(hits, len(table), 0.95)
    print(
        f"{log}: {len(table)} examples, empirical accuracy {hits / len(table):.1%} (95 % interval "
        f"{low:.1%} to {high:.1%}), abstained {(table.predict == ABSTAIN).mean():.1%}; "
        f"adversarial examples in {examples_path(log).name}"
    )


main = partial(evaluation_main, "attack", make_parser, _attack)
