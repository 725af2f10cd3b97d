"""The import of Keras in a worker, without the packages that only notebooks need.

Keras and TensorFlow import scikit-learn, Matplotlib, IPython and JAX where they are installed, for
wrappers, plots and converters. That is two fifths of the time that an import takes, and a worker
that trains or predicts has no use for them. Both packages do without what is not installed, so an
import from the thread that starts the framework says that these are not. Imports of other threads,
and later ones, find them as ever (ADR 0067).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NOT_NEEDED = frozenset({"IPython", "jax", "matplotlib", "sklearn"})


class _LeavesOut(importlib.abc.MetaPathFinder):
    """Finds nothing, and in one thread ends the search for some packages."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._packages and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is left out here", name=fullname)
        return None


@contextlib.contextmanager
def lean_import(backend: str | None) -> Iterator[None]:
    """Within, imports of this thread do not find packages that a worker has no use for.

    Args:
        backend: Of Keras; what it needs is found.
    """
    finder = _LeavesOut(NOT_NEEDED - {backend or "jax"})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
