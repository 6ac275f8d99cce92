"""sets: conformal sets of classes under attack, by one or more noisy passes per image."""

from collections.abc import Sequence
from functools import partial

from smoothadv.cli.evaluation import CONTINUED, is_finished, merge_parser, merge_shards
from smoothadv.cli.options.attack import EvaluationAttackOptions, add_attack
from smoothadv.cli.predict import spec_of
from smoothadv.cli.runner import Options, Parser, run
from smoothadv.models.spec import use_threads
from smoothadv.sets.scoring import SetsSpec, write_scores
from smoothadv.sets.table import SetsTable

_EXAMPLES = """examples:
  python code/sets.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/sets.tsv --radii 0 0.25
  python code/sets.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/attacked.tsv \\
      --radii 0 0.25 --attack PGD --epsilon 0.25 --num-steps 20
  python code/sets.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/counted.tsv \\
      --radii 0 0.25 --N 100
  python code/analyze.py sets logs/sets.tsv logs/attacked.tsv -o sets.png
The same command again continues a log. docs/conformal.md says what a set guarantees.
"""


def make_parser() -> Parser:
    """The parser of the command ``sets``."""
    parser = Parser(
        prog="sets",
        kinds=[SetsSpec],
        epilog=_EXAMPLES,
        description="For each image a set of classes that has the label, with probability 1 - "
        "alpha, under any attack within a radius: conformal prediction by one noisy pass per image "
        "(RCP1, Zargarbashi et al., 2025) or by several (BinCP, Zargarbashi and Bojchevski, 2025). "
        "With --attack, the images are attacked first.",
    )
    add_attack(parser, EvaluationAttackOptions)
    return parser


def _sets(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = spec_of(options, command, SetsSpec)
    use_threads(spec)
    log, _ = write_scores(spec)
    if is_finished(log, spec.shard, "sets"):
        print(*SetsTable(logs=(log.path,)).write())


main = partial(
    run,
    "sets",
    make_parser,
    _sets,
    interrupted=CONTINUED,
    subcommands={
        "merge": partial(run, "sets merge", partial(merge_parser, "sets"), merge_shards),
    },
)
