"""The seeds under which this user has made logs of a classifier, as far as the user's cache folder knows.

Whoever tries many seeds and reports the best log reports more than the guarantee covers. No torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from smoothadv.files import cached_names, write_cached

if TYPE_CHECKING:
    from smoothadv.noise import NoiseKey


def record_seed(key: NoiseKey) -> list[int]:
    """Record that noise of ``key`` is used; returns all seeds recorded for its classifier, dataset and sigma, sorted.

    Each seed is a file of its own in the cache folder, so that several processes can record seeds at once. Where that
    folder cannot be written, only this seed is returned.
    """
    folder = f"seeds/{hashlib.sha256(repr(replace(key, seed=0)).encode()).hexdigest()[:32]}"
    write_cached(f"{folder}/{key.seed}", b"")
    return sorted({key.seed, *(int(name) for name in cached_names(folder) if name.isdigit())})
