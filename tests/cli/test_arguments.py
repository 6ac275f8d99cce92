"""What every option of every command takes and refuses, found by asking all parsers; and what is
written of names.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path

from smoothadv.base.settings import any_seed
from smoothadv.cards import push
from smoothadv.cli import (
    analyze,
    attack,
    certify,
    evaluation,
    predict,
    train,
    train_denoiser,
    train_pgd,
)
from smoothadv.integer import command as quantize
from smoothadv.sweep import command as sweep
from support.commands import command_main

MAKERS = [
    *(
        certify.make_parser,
        certify.verify_parser,
        predict.make_parser,
        attack.make_parser,
        quantize.make_parser,
        push.make_parser,
    ),
    *(
        quantize.export_parser,
        lambda: evaluation.merge_parser("certify"),
        lambda: train.make_parser([]),
    ),
    *(lambda: train_pgd.make_parser([]), lambda: train_pgd.make_parser(["--released-behaviour"])),
    *(lambda: train_denoiser.make_parser([]), analyze._make_parser, sweep._make_parser),
]
MOST = 4_000_000_000
LOG = (
    "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
    "0\t3\t3\t0.25\t1\t0:00:15\n"
    "20\t7\t1\t0.125\t0\t0:00:15\n"
)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        for sub in (
            action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
        ):
            yield from options(sub)
        if callable(action.type) and action.type not in (str, Path):
            yield f"{parser.prog} {action.dest}", action


EVERY = dict(pair for make in MAKERS for pair in options(make()))


def takers(text: str) -> dict[str, object]:
    """What the options make of a text, by their names, without those that refuse it."""
    found = {}
    for name, action in EVERY.items():
        try:
            found[name] = action.type(text)
        except Exception as error:
            assert type(error).__name__ in (
                "SettingError",
                "ArgumentTypeError",
                "UserError",
                "UnknownNameError",
            ), error
    return found


def test_digits_are_those_from_0_to_9_and_outputs_have_names():
    outputs = {
        name
        for name in EVERY
        if name.split()[-1] in ("outfile", "outdir", "-o", "--against", "--to")
    }
    for right, wrong, least in (("5", "٥", 150), ("0.5", "٠.٥", 100), ("3/8", "٣/٨", 10)):
        assert (
            len(takers(right)) > least and not takers(right).keys() & takers(wrong).keys() - outputs
        )
    named = takers("name").keys() | takers("name.md").keys()
    assert len(outputs) > 20 and outputs <= named and not takers("")


def test_counts_end_where_no_run_could():
    counts = {name for name, value in takers("5").items() if type(value) is int}
    seeds = {name for name in counts if EVERY[name].type is any_seed}
    assert len(counts) > 100 and {name.split()[-1] for name in seeds} == {"--seed"}
    assert counts & takers(str(MOST + 1)).keys() == seeds == counts & takers(str(2**128 - 1)).keys()
    assert not counts & takers(
        str(2**128)
    ).keys() and "smoothadv analyze table --decimals" in takers("100")
    assert {f"smoothadv certify {name}" for name in ("--N", "--N0", "--max", "--skip")} <= takers(
        str(MOST)
    ).keys()


def test_names_are_escaped_where_the_terminal_has_ascii_alone(workplace, monkeypatch):
    Path("é.tsv").write_text(LOG)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert command_main("analyze")(["table", "é.tsv", "--sigma", "0.5"]) == 0
    assert b"\\xe9" in stream.buffer.getvalue()
