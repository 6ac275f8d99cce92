"""What a person reads when something is refused."""

from collections.abc import Callable

import pytest

from smoothadv.base.errors import UserError


def refusal(
    call: Callable[..., object], *arguments: object, names: object = "", **options: object
) -> str:
    """The message with which a call is refused, which must be one line of sensible length that has
    ``names`` in it.
    """
    with pytest.raises(UserError) as error:
        call(*arguments, **options)
    message = error.value.args[0]  # as it was written: as text, every message has one line
    assert str(names) in message and len(message.splitlines()) == 1 and len(message) < 1000, message
    return str(error.value)
