"""Types of option values: a bad text gives an error that says what is expected."""

import argparse

import pytest

from smoothadv.settings import non_negative_float, positive_int, probability


@pytest.mark.parametrize(
    ("parse", "text", "value"), [(positive_int, "7", 7), (non_negative_float, "0", 0.0), (probability, "1e-3", 1e-3)]
)
def test_a_number_that_is_accepted_is_returned_with_its_type(parse, text, value):
    assert parse(text) == value and type(parse(text)) is type(value)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "nan", "many", "", "1" + 400 * "0"], ids=lambda text: text[:9])
def test_a_text_that_is_no_such_number_is_refused(text):
    """An integer too large for a float is refused like any other."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of at least 1"):
        positive_int(text)
