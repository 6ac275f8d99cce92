"""SHA-256 digests, in hexadecimal, by which records and caches know what they are about."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest_bytes(parts: Iterable[Any]) -> bytes:
    """As ``digest``, as 32 bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode(errors="surrogateescape") if isinstance(part, str) else part)
    return whole.digest()


def digest(parts: Iterable[Any]) -> str:
    """The digest of texts, in UTF-8, bytes and contiguous arrays, one after the other."""
    return digest_bytes(parts).hex()


def file_digest(path: str | Path) -> str:
    """The digest of a file's content."""
    with open(path, "rb") as file:
        return digest(iter(lambda: file.read(1 << 20), b""))
