"""``Closing``, ``environment``: the end of a block closes an object, or restores variables."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self


class Closing(ABC):
    """Leaving the ``with`` block closes the object, whatever happened in the block."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the object holds; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Within, variables of the environment have other values; None: they are not there."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            set_variable(name, value)
        yield
    finally:
        for name, value in before.items():
            set_variable(name, value)


def set_variable(name: str, value: str | None) -> None:
    """Sets a variable of the environment; None: takes it away."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
