"""Progress of long work on standard error: a bar on a terminal, elsewhere a plain line a minute."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from threading import Thread
from time import monotonic, sleep
from typing import Any

from tqdm import tqdm

from smoothadv.base.errors import escape, warn

SECONDS_BETWEEN_LINES = 60.0
_quiet = ContextVar("quiet", default=False)
_LINE = (
    "{desc}: {n_fmt} of {total_fmt} ({percentage:.0f}%), {rate_fmt}, {elapsed} so far, {remaining} "
    "left{postfix}"
)


class Progress(tqdm):
    """A bar of tqdm, with its arguments, where standard error is a terminal; ``quiet`` shows
    nothing.

    Elsewhere, as under nohup, a line says how far the work is whenever a minute has passed without
    one. Other lines, written within ``external_write_mode``, count as well. Of a bar over an
    iterable, lines come between its items only.
    """

    def __init__(self, *arguments: Any, quiet: bool = False, **options: Any) -> None:
        self._makes_lines = sys.stderr is not None and not getattr(sys.stderr, "isatty", bool)()
        self._last_line = monotonic()
        if self._makes_lines:
            # Any update may make a line, since they may be rare; the rate is that of all the work.
            options["unit"] = f" {options.get('unit', 'it').strip()}"
            options |= {
                "bar_format": _LINE,
                "smoothing": 0,
                "miniters": 0,
                "mininterval": 0,
                "delay": 0,
            }
        super().__init__(*arguments, disable=quiet or _quiet.get() or sys.stderr is None, **options)
        if self._makes_lines:
            self.sp = None  # tqdm then ends without a bar
            _watch()

    def display(self, *arguments: Any, **options: Any) -> bool:
        """What tqdm calls to show how far the work is."""
        if not self._makes_lines:
            return super().display(*arguments, **options)
        if monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = monotonic()
            with contextlib.suppress(
                OSError, ValueError
            ):  # a full disk or a closed stream must not end the work
                print(
                    escape(" ".join(str(self).replace("s/ ", "s/").split())),
                    file=sys.stderr,
                    flush=True,
                )
        return True

    def clear(self, *arguments: Any, **options: Any) -> None:
        """What tqdm calls before others write a line."""
        if self._makes_lines:
            self._last_line = monotonic()
        else:
            super().clear(*arguments, **options)


def warn_of_hours(work: str, images: int) -> None:
    """Warn, before it begins, of ``work`` on so many noisy images that even a fast machine needs
    hours.
    """
    if (hours := images / 3.6e9) >= 1:
        warn(f"{work}, take {hours:,.1f} hours even at 1,000,000 noisy images per second")


@cache
def _watch() -> None:
    """Start the thread by which lines come while one step, like a job of a sweep or an evaluation,
    takes long.
    """

    def watch() -> None:
        while True:
            sleep(1)
            _look()

    Thread(target=watch, daemon=True).start()


def _look() -> None:
    """Make the lines that are due; none of a bar over an iterable, which may stay open in the
    traceback of an error.
    """
    with tqdm.get_lock():
        for bar in tqdm._instances.copy():
            if (
                isinstance(bar, Progress)
                and hasattr(bar, "start_t")
                and bar._makes_lines
                and bar.iterable is None
            ):
                bar.refresh(nolock=True)


@contextlib.contextmanager
def progress_hidden(is_hidden: bool) -> Iterator[None]:
    """Within this context, work shows nothing if ``is_hidden``."""
    before = _quiet.set(is_hidden)
    try:
        yield
    finally:
        _quiet.reset(before)
