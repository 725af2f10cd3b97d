"""One JAX step, run over every batch of a stack in one compiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax


class StackedSteps:
    """``(state, fixed, stacked batches, number of batches) -> state``: one step for each batch.

    The loop over the batches is inside one compiled call. A stack with fewer batches than an
    earlier one is padded to as many (the padding is not trained on), so that an epoch needs two
    compilations: one for full batches, one for the smaller last one.

    Args:
        step: ``(state, fixed, batch) -> state``.
        compiles: Whether to compile it; otherwise it runs operation by operation.
    """

    def __init__(self, step: Callable[[Any, Any, Any], Any], compiles: bool) -> None:
        self._step = step
        self._compiles = compiles
        self._loop = jax.jit(self._trace_loop, donate_argnums=0)
        self._single = jax.jit(self._trace_single, donate_argnums=0)
        self._loops: bool | None = None
        self._capacity: dict[Any, int] = {}

    def __call__(self, state: Any, fixed: Any, data: Any, num_batches: int) -> Any:
        if self._compiles and self._loops is not False:
            stacked, count = self._stack(data, num_batches), np.int32(num_batches)
            if self._loops is None:
                self._loops = self._worth_looping(state, fixed, stacked, count)
            if self._loops:
                return self._loop(state, fixed, stacked, count)
        run = self._single if self._compiles else self._trace_single
        for index in range(num_batches):
            state = run(state, fixed, jax.tree.map(lambda a, i=index: a[i], data))
        return state

    def _worth_looping(self, *args: Any) -> bool:
        """No for convolutions on a CPU, which XLA runs 10 times slower inside a loop."""
        if jax.default_backend() != "cpu":
            return True
        return "conv_general_dilated" not in str(self._loop.trace(*args).jaxpr)

    def _stack(self, data: Any, num_batches: int) -> Any:
        """``data``, padded to the most batches seen in a stack of batches of this shape."""
        leaves, structure = jax.tree.flatten(data)
        key = (structure, *(a.shape[1:] for a in leaves))
        capacity = self._capacity.get(key, 0)
        if num_batches > capacity:
            # Growing at least twofold keeps compilations few where stacks grow step by step.
            capacity = self._capacity[key] = max(num_batches, 2 * capacity)
        if num_batches == capacity:
            return data
        return jax.tree.map(lambda a: padded(a, capacity), data)

    def _trace_loop(self, state: Any, fixed: Any, data: Any, count: Any) -> Any:
        def body(index: Any, state: Any) -> Any:
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), data)
            return self._trace_single(state, fixed, batch)

        if jax.tree.leaves(data)[0].shape[0] == 1:
            return body(0, state)
        return lax.fori_loop(0, count, body, state)

    def _trace_single(self, state: Any, fixed: Any, batch: Any) -> Any:
        return with_types_of(self._step(state, fixed, batch), state)


def copied(tree: Any) -> Any:
    """Copies that share no memory: donating one of them leaves all other arrays as they are."""
    return _copy_call(tree)


_copy_call = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # one call for all arrays


def padded(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """``array`` with zeros after it up to ``rows`` along the first axis."""
    result = np.zeros((rows, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result


def with_types_of(new: Any, old: Any) -> Any:
    """``new`` with the structure and dtypes of ``old``; a JAX loop demands that they stay equal."""
    leaves = [jnp.asarray(a, b.dtype) for a, b in zip(
        jax.tree.leaves(new), jax.tree.leaves(old), strict=True)]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


class HostCopy:
    """Copies arrays of JAX' device into NumPy memory.

    From a GPU they go by way of memory that the GPU writes to by itself and that JAX uses again:
    new memory for each copy takes longer than the copy, since its pages come one by one (34 MB of
    an H100: 29 ms, and 4.4 ms this way).
    """

    def __init__(self) -> None:
        self._pinned = None if jax.default_backend() == "cpu" else pinned_copy()

    def __call__(self, array: Any, out: npt.NDArray[Any]) -> None:
        """Copies ``array`` into ``out``."""
        np.copyto(out, np.asarray(array if self._pinned is None else self._pinned(array)))


def pinned_copy() -> Callable[[Any], Any] | None:
    """A compiled copy into the device's pinned host memory; None if JAX knows none of it."""
    device = jax.devices()[0]
    if all(memory.kind != "pinned_host" for memory in device.addressable_memories()):
        return None
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    # The barrier keeps JAX from handing its input back.
    copy: Callable[[Any], Any] = jax.jit(lax.optimization_barrier, out_shardings=place)
    return copy
