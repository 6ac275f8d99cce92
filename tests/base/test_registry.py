"""Registries find components by name, refuse duplicates, and list the known names for an unknown
one.
"""

import sys

import pytest

from smoothadv.base.errors import UserError
from smoothadv.base.registry import Registry


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


PACKAGE = """
from smoothadv.base.registry import Registry, discover
SHAPES = Registry("shape")
discover(__name__, __path__)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an importable package ``plugins_of_a_test`` of the given files and returns its
    SHAPES.
    """

    def make(files: dict[str, str]) -> Registry:
        folder = tmp_path / "plugins_of_a_test"
        folder.mkdir(exist_ok=True)
        for name, text in {"__init__.py": PACKAGE, **files}.items():
            (folder / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        import plugins_of_a_test

        return plugins_of_a_test.SHAPES

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "plugins_of_a_test"]:
        del sys.modules[name]


def plugin(*names: str) -> str:
    """The text of a file that registers the names."""
    registrations = "".join(f"SHAPES.register('{name}')('a {name}')\n" for name in names)
    return f"from plugins_of_a_test import SHAPES\n{registrations}"


def test_a_file_in_the_package_is_all_that_a_component_needs(package):
    shapes = package(
        {
            "round.py": plugin("circle", "oval"),
            "angular.py": plugin("square"),
            "notes.txt": "no module",
        }
    )
    assert {name: shapes[name] for name in shapes} == {
        "circle": "a circle",
        "oval": "a oval",
        "square": "a square",
    }


def test_files_that_claim_one_name_or_cannot_be_imported_are_not_passed_over(package):
    square = {"angular.py": plugin("square")}
    with pytest.raises(ValueError, match="shape 'square' is already registered"):
        package({**square, "boxes.py": plugin("square")})
    with pytest.raises(ZeroDivisionError):
        package({**square, "broken.py": "1 / 0\n", "boxes.py": ""})
