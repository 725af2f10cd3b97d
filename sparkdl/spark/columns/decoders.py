"""A user's decoder of binary columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.errors import DataError

Decoder = Callable[[Any], Any]


def check_decoder(decoder: Any) -> Decoder:
    """Returns the function from one value of a column to one array.

    Raises:
        DataError: It is no function.
    """
    if not callable(decoder):
        raise DataError(
            "a decoder must be a function",
            expected="a function from one value to one array",
            received=repr(decoder),
        )
    function: Decoder = decoder
    return function
