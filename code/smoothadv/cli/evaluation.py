"""How certify, predict and attack run, and their subcommand ``merge``: the shards of a log become
the log.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from smoothadv.base.settings import Checked, output_file, setting
from smoothadv.cli.options.shared import say_what_is_certified
from smoothadv.cli.runner import Body, Options, Parser, given_settings, run
from smoothadv.evaluation.shards import Shard, merge, shards_of
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.records.writer import WrittenLog

Spec = TypeVar("Spec", bound=EvaluationSpec)


@dataclass(frozen=True, kw_only=True)
class MergeSpec(Checked):
    """Merge ``shards`` into the log ``outfile``."""

    outfile: Path = setting(
        parse=output_file,
        flag="outfile",
        help="log to write: the OUTFILE for which the shards were made",
    )
    shards: tuple[Path, ...] = setting(
        (),
        parse=Path,
        many="*",
        flag="shards",
        metavar="SHARD",
        help="shard logs (default: those in OUTFILE.shards)",
    )
    overwrite: bool = setting(False, help="replace OUTFILE if it exists")


def spec_from(kind: type[Spec], options: Options, command: Sequence[str], **further: Any) -> Spec:
    """The spec that the options and the fields ``further`` describe; UsageError where they
    contradict each other.
    """
    spec = kind(**{**given_settings(kind, options), **further}, command=tuple(command))
    say_what_is_certified(spec.dataset)
    return spec


def is_finished(log: WrittenLog, shard: Shard | None, command: str) -> bool:
    """Whether a log is whole; says what to do next if only a ``shard`` of it is."""
    if shard is not None:
        print(
            f"shard {shard} is done: {shard.path(log.path)}; when all shards are done, `python "
            f"code/{command}.py merge {log.path}` joins them, and then this command without "
            "--shard prints a summary"
        )
    return log.is_whole


def evaluation_main(
    command: str, make_parser: Callable[[], Parser], body: Body, arguments: Sequence[str]
) -> int:
    """Run a command that evaluates, or its subcommand ``merge``, with these ``arguments``; returns
    the exit code.
    """
    if arguments[:1] == ["merge"]:
        return run(f"{command} merge", partial(merge_parser, command), _merge, arguments[1:])
    hint = "every finished example is in the log; run the same command again to continue"
    return run(command, make_parser, body, arguments, interrupted=hint)


def merge_parser(command: str) -> Parser:
    """The parser of the subcommand ``merge`` of ``command``."""
    return Parser(
        prog=f"{command} merge",
        kinds=[MergeSpec],
        description="Join the shards of a log. Refuses gaps, overlaps, unfinished shards and mixed "
        "settings.",
        epilog=f"examples:\n  python code/{command}.py merge logs/cifar10.tsv\n"
        f"  python code/{command}.py merge logs/cifar10.tsv node1/*.tsv node2/*.tsv\n",
    )


def _merge(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = MergeSpec(**given_settings(MergeSpec, options))
    shards = spec.shards or shards_of(spec.outfile)
    rows = merge(spec.outfile, shards, spec.overwrite)
    print(f"{spec.outfile}: {rows} examples from {len(shards)} shards, which can be removed now")
