"""The exceptions and warnings that callers of this package may want to catch, and text as messages
may show it.
"""

import argparse
import importlib
import inspect
import unicodedata
import warnings
from typing import Any

LONGEST_LINE = 2000
"""So many characters of a message are shown, at most, whatever a file or a name holds."""

# What the allocators of PyTorch, of the host, of the CUDA driver and of its libraries say; the last
# one is cuDNN's, where no engine's workspace fits.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "STATUS_ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "unable to find an engine",
)
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of Unicode


def escape(text: str, most: int | None = LONGEST_LINE, plain: bool = False) -> str:
    """``text`` from anywhere as a terminal may show it: on one line, with escapes for what would
    steer a terminal.

    These are control characters, like ESC and line ends, marks like those that change the direction
    of writing, and bytes of a file name that are no text; if ``plain``, also all that is not ASCII.
    Of more than ``most`` characters (None: any number) the middle is left out.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most - 3 - most // 4]}...{text[-(most // 4) :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        ascii(one)[1:-1]
        if unicodedata.category(one) in _STEERING or (plain and not one.isascii())
        else one
        for one in text
    )


class UserError(argparse.ArgumentTypeError):
    """Bad input: the message is ONE line that names the file, field or flag, what was found and
    what is expected.

    Commands print it as ``error: MESSAGE`` and exit with 1; any other exception is a defect of this
    package and shows its traceback. As text it is what ``escape`` makes of the message. Where a
    type of argparse raises it, argparse names the argument.
    """

    def __str__(self) -> str:
        return escape(
            Exception.__str__(self)
        )  # KeyError's, of a subclass, would be the message's repr


class UsageError(UserError):
    """Choices that contradict each other or do not fit what they are applied to; commands exit with
    2.
    """


def optional_module(name: str, without: str) -> Any:
    """A module of a package that is not always installed; where it is not, UserError ``without``
    it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(without) from error


class DoubtfulWarning(UserWarning):
    """Something that is allowed but probably a mistake. Commands print it as ``warning:
    MESSAGE``.
    """


def warn(message: str) -> None:
    """Warn the user, by a DoubtfulWarning, of something that is allowed but probably a mistake; its
    place is the line that called this package.
    """
    inside = [
        level
        for level, one in enumerate(inspect.stack(0), start=1)
        if one.frame.f_globals.get("__name__", "").startswith("smoothadv")
    ]  # between them are frames of contextlib, which decorates functions
    warnings.warn(escape(message), DoubtfulWarning, stacklevel=inside[-1] + 1)


def counted(number: float, noun: str) -> str:
    """The number of things, like "1 image" or "2,000 classes"."""
    return f"{number:,} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on an accelerator or on the host."""
    # torch.OutOfMemoryError is known by its name, since torch is not imported here.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_text = "RuntimeError" in kinds and any(sign in str(error) for sign in _OUT_OF_MEMORY)
    return is_text or not kinds.isdisjoint(("MemoryError", "OutOfMemoryError"))


class Terminated(BaseException):
    """The process was asked to end by SIGTERM, as clusters do, and has saved its work.

    Like KeyboardInterrupt it is no Exception: PyTorch's compiler takes those for its own failures.
    """


class NonFiniteError(UserError, ArithmeticError):
    """A loss or a logit stopped being a finite number."""
