"""A user's decoder, shipped to executors that may lack its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.errors import DataError
from sparkdl.learner.archive import pickle_by_value

Decoder = Callable[[Any], Any]


class DecoderFunction:
    """A function from one value of a column to one array, pickled with its code.

    The driver makes it, and executors call it, even if they cannot import the function's module.

    Raises:
        DataError: It is no function.
    """

    def __init__(self, function: Decoder) -> None:
        if not callable(function):
            raise DataError(
                "a decoder must be a function",
                expected="a function from one value to one array",
                received=repr(function),
            )
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, value: Any) -> Any:
        return self.function(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecoderFunction) and other.function == self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __getstate__(self) -> bytes:
        parts = {"function": self.function}
        if hasattr(self.function, "func"):  # functools.partial
            parts["inner"] = self.function.func
        return pickle_by_value(parts)

    def __setstate__(self, state: bytes) -> None:
        import cloudpickle

        self.__init__(cloudpickle.loads(state)["function"])  # type: ignore[misc]
