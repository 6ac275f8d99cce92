"""Registries find components by name, refuse duplicates, and list the known names for an unknown
one.
"""

import pytest

from smoothadv.base.errors import UserError
from smoothadv.base.registry import Registry, discover


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
