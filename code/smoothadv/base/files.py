"""Files on the disk: written atomically, locked against other processes, and kept in the user's
cache. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import pickle
import re
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from smoothadv.base.digests import digest_bytes
from smoothadv.base.errors import UserError, visible

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import numpy as np

PAGE = ("HTML page", b"<!doctype html")
"""What ``refuse_to_replace`` takes for a page."""
LARGEST_JSON = 64 << 20
"""In bytes: a hundred times the manifest of a log that 256 shards of 50,000 chosen images were
merged into.
"""
DEEPEST_JSON = 50
_LARGEST = "SMOOTHADV_MAX_UNPACKED_GIB"
_USUAL_RATIO = 20
_TUPLES = pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
_MOST_TUPLES = 20  # in each other


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``: readers see the whole old or
    the whole new file.

    Creates missing folders; where ``path`` is a link, the file that it leads to is replaced. If
    anything fails, the old file is kept and the temporary one removed.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")  # what write_atomically fills
    with contextlib.ExitStack() as stack:
        for one in (
            [*[path] * path.is_file(), temporary] if os.name != "nt" else ()
        ):  # which renames no open files
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
    letters. Links are followed; a device or a pipe is refused before it is opened.
    """
    if not path.exists() or path.is_dir():  # write_atomically refuses folders
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


def check_regular(path: Path) -> None:
    """OSError if there is no file, or something else, like a named pipe, whose reader could wait
    for ever.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # open refuses a folder in its own words
        raise OSError(
            errno.EINVAL, "it is no regular file, but a pipe, a socket or a device", str(path)
        )


def read_regular(path: Path, most: int = -1) -> bytes:
    """The content of a file, or its first ``most`` bytes; OSError as above."""
    check_regular(path)
    with open(path, "rb") as file:
        return file.read(most)


def read_json(path: Path) -> Any:
    """The content of a JSON file that no person writes; OSError, or ValueError in one line, if it
    cannot be read.

    Nor is it read if it is larger than ``LARGEST_JSON`` or nested deeper than ``DEEPEST_JSON``: all
    that handles it could run out of memory or of stack.
    """
    text = read_regular(path, LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise ValueError(f"it is larger than {LARGEST_JSON >> 20} MiB")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [content]
    for _ in range(DEEPEST_JSON):
        lists = [
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, (dict, list))
        ]
        level = list(itertools.chain.from_iterable(lists))
    if level:
        raise ValueError("it is nested too deep")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; OSError, or ValueError in one line, if it cannot be read."""
    try:
        return tomllib.loads(read_regular(path).decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_text(path: Path, text: str) -> None:
    """Write ``text``, with escapes for what would steer a terminal, as the whole content of
    ``path``, atomically.
    """
    write_atomically(path, lambda file: file.write(visible(text).encode()))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as indented JSON, atomically."""
    # The only character that json leaves and write_text does not.
    write_text(path, json.dumps(content, indent=2).replace("\x7f", "\\u007f") + "\n")


def refuse_to_inflate(path: Path) -> None:
    """UserError if ``path`` is a zip archive that takes far more memory than disk.

    It may unpack to 1 GiB, or $SMOOTHADV_MAX_UNPACKED_GIB where that is set, and in any case to 20
    times its size.
    """
    given = os.environ.get(_LARGEST, "1")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given):
        raise UserError(f"${_LARGEST} is '{given}', expected a number of GiB")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except (
        Exception
    ):  # a damaged file can raise nearly anything: who reads it will say what is wrong
        return
    if unpacked > max(float(given) * 2**30, _USUAL_RATIO * path.stat().st_size):
        raise UserError(
            f"{path} has {path.stat().st_size} bytes and unpacks to {unpacked / 2**30:.3g} GiB, "
            f"more than {given} GiB: if you trust it, set ${_LARGEST}"
        )


def read_array_header(
    archive: zipfile.ZipFile, member: IO[bytes], name: str
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and type of the array in a member of a .npz file, read up to its data.

    ValueError for objects, and where the data have another size than shape and type say.
    """
    from numpy.lib import format as npy

    read = (
        npy.read_array_header_1_0 if npy.read_magic(member) == (1, 0) else npy.read_array_header_2_0
    )
    shape, is_fortran, dtype = read(member)
    if dtype.hasobject:
        raise ValueError("an array of objects, which are read only with allow_pickle")
    if member.tell() + math.prod(shape) * dtype.itemsize != archive.getinfo(name).file_size:
        raise ValueError(f"an array of another size than {name} has")
    return shape, is_fortran, dtype


@contextlib.contextmanager
def arrays_in(path: Path) -> Iterator[Any]:
    """The NpzFile of a .npz file without objects; ValueError, OSError or UserError where it cannot
    be read or would fill the memory.
    """
    import numpy as np

    refuse_to_inflate(path)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                read_array_header(archive, member, name)
    with np.load(path, allow_pickle=False) as content:
        yield content


def cache_folder() -> Path:
    """The folder of results that can be computed again: $SMOOTHADV_CACHE, or one in the user's
    cache folder.
    """
    explicit, xdg = os.environ.get("SMOOTHADV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(explicit) if explicit else Path(xdg or Path.home() / ".cache") / "smoothadv"


def cached(name: str, compute: Callable[[], bytes]) -> bytes:
    """The bytes that the cache has as ``name``; where they are missing or damaged, ``compute``
    makes them.
    """
    try:
        content = (cache_folder() / name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        content = b""
    digest, payload = content[:32], content[32:]
    if digest_bytes([payload]) != digest:
        payload = compute()
        write_cached(name, payload)
    return payload


def write_cached(name: str, payload: bytes) -> None:
    """Save ``payload`` as ``name`` if the cache folder is writable; otherwise do nothing."""
    try:
        temporary = (
            cache_folder() / f"{name}.{os.getpid()}"
        )  # several processes may write the same name at once
        write_atomically(temporary, lambda file: file.write(digest_bytes([payload]) + payload))
        os.replace(temporary, cache_folder() / name)
    except (OSError, RuntimeError):
        pass


def lock(file: IO[bytes] | int, path: Path, shared: bool = False) -> None:
    """Lock ``path``, which is open as ``file`` (or this descriptor); UserError if another process
    has locked it.

    Several processes can hold a ``shared`` lock at once.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no advisory locks of this kind
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{path} is being written by another process: wait for it or name another"
        ) from error
    except OSError:  # a file system without locks, as some clusters have
        return


def _few_levels(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """``load``, which makes a tuple, but of few levels: Python crashes when it hashes a very deep
    one.
    """

    def load_tuple(unpickler: Any) -> None:
        load(unpickler)
        made = unpickler.stack[-1]
        level = 1 + max((unpickler.levels.get(id(part), (0,))[0] for part in made), default=0)
        if level > _MOST_TUPLES:
            raise pickle.UnpicklingError("it asks to load tuples in tuples in tuples")
        unpickler.levels[id(made)] = level, made  # which keeps its id

    return load_tuple


def _load_bytearray(unpickler: Any) -> None:
    """Bytes of a stated length: Python would fill as much memory with zeros before it looks at the
    file.
    """
    (length,) = struct.unpack("<Q", unpickler.read(8))
    unpickler.append(unpickler.read(length))


# The unpickler written in Python: the one in C allocates as much memory as the number of a memo
# says.
class CarefulUnpickler(pickle._Unpickler):
    """Neither crashes nor allocates more than a file holds, whatever is in it; ``find_class`` must
    not help it.
    """

    dispatch = {
        **pickle._Unpickler.dispatch,
        **{code: _few_levels(pickle._Unpickler.dispatch[code]) for code in _TUPLES},
        pickle.BYTEARRAY8[0]: _load_bytearray,
    }

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        self.levels: dict[int, tuple[int, tuple[Any, ...]]] = {}
