"""Plug-ins: what is loaded, what a digest covers, what is wrong with a plug-in, and what other
processes find of it. Registries find components by name, refuse duplicates, and list the known
names for an unknown one.
"""

import hashlib
import sys
from pathlib import Path

import pytest

from smoothadv.base import plugins
from smoothadv.base.errors import DoubtfulWarning, UsageError, UserError
from smoothadv.base.registry import Registry, discover
from smoothadv.objectives import OBJECTIVES
from support.commands import CODE, run_process
from support.refusals import refusal

OBJECTIVE = """
from dataclasses import dataclass
from smoothadv.objectives import OBJECTIVES
from smoothadv.objectives.gaussian import Gaussian

@OBJECTIVES.register("mine")
@dataclass(frozen=True)
class Mine(Gaussian):
    pass
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder and on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def written(path: str, text: str = OBJECTIVE) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return Path(path)


def test_file_is_loaded_once_under_the_digest_of_its_bytes(workplace):
    plugin = plugins.load(written("mine.py"))
    assert (plugin.name, plugin.source) == ("mine.py", "mine.py")
    assert plugin.sha256 == hashlib.sha256(OBJECTIVE.encode()).hexdigest()
    assert plugin.record["provides"] == ["objective 'mine'"]
    for again in ("mine.py", "./mine.py", f"../{workplace.name}/mine.py"):
        assert plugins.load(again) is plugin
    assert plugins.loaded() == (plugin,) and "mine" in OBJECTIVES


def test_module_of_a_package_has_the_digest_of_the_whole_package():
    contents = {"__init__.py": "", "part/helper.py": "NAME = 'mine'"}
    contents["smoothing.py"] = "from pack_of_mine.part.helper import NAME\n" + OBJECTIVE.replace(
        '"mine"', "NAME"
    )
    for path, text in contents.items():
        written(f"pack_of_mine/{path}", text)
    plugin = plugins.load("pack_of_mine.smoothing")
    assert (plugin.name, plugin.source) == ("pack_of_mine.smoothing", "pack_of_mine.smoothing")
    listed = "".join(f"{path} {len(text)}\n{text}" for path, text in contents.items())
    assert plugin.sha256 == hashlib.sha256(listed.encode()).hexdigest() and "mine" in OBJECTIVES


@pytest.mark.parametrize(
    "name, changed", [("mine.py", "mine.py"), ("one/mine.py", "two/mine.py"), ("mine", "mine.py")]
)
def test_other_code_under_a_name_that_is_loaded_is_refused(name, changed):
    """The same file after a change, and another file; that of a module is read again, too."""
    written(name if name.endswith(".py") else f"{name}.py")
    plugin = plugins.load(name)
    written(changed, OBJECTIVE.replace('"mine"', '"newer"'))
    again = changed if name.endswith(".py") else name
    words = f"plug-in {again} cannot be loaded: {name} is loaded, whose name is the same"
    refusal(plugins.load, again, names=words)
    assert plugins.loaded() == (plugin,) and "newer" not in OBJECTIVES


def test_those_are_used_whose_names_or_components_take_part():
    mine = plugins.load(written("mine.py"))
    plugins.load(written("other.py", OBJECTIVE.replace('"mine"', '"other"')))
    objective = OBJECTIVES["mine"](noise_sd=0.25)
    assert plugins.used({}, [objective]) == plugins.used({"objective": "mine"}) == [mine]
    assert (
        plugins.used({"dataset": "mine", "objective": "gaussian"}, [OBJECTIVES["gaussian"](0.25)])
        == []
    )
    assert (
        plugins.digests([mine]) == {"plugins": {"mine.py": mine.sha256}}
        and plugins.digests([]) == {}
    )


FAULTS = {
    "exception": ("def f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero (line 2)"),
    "import": ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
    "syntax": ("x = (", "SyntaxError"),
    "exit": ("raise SystemExit(0)", "SystemExit"),
    "several lines": ("raise ValueError('first\\nsecond')", "first"),
    "name taken": (
        OBJECTIVE.replace('"mine"', '"gaussian"'),
        "objective 'gaussian' is already registered",
    ),
    "nothing": ("x = 1", "registers nothing"),
    "no dataclass": (
        "from smoothadv.objectives import OBJECTIVES\n\n\n@OBJECTIVES.register('mine')\n"
        "class Mine:\n    pass\n",
        "objective 'mine' (line 4) is no dataclass: write @dataclass(frozen=True)",
    ),
}


@pytest.mark.parametrize("text, words", FAULTS.values(), ids=FAULTS)
def test_fault_is_one_line_that_names_the_plugin(text, words):
    message = refusal(plugins.load, written("bad.py", text), names=words)
    assert message.startswith("plug-in bad.py cannot be loaded: ")
    assert plugins.loaded() == ()
    OBJECTIVES.pop("mine", None)
    assert plugins.load(written("bad.py")).provides, "once it is mended, it can be loaded"


@pytest.mark.parametrize(
    "name, word",
    [
        ("gone.py", "gone.py cannot be read"),
        ("folder/", "folder/ cannot be read"),
        ("gone_module", "no module 'gone_module'"),
        ("gone.module", "no module 'gone.module'"),
        ("sys", "no module 'sys'"),
        ("", "no module ''"),
    ],
)
def test_plugin_that_does_not_exist_is_a_usage_error(name, word):
    Path("folder").mkdir()
    with pytest.raises(UsageError, match=f"^--plugin: .*{word}"):
        plugins.load(name)


@pytest.mark.parametrize("name", ["early_plugin", "early_plugin.py"])
def test_module_that_was_imported_before_is_refused(name):
    written("early_plugin.py", "x = 1")
    early = __import__("early_plugin")
    refusal(plugins.load, name, names="cannot be loaded: it was imported before")
    assert sys.modules.pop("early_plugin") is early


def declare(module: str) -> None:
    """A distribution that declares a plug-in, installed in the working folder."""
    written("mine-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    written("mine-1.0.dist-info/entry_points.txt", f"[smoothadv.plugins]\nmine = {module}\n")


def test_entry_points_are_loaded_once_and_need_no_option():
    declare("installed_plugin")
    written("installed_plugin.py")
    plugins.load_installed()
    plugins.load_installed()
    (plugin,) = plugins.loaded()
    assert plugin.is_installed and plugin.name == "installed_plugin" and "mine" in OBJECTIVES
    assert plugins.load("installed_plugin") is plugin


@pytest.mark.parametrize("text", [None, "1 / 0"], ids=["missing", "exception"])
def test_entry_point_that_cannot_be_loaded_is_a_warning(text):
    declare("broken_plugin")
    if text is not None:
        written("broken_plugin.py", text)
    with pytest.warns(DoubtfulWarning, match="broken_plugin.*an installed distribution declares"):
        plugins.load_installed()
    assert plugins.loaded() == ()


PROGRAM = """
import multiprocessing
import smoothadv

if __name__ == "__main__":
    plugin = smoothadv.plugins.load("numbers_of_mine.py")
    number = plugin.provides[0].component(3)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(plugin.name, pool.apply(repr, [number]))
"""
NUMBERS = """
from dataclasses import dataclass
from smoothadv.base.registry import Registry

@Registry("number").register("mine")
@dataclass(frozen=True)
class Number:
    value: int
"""


def test_package_alone_has_plugins_and_spawned_workers_can_unpickle_theirs(workplace):
    written("numbers_of_mine.py", NUMBERS)
    written("program.py", PROGRAM)
    done = run_process([sys.executable, "program.py"], workplace, PYTHONPATH=str(CODE))
    assert done.stdout == "numbers_of_mine.py Number(value=3)\n", done.stderr


# Registries


@pytest.fixture
def colours() -> Registry:
    registry = Registry("colour")
    for name in ("crimson", "azure", "olive"):
        registry.register(name)(name.upper())
    return registry


def test_names_find_their_components_and_the_first_one_stays(colours):
    assert list(colours) == ["crimson", "azure", "olive"] and len(colours) == 3
    assert [colours[name] for name in colours] == ["CRIMSON", "AZURE", "OLIVE"]
    assert "azure" in colours and "AZURE" not in colours and colours.require("olive") == "olive"
    with pytest.raises(ValueError, match="colour 'azure' is already registered"):
        colours.register("azure")("another blue")
    assert Registry("function").register("azure")(len) is len and colours["azure"] == "AZURE"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("xyz", ""),
        ("azur", " (did you mean 'azure'?)"),
        ("cirmson", " (did you mean 'crimson'?)"),
        ("olives", " (did you mean 'olive'?)"),
    ],
)
def test_unknown_name_lists_all_known_ones_and_suggests_one_that_is_close(colours, name, hint):
    with pytest.raises(KeyError) as error:  # so that a registry is a mapping
        colours[name]
    known = "known: crimson, azure, olive; --plugin FILE adds your own"
    assert isinstance(error.value, UserError)
    assert str(error.value) == f"unknown colour '{name}'{hint}; {known}"


def test_file_of_a_package_that_cannot_be_imported_is_not_passed_over(tmp_path, monkeypatch):
    folder = tmp_path / "package_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        discover("package_of_a_test", [str(folder)])
