"""Every way into the program: scripts, console command, help texts, the command lines of the
documentation, mistyped words; what every option takes and refuses, found by asking all parsers; and
what is imported before a command works.
"""

import argparse
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import smoothadv.cli
from smoothadv.architectures import INPUT_LAYERS
from smoothadv.base.settings import INPUT_LAYER_NAMES, PRECISION_NAMES, any_seed
from smoothadv.cards import push
from smoothadv.cite import command as cite
from smoothadv.cli import (
    COMMANDS,
    analyze,
    attack,
    certify,
    evaluation,
    predict,
    train,
    train_denoiser,
    train_pgd,
)
from smoothadv.cli.runner import _RELEASED, Parser, run
from smoothadv.integer import command as quantize
from smoothadv.sets import command as sets
from smoothadv.sweep import command as sweep
from smoothadv.version import __version__
from smoothadv.voting.classifier import PRECISIONS
from support.commands import CODE, call, command_main, refused, run_process

REPOSITORY = CODE.parent
SCRIPTS = sorted(path.stem for path in CODE.glob("*.py"))


def documented_commands(text: str) -> list[str]:
    """The lines `python code/X.py ...` of a text, each joined with the lines that its backslash
    continues on.

    A line that leaves the start to torchrun, or to the console command, is given as if it did not.
    """
    joined = re.sub(r"\\\n\s*", "", text).replace("$SLURM_ARRAY_TASK_ID", "0")
    joined = re.sub(r"\| `(python code/\w+\.py [^`\n]*)`", r"\n\1\n", joined)  # of a table
    joined = re.sub(
        r"^( *)torchrun (--\S+ \S+ )*(-- )?code/", r"\1python code/", joined, flags=re.MULTILINE
    )
    joined = re.sub(r"^( *)smoothadv (\w+) ", r"\1python code/\2.py ", joined, flags=re.MULTILINE)
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("python code/")]


def help_text(name: str, monkeypatch, capsys) -> str:
    """What `python code/NAME.py --help` prints; the script runs as __main__, in this process."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as exit_request:
        runpy.run_path(str(CODE / f"{name}.py"), run_name="__main__")
    captured = capsys.readouterr()
    assert (exit_request.value.code, captured.err) == (0, "")
    return captured.out


# What a command does first after it has validated its command line.
FIRST_STEPS = {
    "train": ["training.setup.get_dataset"],
    "train_pgd": ["training.setup.get_dataset"],
    "train_denoiser": ["training.setup.get_dataset"],
    "quantize": ["integer.quantize.quantize", "integer.export.export"],
    "push": ["cards.push.files_of"],
    "certify": [
        "evaluation.certify.prepare",
        "evaluation.verify.verify",
        "models.load.loose_images",
    ],
    "predict": ["evaluation.predict.prepare", "models.load.loose_images"],
    "sets": ["sets.scoring.prepare"],
    "attack": ["evaluation.predict.warn_of_few_draws", "evaluation.falsify.read_certificates"],
    "analyze": [
        "analysis.reading.read_logs",
        "cards.card.CardSpec.made",
        "cards.board.BoardSpec.text",
        "sets.table.ScoreLog.read",
    ],
    "sweep": ["sweep.command.read_grids"],
    "list": ["cli.list.recipe_names"],
    "cite": ["cite.command.reasons"],
}


class Accepted(BaseException):
    """The command line is valid; no command takes this for a fault of a plug-in."""


def accept(*arguments, **options):
    raise Accepted


@pytest.fixture
def validate(monkeypatch):
    """Give a documented command line to its command, which goes no further than to accept it."""

    def give(line: str) -> None:
        python, path, *arguments = shlex.split(line, comments=True)
        assert python == "python" and (REPOSITORY / path).is_file()
        name = Path(path).stem
        for step in FIRST_STEPS[name]:
            monkeypatch.setattr(f"smoothadv.{step}", accept)
        if arguments[:1] == ["merge"]:
            monkeypatch.setattr("smoothadv.cli.evaluation.merge", accept)
        with pytest.raises(Accepted):
            code = COMMANDS[name](arguments)
            pytest.fail(f"exit code {code}: {line}")

    return give


def test_scripts_and_console_command_have_the_same_commands():
    assert sorted(COMMANDS) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_answers_help_with_examples_that_are_valid(name, monkeypatch, capsys, validate):
    text = help_text(name, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("usage: ") and "\nexamples:\n" in text
    lines = documented_commands(text)
    assert f"code/{name}.py" in lines[0], "commands that use what it makes may follow"
    for line in lines:
        validate(line)


DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "ARTIFACT.md",
    *sorted(REPOSITORY.glob("docs/*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_commands_are_valid(document, validate, workplace):
    """A page's plug-in is its first program, and a file of stages is the one of cascades.md."""
    cascades = (REPOSITORY / "docs" / "cascades.md").read_text()
    (stages,) = re.findall(r"^```toml\n(threshold.*?)^```$", cascades, re.DOTALL | re.MULTILINE)
    Path("cascade.toml").write_text(stages)
    text = document.read_text()
    for name in re.findall(r"--plugin ([a-z]+\.py)", text):
        Path(name).write_text(
            re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
        )
    for line in documented_commands(text):
        validate(line)


def test_grid_of_a_new_objective_is_accepted_with_its_plugin(capsys, workplace):
    text = (REPOSITORY / "docs" / "new_objective.md").read_text()
    for name, language in [("averaged.py", "python"), ("equal_cost.toml", "toml")]:
        Path(name).write_text(
            re.search(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
        )
    assert smoothadv.cli.main(["sweep", "status", "equal_cost.toml"]) == 0
    assert "equal_cost: 9 jobs: 9 waiting" in capsys.readouterr().out


def test_documented_commands_are_found_with_their_continuations():
    text = (
        "$ ls\n  python code/a.py x \\\n      --y 1\npython code/b.py\nsmoothadv c d\nNot python "
        "code/c.py here.\n"
    )
    assert documented_commands(text) == [
        "python code/a.py x --y 1",
        "python code/b.py",
        "python code/c.py d",
    ]


def test_invalid_documented_command_is_noticed(validate):
    with pytest.raises(pytest.fail.Exception):
        validate("python code/train.py digits digits_resnet8 models/x --nois 0.25")


def test_console_help_lists_the_commands(capsys):
    assert smoothadv.cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^\s+{name}\s", text, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["tarin"], []], ids=["misspelt", "nothing"])
def test_console_command_lists_its_commands(arguments, capsys):
    assert smoothadv.cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert (
        captured.err.startswith("error: ") and captured.err.count("\n") == 1 and captured.out == ""
    )
    assert all(name in captured.err for name in [*arguments, *COMMANDS])
    assert ("(did you mean 'train'?)" in captured.err) == bool(arguments)


def test_list_names_what_is_known(capsys, workplace):
    Path("mine.py").write_text(
        "from smoothadv.attacks import ATTACKS\nATTACKS.register('mine')(ATTACKS['PGD'])\n"
    )
    done = call(capsys, "list", "--plugin", "mine.py")
    lines = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert (done.code, done.err) == (0, "")
    assert lines["attacks"] == "DDN, PGD, mine" and lines["plug-ins"] == "mine.py"
    assert "digits" in lines["datasets"] and "timm:NAME" in lines["architectures"]


def test_python_without_the_packages_says_how_to_have_them(tmp_path):
    done = run_process([sys.executable, "-S", CODE / "certify.py", "--help"], tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "has no package" in line and "source .venv/bin/activate" in line


def test_a_warning_appears_once_in_each_run(capsys):
    from smoothadv.base.errors import warn
    from smoothadv.cli.runner import _warnings_as_lines

    for _ in range(2):
        with _warnings_as_lines():
            for text in ("the same", "the same", "another"):
                warn(text)
        assert capsys.readouterr().err == "warning: the same\nwarning: another\n"


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


# Each takes a noticeable part of the time that torch takes.
SLOW = [
    "PIL",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "mpmath",
    "pandas",
    "ray",
    "safetensors",
    "scipy.stats",
    "sklearn",
    "statsmodels",
    "submitit",
    "torchvision",
    "torch._dynamo",
    "torch._inductor",
]
# Runs command lines one after the other; prints after each which of the modules have been imported
# by then.
PROGRAM = """
import json, sys
from smoothadv.cli import main
lines, watched = map(json.loads, sys.argv[1:])
for line in lines:
    code = main(line)
    print("\\nend", code, *(name for name in watched if name in sys.modules))
"""
# With the exit code of each.
WITHOUT_TORCH = [
    (["--help"], 0),
    (["--version"], 0),
    (["certfy"], 2),
    (["certify", "--help"], 0),
    (["certify", "--version"], 0),
    (["certify"], 2),
    (["certify", "digits", "c.pth.tar", "0", "log.tsv"], 2),
    (["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--precison", "bf16"], 2),
    (["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--method", "adaptiv"], 2),
    (["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--radii", "0.5"], 2),
    (["certify", "merge", "--help"], 0),
    (["analyze", "--help"], 0),
    (["analyze", "plot", "--help"], 0),
    (["analyze", "tabel"], 2),
    (["cite", "--help"], 0),
    (["cite", "nowhere"], 1),
    (["push", "--help"], 0),
    (["push", "model.pth.tar", "me"], 2),
    (["sweep", "--help"], 0),
    (["sweep", "run", "--help"], 0),
    (["sweep", "run", "grid.toml", "--engine", "locl"], 2),
    (["sweep", "plan", "nowhere.toml"], 1),
]
# Only torch knows whether there is such a device.
NO_DEVICE = ["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--device", "nowhere"]
WITH_TORCH = [
    (NO_DEVICE, 2),
    *(([name, "--help"], 0) for name in ("train", "train_pgd", "predict", "attack", "sets")),
]


def imported(lines: list[list[str]], watched: list[str], folder) -> list[tuple[int, set[str]]]:
    """The exit code of each command line, and which of the modules it or an earlier one has
    imported.
    """
    words = [sys.executable, "-c", PROGRAM, json.dumps(lines), json.dumps(watched)]
    done = run_process(words, folder, PYTHONPATH=str(CODE))
    assert done.returncode == 0, done.stderr
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("end ")]
    assert len(ends) == len(lines)
    return [(int(code), set(names)) for code, *names in ends]


def test_commands_import_no_library_that_they_do_not_need(checkpoint, tmp_path):
    """In one process: help texts and usage errors without torch, then those with it, then a
    certification.
    """
    certify = [
        "certify",
        "digits",
        str(checkpoint),
        "0.25",
        str(tmp_path / "log.tsv"),
        "--N",
        "100",
        "--max",
        "1",
    ]
    lines = [line for line, _ in WITHOUT_TORCH + WITH_TORCH]
    *found, (code, at_work) = imported(
        [*lines, [*certify, "--device", "cpu"]], ["torch", *SLOW], tmp_path
    )
    assert list(zip(lines, found)) == [
        *((line, (code, set())) for line, code in WITHOUT_TORCH),
        *((line, (code, {"torch"})) for line, code in WITH_TORCH),
    ]
    # The images come with scikit-learn, which imports SciPy and, where it is installed, pandas.
    assert code == 0 and at_work - {"scipy.stats", "pandas"} == {"torch", "sklearn"}


def test_names_that_help_texts_list_are_those_that_torch_code_defines():
    assert list(INPUT_LAYER_NAMES) == list(INPUT_LAYERS) and list(PRECISION_NAMES) == list(
        PRECISIONS
    )


MAKERS = [
    *(
        certify.make_parser,
        certify.verify_parser,
        predict.make_parser,
        attack.make_parser,
        quantize.make_parser,
        push.make_parser,
        cite.make_parser,
        sets.make_parser,
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
TWO_ROWS = (
    "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
    "0\t3\t3\t0.25\t1\t0:00:15\n"
    "20\t7\t1\t0.125\t0\t0:00:15\n"
)


def options_in(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        for sub in (
            action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
        ):
            yield from options_in(sub)
        if callable(action.type) and action.type not in (str, Path):
            yield f"{parser.prog} {action.dest}", action


EVERY = dict(pair for make in MAKERS for pair in options_in(make()))


def takers(text: str) -> dict[str, object]:
    """What the options_in make of a text, by their names, without those that refuse it."""
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
    Path("é.tsv").write_text(TWO_ROWS)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert command_main("analyze")(["table", "é.tsv", "--sigma", "0.5"]) == 0
    assert b"\\xe9" in stream.buffer.getvalue()
