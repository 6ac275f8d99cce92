"""Tables that the tests build are cached in a folder of their own, never among this user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory) -> Iterator[Path]:
    """The folder in which every test of this part keeps its tables, unless it names another."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOOTHADV_CACHE", str(folder))
        yield folder
