"""The exceptions and warnings that callers of this package may want to catch."""

from __future__ import annotations

import warnings


class UserError(Exception):
    """Bad input: the message is ONE line that names the file, field or flag, what was found and what is expected.

    Commands print it as ``error: MESSAGE`` and exit with 1; any other exception is a defect of this package
    and shows its traceback.
    """


class UsageError(UserError):
    """Choices that contradict each other or do not fit what they are applied to; commands exit with 2."""


class DoubtfulWarning(UserWarning):
    """Something that is allowed but probably a mistake. Commands print it as ``warning: MESSAGE``."""


def warn(message: str) -> None:
    """Warn the user, by a DoubtfulWarning, of something that is allowed but probably a mistake."""
    warnings.warn(message, DoubtfulWarning, stacklevel=3)


class Terminated(Exception):
    """The process was asked to end by SIGTERM, as clusters do, and has saved its work."""


class NonFiniteError(UserError, ArithmeticError):
    """A loss or a logit stopped being a finite number."""
