"""How a distributed optimizer joins the gradients of all ranks, on each Keras backend.

All dense gradients of one dtype travel as one flat buffer, sparse ones (``tf.IndexedSlices``) as
their rows and indices. On TensorFlow with Horovod, Horovod's own operations join them inside the
graph; everywhere else the compiled step calls the communicator.
"""

from __future__ import annotations

import importlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparkdl.codecs import SUM_DTYPES, Raw
from sparkdl.collective.arithmetic import require_not_bfloat16
from sparkdl.collective.communicator import Communicator
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.failures import carried

OPS = {"average": "mean", "sum": "sum"}
_reducers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def make_reducer(
    communicator: Communicator, op: str, compression: str, sparse_as_dense: bool
) -> GradientReducer:
    """The reducer for the Keras backend that runs here.

    Args:
        communicator: Among all ranks.
        op: ``'average'`` or ``'sum'`` over the ranks.
        compression: ``'none'``, ``'fp16'`` or ``'bf16'``: the dtype in which floats travel.
        sparse_as_dense: Whether sparse gradients are made dense first.

    Raises:
        UnknownNameError: Unknown ``op`` or ``compression``.
        ConfigError: Horovod's operations cannot take the dtype.
    """
    import keras

    if op not in OPS:
        raise UnknownNameError("op", op, OPS)
    if compression not in SUM_DTYPES:
        raise UnknownNameError("compression", compression, SUM_DTYPES)
    if not isinstance(sparse_as_dense, bool):
        raise ConfigError(
            "sparse_as_dense must be a truth value", expected="True or False",
            received=repr(sparse_as_dense),
        )  # fmt: skip
    backend = keras.backend.backend()
    kinds: dict[str, type[GradientReducer]]
    kinds = {"tensorflow": _TensorFlowReducer, "jax": _JaxReducer, "torch": _TorchReducer}
    if backend not in kinds:
        raise UnknownNameError("Keras backend", backend, kinds)
    kind = kinds[backend]
    if backend == "tensorflow" and communicator.name == "horovod":
        require_not_bfloat16(SUM_DTYPES[compression])
        kind = _HorovodReducer
    return kind(communicator, op, compression, sparse_as_dense)


def as_dense(gradient: Any) -> Any:
    """A gradient of any backend without sparsity; rows of one index are summed."""
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        import tensorflow as tf

        return tf.convert_to_tensor(gradient)
    if hasattr(gradient, "todense"):  # of JAX
        return gradient.todense()
    return gradient.to_dense() if getattr(gradient, "is_sparse", False) else gradient


class GradientReducer(ABC):
    """Joins the gradients of a step over all ranks; every rank calls it at the same steps.

    The base of all backends: one flat NumPy array in, the joined one out.
    """

    def __init__(
        self, communicator: Communicator, op: str, compression: str, sparse_as_dense: bool
    ) -> None:
        self._communicator, self._op = communicator, OPS[op]
        self._wire = SUM_DTYPES[compression] if compression != Raw.name else None
        self._sparse_as_dense = sparse_as_dense

    @abstractmethod
    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients joined, each in its own shape and dtype; None stays None."""

    def _reduce(self, array: object) -> Any:
        """Flat array -> its reduction over the ranks, in the same dtype."""
        return self._communicator.all_reduce(np.asarray(array), self._op)

    def _wire_dtype(self, dtype: str) -> str:
        """Only wider floats are compressed."""
        return self._wire if self._wire is not None and dtype in ("float32", "float64") else dtype


def _by_dtype(gradients: Sequence[Any], name: Callable[[Any], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for position, gradient in enumerate(gradients):
        if gradient is not None:
            groups.setdefault(name(gradient), []).append(position)
    return dict(sorted(groups.items()))


class _TensorFlowReducer(GradientReducer):
    """Through ``tf.numpy_function``, which a graph runs in the order of the program."""

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        import tensorflow as tf

        joined = list(gradients)
        for i, gradient in enumerate(joined):
            if isinstance(gradient, tf.IndexedSlices):
                dense = self._sparse_as_dense
                joined[i] = as_dense(gradient) if dense else self._sparse(gradient, i)
        others = [None if isinstance(g, tf.IndexedSlices) else g for g in joined]
        for dtype, positions in _by_dtype(others, lambda g: str(g.dtype.name)).items():
            wire = self._wire_dtype(dtype)
            values = [tf.cast(others[i], wire) for i in positions]
            for i, value in zip(positions, self._dense(values, wire), strict=True):
                joined[i] = tf.cast(value, dtype)
        return joined

    def _dense(self, values: list[Any], wire: str) -> list[Any]:
        import tensorflow as tf

        flat = tf.concat([tf.reshape(v, [-1]) for v in values], 0)
        reduced = tf.numpy_function(carried(self._reduce), [flat], flat.dtype)
        reduced.set_shape(flat.shape)
        parts = tf.split(reduced, [tf.size(v) for v in values], num=len(values))
        return [tf.reshape(p, tf.shape(v)) for p, v in zip(parts, values, strict=True)]

    def _sparse(self, slices: Any, position: int) -> Any:
        """All ranks' rows, none summed: the optimizer sees what it sees of one process's batch."""
        import tensorflow as tf

        dtype = slices.values.dtype
        values = tf.cast(slices.values, self._wire_dtype(dtype.name))
        values, indices = self._gather(values, slices.indices, position)
        values = tf.cast(values, dtype)
        if self._op == "mean":
            values /= tf.cast(self._communicator.size, dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _gather(self, values: Any, indices: Any, position: int) -> tuple[Any, Any]:
        import tensorflow as tf

        def gather(values: Any, indices: Any) -> tuple[Any, Any]:
            rows = self._communicator.all_gather(values)
            places = self._communicator.all_gather(indices)
            return np.concatenate(rows), np.concatenate(places)

        rows, places = tf.numpy_function(
            carried(gather), [values, indices], [values.dtype, indices.dtype]
        )
        rows.set_shape([None, *values.shape[1:]])
        places.set_shape([None])
        return rows, places


class _HorovodReducer(_TensorFlowReducer):
    """Horovod's operations in the graph; Horovod fuses the tensors and starts when all have one.

    Horovod matches operations by name. The names count the reducers of this run, as Keras' own
    names differ between ranks whose reused processes have made different models before.
    """

    def __init__(
        self, communicator: Communicator, op: str, compression: str, sparse_as_dense: bool
    ) -> None:
        super().__init__(communicator, op, compression, sparse_as_dense)
        number = _reducers[communicator] = _reducers.get(communicator, 0) + 1
        self._name = f"sparkdl.gradients.{number}"

    def _dense(self, values: list[Any], wire: str) -> list[Any]:
        hvd = importlib.import_module("horovod.tensorflow")
        op = hvd.Average if self._op == "mean" else hvd.Sum
        name = f"{self._name}.{wire}"
        return list(hvd.grouped_allreduce(values, op=op, name=name, ignore_name_scope=True))

    def _gather(self, values: object, indices: object, position: int) -> tuple[Any, Any]:
        hvd = importlib.import_module("horovod.tensorflow")
        rows, places = (
            hvd.allgather(tensor, name=f"{self._name}.{part}.{position}", ignore_name_scope=True)
            for tensor, part in ((values, "rows"), (indices, "indices"))
        )
        return rows, places


class _JaxReducer(GradientReducer):
    """Through an ordered ``io_callback``; sparse gradients are made dense."""

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        import jax
        from jax import numpy as jnp
        from jax.experimental import io_callback

        joined = [as_dense(g) for g in gradients]
        for dtype, positions in _by_dtype(joined, lambda g: str(g.dtype.name)).items():
            wire = self._wire_dtype(dtype)
            flat = jnp.concatenate([joined[i].reshape(-1) for i in positions]).astype(wire)
            result = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
            reduced = io_callback(carried(self._reduce), result, flat, ordered=True).astype(dtype)
            parts = jnp.split(reduced, np.cumsum([joined[i].size for i in positions])[:-1])
            for i, part in zip(positions, parts, strict=True):
                joined[i] = part.reshape(joined[i].shape)
        return joined


class _TorchReducer(GradientReducer):
    """Outside of any graph, through CPU memory; sparse gradients are made dense."""

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        import torch

        joined = [as_dense(g) for g in gradients]
        with torch.no_grad():
            names = _by_dtype(joined, lambda tensor: str(tensor.dtype).rpartition(".")[2])
            for dtype, positions in names.items():
                wire = getattr(torch, self._wire_dtype(dtype))
                flat = torch.cat([joined[i].reshape(-1).to(wire) for i in positions]).cpu()
                if wire is torch.bfloat16:
                    from ml_dtypes import bfloat16

                    bits = flat.view(torch.int16).numpy().view(bfloat16)
                    reduced = torch.from_numpy(self._reduce(bits).view(np.int16)).view(wire)
                else:
                    reduced = torch.from_numpy(self._reduce(flat.numpy()))
                sizes = [joined[i].numel() for i in positions]
                for i, part in zip(positions, reduced.split(sizes), strict=True):
                    joined[i] = part.reshape(joined[i].shape).to(joined[i])
        return joined
