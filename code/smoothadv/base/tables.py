"""Keeps tables that take long to compute in this user's cache, and shows a bar meanwhile."""

import io
from collections.abc import Callable, Sequence

import numpy as np

from smoothadv.base.files import cached, digest
from smoothadv.base.progress import Progress


def kept_rows(
    key: str, row: Callable[[float], np.ndarray], nulls: Sequence[float]
) -> list[np.ndarray]:
    """``row`` of each of ``nulls``: from the cache, by a ``key`` that says all that decides them;
    where it has none, or damaged ones, they are computed.
    """

    def computed() -> bytes:
        content = io.BytesIO()
        np.save(content, [row(each) for each in Progress(nulls, "tables", delay=2, leave=False)])
        return content.getvalue()

    content = cached(f"tables-{digest([key])[:32]}", computed)
    return [*np.load(io.BytesIO(content), allow_pickle=False)]
