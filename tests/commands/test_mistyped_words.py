"""Mistyped options, subcommands and choices: one line, exit code 2, and the word that was probably meant."""

import sys

import pytest

import smoothadv.commands
from smoothadv.commands import COMMANDS
from smoothadv.commands.runner import Parser, run
from smoothadv.version import __version__
from support.commands import call

CERTIFY, TRAIN = ["digits", "c.pth.tar", "0.25", "log.tsv"], ["digits", "digits_resnet8", "out"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("certify", [*CERTIFY, "--skp", "20"], "unknown option --skp (did you mean --skip?)"),
        ("certify", [*CERTIFY, "--alfa=0.01"], "unknown option --alfa (did you mean --alpha?)"),
        ("certify", ["--skp", "20", *CERTIFY], "unknown option --skp (did you mean --skip?)"),
        ("certify", [*CERTIFY, "--qwxz"], "unknown option --qwxz"),
        ("certify", ["merge", "log.tsv", "--overwritten"], "unknown option --overwritten (did you mean --overwrite?)"),
        ("analyze", ["table", "log.tsv", "--sigmaa", "3"], "unknown option --sigmaa (did you mean --sigma?)"),
        ("analyze", ["--tabel", "log.tsv"], "unknown option --tabel"),
        ("analyze", ["tabel", "log.tsv"], "'tabel' (did you mean 'table'?)"),
        ("sweep", ["rum", "grid.toml"], "'rum' (did you mean 'run'?)"),
        ("certify", [*CERTIFY, "--input-layer", "centre"], "'centre' (did you mean 'center'?)"),
        ("train", [*TRAIN, "--noice", "1"], "unknown option --noice (did you mean --noise?)"),
        ("train", [*TRAIN, "--no-horizontal-flop"], "(did you mean --no-horizontal-flip?)"),
    ],
)
def test_word_that_was_meant_is_suggested(name, arguments, message, capsys, workplace):
    outcome = call(capsys, name, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and message in outcome.err and outcome.err.count("\n") == 1
    assert f"(see smoothadv {name}" in outcome.err and outcome.err.endswith(" --help)\n")
    assert not list(workplace.iterdir())


@pytest.mark.parametrize(
    ("words", "title", "rest"),
    [
        (["--title", "--not an option--"], "--not an option--", []),
        (["--title=--x", "a"], "--x", ["a"]),
        (["--", "--titel"], None, ["--titel"]),
        (["-5", "--title", "x"], "x", ["-5"]),
    ],
    ids=["value with spaces", "value with dashes", "after two dashes", "number"],
)
def test_values_are_not_taken_for_options(words, title, rest):
    parser = Parser(prog="analyze")
    parser.add_argument("--title")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args(words)
    assert (options.title, options.rest) == (title, rest)


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_every_command_prints_the_version(words, capsys):
    assert smoothadv.commands.main([*words, "--version"]) == 0
    assert capsys.readouterr().out == f"smoothadv {__version__}\n"


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ("/usr/bin/smoothadv", "smoothadv certify merge"),
        ("/clone/code/certify.py", "python code/certify.py merge"),
        ("/lib/smoothadv/__main__.py", "smoothadv certify merge"),
    ],
)
def test_usage_says_what_was_typed_and_records_say_smoothadv(started, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    parser = Parser(prog="certify merge")
    assert parser.prog == shown
    recorded = []
    assert run("certify merge", lambda: parser, lambda *given: recorded.append(given[2]), ["--debug"]) == 0
    assert recorded == [["smoothadv", "certify", "merge", "--debug"]]
