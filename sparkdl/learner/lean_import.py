"""The import of Keras in a worker, without collections of garbage and packages for notebooks only.

Keras and TensorFlow import scikit-learn, Matplotlib, IPython and JAX where they are installed, for
wrappers, plots and converters. That is two fifths of the time that an import takes, and a worker
that trains or predicts has no use for them. Both packages do without what is not installed, so an
import from the thread that starts the framework says that these are not. Imports of other threads,
and later ones, find them as ever (ADR 0067).

An import makes half a million objects that stay, and Python's collector looks at all of them again
and again while they come: a fifth to a third of the import's time. It finds next to nothing, so it
pauses, and never looks at them again (ADR 0096).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NOT_NEEDED = frozenset({"IPython", "jax", "matplotlib", "sklearn"})

_MANY_MODULES = 500
"""A framework has more, what is already imported brings none."""


class _LeavesOut:
    """A finder of modules that does not find some packages for one thread."""

    def __init__(self, finder: Any, packages: frozenset[str], thread: int) -> None:
        self.finder = finder
        self._packages, self._thread = packages, thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._packages and threading.get_ident() == self._thread:
            return None
        found: ModuleSpec | None = self.finder.find_spec(fullname, path, target)
        return found


@contextlib.contextmanager
def lean_import(backend: str | None) -> Iterator[None]:
    """Within, imports of this thread do not find packages that a worker has no use for, and no
    garbage is collected. What was imported is left out of later collections.

    Args:
        backend: Of Keras; what it needs is found.
    """
    collects, number = gc.isenabled(), len(sys.modules)
    packages, thread = NOT_NEEDED - {backend or "jax"}, threading.get_ident()
    sys.meta_path[:] = [_LeavesOut(finder, packages, thread) for finder in sys.meta_path]
    gc.disable()
    try:
        yield
    finally:  # finders that came meanwhile stay
        if collects:
            gc.enable()
        if len(sys.modules) > number + _MANY_MODULES:
            gc.freeze()
        sys.meta_path[:] = [
            finder.finder if isinstance(finder, _LeavesOut) else finder for finder in sys.meta_path
        ]
