"""The seeds under which this user has made logs of a classifier, as far as the user's cache folder knows.

Whoever tries many seeds and reports the best log reports more than the guarantee covers.
"""

import hashlib
import re
from dataclasses import replace

from smoothadv.files import cached_names, write_cached
from smoothadv.noise import NoiseKey


def used_seeds(key: NoiseKey) -> list[int]:
    """The seeds recorded so far for the classifier, dataset and sigma of ``key``, and its own, sorted."""
    return sorted({key.seed, *(int(name) for name in cached_names(_folder(key)) if re.fullmatch("[0-9]+", name))})


def record_seed(key: NoiseKey) -> None:
    """Record that noise of ``key`` is used, if the cache folder can be written.

    Each seed is a file of its own, so that several processes can record seeds at once.
    """
    write_cached(f"{_folder(key)}/{key.seed}", b"")


def _folder(key: NoiseKey) -> str:
    return f"seeds/{hashlib.sha256(repr(replace(key, seed=0)).encode()).hexdigest()[:32]}"
