"""Weights that are only read, once in memory for all processes of an executor.

Those of a model that predicts, and what is frozen in one that trains.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib

from sparkdl.data.columns import ALIGNMENT
from sparkdl.files.temporary import executor_folder
from sparkdl.learner.archives.archive import making_models
from sparkdl.learner.framework import replaced
from sparkdl.learner.state.model_weights import exchanged_variables
from sparkdl.process.closing import Closing

LEAST_BYTES = 32 << 20
"""The size of the weights from which on they are shared."""
_LARGE_BYTES = 1 << 20
"""The size of a variable that waits for its value."""
_PLAIN = {"float16", "float32", "float64", "int8", "int16", "int32", "int64"}
"""Names of the dtypes that NumPy and DLPack know."""
_FILE, _LOCK = "weights", "in-use"


def shared_weights(weights: list[Any], digest: str | None = None) -> SharedWeights | None:
    """Lets weights lie where those of other processes with the same model do; None: alone.

    Args:
        weights: Variables that nobody writes to.
        digest: Of the model with them; None: that of their values.
    """
    folder = executor_folder()
    if folder is not None and can_share(weights):
        with contextlib.suppress(OSError):  # no room on the disk
            return SharedWeights(weights, folder, digest or _digest(weights))
    return None


@contextlib.contextmanager
def sparing_memory() -> Iterator[None]:
    """Within, Keras reads a model file's values from the disk, not from a copy in memory.

    TensorFlow's allocator on CPUs (oneDNN's) keeps for itself what variables once had, 1.5 times
    the size of the weights: an initial value, which the file replaces, and a copy of what was read.
    Large variables that this thread makes wait for their value, which stays in NumPy's memory.
    """
    with making_models, contextlib.ExitStack() as stack:
        if hasattr(saving_lib, "is_memory_sufficient"):
            stack.enter_context(replaced(saving_lib, "is_memory_sufficient", lambda model: False))
        if keras.backend.backend() == "tensorflow" and not _has_tensorflow_gpus():
            stack.enter_context(_given_values())
        yield


@contextlib.contextmanager
def _given_values() -> Iterator[None]:
    from keras.src.backend.tensorflow.core import Variable

    here, waiting = threading.get_ident(), dict[int, Any]()
    made, set_to = Variable._initialize_with_initializer, Variable._direct_assign
    converted, built = Variable._convert_to_tensor, BaseOptimizer.build

    def make(self: Any, initializer: Callable[..., Any]) -> None:
        kind: str = self._dtype
        size = np.prod(self._shape) * np.dtype(kind).itemsize if kind in _PLAIN else 0
        if size < _LARGE_BYTES or threading.get_ident() != here:
            made(self, initializer)
        else:
            self._value, self._initializer, waiting[id(self)] = None, initializer, self

    def assign(self: Any, value: Any) -> None:
        waiting.pop(id(self), None)
        if self._value is not None:
            set_to(self, value)
        else:
            self._initialize(value)
            self._initializer = None

    def build(self: Any, variables: list[Any]) -> None:
        mine = waiting.values() if threading.get_ident() == here else ()
        for variable in mine:  # an optimizer asks for their names
            variable._initialize(_tensor(_aligned(variable.shape, np.dtype(variable._dtype))))
        built(self, variables)

    def convert(self: Any, value: Any, dtype: Any = None) -> Any:
        size, kind = getattr(value, "nbytes", 0), getattr(value, "dtype", None)
        same = isinstance(kind, np.dtype) and kind.name == dtype and dtype in _PLAIN
        if size < _LARGE_BYTES or not same:
            return converted(self, value, dtype)
        array = _aligned(value.shape, value.dtype)
        array[...] = value
        return _tensor(array)

    with (
        replaced(Variable, "_initialize_with_initializer", make),
        replaced(Variable, "_direct_assign", assign),
        replaced(Variable, "_convert_to_tensor", convert),
        replaced(BaseOptimizer, "build", build),
    ):
        yield
    for variable in waiting.values():  # the file has no value of it
        if variable._value is None:
            variable._deferred_initialize()
        else:  # the optimizer knows the one that it has
            variable.assign(variable._initializer(variable.shape, dtype=variable.dtype))


def frozen_weights(model: keras.Model) -> list[Any]:
    """The weights that a fit only reads; none on JAX, whose steps return all in new memory."""
    changed = {id(v) for v in exchanged_variables(model)}
    on_jax = keras.backend.backend() == "jax"
    return [] if on_jax else [v for v in model.weights if id(v) not in changed]


def _digest(weights: list[Any]) -> str:
    digest = hashlib.sha256()
    for variable in _shareable(weights):
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).data)
    return digest.hexdigest()


class SharedWeights(Closing):
    """A process' part in the file of one model's weights, once in memory for an executor.

    They lie in a file that every process maps; what the processes share are the pages of that
    file. The mapping is private and writable: what writes into a variable gets a copy of the page,
    and nobody else sees it. Which arrays alias the mapping (ADR 0202): PyTorch's ``from_numpy``,
    and what DLPack makes of memory that begins at a multiple of 64: arrays of JAX (whose
    ``asarray`` copies), and TensorFlow's variables to which such a tensor is assigned.

    Several processes may do this at once: the first that gets one lock writes the file, and gives
    it its name when it is whole; the other lock is shared by all that use the folder. It goes with
    the last process that closes its part, or with the executor's own folder, in which it lies.

    Args:
        weights: Variables with their values; they get arrays that alias the file.
        folder: Of the executor: on its disk, removed when it ends.
        digest: Of the weights, or of the model with them.

    Raises:
        OSError: The file cannot be written, or not be mapped. The variables are as they were.
    """

    def __init__(self, weights: list[Any], folder: str, digest: str) -> None:
        self._folder = os.path.join(folder, f"sparkdl-weights-{digest[:40]}")
        shared = _shareable(weights)
        self._lock = self._locked()
        try:
            mapped = self._mapped(shared)
        except OSError:
            self.close()
            raise
        start = 0
        for variable in shared:
            shape, kind = tuple(variable.shape), _kind(variable)
            count = int(np.prod(shape))
            _alias(variable, np.frombuffer(mapped, kind, count, start).reshape(shape))
            start += _padded(count * kind.itemsize)
        gc.collect()  # the file that was read, which HDF5's reader holds in a cycle
        with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)  # what the values took before

    def _mapped(self, variables: list[Any]) -> mmap.mmap:
        """The file, which is written first where it is not there."""
        path = os.path.join(self._folder, _FILE)
        if not os.path.exists(path):
            with open(os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists(path):
                    _write(f"{path}.part", variables)
                    os.rename(f"{path}.part", path)
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _locked(self) -> int:
        """The lock of the folder, which all hold that use it."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            name = os.path.join(self._folder, _LOCK)
            try:
                lock = os.open(name, os.O_CREAT | os.O_RDWR, 0o600)
            except FileNotFoundError:  # the last process that used it has just removed it
                continue
            fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(name)):
                    return lock
            os.close(lock)  # of a folder that was removed meanwhile

    def close(self) -> None:
        """Leaves the file, and removes the folder if no other process uses it.

        What has been mapped stays readable.
        """
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):  # others use it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def can_share(weights: list[Any]) -> bool:
    """Whether it is worth it, and the weights lie in this machine's memory."""
    if sum(int(np.prod(v.shape)) * _kind(v).itemsize for v in _shareable(weights)) < LEAST_BYTES:
        return False
    backend = keras.backend.backend()
    if backend == "torch":
        return all(v.value.device.type == "cpu" for v in weights)
    if backend == "jax":
        import jax

        return jax.default_backend() == "cpu" and keras.distribution.distribution() is None
    return not _has_tensorflow_gpus()


def _has_tensorflow_gpus() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _shareable(weights: list[Any]) -> list[Any]:
    return [v for v in weights if keras.backend.standardize_dtype(v.dtype) in _PLAIN]


def _kind(variable: keras.Variable) -> np.dtype[Any]:
    """The dtype of the value: JAX makes float32 of a layer's float64."""
    kind: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(variable.value.dtype))
    return kind


def _aligned(shape: Sequence[int], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros that take memory when they are written, where a tensor may alias them."""
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _write(path: str, variables: list[Any]) -> None:
    with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        for variable in variables:
            array = np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value))
            file.write(array.reshape(-1).view(np.uint8).data)
            file.write(bytes(_padded(array.nbytes) - array.nbytes))


def _alias(variable: keras.Variable, array: npt.NDArray[Any]) -> None:
    """Gives a variable the memory of an array, which has its value."""
    backend = keras.backend.backend()
    if not array.size:
        return
    if backend == "torch":
        import torch

        variable.value.data = torch.from_numpy(array)
    elif backend == "jax":
        import jax

        variable.assign(jax.dlpack.from_dlpack(array))
    else:
        variable.assign(_tensor(array))


def _tensor(array: npt.NDArray[Any]) -> Any:
    """A tensor of TensorFlow that aliases an array."""
    import tensorflow as tf

    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
