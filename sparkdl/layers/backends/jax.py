"""For JAX: ordered callbacks inside of the compiled step; gradients of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from sparkdl.failures import carried

if TYPE_CHECKING:
    from sparkdl.layers.backends import Forgotten, HostClasses, HostRows
    from sparkdl.weights import FloatArray


def lookup(rows: HostRows, ids: jax.Array, anchor: jax.Array, width: int) -> Any:
    count = ids.size + 1  # as many rows as there may be, with that of the padding
    form, nothing = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.float32)
    forms = form((count, width), jnp.float32), form(ids.shape, jnp.int32)

    def fetch(ids: jax.Array, differentiated: bool) -> Any:
        def pull(ids: jax.Array) -> Any:
            found, places = rows.pull(np.asarray(ids), differentiated)
            return np.pad(found, [(0, count - len(found)), (0, 0)]), places

        found, places = io_callback(carried(pull), forms, ids, ordered=True)
        return found[places], places

    def push(sums: object) -> Any:
        return rows.push(np.asarray(sums, np.float32))

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def rows_of(ids: object, anchor: object) -> Any:
        return fetch(ids, False)[0]

    def forward(ids: object, anchor: object) -> Any:
        return fetch(ids, True)

    def backward(places: jax.Array, upstream: jax.Array) -> Any:
        flat = upstream.reshape(-1, width)
        sums = jax.ops.segment_sum(flat, places.reshape(-1), num_segments=count)
        done = io_callback(carried(push), nothing, sums, ordered=True)
        return np.zeros(places.shape, jax.dtypes.float0), done

    rows_of.defvjp(forward, backward)
    return rows_of(ids, anchor)


def losses(classes: HostClasses, features: jax.Array, labels: jax.Array, anchor: jax.Array) -> Any:
    per_row = jax.ShapeDtypeStruct(features.shape[:1], jnp.float32)
    as_features = jax.ShapeDtypeStruct(features.shape, jnp.float32)

    def ask(features: jax.Array, labels: jax.Array, differentiated: bool) -> Any:
        def measure(features: jax.Array, labels: jax.Array) -> Any:
            array = np.asarray(features, np.float32)
            return classes.measure(array, np.asarray(labels), differentiated)

        return io_callback(carried(measure), per_row, features, labels, ordered=True)

    def learn(upstream: object) -> Any:
        return classes.learn(np.asarray(upstream, np.float32))

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def losses_of(features: object, labels: object, anchor: object) -> Any:
        return ask(features, labels, False)

    def forward(features: object, labels: object, anchor: object) -> Any:
        return ask(features, labels, True), None

    def backward(kept: None, upstream: jax.Array) -> Any:
        gradient = io_callback(carried(learn), as_features, upstream, ordered=True)
        whole = jnp.issubdtype(labels.dtype, jnp.integer)
        nothing = np.zeros(labels.shape, jax.dtypes.float0 if whole else labels.dtype)
        return gradient, nothing, jnp.zeros(())

    losses_of.defvjp(forward, backward)
    return losses_of(features, labels, anchor)


def after(function: Callable[[], FloatArray], like: jax.Array) -> Any:
    return io_callback(function, jax.ShapeDtypeStruct(like.shape[:1], jnp.float32), ordered=True)


def recompute(
    function: Forgotten, inputs: Sequence[Any], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of ``function``; the gradient computes it again.

    ``jax.checkpoint`` puts barriers before the second computation. XLA on CPUs drops them and
    finds both computations equal: such a network takes as much memory as without.
    """
    forget = jax.custom_vjp(function)
    forget.defvjp(lambda *tensors: (function(*tensors), tensors), _backward(function, len(inputs)))
    results: tuple[list[Any], list[Any]] = forget(*inputs, *weights)
    return results


def _backward(function: Forgotten, inputs: int) -> Callable[..., tuple[Any, ...]]:
    def backward(tensors: tuple[Any, ...], upstream: tuple[list[Any], list[Any]]) -> Any:
        gradient = next(g for g in upstream[0] if jnp.issubdtype(g.dtype, jnp.floating))
        again = [_after(gradient, tensor) for tensor in tensors[:inputs]]
        _, gradients_of = jax.vjp(function, *again, *tensors[inputs:])
        return gradients_of(upstream)

    return backward


def _after(gradient: jax.Array, tensor: jax.Array) -> Any:
    """The tensor itself, such that no compiler can take it for the one before the gradient."""
    if tensor.dtype == bool:
        return tensor
    first = gradient.reshape(-1)[:1]
    nothing = jnp.any(first > jnp.finfo(first.dtype).max).astype(tensor.dtype)
    return tensor + nothing
