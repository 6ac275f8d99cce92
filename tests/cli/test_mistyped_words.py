"""Mistyped words, and commands of the released code: one line, exit code 2, and what was probably
meant.
"""

import importlib
import shlex
import sys
from collections.abc import Sequence

import pytest

import smoothadv.cli
from smoothadv.cli import COMMANDS
from smoothadv.cli.released_options import translated
from smoothadv.cli.runner import Parser, run
from smoothadv.version import __version__
from support.commands import call


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
    assert smoothadv.cli.main([*words, "--version"]) == 0
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
    assert (
        run("certify merge", lambda: parser, lambda *given: recorded.append(given[2]), ["--debug"])
        == 0
    )
    assert recorded == [["smoothadv", "certify", "merge", "--debug"]]


def parser_of(command: str, words: Sequence[str] = ()) -> Parser:
    """The parser of a command, made for the words that follow it."""
    make = importlib.import_module(f"smoothadv.cli.{command}").make_parser
    return make(words) if command.startswith("train") else make()


PAPER = (
    "cifar10 cifar_resnet110 out --batch 256 --noise 0.12 --gpu 0 --lr_step_size 50 --epochs 150 "
    "--adv-training"
)
PREDICT = "cifar10 out/checkpoint.pth.tar 0.12 predictions --batch 400 --N 1000"
READMES = {
    f"train_pgd {PAPER} --attack PGD --num-steps 10 --epsilon 64 --train-multi-noise "
    "--num-noise-vec 2 --warmup 10": (
        "CUDA_VISIBLE_DEVICES=0",
        "train_pgd cifar10 cifar_resnet110 out --batch 256 --noise 0.12 --lr_step_size 50 --epochs "
        "150 --attack PGD --num-steps 10 --epsilon 64/256 --num-noise-vec 2 --warmup 10",
    ),
    f"train_pgd {PAPER} --attack PGD --epsilon 64 --num-steps 2 --resume --warmup 10": (
        "CUDA_VISIBLE_DEVICES=0",
        "train_pgd cifar10 cifar_resnet110 out --batch 256 --noise 0.12 --lr_step_size 50 --epochs "
        "150 --attack PGD --epsilon 64/256 --num-steps 2 --resume --warmup 10",
    ),
    f"predict {PREDICT} alpha=0.001": ("", f"predict {PREDICT} --alpha 0.001"),
    f"predict {PREDICT} --attack PGD --epsilon 127 --num-steps 20 --num-noise-vec 32 "
    "--visualize-examples": (
        "",
        f"predict {PREDICT} --attack PGD --epsilon 127/256 --num-steps 20 --num-noise-vec 32",
    ),
    "train cifar10 cifar_resnet110 out --batch 400 --noise_sd=0.25 --gpu 0,1 --workers 4 --wd 1e-4 "
    "--print-freq 10 --learning-rate 0.1": (
        "CUDA_VISIBLE_DEVICES=0,1",
        "train cifar10 cifar_resnet110 out --batch 400 --noise 0.25 --weight-decay 1e-4 --lr 0.1",
    ),
    f"train_pgd {PAPER} --attack DDN --epsilon 0.5 --num-steps 4 --use-unlabelled d.pickle "
    "--self-training-weight 1": (
        "CUDA_VISIBLE_DEVICES=0",
        "train_pgd cifar10 cifar_resnet110 out --batch 256 --noise 0.12 --lr_step_size 50 --epochs "
        "150 --attack DDN --epsilon 0.5 --num-steps 4 --use-unlabelled d.pickle "
        "--unlabelled-weight 1",
    ),
}


@pytest.mark.parametrize("typed", READMES)
def test_a_released_command_is_answered_by_the_one_to_type_here(typed, capsys, workplace):
    command, *words = shlex.split(typed)
    environment, expected = READMES[typed]
    outcome = call(capsys, command, *words)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (
        2,
        "",
        1,
    ) and "docs/released.md" in outcome.err
    here = f"smoothadv {expected}".strip()
    assert f"the command is {environment + ' ' if environment else ''}{here} ," in outcome.err
    words = shlex.split(expected)[1:]
    assert translated("smoothadv", words) is None
    parser_of(command, words).parse_args(words)  # does not exit


@pytest.mark.parametrize(
    "words",
    [
        "cifar10 out/checkpoint.pth.tar 0.12 certification_output --batch 400 --alpha 0.001 --N0 "
        "100 --N 100000",
        "cifar10 gpu/alpha 0.12 alpha --skip 20 --batch 400",
    ],
)
def test_other_words_are_left_alone(words):
    assert translated("smoothadv certify", words.split()) is None
    parser_of("certify").parse_args(words.split())


def test_no_command_has_an_option_that_would_be_translated():
    commands = ("train", "train_pgd", "certify", "predict")
    words = {word for name in commands for word in parser_of(name)._option_string_actions}
    assert len(words) > 50 and all(translated("", [word]) is None for word in words)
    assert not any(
        translated("", [word]) is None for word in ("--gpu", "--adv-training", "--noise_sd")
    )
