"""Files on the disk: written atomically, locked against other processes, and kept in the user's cache. No torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from smoothadv.errors import UserError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a temporary file, then put it in the place of ``path``: readers see the old or the new one.

    Creates missing folders; on any failure the old file is untouched and the temporary one removed.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error  # as a full disk is reported
        raise


def write_text(path: Path, text: str) -> None:
    """``text`` as the whole of ``path``, atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """``content`` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def cache_folder() -> Path:
    """Where what can be computed again is kept between runs: $SMOOTHADV_CACHE, or the user's cache folder."""
    explicit, xdg = os.environ.get("SMOOTHADV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(explicit) if explicit else Path(xdg or Path.home() / ".cache") / "smoothadv"


def read_cached(name: str) -> bytes | None:
    """What ``write_cached`` put under ``name``; None if nothing is there or the file is not whole."""
    try:
        content = (cache_folder() / name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    digest, payload = content[:32], content[32:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def write_cached(name: str, payload: bytes) -> None:
    """Keep ``payload`` under ``name`` if the cache folder can be written; nothing depends on it."""
    try:
        own = cache_folder() / f"{name}.{os.getpid()}"  # several processes may want the same at once
        write_atomically(own, lambda file: file.write(hashlib.sha256(payload).digest() + payload))
        os.replace(own, cache_folder() / name)
    except (OSError, RuntimeError):
        pass


def lock(file: IO[bytes] | int, path: Path, shared: bool = False) -> None:
    """Refuse to share ``path``, open as ``file`` or as that descriptor, with another process that is writing it.

    ``shared`` shares it with others that do so too.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no advisory locks of this kind
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{path} is being written by another process: wait for it or name another") from error
    except OSError:  # a file system without locks, as some clusters have
        return
