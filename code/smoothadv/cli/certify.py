"""certify: radii of a smoothed classifier on test images."""

from collections.abc import Sequence
from functools import partial

from smoothadv.base.errors import UserError, counted
from smoothadv.base.files import file_digest, write_json
from smoothadv.base.settings import options_of
from smoothadv.cli.evaluation import (
    CONTINUED,
    evaluate_images,
    images_parser,
    is_finished,
    merge_parser,
    merge_shards,
    spec_from,
)
from smoothadv.cli.runner import (
    Options,
    Parser,
    add_settings,
    given_settings,
    group_of,
    refuse_foreign_settings,
    run,
)
from smoothadv.evaluation.specs import CertifySpec, VerifySpec, method_of
from smoothadv.models.name import STAGES
from smoothadv.models.spec import use_threads
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import PROCEDURES, accuracy

_EXAMPLES = """examples:
  python code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv --skip 20
  python code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/all.tsv --method adaptive
on several GPUs, or machines:
  torchrun --nproc-per-node 8 \\
      -- code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv
  python code/certify.py cifar10 models/pgd/checkpoint.pth.tar 0.25 logs/cifar10.tsv --shard 0/4
  python code/certify.py merge logs/cifar10.tsv
photographs without labels:
  python code/certify.py images cifar10 models/pgd/checkpoint.pth.tar 0.25 cat.png photos/
rows of a log drawn again, and compared:
  python code/certify.py verify logs/cifar10.tsv --rows 20
The same command again continues a log. docs/guarantee.md says what a radius guarantees.
"""


def make_parser() -> Parser:
    """The parser of the command ``certify``."""
    parser = Parser(
        prog="certify",
        epilog=_EXAMPLES,
        description="Certify a smoothed classifier (Cohen et al., 2019): for each "
        "image a class and an l2 radius within which it cannot change, or an abstention.",
        kinds=[CertifySpec],
    )
    add_settings(
        group_of(parser, "procedure"),
        [one for kind in PROCEDURES.values() for one in options_of(kind)],
    )
    return parser


def spec_of(options: Options, command: Sequence[str]) -> CertifySpec:
    """The spec that the options describe; a usage error for options of another procedure than
    --method's.
    """
    method = options.get("--method", "exact")
    if options["sigma"] == STAGES and not method.endswith("router"):
        method = method_of(method, "cascade")  # a router's has the same settings
    refuse_foreign_settings(options, PROCEDURES, "--method", method)
    settings = given_settings(PROCEDURES[method], options)
    return spec_from(CertifySpec, options, command, settings=settings)


def _certify(parser: Parser, options: Options, command: Sequence[str]) -> None:
    """Certify, and print one line with the results in the log; where radii lie on a grid, the
    accuracies at the grid's radii.
    """
    spec = spec_of(options, command)
    use_threads(spec)
    # Imports torch, for which a usage error need not wait.
    from smoothadv.evaluation.certify import certify, rehearse

    if spec.dry_run:
        if text := rehearse(spec):
            print(text)
        return
    log, procedure = certify(spec)
    if not is_finished(log, spec.shard, "certify"):
        return
    table = log.table
    grid = [radius for radius in getattr(procedure, "radii", ()) if radius > 0]
    radii = [0.0, *(grid or accuracy.default_radii([table]))][:6]
    accuracies = zip(radii, accuracy.certified_accuracies(table, radii))
    listed = ", ".join(f"{share:.1%} at {radius:g}" for radius, share in accuracies)
    on_the_grid = " on the grid of radii" if procedure.on_grid else ""
    among = f"top-{procedure.top_k} " if procedure.top_k > 1 else ""
    print(
        f"{log.path}: {counted(len(table), 'example')}, certified {among}accuracy {listed}; "
        f"average certified radius{on_the_grid} {accuracy.average_certified_radius(table):.3f}"
    )


def _in_memory(spec: CertifySpec) -> WrittenLog:
    from smoothadv.evaluation.certify import certify  # imports torch

    return certify(spec)[0]


verify_parser = partial(
    Parser,
    prog="certify verify",
    kinds=[VerifySpec],
    description="Draw random rows of a certification log again, and compare all columns but the "
    "time. A log made with --sound of a checkpoint of integers can be repeated on any machine, "
    "another one where it was made.",
    epilog="examples:\n  python code/certify.py verify logs/integers.tsv --rows 100\n",
)


def _verify(parser: Parser, options: Options, command: Sequence[str]) -> None:
    from smoothadv.evaluation.verify import verify  # imports torch

    spec = VerifySpec(**given_settings(VerifySpec, options))
    use_threads(spec)
    found = verify(spec)
    rows = (
        f"{found.repeated} of {counted(found.rows, 'row')} of {spec.log}, chosen by --seed "
        f"{found.seed}, were drawn again"
    )
    for index, difference in found.differences.items():
        print(f"image {index}: {difference}", flush=True)
    if found.differences:
        raise UserError(f"{rows}: {len(found.differences)} differ")
    if found.missing:
        some = ", ".join(map(str, found.missing[:8])) + ", ..." * (len(found.missing) > 8)
        count = len(found.missing) + found.rows
        raise UserError(
            f"{rows}, and are equal; unfinished: {len(found.missing)} of {counted(count, 'image')} "
            f"are missing, {some}"
        )
    if spec.output:
        redrawn = {"rows": found.repeated, "seed": found.seed}
        write_json(spec.output, {"log_sha256": file_digest(spec.log), "redrawn": redrawn})
    print(f"{rows}: all are equal")


main = partial(
    run,
    "certify",
    make_parser,
    _certify,
    interrupted=CONTINUED,
    subcommands={
        "merge": partial(run, "certify merge", partial(merge_parser, "certify"), merge_shards),
        "verify": partial(run, "certify verify", verify_parser, _verify),
        "images": partial(
            run,
            "certify images",
            partial(images_parser, "certify", CertifySpec),
            partial(evaluate_images, CertifySpec, _in_memory),
        ),
    },
)
