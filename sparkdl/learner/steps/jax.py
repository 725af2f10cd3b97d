"""A Keras model trained through one compiled JAX call per stack of batches.

JAX has no variables: the training state (weights, statistics, optimizer, metrics) is a tree of
arrays that the learner holds. It goes into each call and comes out changed. The Keras variables
keep their old values until :meth:`JaxLearner.sync_model`. Each batch goes through the model's own
``train_step``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt
from jax import lax

from sparkdl.learner.state.metric_state import ModelMetrics, stateless_logged_step
from sparkdl.learner.state.optimizer_state import ModelOptimizer
from sparkdl.learner.steps.denominators import forward_terms
from sparkdl.learner.steps.keras_learner import (
    Found,
    KerasLearner,
    captured_step,
    require_one_batch,
    weighing,
)
from sparkdl.learner.steps.repeated_rows import few_rows
from sparkdl.learner.structure import arranged, pack_batch
from sparkdl.training.learning import BatchStack
from sparkdl.weights import FloatArray


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

    def __call__(self, state: object, fixed: object, data: object, num_batches: int) -> Any:
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

    def _worth_looping(self, *args: object) -> bool:
        """No for convolutions on a CPU, which XLA runs 10 times slower inside a loop."""
        if jax.default_backend() != "cpu":
            return True
        return "conv_general_dilated" not in str(self._loop.trace(*args).jaxpr)

    def _stack(self, data: object, num_batches: int) -> Any:
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

    def _trace_loop(self, state: object, fixed: object, data: object, count: object) -> Any:
        def body(index: object, state: object) -> Any:
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), data)
            return self._trace_single(state, fixed, batch)

        if jax.tree.leaves(data)[0].shape[0] == 1:
            return body(0, state)
        return lax.fori_loop(0, count, body, state)

    def _trace_single(self, state: object, fixed: object, batch: object) -> Any:
        return with_types_of(self._step(state, fixed, batch), state)


copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # one call for all arrays
"""Copies that share no memory: donating one of them leaves all other arrays as they are."""


def padded(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """``array`` with zeros after it up to ``rows`` along the first axis."""
    result = np.zeros((rows, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result


def with_types_of(new: object, old: object) -> Any:
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

    def __call__(self, array: object, out: npt.NDArray[Any]) -> None:
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


# Keras' own names for the four parts of the state of a train step, in its order.
_State = tuple[list[Any], list[Any], list[Any], list[Any]]


class JaxLearner(KerasLearner):
    """See :class:`sparkdl.training.learning.Learner`. The state is donated to each compiled call:
    XLA updates it in place."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        # Keras, too, compiles neither what runs eagerly nor what was compiled with jit_compile off.
        self._compiles = bool(model.jit_compile) and not model.run_eagerly
        groups = model.trainable_variables, model.non_trainable_variables
        self._place = {id(v): (g, i) for g, group in enumerate(groups) for i, v in enumerate(group)}
        self._trained_at = [self._place[id(v)][1] for v in self.trained]
        self._averaged_at = [self._place[id(v)][1] for v in self.averaged]
        self._state: _State = ([], [], [], [])
        self.metrics = _JaxMetrics(self)
        self.optimizer = ModelOptimizer(model, self.trained, self._optimizer_scope)
        self._model_step = stateless_logged_step(model, "train_step", metrics_at=3)
        self._model_test = stateless_logged_step(model, "test_step", metrics_at=2)
        self._train_steps = StackedSteps(self._train_step, self._compiles)
        self._test_steps = StackedSteps(self._test_step, self._compiles)
        self._gradients = self._compile(self._trace_gradients, donate_argnums=(2, 3))
        self._denominators = self._compile(self._trace_denominators)
        self._apply = self._compile(self._trace_apply, donate_argnums=(0, 1), static_argnums=(3,))
        self._concat = jax.jit(self._trace_concat)
        self._split = jax.jit(self._trace_split)
        self._copy_to_host = HostCopy()
        self.reload()

    def _variables(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        model = self.model
        fixed = model.trainable_variables, model.non_trainable_variables
        return *fixed, model.optimizer.variables, model.metrics_variables

    def reload(self) -> None:
        self._state = copied(tuple([v.value for v in group] for group in self._variables()))
        super().reload()

    def sync_model(self) -> None:
        # Copies, since the next call donates the state, and its arrays cannot be read afterwards.
        for variables, values in zip(self._variables(), copied(self._state), strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _set(
        self,
        trainable: Any = None,
        non_trainable: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
    ) -> None:
        given = (trainable, non_trainable, optimizer, metrics)
        pairs = zip(self._state, given, strict=True)
        a, b, c, d = (old if new is None else list(new) for old, new in pairs)
        self._state = a, b, c, d

    def read_weights(self, out: FloatArray) -> None:
        self.layout.check(out)
        trainable, non_trainable, _, _ = self._state
        trained = _chosen(trainable, self._trained_at)
        averaged = _chosen(non_trainable, self._averaged_at)
        self._copy_to_host(self._concat(trained, averaged), out)

    def write_weights(self, flat: FloatArray) -> None:
        self.layout.check(flat)
        parts = self._split(self._given(flat))
        trainable, non_trainable, _, _ = self._state
        present = _chosen(trainable, self._trained_at) + _chosen(non_trainable, self._averaged_at)
        parts = [_more_exact(old, new) for old, new in zip(present, parts, strict=True)]
        trained, averages = parts[: len(self.trained)], parts[len(self.trained) :]
        trainable = _replaced(trainable, self._trained_at, trained)
        self._set(trainable, _replaced(non_trainable, self._averaged_at, averages))

    def _given(self, flat: FloatArray) -> Any:
        if jax.default_backend() == "cpu":  # which reads NumPy memory in place, and later
            return flat.copy()
        return jax.block_until_ready(jax.device_put(flat))

    def values_of(self, variables: Sequence[keras.Variable]) -> list[npt.NDArray[Any]]:
        places = (self._place[id(v)] for v in variables)
        return [np.asarray(self._state[group][index]) for group, index in places]

    def set_values(self, pairs: list[tuple[keras.Variable, npt.NDArray[Any]]]) -> None:
        groups = list(self._state[0]), list(self._state[1])
        for variable, value in pairs:
            group, index = self._place[id(variable)]
            groups[group][index] = jnp.array(value, groups[group][index].dtype)
        self._set(*groups)

    def _trace_concat(self, trained: list[Any], averaged: list[Any]) -> Any:
        return jnp.concatenate([jnp.ravel(v).astype(jnp.float32) for v in (*trained, *averaged)])

    def _trace_split(self, flat: Any) -> list[Any]:
        # jnp.copy: an output that is the input itself would share the caller's NumPy memory.
        return [
            jnp.copy(flat[s.offset : s.offset + s.size].reshape(s.shape).astype(s.dtype))
            for s in self.layout.slots
        ]

    def train(self, stack: BatchStack) -> None:
        self.metrics.build(stack)
        jax.block_until_ready(self._state)  # one call at a time, so that inputs cannot pile up
        data = arranged(self.model, stack)
        self._state = self._train_steps(self._state, None, data, stack.num_batches)

    def _train_step(self, state: Any, fixed: None, batch: Any) -> Any:
        return self._model_step(state, pack_batch(*batch))[1]

    def _test_step(self, state: Any, trainable: Any, batch: Any) -> Any:
        return self._model_test((trainable, *state), pack_batch(*batch))[1][1:]

    def _compile(self, function: Callable[..., Any], **options: tuple[int, ...]) -> Any:
        return jax.jit(function, **options) if self._compiles else function

    def gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None = None
    ) -> None:
        require_one_batch(stack)
        self.layout.check(out)
        self.metrics.build(stack)
        computed, found = self._gradients(*self._state_and_batch(stack), factors)
        self.note(found)
        self._take(computed, out)

    def _take(self, computed: tuple[Any, Any, Any, Any], out: FloatArray) -> None:
        flat, non_trainable, metrics, overwritten = computed
        places = [i for i in range(len(self._state[0])) if i not in self._trained_at]
        trainable = _replaced(self._state[0], places, overwritten) if overwritten else None
        self._set(trainable, non_trainable, metrics=metrics)
        self._copy_to_host(flat, out)

    def _state_and_batch(self, stack: BatchStack) -> tuple[Any, Any, Any, Any, Any]:
        trainable, non_trainable, optimizer, metrics = self._state
        batch = jax.tree.map(lambda a: a[0], arranged(self.model, stack))
        return trainable, optimizer, non_trainable, metrics, batch

    def eager_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        state_and_batch = self._state_and_batch(stack)
        with jax.disable_jit():
            computed, _ = self._trace_gradients(*state_and_batch, factors)
        self._take(computed, out)

    def find_terms(self, stack: BatchStack) -> Found:
        state_and_batch = self._state_and_batch(stack)
        if self._compiles:  # the call that follows finds what is traced here
            found = self._gradients.trace(*state_and_batch, None).out_info[1]
        else:  # code that wants numbers (RandomCrop); no state is changed
            few = jax.tree.map(lambda array: array[: few_rows(self.model)], state_and_batch[-1])
            found = self._trace_gradients(*state_and_batch[:4], few, None)[1]
        assert isinstance(found, Found)
        return found

    def denominators(self, stack: BatchStack) -> npt.NDArray[Any]:
        return np.asarray(self._denominators(*self._state_and_batch(stack)))

    def _trace_denominators(
        self, trainable: Any, optimizer: Any, non_trainable: Any, metrics: Any, batch: Any
    ) -> Any:
        model, state = self.model, (trainable, non_trainable, optimizer, metrics)
        groups = model.trainable_variables, model.non_trainable_variables
        both = zip(groups, state[:2], strict=True)
        mapping = [pair for group, values in both for pair in zip(group, values, strict=True)]
        return forward_terms(model, pack_batch(*batch), mapping, state, sums=self.sums).stacked()

    def _trace_gradients(
        self, trainable: object, optimizer: object, non_trainable: object, metrics: object,
        batch: Any, factors: object,
    ) -> Any:  # fmt: skip
        state = (trainable, non_trainable, optimizer, metrics)
        (_, after), gradients, overwritten, found = captured_step(
            self, lambda: self._model_step(state, pack_batch(*batch)), *weighing(self, factors)
        )
        after = with_types_of(after, state)
        pairs = zip(gradients, self.trained, strict=True)
        parts = [jnp.zeros(v.shape, jnp.float32) if g is None else g for g, v in pairs]
        flat = self._trace_concat(parts, _chosen(after[1], self._averaged_at))
        return (flat, after[1], after[3], [v for _, v in overwritten]), found

    def apply_gradients(self, flat: FloatArray) -> None:
        self.layout.check(flat)
        trainable, non_trainable, optimizer, _ = self._state
        trainable, optimizer, averages = self._apply(
            trainable, optimizer, self._given(flat), self.known
        )
        self._set(trainable, _replaced(non_trainable, self._averaged_at, averages), optimizer)

    def _trace_apply(
        self, trainable: list[jax.Array], optimizer: list[jax.Array], flat: jax.Array,
        known: tuple[bool, ...],
    ) -> Any:  # fmt: skip
        parts = self._trace_split(flat)
        pairs = zip(parts[: len(self.trained)], known, strict=True)
        given = [part if has else None for part, has in pairs]
        # Overwritten variables have their new values already, and are overwritten by these.
        gradients = _replaced(trainable, self._trained_at, given)
        after = self.model.optimizer.stateless_apply(optimizer, gradients, trainable)
        trainable, optimizer = with_types_of(after, (trainable, optimizer))
        return trainable, optimizer, parts[len(self.trained) :]

    def _evaluate_stack(self, stack: BatchStack) -> None:
        trainable, non_trainable, _, metrics = self._state
        jax.block_until_ready(metrics)
        non_trainable, metrics = self._test_steps(
            (non_trainable, metrics), trainable, arranged(self.model, stack), stack.num_batches
        )
        self._set(non_trainable=non_trainable, metrics=metrics)

    @contextlib.contextmanager
    def _optimizer_scope(self) -> Iterator[Any]:
        """Within, Keras' optimizer variables have the values of the learner's state."""
        mapping = list(zip(self.model.optimizer.variables, self._state[2], strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            yield scope
        pairs = ((scope.get_current_value(variable), old) for variable, old in mapping)
        self._set(optimizer=[old if new is old else copied(new) for new, old in pairs])


class _JaxMetrics(ModelMetrics):
    """Metric variables whose values are in a learner's state."""

    def __init__(self, learner: JaxLearner) -> None:
        super().__init__(learner.model)
        self._learner = learner

    def take_over(self) -> None:
        self.set_values([v.value for v in self._model.metrics_variables])

    def values(self) -> list[Any]:
        values: list[Any] = copied(self._learner._state[3])  # the next call donates the state
        return values

    def set_values(self, values: list[Any]) -> None:
        self._learner._set(metrics=copied(values))


jax.tree_util.register_pytree_node(Found, lambda found: ((), found), lambda found, _: found)


def _chosen(values: list[Any], places: list[int]) -> list[Any]:
    return [values[i] for i in places]


def _replaced(values: list[Any], places: list[int], new: list[Any]) -> list[Any]:
    result = list(values)
    for index, value in zip(places, new, strict=True):
        result[index] = value
    return result


def _more_exact(old: Any, new: Any) -> Any:
    """``new``, with the elements of a float64 array that round to the same as they were."""
    if old.dtype != jnp.float64:
        return new
    return jnp.where(old.astype(jnp.float32) == new.astype(jnp.float32), old, new)
