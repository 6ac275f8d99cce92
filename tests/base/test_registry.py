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
    Registry("colour").register("azure")("sky")  # which shares nothing with the other registry
    assert colours["azure"] == "AZURE"


def test_register_decorates_without_changing_the_component():
    registry = Registry("function")
    assert registry.register("length")(len) is len is registry["length"]


def test_unknown_name_lists_all_known_ones_in_one_line(colours):
    with pytest.raises(KeyError) as error:  # so that a registry is a mapping
        colours["xyz"]
    assert isinstance(error.value, UserError)
    assert (
        str(error.value)
        == "unknown colour 'xyz'; known: crimson, azure, olive; --plugin FILE adds your own"
    )


@pytest.mark.parametrize(
    "typo, meant", [("azur", "azure"), ("cirmson", "crimson"), ("olives", "olive")]
)
def test_unknown_name_that_is_close_to_a_known_one_suggests_it(colours, typo, meant):
    for ask in (colours.__getitem__, colours.require):
        with pytest.raises(UserError, match=f"unknown colour '{typo}' .did you mean '{meant}'"):
            ask(typo)


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
