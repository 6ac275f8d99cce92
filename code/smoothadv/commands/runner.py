"""How every command runs: one clear line for each foreseeable error, and the exit code that goes with it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from smoothadv.errors import DoubtfulWarning, Terminated, UsageError, UserError

SUCCESS, FAILURE, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


class Parser(argparse.ArgumentParser):
    """An argument parser that keeps help text as written, refuses abbreviations and answers errors in one line."""

    def __init__(self, *, epilog: str | None = None, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=epilog, allow_abbrev=False, **options
        )
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

        self._source = ""

    @contextmanager
    def reading(self, source: str) -> Iterator[None]:
        """Within this context, a usage error names ``source``, which is not the command line, as its place."""
        around, self._source = self._source, f"{self._source}{source}: "
        try:
            yield
        except UsageError as error:
            self.error(str(error))
        finally:
            self._source = around

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {self._source}{message} (see {self.prog} --help)\n")


Body = Callable[[argparse.Namespace, Sequence[str]], None]
"""Carries out a command, given its options and the command line that repeats this run."""


def run(parser: Parser, body: Body, arguments: Sequence[str] | None, interrupted: str = "") -> int:
    """Parse ``arguments`` (None: the process's), call ``body`` and turn what happens into an exit code.

    0 on success, 2 on a usage error, 1 with one line on a UserError or a failing file, 130 on Ctrl-C and 143 on a
    SIGTERM that was obeyed; after these two ``interrupted`` tells the user how to continue. ``--debug`` adds the
    traceback. Any other exception is a defect and propagates.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parser.parse_args(words)
        with _warnings_as_lines():
            body(options, ["smoothadv", parser.prog, *words])
        sys.stdout.flush()
        return SUCCESS
    except SystemExit as exit_request:  # argparse's way to end after --help or a usage error
        return int(exit_request.code or SUCCESS)
    except UsageError as error:
        _failed(f"{error} (see {parser.prog} --help)", arguments)
        return USAGE
    except UserError as error:
        return _failed(str(error), arguments)
    except MemoryError as error:
        return _failed(f"out of memory: use a smaller --batch ({error})", arguments)
    except RuntimeError as error:
        # torch.OutOfMemoryError or an error of the host's allocator, known by its text: torch is not imported here.
        if not any(sign in str(error) for sign in ("out of memory", "can't allocate memory", "ALLOCATION_FAILED")):
            raise
        return _failed(
            f"out of memory: use a smaller --batch or --num-noise-vec ({str(error).split('. ')[0]})", arguments
        )
    except BrokenPipeError:
        # The reader of the output has closed it, as in `... | head`: that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except OSError as error:
        return _failed(f"{error.filename or 'input/output'}: {error.strerror or error}", arguments)
    except KeyboardInterrupt:
        print(f"\ninterrupted{': ' + interrupted if interrupted else ''}", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print(f"stopped by SIGTERM{': ' + interrupted if interrupted else ''}", file=sys.stderr)
        return TERMINATED


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within this context, each DoubtfulWarning is one line on standard error, whatever warning filters Python has."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DoubtfulWarning)
        other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if issubclass(category, DoubtfulWarning):
                print(f"warning: {message}", file=sys.stderr)
            else:
                other(message, category, *place, **options)

        warnings.showwarning = show
        yield


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context, SIGTERM raises Terminated, so that a run can save its work before it stops."""

    def terminate(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(message: str, arguments: Sequence[str] | None) -> int:
    if "--debug" in (sys.argv if arguments is None else arguments):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return FAILURE
