"""A Keras model trained through one compiled JAX call per window.

JAX has no variables: the training state (weights, statistics, optimizer, metrics) is a tree of
arrays that lives here, goes into each call, and comes out changed. The Keras variables are a stale
copy until :meth:`JaxLearner.sync_model`. The loop over the batches of a window is inside the call,
so that Python runs once per window; each batch goes through the model's own ``train_step``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt
from jax import lax

from sparkdl.learner.keras_learner import (
    KerasLearner,
    flatten_arrays,
    match_gradients,
    require_one_batch,
)
from sparkdl.protocols import Arrays, BatchStack
from sparkdl.weights import FloatArray

# Keras' own names for the four parts of the state of a train step, in its order.
_State = tuple[list[Any], list[Any], list[Any], list[Any]]


class JaxLearner(KerasLearner):
    """See :class:`sparkdl.protocols.Learner`.

    A window with fewer batches than an earlier one is padded to it, so that an epoch needs two
    compilations: one for full batches, one for the smaller last one. The state is donated to each
    call: XLA updates it in place.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # Keras, too, compiles neither what runs eagerly nor what was compiled with jit_compile off.
        self._compiles = bool(model.jit_compile) and not model.run_eagerly
        places = {id(v): i for i, v in enumerate(model.non_trainable_variables)}
        self._averaged_at = [places[id(v)] for v in self.averaged]
        self._has_gradient: list[bool] = [True] * len(self.trained)
        self._predicted_rows: dict[Any, int] = {}
        self._state: _State = ([], [], [], [])
        self._train_window = _WindowCall(self._train_step, self._compiles)
        self._test_window = _WindowCall(self._test_step, self._compiles)
        self._gradients = self._compile(self._trace_gradients, donate=(2, 3))
        self._apply = self._compile(self._trace_apply, donate=(0, 1))
        self._call = self._compile(self._trace_predict)
        self._concat = jax.jit(self._trace_concat)
        self._split = jax.jit(self._trace_split)
        self.reload()

    # -- state ---------------------------------------------------------------------------------

    def reload(self) -> None:
        model = self.model
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        self._state = _copy(tuple([v.value for v in variables] for variables in groups))

    def sync_model(self) -> None:
        model = self.model
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        # Copies, since the next window donates the state, which ends its arrays.
        for variables, values in zip(groups, _copy(self._state), strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def build_metrics(self, window: BatchStack) -> None:
        if not self._metrics_ready:
            super().build_metrics(window)
            self._set(metrics=_copies(self.model.metrics_variables))

    def _set(
        self,
        trainable: Any = None,
        non_trainable: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
    ) -> None:
        given = (trainable, non_trainable, optimizer, metrics)
        a, b, c, d = (
            old if new is None else list(new) for old, new in zip(self._state, given, strict=True)
        )
        self._state = a, b, c, d

    # -- weights -------------------------------------------------------------------------------

    def read_weights(self, out: FloatArray) -> None:
        self._layout.check(out)
        trainable, non_trainable, _, _ = self._state
        np.copyto(out, np.asarray(self._concat(trainable, self._averages(non_trainable))))

    def write_weights(self, flat: FloatArray) -> None:
        self._layout.check(flat)
        # On a CPU, JAX reads NumPy memory in place and later; the caller's buffer may change.
        parts = self._split(flat.copy())
        trainable, averages = parts[: len(self.trained)], parts[len(self.trained) :]
        self._set(trainable, self._with_averages(self._state[1], averages))

    def _averages(self, non_trainable: list[Any]) -> list[Any]:
        return [non_trainable[i] for i in self._averaged_at]

    def _with_averages(self, non_trainable: list[Any], averages: list[Any]) -> list[Any]:
        result = list(non_trainable)
        for index, value in zip(self._averaged_at, averages, strict=True):
            result[index] = value
        return result

    def _trace_concat(self, trained: list[Any], averaged: list[Any]) -> Any:
        return jnp.concatenate([jnp.ravel(v).astype(jnp.float32) for v in (*trained, *averaged)])

    def _trace_split(self, flat: Any) -> list[Any]:
        # jnp.copy: an output that is the input itself would share the caller's NumPy memory.
        return [
            jnp.copy(flat[s.offset : s.offset + s.size].reshape(s.shape).astype(s.dtype))
            for s in self._layout.slots
        ]

    # -- training ------------------------------------------------------------------------------

    def train(self, window: BatchStack) -> None:
        self.build_metrics(window)
        jax.block_until_ready(self._state)  # one window in flight, so that inputs cannot pile up
        data = self.data(window.x, window.y, window.sample_weight)
        self._state = self._train_window(self._state, None, data, window.num_batches)

    def _train_step(self, state: Any, fixed: None, batch: Any) -> Any:
        return self.model.train_step(state, batch)[1]

    def _test_step(self, state: Any, trainable: Any, batch: Any) -> Any:
        return self.model.test_step((trainable, *state), batch)[1][1:]

    def _compile(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
        return jax.jit(function, donate_argnums=donate) if self._compiles else function

    def gradients(self, window: BatchStack, out: FloatArray) -> None:
        require_one_batch(window)
        self._layout.check(out)
        self.build_metrics(window)
        data = self.data(window.x, window.y, window.sample_weight)
        batch = jax.tree.map(lambda a: a[0], data)
        trainable, non_trainable, optimizer, metrics = self._state
        flat, non_trainable, metrics = self._gradients(
            trainable, optimizer, non_trainable, metrics, batch
        )
        self._set(non_trainable=non_trainable, metrics=metrics)
        np.copyto(out, np.asarray(flat))

    def _trace_gradients(
        self, trainable: Any, optimizer: Any, non_trainable: Any, metrics: Any, batch: Any
    ) -> Any:
        state = (trainable, non_trainable, optimizer, metrics)
        with _captured_gradients(self.model.optimizer) as captured:
            after = _as_before(self.model.train_step(state, batch)[1], state)
        gradients = match_gradients(self.model, captured, self.trained)
        self._has_gradient = [g is not None for g in gradients]
        parts = [
            jnp.zeros(v.shape, jnp.float32) if g is None else g
            for g, v in zip(gradients, self.trained, strict=True)
        ]
        flat = self._trace_concat(parts, self._averages(after[1]))
        return flat, after[1], after[3]

    def apply_gradients(self, flat: FloatArray) -> None:
        self._layout.check(flat)
        trainable, non_trainable, optimizer, _ = self._state
        trainable, optimizer, averages = self._apply(trainable, optimizer, flat.copy())
        self._set(trainable, self._with_averages(non_trainable, averages), optimizer)

    def _trace_apply(self, trainable: Any, optimizer: Any, flat: Any) -> Any:
        parts = self._trace_split(flat)
        gradients = [
            g if has else None
            for g, has in zip(parts[: len(self.trained)], self._has_gradient, strict=True)
        ]
        after = self.model.optimizer.stateless_apply(optimizer, gradients, trainable)
        trainable, optimizer = _as_before(after, (trainable, optimizer))
        return trainable, optimizer, parts[len(self.trained) :]

    # -- metrics -------------------------------------------------------------------------------

    def metric_state(self) -> npt.NDArray[np.float64]:
        return flatten_arrays(self._state[3])

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self._set(metrics=_copies(self.model.metrics_variables))

    def evaluate(self, windows: Iterable[BatchStack]) -> npt.NDArray[np.float64]:
        saved: list[Any] | None = None
        for window in windows:
            self.build_metrics(window)
            if saved is None:
                saved = self._state[3]
                self.reset_metrics()
            trainable, non_trainable, _, metrics = self._state
            jax.block_until_ready(metrics)
            data = self.data(window.x, window.y, window.sample_weight)
            non_trainable, metrics = self._test_window(
                (non_trainable, metrics), trainable, data, window.num_batches
            )
            self._set(non_trainable=non_trainable, metrics=metrics)
        if saved is None:
            return np.zeros(0)
        state = self.metric_state()
        self._set(metrics=saved)
        return state

    # -- optimizer -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _optimizer_scope(self) -> Iterator[Any]:
        """Within, Keras' optimizer variables have the values of the learner's state."""
        variables = self.model.optimizer.variables
        mapping = list(zip(variables, self._state[2], strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            yield scope
        self._set(
            optimizer=[
                old if (new := scope.get_current_value(v)) is old else _copy(new)
                for v, old in mapping
            ]
        )

    @property
    def learning_rate(self) -> float:
        with self._optimizer_scope():
            return super().learning_rate

    def set_learning_rate(self, value: float) -> None:
        with self._optimizer_scope():
            super().set_learning_rate(value)

    @property
    def step(self) -> int:
        with self._optimizer_scope():
            return super().step

    def set_step(self, step: int) -> None:
        with self._optimizer_scope():
            super().set_step(step)

    def _optimizer_arrays(self) -> list[npt.NDArray[Any]]:
        return [np.asarray(value) for value in self._state[2]]

    def load_optimizer_state(self, state: bytes) -> None:
        super().load_optimizer_state(state)
        self._set(optimizer=_copies(self.model.optimizer.variables))

    # -- prediction ----------------------------------------------------------------------------

    def predict(self, x: Arrays) -> Arrays:
        if not self._compiles or not x:
            return super().predict(x)
        rows = len(next(iter(x.values())))
        key = tuple((name, a.shape[1:]) for name, a in sorted(x.items()))
        usual = self._predicted_rows[key] = max(rows, self._predicted_rows.get(key, 0))
        if rows == usual:
            return super().predict(x)
        outputs = super().predict({name: _padded(a, usual) for name, a in x.items()})
        return {name: a[:rows] for name, a in outputs.items()}

    def _predict(self, x: Any) -> Any:
        trainable, non_trainable, _, _ = self._state
        outputs, non_trainable = self._call(trainable, non_trainable, x)
        self._set(non_trainable=non_trainable)  # seeds move on in layers random at inference, too
        return outputs

    def _trace_predict(self, trainable: Any, non_trainable: Any, x: Any) -> Any:
        return self.model.predict_step((trainable, non_trainable), (x,))


class _WindowCall:
    """``(state, fixed, stacked batches, number of batches) -> state`` around one step.

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

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return int(self._loop._cache_size() + self._single._cache_size())

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
        """Not where XLA on a CPU has convolutions: inside a loop they are 10 times slower."""
        if jax.default_backend() != "cpu":
            return True
        return "conv_general_dilated" not in str(self._loop.trace(*args).jaxpr)

    def _stack(self, data: Any, num_batches: int) -> Any:
        """``data``, padded to the most batches seen in a window of such batches."""
        leaves, structure = jax.tree.flatten(data)
        key = (structure, *(a.shape[1:] for a in leaves))
        capacity = self._capacity.get(key, 0)
        if num_batches > capacity:
            # Growing at least twofold keeps compilations few where windows grow step by step.
            capacity = self._capacity[key] = max(num_batches, 2 * capacity)
        if num_batches == capacity:
            return data
        return jax.tree.map(lambda a: _padded(a, capacity), data)

    def _trace_loop(self, state: Any, fixed: Any, data: Any, count: Any) -> Any:
        def body(index: Any, state: Any) -> Any:
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), data)
            return self._trace_single(state, fixed, batch)

        if jax.tree.leaves(data)[0].shape[0] == 1:
            return body(0, state)
        return lax.fori_loop(0, count, body, state)

    def _trace_single(self, state: Any, fixed: Any, batch: Any) -> Any:
        return _as_before(self._step(state, fixed, batch), state)


def _copy(tree: Any) -> Any:
    """Arrays of their own: donating them ends no others, and no NumPy memory shows through."""
    return _copy_call(tree)


_copy_call = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # one call for all arrays


def _copies(variables: Iterable[Any]) -> list[Any]:
    copies: list[Any] = _copy([v.value for v in variables])
    return copies


def _padded(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """``array`` with zeros after it up to ``rows`` along the first axis."""
    result = np.zeros((rows, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result


def _as_before(new: Any, old: Any) -> Any:
    """``new`` with the tree and dtypes of ``old``, which a loop's carry has to keep."""
    leaves = [jnp.asarray(a, b.dtype) for a, b in zip(
        jax.tree.leaves(new), jax.tree.leaves(old), strict=True)]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


@contextlib.contextmanager
def _captured_gradients(optimizer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Makes ``optimizer.stateless_apply`` collect ``(gradient, variable)`` instead of stepping."""
    captured: list[tuple[Any, Any]] = []

    def capture(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        captured.extend(zip(grads, optimizer._trainable_variables, strict=True))
        return trainable_variables, optimizer_variables

    object.__setattr__(optimizer, "stateless_apply", capture)
    try:
        yield captured
    finally:
        object.__delattr__(optimizer, "stateless_apply")
