"""Progress of long work on standard error: a bar on a terminal, elsewhere a plain line a minute."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from time import monotonic
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
    one. Other lines, written within ``external_write_mode``, count as well.
    """

    def __init__(self, *arguments: Any, quiet: bool = False, **options: Any) -> None:
        self._makes_lines = not getattr(sys.stderr, "isatty", bool)()
        self._last_line = monotonic()
        if self._makes_lines:
            options["unit"] = f" {options.get('unit', 'it').strip()}"
            # Any update may make a line, since they may be rare; the rate is that of all the work.
            options |= dict.fromkeys(("smoothing", "miniters", "mininterval", "delay"), 0)
            options["bar_format"] = _LINE
        super().__init__(*arguments, disable=quiet or _quiet.get() or sys.stderr is None, **options)
        if self._makes_lines:
            self.sp = None  # tqdm then ends without a bar

    def display(self, *arguments: Any, **options: Any) -> bool:
        """What tqdm calls to show how far the work is."""
        if not self._makes_lines:
            return super().display(*arguments, **options)
        if monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = monotonic()
            line = " ".join(str(self).replace("s/ ", "s/").split())
            with contextlib.suppress(OSError, ValueError):  # a full disk must not end the work
                print(escape(line), file=sys.stderr, flush=True)
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


@contextlib.contextmanager
def progress_hidden(is_hidden: bool) -> Iterator[None]:
    """Within this context, work shows nothing if ``is_hidden``."""
    before = _quiet.set(is_hidden)
    try:
        yield
    finally:
        _quiet.reset(before)
