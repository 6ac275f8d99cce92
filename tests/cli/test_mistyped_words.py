"""Mistyped words, and commands of the released code: one line, exit code 2, and what was probably
meant.
"""

import sys

import pytest

import smoothadv.cli
from smoothadv.cli import COMMANDS, train_pgd
from smoothadv.cli.runner import _RELEASED, Parser, run
from smoothadv.version import __version__
from support.commands import call, refused


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
    parser.add_argument("--title", dest="--title")
    parser.add_argument("rest", nargs="*")
    options = vars(parser.parse_args(words))
    assert (options.get("--title"), options.get("rest", [])) == (title, rest)


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_every_command_prints_the_version(words, capsys):
    assert smoothadv.cli.main([*words, "--version"]) == 0
    assert capsys.readouterr().out == f"smoothadv {__version__}\n"


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ("/usr/bin/smoothadv", "smoothadv certify merge"),
        ("/clone/code/certify.py", "python code/certify.py merge"),
        ("/clone/code/train.py", "python code/certify.py merge"),
        ("/lib/smoothadv/__main__.py", "smoothadv certify merge"),
    ],
)
def test_usage_says_what_was_typed_and_records_say_smoothadv(started, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    parser = Parser(prog="certify merge")
    assert parser.prog == shown
    recorded = []
    assert (
        run("certify merge", lambda: parser, lambda *given: recorded.append(given[2]), ["--debug"])
        == 0
    )
    assert recorded == [["smoothadv", "certify", "merge", "--debug"]]


@pytest.mark.parametrize("flag", _RELEASED)
def test_an_option_of_the_released_code_is_answered_by_the_one_to_type_here(flag, capsys):
    command = "predict" if flag == "--base-attack" else "train_pgd"
    outcome = call(capsys, command, "digits", "digits_resnet8", "out", flag, "1")
    assert refused(outcome, flag, _RELEASED[flag], "docs/released.md", code=2)
    if _RELEASED[flag].startswith("write"):
        assert _RELEASED[flag].split()[1] in train_pgd.make_parser([])._option_string_actions
