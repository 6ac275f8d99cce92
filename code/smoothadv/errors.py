"""The one exception for what a user can foresee and mend."""


class UserError(Exception):
    """Bad input: the message is ONE line that names the file, field or flag, what was found and what would do.

    Commands print it as ``error: MESSAGE`` and exit with 1; anything else is a defect of this package
    and shows its traceback.
    """


class Terminated(Exception):
    """The process was asked to end by SIGTERM, as clusters do, and has saved its work."""


class NonFiniteError(UserError, ArithmeticError):
    """A loss or a logit stopped being a finite number."""
