"""By a gradient of its own, with and without XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Function = Callable[..., tuple[list[Any], list[Any]]]


def recompute(function: Function, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results of ``function``; the gradient computes it again.

    ``tf.recompute_grad`` takes gradients of all outputs, and integers (the state of random
    generators) have none.
    """
    held: list[Any] = []

    @tf.custom_gradient
    def forget(*tensors: Any) -> tuple[list[Any], Any]:
        results, leaving = function(*tensors)
        held[:] = leaving

        def backward(*upstream: Any) -> list[Any]:
            floats = [n for n, result in enumerate(results) if result.dtype.is_floating]
            gradients = [upstream[number] for number in floats]
            with tf.GradientTape() as tape, tf.control_dependencies(gradients):
                again = [_after(gradients[0], tensor) for tensor in tensors]
                tape.watch([tensor for tensor in again if tensor.dtype.is_floating])
                computed, _ = function(*again)
            computed = [computed[number] for number in floats]
            return list(tape.gradient(computed, again, gradients))

        return results, backward

    return list(forget(*values)), held


def _after(gradient: Any, tensor: Any) -> Any:
    """The tensor itself, such that no compiler can take it for the one before the gradient."""
    if not tensor.dtype.is_floating:
        return tf.identity(tensor)
    # XLA knows no order but that of data, and would find both computations equal.
    first = tf.reshape(gradient, [-1])[:1]
    nothing = tf.cast(tf.reduce_any(first > first.dtype.max), tensor.dtype)
    return tensor + nothing
