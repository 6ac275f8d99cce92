"""predict: the smoothed classifier's classes, on clean or on attacked images."""

from collections.abc import Sequence
from functools import partial

from smoothadv.attacks import ATTACKS
from smoothadv.base.errors import UsageError, counted
from smoothadv.cli.evaluation import (
    CONTINUED,
    evaluate_images,
    images_parser,
    is_finished,
    merge_parser,
    merge_shards,
    spec_from,
)
from smoothadv.cli.options.attack import (
    EvaluationAttackOptions,
    add_attack,
    attacked_fields,
    flags_of,
)
from smoothadv.cli.runner import Options, Parser, run
from smoothadv.evaluation.predict import predict
from smoothadv.evaluation.specs import PredictSpec, Spec
from smoothadv.models.spec import use_threads
from smoothadv.statistics import ABSTAIN

_EXAMPLES = """examples:
  python code/predict.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/clean.tsv --skip 20
  python code/predict.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/attacked.tsv --skip 20 \\
      --N 10000 --attack PGD --epsilon 0.5 --num-steps 20 --num-noise-vec 128
photographs without labels:
  python code/predict.py images cifar10 models/pgd/checkpoint.pth.tar 0.25 cat.png photos/
"""


def make_parser() -> Parser:
    """The parser of the command ``predict``."""
    parser = Parser(
        prog="predict",
        epilog=_EXAMPLES,
        description="Predict with a smoothed classifier (Cohen et al., 2019), or "
        "abstain; with --attack, on attacked images (Salman et al., 2019).",
        kinds=[PredictSpec],
    )
    add_attack(parser, EvaluationAttackOptions)
    return parser


def spec_of(options: Options, command: Sequence[str], kind: type[Spec]) -> Spec:
    """The spec of a ``kind`` that the options describe; a usage error for options of an attack
    without --attack.
    """
    if "--attack" in options:
        return spec_from(kind, options, command, **attacked_fields(options))
    flags = flags_of(EvaluationAttackOptions, *ATTACKS.values())
    if given := [flag for flag in options if flag in flags]:
        raise UsageError(
            f"{given[0]} is only read together with --attack: add --attack NAME or leave it out"
        )
    return spec_from(kind, options, command)


def _predict(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = spec_of(options, command, PredictSpec)
    use_threads(spec)
    log = predict(spec)
    if is_finished(log, spec.shard, "predict"):
        table = log.table
        print(
            f"{log.path}: {counted(len(table), 'example')}, accuracy {table.correct.mean():.1%}, "
            f"abstained {(table.predict == ABSTAIN).mean():.1%}"
            + f", where no {spec.top_k} classes lead all others significantly"
            * (spec.top_k > 1)
        )


main = partial(
    run,
    "predict",
    make_parser,
    _predict,
    interrupted=CONTINUED,
    subcommands={
        "merge": partial(run, "predict merge", partial(merge_parser, "predict"), merge_shards),
        "images": partial(
            run,
            "predict images",
            partial(images_parser, "predict", PredictSpec),
            partial(evaluate_images, PredictSpec, predict),
        ),
    },
)
