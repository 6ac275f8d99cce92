"""Tables of procedures are computed once where they can be kept; damaged files are replaced."""

import numpy as np
import pytest

from smoothadv.base.files import kept_rows
from smoothadv.statistics import Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.error_spending import rows_of


@pytest.fixture
def computed(tmp_path, monkeypatch) -> list[float]:
    """The nulls of the rows that were computed and not read."""
    monkeypatch.setenv("SMOOTHADV_CACHE", str(tmp_path))
    nulls = []

    def counted(key, row, of):
        return kept_rows(key, lambda null: (nulls.append(null), row(null))[1], of)

    token = rows_of.set(counted)
    yield nulls
    rows_of.reset(token)


def tables(**changes: float) -> list[list]:
    sizes = {"sigma": 0.5, "n0": 50, "n": 3000, "alpha": 1e-3, **changes}
    made = Adaptive(Smoothing(**sizes), radii=(0.5, 1.0))
    return [made.looks.tolist(), made._efficacy.tolist()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content,
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: b"not a table at all" * 20,
    ],
)
def test_rows_are_computed_once_and_again_where_their_file_is_damaged(tmp_path, computed, damage):
    expected = tables()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    is_whole = file.read_bytes() == whole
    assert tables() == tables() == expected and len(computed) == (3 if is_whole else 6)


def test_other_settings_have_rows_of_their_own(tmp_path, computed):
    for change in ({}, {"sigma": 0.25}, {"n": 2999}, {"alpha": 1.001e-3}, {"noise_distance": 1e-9}):
        tables(**change)
    assert tables(alpha=1.001e-3)[0] == tables()[0], "the level alone is another one"
    assert len(computed) == 15 and len([*tmp_path.iterdir()]) == 5
    tables(n0=10)
    assert len(computed) == 15, "n0 has no part in them"


def test_rows_are_computed_where_no_file_can_be_kept(tmp_path, computed, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SMOOTHADV_CACHE", str(tmp_path / "file" / "cache"))
    assert tables() == tables() and len(computed) == 6
    assert np.isfinite(computed).all()
