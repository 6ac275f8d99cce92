"""Files on the disk: written atomically, locked against other processes, kept in the user's cache;
and SHA-256 digests, by which records and caches know what they are about. No torch.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.base.progress import Progress

PAGE = ("HTML page", b"<!doctype html")
"""What ``refuse_to_replace`` takes for a page."""


def digest(parts: Iterable[Any]) -> str:
    """The digest of texts, in UTF-8, bytes and contiguous arrays, one after the other, in
    hexadecimal.
    """
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode(errors="surrogateescape") if isinstance(part, str) else part)
    return whole.hexdigest()


def file_digest(path: str | Path) -> str:
    """The digest of a file's content."""
    with open(path, "rb") as file:
        return digest(iter(lambda: file.read(1 << 20), b""))


class FolderError(UserError, OSError):
    """A folder cannot be made."""


def make_folder(path: Path) -> None:
    """Make a folder, and those above it; FolderError where none can be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = "this is a file: name a folder" if is_file else error.strerror
        raise FolderError(f"{error.filename}: {reason}") from error


def state_of(path: Path) -> str:
    """A text that changes whenever the file is written or replaced, whatever its time of
    modification says.
    """
    now = path.stat()
    return f"{path} {now.st_size} {now.st_ctime_ns} {now.st_ino}"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``: readers see the whole old or
    the whole new file.

    Creates missing folders; where ``path`` is a link, the file that it leads to is replaced. If
    anything fails, the old file is kept and the temporary one removed.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    make_folder(path.parent)
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
            raise OSError(
                error.errno, error.strerror, str(path)
            ) from error  # a full disk is reported without the path
        raise


@contextlib.contextmanager
def reserved(path: Path, overwrite: bool = True) -> Iterator[None]:
    """Within this context no other process reserves ``path``, or writes it as a log; its folder is
    made.

    UserError if one does already, or if the file exists, without ``overwrite``.
    """
    path = Path(os.path.realpath(path))
    make_folder(path.parent)
    temporary = path.with_name(path.name + ".tmp")  # what write_atomically fills
    with contextlib.ExitStack() as stack:
        for one in (path, temporary) if path.is_file() else (temporary,):
            lock(stack.enter_context(one.open("ab")), path)
        stack.callback(temporary.unlink, missing_ok=True)
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists already: add --overwrite to replace it")
        yield


def append_whole(file: IO[bytes], content: bytes, path: Path) -> None:
    """Append ``content`` to the disk file ``path``, open unbuffered as ``file``; where that fails,
    none of it stays.
    """
    before = os.fstat(file.fileno()).st_size
    try:
        while content:  # a write may write only a part and return its length
            content = content[file.write(content) :]
        os.fsync(file.fileno())
    except OSError as error:
        file.truncate(before)  # if the disk is full, half of it may be there
        raise OSError(error.errno, error.strerror, str(path)) from error


def refuse_to_replace(path: Path, what: str, *starts: bytes) -> None:
    """UserError unless the file ``path`` is missing, empty or ``what``: a name given by mistake
    must destroy nothing.

    A file is ``what``, like "table", if it begins with one of ``starts``, in small or capital
    letters. Links are followed; a folder, a device or a pipe is refused.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file to write")
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(
            f"{path} is no regular file, so nothing is written to it: name another file"
        )
    with path.open("rb") as file:
        begin = file.read(80)
    if begin and not begin.lower().startswith(tuple(start.lower() for start in starts)):
        line = begin.partition(b"\n")[0].decode("ascii", "replace")
        found = (
            f"text that begins with {line[:40]!r}"
            if line.replace("\t", "").isprintable()
            else "other data"
        )
        raise UserError(
            f"{path} holds no {what} but {found}, so it is not overwritten: name another file"
        )


def read_json(path: Path) -> Any:
    """The content of a JSON file; OSError, or ValueError in one line, if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; OSError, or ValueError in one line, if it cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_bytes().decode())


def write_text(path: Path, text: str) -> None:
    """Write ``text``, in UTF-8, as the whole content of ``path``, atomically."""
    content = text.encode(errors="backslashreplace")  # a name may hold bytes that are no text
    write_atomically(path, lambda file: file.write(content))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def cache_folder() -> Path:
    """The folder of results that can be computed again: $SMOOTHADV_CACHE, or one in the user's
    cache folder.
    """
    explicit, xdg = os.environ.get("SMOOTHADV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(explicit) if explicit else Path(xdg or Path.home() / ".cache") / "smoothadv"


def cached(name: str, compute: Callable[[], bytes]) -> bytes:
    """The bytes that the cache has as ``name``; where they are missing or damaged, ``compute``
    makes them, which are saved if the cache folder is writable.
    """
    try:
        content = (cache_folder() / name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        content = b""
    saved, payload = content[:64], content[64:]
    if digest([payload]).encode() == saved:
        return payload
    payload = compute()
    keep(name, payload)
    return payload


def keep(name: str, payload: bytes) -> None:
    """Save the bytes as ``name`` in the cache, if its folder is writable."""
    with contextlib.suppress(OSError, RuntimeError):
        # Several processes may write the same name at once.
        temporary = cache_folder() / f"{name}.{os.getpid()}"
        write_atomically(temporary, lambda file: file.write(digest([payload]).encode() + payload))
        os.replace(temporary, cache_folder() / name)


def lock(file: IO[bytes] | int, path: Path, shared: bool = False) -> None:
    """Lock ``path``, which is open as ``file`` (or this descriptor); UserError if another process
    has locked it.

    Several processes can hold a ``shared`` lock at once.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{path} is being written by another process: wait for it or name another"
        ) from error
    except OSError:  # a file system without locks, as some clusters have
        return


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
