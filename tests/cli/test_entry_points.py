"""Every way into the program: scripts, console command, help texts, and the command lines of the
documentation.
"""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import smoothadv.cli
from smoothadv.cli import COMMANDS
from support.commands import CODE, call, run_process, script

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
    "attack": ["evaluation.predict.warn_of_few_draws", "evaluation.falsify.read_certificates"],
    "analyze": [
        "analysis.functions.read_logs",
        "cards.card.CardSpec.made",
        "cards.board.BoardSpec.text",
    ],
    "sweep": ["sweep.command.read_grids"],
    "list": ["cli.list.recipe_names"],
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


def test_script_process_ends_with_the_commands_exit_code(tmp_path):
    done = run_process(script("analyze", "summary", "nowhere.tsv"), tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nowhere.tsv ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


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
