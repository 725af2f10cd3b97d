"""A Keras model trained through one compiled TensorFlow call per window.

The loop over the batches of a window is inside the graph, so that Python runs once per window:
on one core 2.5 to 3 times the rows per second of ``model.fit`` for small networks. Each batch goes
through the model's own ``train_step``, so custom steps, mixed precision and metrics behave as in
Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sparkdl.learner.base import WindowLike
from sparkdl.learner.keras_base import KerasLearner, match_gradients, require_one_batch
from sparkdl.weights import FloatArray


class TensorFlowLearner(KerasLearner):
    """See :class:`sparkdl.learner.base.Learner`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # XLA pays on accelerators; on CPUs the plain graph is as fast and compiles 3x sooner.
        self._jit = bool(model.jit_compile) and bool(tf.config.list_physical_devices("GPU"))
        self._has_gradient: list[bool] = []
        self._flat: tf.Tensor | None = None
        self._train_window = self._compile_window(model.train_step, with_weights=True)
        self._test_window = self._compile_window(model.test_step, with_weights=False)
        self._gradients = tf.function(self._trace_gradients, autograph=False, reduce_retracing=True)
        self._apply = tf.function(self._trace_apply, autograph=False)
        self._assign = tf.function(self._trace_assign, autograph=False)
        self._concat = tf.function(self._trace_concat, autograph=False)
        self._call = tf.function(
            model.predict_step, autograph=False, reduce_retracing=True, jit_compile=self._jit
        )

    # -- weights -------------------------------------------------------------------------------

    def read_weights(self, out: FloatArray) -> None:
        flat = self._concat() if self._flat is None else self._flat
        np.copyto(out, flat.numpy())

    def write_weights(self, flat: FloatArray) -> None:
        self._layout.check(flat)
        self._assign(tf.convert_to_tensor(flat))
        self._flat = None

    def reload(self) -> None:
        self._flat = None

    def _trace_concat(self) -> tf.Tensor:
        parts = [
            tf.reshape(tf.cast(v.value, tf.float32), [-1]) for v in (*self.trained, *self.averaged)
        ]
        return tf.concat(parts, 0)

    def _trace_assign(self, flat: tf.Tensor) -> None:
        for variable, part in zip((*self.trained, *self.averaged), self._split(flat), strict=True):
            variable.assign(part)

    def _split(self, flat: tf.Tensor) -> list[tf.Tensor]:
        slots = self._layout.slots
        parts = tf.split(flat, [s.size for s in slots])
        return [
            tf.cast(tf.reshape(part, slot.shape), slot.dtype)
            for part, slot in zip(parts, slots, strict=True)
        ]

    # -- training ------------------------------------------------------------------------------

    def train(self, window: WindowLike) -> None:
        self.build_metrics(window)
        self._flat = self._train_window(*self._tensors(window), window.num_batches)

    def _evaluate_window(self, window: WindowLike) -> None:
        self._test_window(*self._tensors(window), window.num_batches)

    def _tensors(self, window: WindowLike) -> tuple[Any, Any, Any]:
        x, y, sample_weight = self.data(window.x, window.y, window.sample_weight)
        return (
            _map(tf.convert_to_tensor, x),
            _map(tf.convert_to_tensor, y),
            _map(tf.convert_to_tensor, sample_weight),
        )

    def _compile_window(self, step: Callable[[Any], Any], with_weights: bool) -> Any:
        def run(x: Any, y: Any, sample_weight: Any, num_batches: tf.Tensor) -> Any:
            def body(index: tf.Tensor) -> tuple[tf.Tensor]:
                step(_map(lambda t: t[index], (x, y, sample_weight)))
                return (index + 1,)

            tf.while_loop(
                lambda index: index < num_batches, body, (tf.constant(0),), parallel_iterations=1
            )
            return self._trace_concat() if with_weights else tf.constant(0)

        # Keras weighs the loss of each output by the rows of a batch only where the graph knows
        # their number: each batch size needs a graph of its own then.
        several = isinstance(self.model.loss, (dict, list, tuple))
        compiled = tf.function(
            run, autograph=False, reduce_retracing=not several, jit_compile=self._jit
        )
        return lambda x, y, w, n: compiled(x, y, w, tf.constant(n))

    def gradients(self, window: WindowLike, out: FloatArray) -> None:
        require_one_batch(window)
        self.build_metrics(window)
        batch = _map(lambda t: t[0], self._tensors(window))
        np.copyto(out, self._gradients(*batch).numpy())
        self._flat = None

    def _trace_gradients(self, x: Any, y: Any, sample_weight: Any) -> tf.Tensor:
        with _captured_gradients(self.model.optimizer) as captured:
            self.model.train_step((x, y, sample_weight))
        gradients = match_gradients(self.model, captured, self.trained)
        self._has_gradient = [g is not None for g in gradients]
        parts = []
        for variable, gradient in zip(self.trained, gradients, strict=True):
            if gradient is None:
                gradient = tf.zeros(variable.shape)
            dense = tf.convert_to_tensor(gradient)  # IndexedSlices (embeddings) become dense
            parts.append(tf.reshape(tf.cast(dense, tf.float32), [-1]))
        parts += [tf.reshape(tf.cast(v.value, tf.float32), [-1]) for v in self.averaged]
        return tf.concat(parts, 0)

    def apply_gradients(self, flat: FloatArray) -> None:
        self._layout.check(flat)
        if not self._has_gradient:
            self._has_gradient = [True] * len(self.trained)
        self._apply(tf.convert_to_tensor(flat))
        self._flat = None

    def _trace_apply(self, flat: tf.Tensor) -> None:
        parts = self._split(flat)
        pairs = [
            (g, v)
            for g, v, has in zip(
                parts[: len(self.trained)], self.trained, self._has_gradient, strict=True
            )
            if has
        ]
        self.model.optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        for variable, part in zip(self.averaged, parts[len(self.trained) :], strict=True):
            variable.assign(part)

    # -- prediction ----------------------------------------------------------------------------

    def _predict(self, x: Any) -> Any:
        return self._call((_map(tf.convert_to_tensor, x),))


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    """``tf.nest.map_structure`` that leaves None (absent sample weights) alone."""
    return tf.nest.map_structure(lambda t: None if t is None else function(t), structure)


@contextlib.contextmanager
def _captured_gradients(optimizer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Makes ``optimizer.apply`` collect ``(gradient, variable)`` pairs instead of stepping."""
    captured: list[tuple[Any, Any]] = []

    def capture(grads: Any, trainable_variables: Any = None) -> None:
        variables = (
            optimizer._trainable_variables if trainable_variables is None else (trainable_variables)
        )
        captured.extend(zip(grads, variables, strict=True))

    object.__setattr__(optimizer, "apply", capture)
    try:
        yield captured
    finally:
        object.__delattr__(optimizer, "apply")


def configure_threads(cores: int) -> None:
    """Bounds TensorFlow's threads to the task's cores; no effect once it has started."""
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(cores)
        tf.config.threading.set_inter_op_parallelism_threads(max(1, min(2, cores)))


def memory_growth() -> None:
    """Lets several processes share one host's GPUs: memory is taken as needed."""
    for device in tf.config.list_physical_devices("GPU"):
        with contextlib.suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)
