"""``Closing``: the context manager of everything that has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
