"""For TensorFlow: functions of Python inside the graph, in its order; gradients of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop

from sparkdl.failures import carried

if TYPE_CHECKING:
    from sparkdl.layers.backends import Forgotten, HostClasses, HostRows
    from sparkdl.weights import FloatArray


def lookup(rows: HostRows, ids: tf.Tensor, anchor: tf.Tensor, width: int) -> Any:
    ids, anchor = tf.convert_to_tensor(ids), tf.convert_to_tensor(anchor)
    differentiated = should_record_backprop([anchor])

    def pull(ids: tf.Tensor) -> Any:
        return rows.pull(ids, differentiated)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def rows_of(anchor: tf.Tensor) -> Any:
        found, places = tf.numpy_function(carried(pull), [ids], [tf.float32, tf.int32])
        found.set_shape([None, width])
        places.set_shape(ids.shape)

        def gradient(upstream: tf.Tensor) -> Any:
            nonlocal differentiated
            differentiated = True  # a graph of its own, which a tape differentiates afterwards
            upstream = tf.convert_to_tensor(upstream)
            sums = tf.math.unsorted_segment_sum(upstream, places, tf.shape(found)[0])
            done = tf.numpy_function(carried(rows.push), [sums], tf.float32)
            done.set_shape([])
            return done

        return tf.gather(found, places), gradient

    return rows_of(anchor)


def losses(classes: HostClasses, features: tf.Tensor, labels: tf.Tensor, anchor: tf.Tensor) -> Any:
    labels, anchor = tf.convert_to_tensor(labels), tf.convert_to_tensor(anchor)
    differentiated = should_record_backprop([tf.convert_to_tensor(features), anchor])

    def measure(features: tf.Tensor, labels: tf.Tensor) -> Any:
        return classes.measure(features, labels, differentiated)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def losses_of(features: tf.Tensor, anchor: tf.Tensor) -> Any:
        found = tf.numpy_function(carried(measure), [features, labels], tf.float32)
        found.set_shape(features.shape[:1])

        def gradient(upstream: tf.Tensor) -> Any:
            nonlocal differentiated
            differentiated = True
            onward = tf.numpy_function(carried(classes.learn), [upstream], tf.float32)
            onward.set_shape(features.shape)
            with tf.control_dependencies([onward]):
                return onward, tf.zeros([])

        return found, gradient

    return losses_of(features, anchor)


def after(function: Callable[[], FloatArray], like: tf.Tensor) -> Any:
    found = tf.numpy_function(function, [], tf.float32)
    found.set_shape(like.shape[:1])
    return found


def recompute(
    function: Forgotten, inputs: Sequence[Any], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of ``function``; the gradient computes it again.

    ``tf.recompute_grad`` takes gradients of all outputs, and integers (the state of random
    generators) have none.
    """
    held: list[Any] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forget(*tensors: object) -> tuple[list[Any], Any]:
        results, leaving = function(*tensors)
        held[:] = leaving

        def backward(*upstream: object) -> list[Any]:
            floats = [n for n, result in enumerate(results) if result.dtype.is_floating]
            gradients = [upstream[number] for number in floats]
            with tf.GradientTape() as tape, tf.control_dependencies(gradients):
                again = [_after(gradients[0], tensor) for tensor in tensors[: len(inputs)]]
                again += map(tf.identity, tensors[len(inputs) :])
                tape.watch([tensor for tensor in again if tensor.dtype.is_floating])
                computed, _ = function(*again)
            computed = [computed[number] for number in floats]
            return list(tape.gradient(computed, again, gradients))

        return results, backward

    return list(forget(*inputs, *weights)), held


def _after(gradient: tf.Tensor, tensor: tf.Tensor) -> Any:
    """The tensor itself, such that no compiler can take it for the one before the gradient."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return tf.identity(tensor)
    # XLA knows no order but that of data, and would find both computations equal.
    first = tf.reshape(gradient, [-1])[:1]
    nothing = tf.cast(tf.reduce_any(first > first.dtype.max), tensor.dtype)
    return tensor + nothing
