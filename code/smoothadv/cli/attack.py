"""attack: a smoothed classifier's accuracy under attack, its adversarial examples, and attempts on
its certificates.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from functools import partial

from smoothadv.analysis.examples import write_pictures
from smoothadv.base.errors import UsageError, UserError, counted
from smoothadv.base.settings import Setting, options_of, positive_int
from smoothadv.cli.evaluation import (
    CONTINUED,
    is_finished,
    merge_parser,
    merge_shards,
    spec_from,
)
from smoothadv.cli.options.attack import EvaluationAttackOptions, add_attack, attacked_fields
from smoothadv.cli.runner import Options, Parser, command_line_of, run
from smoothadv.evaluation.falsify import Verdict, falsify, verdict
from smoothadv.evaluation.predict import attack
from smoothadv.evaluation.specs import AttackSpec, FalsifySpec
from smoothadv.models.spec import use_threads
from smoothadv.records.logs import CLASS, examples_path, numbered, pictures_folder
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import ABSTAIN
from smoothadv.statistics.bounds import binomial_interval

_DEFAULTS = {"--attack": "PGD", "--num-steps": 20}


_EXAMPLES = """examples:
  python code/attack.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/attacked --skip 20 \\
      --epsilon 0.25 0.5 0.75 1.0 --num-noise-vec 128 --restarts 5 --png 20
  python code/attack.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/free --skip 20 \\
      --epsilon 0.5 --gradient stein --num-noise-vec 512
try to falsify every certificate of a log:
  python code/attack.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/falsified \\
      --against logs/cifar10.tsv
The same command again continues a log. docs/attacks.md describes the attacks.
"""


def make_parser() -> Parser:
    """The parser of the command ``attack``."""
    parser = Parser(
        prog="attack",
        epilog=_EXAMPLES,
        description="Attack a smoothed classifier on test images (Salman et al., 2019): a "
        "prediction log and the adversarial examples for each epsilon; or, with --against, try to "
        "falsify the certificates of a log.",
        kinds=[AttackSpec, FalsifySpec],
    )
    parser.add_argument(
        "--png",
        dest="--png",
        type=positive_int,
        metavar="COUNT",
        help="save pictures of the first COUNT images, before and after the attack",
    )
    add_attack(parser, EvaluationAttackOptions, _with_default)
    return parser


def _with_default(one: Setting) -> Setting:
    """An attack's setting as this command offers it."""
    return dataclasses.replace(one, default=_DEFAULTS.get(one.flag, one.default))


def spec_of(options: Options, command: Sequence[str]) -> AttackSpec | FalsifySpec:
    """The spec that the options describe; a usage error where they contradict each other."""
    if ("--epsilon" in options) == ("--against" in options):
        raise UsageError(
            "give either --epsilon, the l2 norms of the attack, or --against, the log of "
            "certificates to attack"
        )
    kind: type[AttackSpec | FalsifySpec] = FalsifySpec if "--against" in options else AttackSpec
    for one in options_of(FalsifySpec):
        if one.flag in options and one.field not in kind.__dataclass_fields__:
            raise UsageError(f"{one.flag} is only read together with --against: leave it out")
    whole = [flag for flag in ("--png", "--false-alarm") if flag in options]
    if whole and "--shard" in options:
        raise UsageError(
            f"{whole[0]} is not read with --shard: give it without --shard, after the shards are "
            "merged"
        )
    # Each log, or each certificate, sets its own epsilon.
    steps = options.get("--num-steps", _DEFAULTS["--num-steps"])
    return spec_from(
        kind, options, command, **attacked_fields(options, "PGD", epsilon=0.0, num_steps=steps)
    )


def _attack(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = spec_of(options, command)
    use_threads(spec)
    logs: Iterable[WrittenLog]
    if isinstance(spec, FalsifySpec):
        log, certificates = falsify(spec)
        logs = [log]
    else:
        logs = attack(spec)
    for log in logs:
        if not is_finished(log, spec.shard, "attack"):
            continue
        if "--png" in options:
            pictures = write_pictures(log.path, options["--png"])
            print(f"{pictures_folder(log.path)}: {len(pictures)} pictures")
        if isinstance(spec, FalsifySpec):
            # What repeats the attack on one certificate.
            changes = {"--batch": log.batch, "--attack-batch": log.attack_batch}
            without = {
                *"outdir --images --only --skip --max --shard --existing --png debug".split()
            }
            words = command_line_of(parser, options, without, changes)
            found = verdict(spec, certificates, log.table, log.path)
            _print_verdict(found, spec, parser.prog, words)
        else:
            _summarise(log)


def _print_verdict(found: Verdict, spec: FalsifySpec, prog: str, words: list[str]) -> None:
    """Print each flip with the command that repeats its attack; UserError if the log holds false
    certificates.
    """
    columns = numbered(found.flips.columns, CLASS) or ["predict"]
    for row in found.flips.itertuples():
        predicted = ", ".join(str(getattr(row, name)) for name in columns)
        repeat = [*words[:3], f"{spec.outdir}_{row.idx}", *words[3:], "--only", str(row.idx)]
        print(
            f"flipped: image {row.idx} (class {row.label}), certified as {row.certified} within "
            f"{row.radius:.6g}, is predicted as {predicted} at a distance of "
            f"{row.attack_norm:.6g}; again with\n  {prog} {shlex.join(repeat)}"
        )
    if found.refutes:
        raise UserError(f"{spec.against} holds false certificates: {found.sentence}")
    print(found.sentence)


def _summarise(log: WrittenLog) -> None:
    table = log.table
    hits = int(table.correct.sum())
    low, high = binomial_interval(hits, len(table), 0.95)
    print(
        f"{log.path}: {counted(len(table), 'example')}, empirical accuracy "
        f"{hits / len(table):.1%} (95 % interval {low:.1%} to {high:.1%}), abstained "
        f"{(table.predict == ABSTAIN).mean():.1%}; adversarial examples in "
        f"{examples_path(log.path).name}"
    )


main = partial(
    run,
    "attack",
    make_parser,
    _attack,
    interrupted=CONTINUED,
    subcommands={
        "merge": partial(run, "attack merge", partial(merge_parser, "attack"), merge_shards)
    },
)
