"""Which Keras backend runs in this process, the start of its framework, and a quick import of it;
and attributes that are replaced for a while.

Each function imports what it needs when it is called, as a framework keeps the devices that it
saw when it was imported.
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

from sparkdl.errors import ResourceError


def running_backend() -> str | None:
    """The Keras backend of this process; None if Keras is not imported yet."""
    if "keras" not in sys.modules:
        return None
    import keras

    return str(keras.backend.backend())


def jax_takes_64_bits() -> bool:
    """Whether Keras runs on JAX, which was told to take numbers of 64 bits as they are."""
    if running_backend() != "jax":
        return False
    import jax

    return bool(jax.config.jax_enable_x64)


@contextlib.contextmanager
def replaced(thing: object, name: str, value: object, wanted: object = True) -> Iterator[None]:
    """Within, an attribute has another value, if that is ``wanted``."""
    before = getattr(thing, name)
    if wanted:
        setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


@contextlib.contextmanager
def overlaid(thing: object, **functions: object) -> Iterator[None]:
    """Within, an object of Keras' has other functions in place of those of its class."""
    for name, function in functions.items():  # not setattr: Keras' own would track them
        object.__setattr__(thing, name, function)
    try:
        yield
    finally:
        for name in functions:
            object.__delattr__(thing, name)


def start_backend(backend: str | None, cores: int) -> None:
    """Imports Keras on a backend, whose framework is held to some CPU cores.

    The environment (``KERAS_BACKEND``, ``CUDA_VISIBLE_DEVICES``) must be set before.

    Args:
        backend: ``'tensorflow'``, ``'jax'`` or ``'torch'``; None: any.
        cores: CPU cores of this process (JAX takes all).

    Raises:
        ResourceError: Keras runs on another backend.
    """
    if backend == "tensorflow":
        bound_tensorflow(cores)
    elif backend == "torch":
        import torch

        torch.set_num_threads(cores)
        torch.cuda.is_available()  # looks at the devices now
    elif backend == "jax":
        import jax

        jax.devices()  # looks at the devices now
    import keras

    if backend is not None and keras.backend.backend() != backend:
        raise ResourceError(
            "Keras runs on another backend than the model was made with", expected=backend,
            received=keras.backend.backend(),
        )  # fmt: skip


def bound_tensorflow(cores: int) -> None:
    """Holds TensorFlow to some CPU cores, and makes it take GPU memory only as it needs it.

    Then several processes can share a GPU. No effect once TensorFlow has started.
    """
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(cores)
        tf.config.threading.set_inter_op_parallelism_threads(max(1, min(2, cores)))
    for device in tf.config.list_physical_devices("GPU"):
        with contextlib.suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)


def seed_everything(seed: int) -> None:
    """Sets the seeds of Python, NumPy and the backend, as ``keras.utils.set_random_seed`` does."""
    import keras

    keras.utils.set_random_seed(seed)


def debug_limits() -> tuple[int | None, int | None]:
    """The most epochs of a fit and the most batches of an epoch, as ``keras.config`` has them."""
    import keras

    names = ("max_epochs", "max_steps_per_epoch")  # since Keras 3.11
    epochs, steps = (getattr(keras.config, name, lambda: None)() or None for name in names)
    return epochs, steps


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

    Keras and TensorFlow import scikit-learn, Matplotlib, IPython and JAX where they are installed,
    for wrappers, plots and converters: two fifths of the time of an import. Both do without what is
    not installed. Imports of other threads, and later ones, find them as ever (ADR 0067).

    An import makes half a million objects that stay. Python's collector would look at all of them
    again and again, for a fifth to a third of the import's time (ADR 0096).

    Args:
        backend: Backend of Keras; what it needs is found.
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
