"""Learners and predictors kept in a reused worker process, so that nothing is compiled twice."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import ALIGNMENT
from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import ModelArchive, decode_model, restore_state
from sparkdl.learner.archives.unsaved_settings import BesideFile, OwnAttributes
from sparkdl.learner.prediction.generation import TextGenerator
from sparkdl.learner.prediction.predictor import make_predictor
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.process.closing import Closing
from sparkdl.training.learning import Predictor

if TYPE_CHECKING:
    from sparkdl.learner.steps.keras_learner import KerasLearner

_CAPACITY = 2
Key = tuple[str, str]
"""``ModelArchive.key``, and ``DataSpec.form`` of the batches that the steps were compiled for."""


@dataclass(frozen=True)
class _KeptLearner:
    """A learner, and what code of the user's may have changed of its model since it was made."""

    learner: KerasLearner
    own: OwnAttributes


_kept: OrderedDict[Key, _KeptLearner] = OrderedDict()
"""The learner that was used last is last."""


@dataclass
class _KeptPredictor:
    """A predictor, what it predicts with, and how many use it now."""

    key: str
    digest: str
    model: Any
    predictor: Predictor
    own: OwnAttributes | None
    """None for a program that was exported."""
    changes: bool = False
    """Whether to predict changes it: seeds go on, or code of the user's own sets attributes."""
    users: int = 0
    shared: SharedWeights | None = None
    """This process' part in the file of the weights, where they are large."""

    def close(self) -> None:
        """Leaves the file of the weights."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


_predictors: OrderedDict[str, _KeptPredictor] = OrderedDict()
"""Digest of a model with its weights -> its predictor; the one used last is last."""


def cached_learner(archive: ModelArchive, form: str = "") -> KerasLearner:
    """A learner with the archive's model, weights and optimizer state.

    A learner kept from a model of equal key and batches of equal form is used again with its
    compiled steps; all of its variables and plain attributes are set anew. Not thread-safe: a
    worker process runs one task at a time.

    Args:
        archive: The model.
        form: Form of the batches, see :attr:`sparkdl.data.columns.DataSpec.form`: metrics, and what
            tracing finds out about the loss, depend on it.
    """
    kept = _kept.pop((archive.key, form), None)
    if kept is None:
        model = decode_model(archive)
        own = OwnAttributes.of(model)
        kept = _KeptLearner(make_learner(model), own)
    else:
        model = kept.learner.model
        kept.own.give_back(model)
        restore_state(model, archive)
        model.reset_metrics()
        kept.learner.reload()
    _kept[archive.key, form] = kept
    while len(_kept) > _CAPACITY:
        _kept.popitem(last=False)
    return kept.learner


@contextlib.contextmanager
def keras_settings(archive: ModelArchive) -> Iterator[None]:
    """Within, this process has the settings of Keras that the archive's model was made with.

    To be left only when what the model compiles has been called: Keras asks for some of them there.
    """
    if not archive.beside:
        yield
        return
    with BesideFile.from_bytes(archive.beside).settings.globals.set():
        yield


def is_kept(archive: ModelArchive, form: str = "") -> bool:
    """Whether :func:`cached_learner` has a compiled model for ``archive`` and ``form``."""
    return (archive.key, form) in _kept


def forget_learner(archive: ModelArchive, form: str = "") -> None:
    """Drops a learner whose state cannot be trusted, as its fit ended in an exception."""
    _kept.pop((archive.key, form), None)


@contextlib.contextmanager
def cached_predictor(wanted: PredictorArchive) -> Iterator[Predictor]:
    """Within, a predictor with the archive's weights. Not thread-safe.

    One that was kept with the same weights is used by several at once (functions in one query share
    a worker process). One of equal key that nobody uses gets the weights, the seeds and the
    attributes of the archive, and keeps its compiled call.
    """
    kept = _predictors.pop(wanted.digest, None)
    if kept is None:
        kept = _with_new_weights(wanted) or _opened(wanted)
    elif not kept.users and kept.changes:
        _renew(kept, wanted)
    _predictors[wanted.digest] = kept
    kept.users += 1
    try:
        yield kept.predictor
    finally:
        kept.users -= 1
        idle = [digest for digest, other in _predictors.items() if not other.users]
        for digest in idle[:-_CAPACITY]:
            _predictors.pop(digest).close()


def _opened(wanted: PredictorArchive) -> _KeptPredictor:
    """A new predictor."""
    key, digest = wanted.archive.key, wanted.digest
    if wanted.form == "saved_model":
        from sparkdl.learner.prediction.saved_model import SavedModelPredictor

        return _KeptPredictor(key, digest, None, SavedModelPredictor(wanted.archive.content), None)
    model = decode_model(wanted.archive, compiled=False)
    shared = _shared(model, digest)
    if wanted.generation is not None:
        writer = TextGenerator(model, wanted.generation)
        return _KeptPredictor(key, digest, None, writer, None, shared=shared)
    own = OwnAttributes.of(model)
    changes = bool(own) or len(model.variables) > len(model.weights)
    return _KeptPredictor(key, digest, model, make_predictor(model), own, changes, shared=shared)


def _shared(model: Any, digest: str) -> SharedWeights | None:
    """Lets the weights lie where those of other processes with the same model do; None: alone."""
    folder = executor_folder()
    if folder is not None and can_share(model):
        with contextlib.suppress(OSError):  # no room on the disk
            return SharedWeights(model, folder, digest)
    return None


def _with_new_weights(wanted: PredictorArchive) -> _KeptPredictor | None:
    """An idle predictor of equal architecture with the new weights; None: there is none."""
    for digest, kept in _predictors.items():
        if kept.key == wanted.archive.key and kept.own is not None and not kept.users:
            del _predictors[digest]
            _renew(kept, wanted)
            return kept
    return None


def _renew(kept: _KeptPredictor, wanted: PredictorArchive) -> None:
    """Gives an idle predictor the state of an equal model."""
    assert kept.own is not None
    kept.own.give_back(kept.model)
    restore_state(kept.model, wanted.archive)
    kept.digest = wanted.digest
    former, kept.shared = kept.shared, _shared(kept.model, kept.digest)
    if former is not None:  # left last, as the file may be the same one
        former.close()
    kept.predictor.reload()


LEAST_BYTES = 32 << 20
"""The size of the weights from which on they are shared."""
_FILE, _LOCK = "weights", "in-use"


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
        model: With all of its values; its variables get arrays that alias the file.
        folder: Of the executor: on its disk, removed when it ends.
        digest: Of the model with its weights.

    Raises:
        OSError: The file cannot be written, or not be mapped. The variables are as they were.
    """

    def __init__(self, model: Any, folder: str, digest: str) -> None:
        self._folder = os.path.join(folder, f"sparkdl-weights-{digest[:40]}")
        shared = _shareable(model)
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


def executor_folder() -> str | None:
    """The folder of the executor that this process works for; None outside of Spark's workers."""
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return folders[0] if "blockmgr-" in folders[0] and os.path.isdir(folders[0]) else None


def can_share(model: Any) -> bool:
    """Whether it is worth it, and the weights lie in this machine's memory."""
    sizes = [int(np.prod(v.shape)) * _kind(v).itemsize for v in _shareable(model)]
    if sum(sizes) < LEAST_BYTES:
        return False
    backend = keras.backend.backend()
    if backend == "torch":
        return all(v.value.device.type == "cpu" for v in model.weights)
    if backend == "jax":
        import jax

        return jax.default_backend() == "cpu" and keras.distribution.distribution() is None
    import tensorflow as tf

    return not tf.config.list_physical_devices("GPU")


def _shareable(model: Any) -> list[Any]:
    """The variables with a dtype that NumPy has, and DLPack; others stay in each process."""
    names = [(v, keras.backend.standardize_dtype(v.dtype)) for v in model.weights]
    return [v for v, name in names if name.startswith(("float16", "float32", "float64", "int"))]


def _kind(variable: Any) -> np.dtype[Any]:
    kind: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return kind


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _write(path: str, variables: list[Any]) -> None:
    with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        for variable in variables:
            array = np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value))
            file.write(array.reshape(-1).view(np.uint8).data)
            file.write(bytes(_padded(array.nbytes) - array.nbytes))


def _alias(variable: Any, array: npt.NDArray[Any]) -> None:
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
        import tensorflow as tf

        variable.assign(tf.experimental.dlpack.from_dlpack(array.__dlpack__()))
