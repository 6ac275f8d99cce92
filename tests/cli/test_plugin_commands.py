"""The plug-in of docs/plugins.md at work in the commands, and what they say when it is missing or
has changed.
"""

import shutil
from pathlib import Path

import pytest

from smoothadv.attacks.estimators import ESTIMATORS
from smoothadv.checkpoints import read_checkpoint
from smoothadv.cli.attack import make_parser
from smoothadv.cli.runner import command_line_of
from support.commands import (
    call,
    manifest_of,
    place_of,
    refused,
    rows,
    succeed,
)
from support.plugin_page import GRID, SHAPES, words
from support.warm import patch_stages

CHECKPOINT = "models/shapes/checkpoint.pth.tar"
FAST = ["--device", "cpu", "--max", 12]


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """A folder with the page's plug-in, the model that the page's command trains, and its log."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "shapes.py").write_text(SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeed("train", *words("train"), "--device", "cpu")
        succeed("certify", *words("certify"), *FAST)
    return folder


@pytest.fixture
def workplace(learned, tmp_path, monkeypatch) -> Path:
    """A copy of that folder of the test's own, which is the working folder."""
    shutil.copytree(learned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_option(arguments: list[str]) -> list[str]:
    """The words of a command without --plugin and its value."""
    start = arguments.index("--plugin")
    return [*arguments[:start], *arguments[start + 2 :]]


def change(workplace: Path) -> None:
    """Another version of the plug-in, which does the same."""
    (workplace / "shapes.py").write_text(SHAPES + "\n# changed\n")


def test_checkpoint_and_manifest_record_the_plugin_and_its_digest(workplace):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smoothadv.models.checkpoint.require_architecture", lambda name: name)
        content = read_checkpoint(Path(CHECKPOINT))
    (record,) = content["plugins"]
    provided = ["dataset 'shapes'", "architecture 'shapes_cnn'", "objective 'soft_gaussian'"]
    assert record["name"] == "shapes.py" and record["provides"] == provided
    manifest = manifest_of(Path("logs/shapes.tsv"))
    assert (
        manifest["settings"]["plugins"]
        == content["recipe"]["plugins"]
        == {"shapes.py": record["sha256"]}
    )
    for run in (manifest["runs"][0], content["runs"][0]):
        assert run["plugins"] == [
            {"name": "shapes.py", "source": "shapes.py", "sha256": record["sha256"]}
        ]


def test_attack_against_the_log_of_a_plugin(workplace, capsys):
    place_of(Path("logs/shapes.tsv"), "certified", lambda row: float(row["radius"]) > 0)
    few = ["--device", "cpu", "--num-steps", 2, "--num-noise-vec", 2]
    outcome = call(capsys, "attack", *words("attack"), *few)
    assert outcome.code == 0 and "certificates attacked" in outcome.out, outcome
    assert manifest_of(Path("logs/attacked/against.tsv"))["settings"]["plugins"].keys() == {
        "shapes.py"
    }


def test_sweep_gives_the_plugins_of_its_grid_to_all_commands(workplace, capsys, warm, monkeypatch):
    patch_stages(warm, monkeypatch)
    folder = Path("grids")
    folder.mkdir()
    Path("shapes.py").rename(folder / "shapes.py")
    small = GRID.replace("noise = [0.25, 0.5]", "noise = 0.25").replace("epochs = 20", "epochs = 1")
    (folder / "tiny.toml").write_text(small.replace("skip = 10", "skip = 50"))
    outcome = call(capsys, "sweep", "run", folder / "tiny.toml", "--device", "cpu")
    assert outcome.code == 0, outcome
    (log,) = Path("logs/tiny").rglob("*.tsv")
    assert len(rows(log)) == 4 and manifest_of(log)["settings"]["plugins"].keys() == {"shapes.py"}
    (job_log,) = Path("logs/tiny").rglob("job.log")
    commands = [line for line in job_log.read_text().splitlines() if line.startswith("$ ")]
    assert len(commands) == 2 and all("--plugin grids/shapes.py" in line for line in commands)
    # The digest belongs to what a complete job must have been made with.
    status = ("status", folder / "tiny.toml", "--device", "cpu")
    assert "1 done" in call(capsys, "sweep", *status).out
    (folder / "shapes.py").write_text(SHAPES + "# changed")
    assert "plugins.shapes.py was" in call(capsys, "sweep", *status).out


MISSING = ["which is not loaded: add --plugin PATH/shapes.py", CHECKPOINT]
DATASET = ["dataset 'shapes' is from the plug-in shapes.py (sha256 ", *MISSING]
ARCHITECTURE = ["architecture 'shapes_cnn' is from the plug-in shapes.py (sha256 ", *MISSING]
OPTION = ["unknown option --label-smoothing; --plugin FILE adds the options of a plug-in"]


@pytest.mark.parametrize(
    ("command", "arguments", "code", "texts"),
    [
        *(
            (name, without_option(words(name)), 2, texts)
            for name, texts in (("train", OPTION), ("certify", DATASET), ("attack", DATASET))
        ),
        ("certify", ["digits", CHECKPOINT, 0.25, "log.tsv", "--device", "cpu"], 1, ARCHITECTURE),
    ],
    ids=["option", "dataset", "dataset of an attack", "architecture"],
)
def test_missing_plugin_is_named(workplace, capsys, command, arguments, code, texts):
    assert refused(call(capsys, command, *arguments), *texts, code=code)


def test_changed_plugin_neither_continues_a_log_nor_resumes_a_training(workplace, capsys):
    change(workplace)
    for command, further in (("certify", FAST), ("train", ["--resume", "--device", "cpu"])):
        outcome = call(capsys, command, *words(command), *further)
        lines = outcome.err.splitlines()
        assert outcome.code == 1 and len(lines) == 2, outcome.err
        assert "shapes_cnn" in lines[0] or "another version of the plug-in shapes.py" in lines[0]
        assert (
            lines[1].startswith("error: cannot resume ") and "plugins.shapes.py was '" in lines[1]
        )


def test_help_lists_the_options_of_a_plugin(workplace, capsys):
    outcome = call(
        capsys, "train", "--help", "--objective", "soft_gaussian", "--plugin", "shapes.py"
    )
    assert outcome.code == 0
    assert "--label-smoothing" in outcome.out and "soft_gaussian" in outcome.out


def test_command_that_repeats_an_attack_has_each_plugin_after_its_own_flag():
    parser = make_parser()
    words = "digits c.pth.tar 0.25 out --plugin a.py --plugin b.py --only 1 2"
    again = command_line_of(parser, vars(parser.parse_args(words.split())), (), {})
    assert " --plugin a.py --plugin b.py" in " ".join(again) and " --only 1 2" in " ".join(again)


FAULTY = """from dataclasses import dataclass

from torch import nn

from smoothadv.architectures import ARCHITECTURES
from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.objectives import OBJECTIVES
from smoothadv.objectives.bases import CopiesObjective


@OBJECTIVES.register("termless")
@dataclass(frozen=True)
class Termless(CopiesObjective):
    "Of a term that it does not return."
    TERMS = ("spread",)


@OBJECTIVES.register("raises")
@dataclass(frozen=True)
class Raises(CopiesObjective):
    "Raises what no caller expects."
    def criterion(self, logits, labels):
        return self.nothing


@ATTACKS.register("ONE")
@dataclass(frozen=True)
class One(GradientAttack):
    "One perturbation for all images."
    def perturbation(self, problem):
        return 0 * problem.inputs[0]


@ARCHITECTURES.register("spatial")
def spatial(description):
    return nn.Conv2d(1, 10, 3)
"""


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("digits_resnet8", ["--objective", "termless"], "line 11 (objective 'termless'): "),
        ("digits_resnet8", ["--objective", "raises"], "line 23: AttributeError: "),
        ("spatial", [], "line 34 (architecture 'spatial'): "),
        (
            "digits_resnet8",
            "--attack ONE --epsilon 0.5 --num-steps 1 --warmup 0".split(),
            "line 26 (attack 'ONE'): ValueError: a perturbation [1, 8, 8] was found",
        ),
    ],
)
def test_fault_of_a_plugin_at_work_is_one_line(workplace, capsys, arch, options, message):
    (workplace / "faulty.py").write_text(FAULTY)
    command = "train_pgd" if "--attack" in options else "train"
    words = [command, "digits", arch, "run", "--noise", 0.25, "--epochs", 1, "--device", "cpu"]
    outcome = call(capsys, *words, *options, "--plugin", "faulty.py")
    assert refused(outcome, f"error: plug-in faulty.py, {message}"), outcome


def test_gradients_and_formats_of_a_plug_in_can_be_named(workplace, checkpoint, capsys):
    """Although they are no registrations of their own files."""
    Path("mine.py").write_text(
        "from smoothadv.analysis.table_formats import FORMATS\n"
        "from smoothadv.attacks.estimators import ESTIMATORS, expected_loss\n"
        "ESTIMATORS['mine'] = (lambda sigma: expected_loss, 'mine')\n"
        "FORMATS.register('count')(lambda table, decimals: f'{len(table.rows)} rows')\n"
    )
    mine = ["--plugin", "mine.py"]
    attack = ["digits", checkpoint, 0.25, "out", "--attack", "PGD", "--epsilon", 0.5, *FAST, *mine]
    attack += ["--num-steps", 1, "--num-noise-vec", 1, "--N", 10, "--gradient"]
    outcome = call(capsys, "attack", *attack, "none")
    assert refused(outcome, "--gradient", "'none'", "base", "mine", code=2)
    try:
        assert call(capsys, "attack", *attack, "mine").code == 0
    finally:
        ESTIMATORS.pop("mine", None)
    summary = ["analyze", "summary", "logs/shapes.tsv", "--format", "count", *mine]
    Path("tiny.toml").write_text(GRID)
    status = ["sweep", "status", "tiny.toml", "--device", "cpu", "--format", "count", *mine]
    for one, text in ((summary, "1 rows"), (status, "2 rows")):
        outcome = call(capsys, *one)
        assert (outcome.code, outcome.out.strip()) == (0, text), outcome
    Path("notes").write_text("of mine")
    for _ in range(2):
        assert call(capsys, *summary, "-o", "table").code == 0
        assert Path("table").read_text() == "1 rows"
        assert refused(call(capsys, *summary, "-o", "notes"), "notes holds no table")
