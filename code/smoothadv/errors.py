"""The exceptions that callers of this package may want to catch."""


class UserError(Exception):
    """Bad input: the message is ONE line that names the file, field or flag, what was found and what is expected.

    Commands print it as ``error: MESSAGE`` and exit with 1; any other exception is a defect of this package
    and shows its traceback.
    """


class Terminated(Exception):
    """The process was asked to end by SIGTERM, as clusters do, and has saved its work."""


class NonFiniteError(UserError, ArithmeticError):
    """A loss or a logit stopped being a finite number."""
