"""A Keras model trained through one compiled TensorFlow call per stack of batches.

The loop over the batches is inside the graph, so that Python runs once per stack: on one core that
trains 2.5 to 3 times the rows per second of ``model.fit`` for small networks. Each batch goes
through the model's own ``train_step``, so custom steps, mixed precision and metrics behave as in
Keras.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from sparkdl.failures import carried
from sparkdl.learner.framework import replaced
from sparkdl.learner.signature import takes_strings
from sparkdl.learner.state.metric_state import logged_step
from sparkdl.learner.state.optimizer_state import innermost_optimizer
from sparkdl.learner.steps.captured_gradients import gradients_to_apply
from sparkdl.learner.steps.denominators import forward_terms
from sparkdl.learner.steps.keras_learner import (
    Found,
    KerasLearner,
    ReducedStep,
    captured_step,
    require_one_batch,
    weighing,
)
from sparkdl.learner.steps.repeated_rows import few_rows
from sparkdl.learner.steps.tensorflow_calls import ShapedCalls, compiled_apart, in_main_thread
from sparkdl.learner.steps.tensorflow_exchange import (
    LARGE_BYTES,
    LEAST_FUSED,
    HorovodExchange,
    Joined,
    NumpyExchange,
    SynchronizedMoments,
    apply_fused,
    as_arrays,
    as_slices,
    assign_each,
    copy_flat,
    copy_slots,
    dense_of,
    flat_parts,
    flat_rows,
    flatten,
    in_form,
    own,
    sliced_places,
    split,
    with_slices,
)
from sparkdl.learner.structure import arranged, map_arrays, pack_batch
from sparkdl.training.learning import BatchStack, Exchanger, Reducer
from sparkdl.training.slices import Slices
from sparkdl.weights import FloatArray

Steps = Callable[..., Any]
"""``(stack, x, y, sample weights, number of batches) -> weights``."""


class TensorFlowLearner(KerasLearner):
    """See :class:`sparkdl.training.learning.Learner`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # XLA pays on accelerators; on CPUs the plain graph is as fast and compiles 3x sooner.
        has_gpu = bool(tf.config.list_physical_devices("GPU"))  # strings are unknown to XLA
        self._jit = bool(model.jit_compile) and has_gpu and not takes_strings(model)
        self._eager = bool(model.run_eagerly)  # what is not compiled: each step as Keras takes it
        self._compiles_exchange = not (self._eager or self.overwritten)  # of which more is told
        self._flat: tf.Tensor | None = None
        self._reducer: Any = None
        self._exchanger: Exchanger | None = None
        self._agree: Callable[[], None] | None = None  # still to be called in the present stack
        self._applying: dict[tuple[Any, ...], Any] = {}
        self._reducing: dict[tuple[Any, ...], ShapedCalls] = {}
        self._skipping: dict[tuple[Any, ...], Any] = {}
        self._train_step = logged_step(model, "train_step")
        self._train_steps = self._compile_steps(self._train_step, with_weights=True)
        self._test_steps = self._compile_steps(logged_step(model, "test_step"), with_weights=False)
        self._moments = SynchronizedMoments(model)
        self._gradients = self._compile_batch(self._trace_weighed)
        self._apart_gradients = self._compile_batch(self._trace_weighed_apart)
        self._denominators = self._compile_batch(self._trace_denominators)
        self._concat = compiled_apart(self._trace_concat)
        self.reload()

    def read_weights(self, out: FloatArray) -> None:
        if self._reducer is not None:  # within a compiled call, which may hold all threads
            copy_slots([v.numpy() for v in self.exchanged], self.layout.slots, out)
            return
        flat = self._concat() if self._flat is None else self._flat
        np.copyto(out, np.asarray(flat))  # without the copy that flat.numpy() would make first

    def write_weights(self, flat: FloatArray) -> None:
        self.layout.check(flat)
        self._flat = None
        if self.layout.size_bytes < LARGE_BYTES:
            self._assign(tf.convert_to_tensor(flat))
        else:
            assign_each(self.exchanged, self.layout.views(flat))

    def reload(self) -> None:
        super().reload()
        self._flat = None

    def set_values(self, pairs: list[tuple[Any, npt.NDArray[Any]]]) -> None:
        super().set_values(pairs)
        self._flat = None

    @cached_property
    def _assign(self) -> Any:
        def assign(flat: tf.Tensor) -> None:
            assign_each(self.exchanged, split(flat, self.layout))

        # Compiled for the one signature it has: to look that up would take as long as the call.
        flat = tf.TensorSpec([self.layout.size], tf.float32)
        return tf.function(assign, autograph=False).get_concrete_function(flat)

    def _trace_concat(self) -> tf.Tensor:
        parts = [tf.reshape(tf.cast(v.value, tf.float32), [-1]) for v in self.exchanged]
        return tf.concat(parts, 0)

    def train(self, stack: BatchStack) -> None:
        self.metrics.build(stack)
        count = tf.constant(stack.num_batches)
        self._flat, _ = self._train_steps(stack, *self._tensors(stack), count)

    def _evaluate_stack(self, stack: BatchStack) -> None:
        self._test_steps(stack, *self._tensors(stack), tf.constant(stack.num_batches))

    def _tensors(self, stack: BatchStack, batch: int | None = None) -> tuple[Any, Any, Any]:
        arrays = arranged(self.model, stack)
        if batch is not None:  # cut as NumPy arrays, where it costs nothing
            arrays = map_arrays(lambda array: array[batch], arrays)
        tensors: tuple[Any, Any, Any] = map_arrays(tf.convert_to_tensor, arrays)
        return tensors

    def _compile_batch(self, function: Callable[..., Any]) -> Steps:
        if self._eager or self._moments.layers:  # whose sums wait: for a thread of their own
            return lambda stack, *given: function(*given)
        return self._shaped(function, 0)

    def _shaped(self, function: Callable[..., Any], rows_at: int, **options: object) -> ShapedCalls:
        """Keras weighs the losses of several outputs by the rows of a batch where the graph knows
        their number. Its own graphs do not, nor do one worker's; of several workers each number of
        rows has a graph of its own."""
        outputs = getattr(self.model, "outputs", None) or ()
        several = isinstance(self.model.loss, (dict, list, tuple)) or len(outputs) > 1
        batches = (0,) if rows_at else ()

        def unknown() -> tuple[int, ...]:
            return (*batches, rows_at) if several and self.draws.alone else batches

        return ShapedCalls(function, unknown, reduce_retracing=not several, **options)

    def _compile_steps(self, step: Callable[[Any], Any], with_weights: bool) -> Steps:
        def run(x: object, y: object, sample_weight: object, num_batches: tf.Tensor) -> Any:
            _trace_batches(step, (x, y, sample_weight), tf.constant(0), num_batches)
            return (self._trace_concat() if with_weights else tf.constant(0)), None

        if self._eager:  # outside a graph tf.while_loop is a loop of Python
            return lambda stack, *given: run(*given)
        return self._shaped(run, 1, jit_compile=self._jit)

    def train_exchanging(self, stack: BatchStack, window: int, exchanger: Exchanger) -> None:
        if self._jit or self._eager or not in_main_thread():
            super().train_exchanging(stack, window, exchanger)
            return
        self.metrics.build(stack)
        counts = tf.constant(stack.num_batches), tf.constant(window)
        self._flat = None
        with replaced(self, "_exchanger", exchanger):  # no longer, see train_reducing
            self._exchanging_steps(stack, *self._tensors(stack), *counts)

    @cached_property
    def _exchanging_steps(self) -> ShapedCalls:
        """The compiled loop over a stack's batches, with an exchange after each window."""

        def run(
            x: object, y: object, sample_weight: object, num_batches: tf.Tensor, window: tf.Tensor
        ) -> tuple[tf.Tensor, None]:
            def windows(index: tf.Tensor) -> tuple[tf.Tensor]:
                end = tf.minimum(index + window, num_batches)
                _trace_batches(self._train_step, (x, y, sample_weight), index, end)
                self._trace_exchange()
                return (end,)

            done: tuple[tf.Tensor] = tf.while_loop(
                lambda index: index < num_batches, windows, (tf.constant(0),), parallel_iterations=1
            )
            return done[0], None

        return self._shaped(run, 1)

    def _trace_exchange(self) -> None:
        slots = zip(self.exchanged, self.layout.slots, strict=True)
        values = [dense_of(variable.value, slot) for variable, slot in slots]
        flat = tf.numpy_function(carried(self._exchange), values, tf.float32)
        flat.set_shape([self.layout.size])
        for variable, part in zip(self.exchanged, split(flat, self.layout), strict=True):
            variable.assign(own(part))

    def _exchange(self, *values: FloatArray) -> FloatArray:
        exchanger = self._exchanger
        assert exchanger is not None
        copy_slots(values, self.layout.slots, exchanger.buffer)
        exchanger.exchange()
        return exchanger.buffer

    def gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None = None
    ) -> None:
        require_one_batch(stack)
        self.metrics.build(stack)
        given = (*self._tensors(stack, 0), _tensor_or_none(factors))
        values, found = self._gradients(stack, *given)
        self.note(found)
        copy_flat(values, self.layout.slots, out)
        self._flat = None

    def eager_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        values, _ = self._trace_weighed(*self._tensors(stack, 0), factors)
        copy_flat(values, self.layout.slots, out)
        self._flat = None

    def find_terms(self, stack: BatchStack) -> Found:
        data = self._tensors(stack, 0)
        if isinstance(self._gradients, ShapedCalls):
            found: Found = self._gradients.compiled(stack, *data, None)[1]
            return found
        few = map_arrays(lambda tensor: tensor[: few_rows(self.model)], data)
        terms = forward_terms(self.model, pack_batch(*few), sums=self.sums)
        return Found((True,) * len(self.trained), tuple(terms.counted))

    def denominators(self, stack: BatchStack) -> npt.NDArray[Any]:
        return np.asarray(self._denominators(stack, *self._tensors(stack, 0))[0])

    def _trace_denominators(
        self, x: object, y: object, sample_weight: object
    ) -> tuple[tf.Tensor, None]:
        batch = pack_batch(x, y, sample_weight)
        return forward_terms(self.model, batch, sums=self.sums).stacked(), None

    def _trace_weighed(
        self, x: object, y: object, sample_weight: object, factors: tf.Tensor | None
    ) -> tuple[tf.Tensor | list[tf.Tensor], Found]:
        values, found = self._trace_step(pack_batch(x, y, sample_weight), factors)
        form = flat_parts if self.layout.size_bytes >= LARGE_BYTES else flatten
        return form(values, self.layout.slots), found

    def _trace_step(
        self, batch: object, factors: tf.Tensor | None = None
    ) -> tuple[list[Any], Found]:
        """The gradients of one batch (None where there is none), and the statistics after it."""

        def step() -> None:
            self._moments.trace(self._train_step, batch)

        _, gradients, overwritten, found = captured_step(self, step, *weighing(self, factors))
        for variable, value in overwritten:
            variable.assign(value)
        found = replace(found, sliced=sliced_places(gradients))
        return [*gradients, *(v.value for v in self.averaged)], found

    def _trace_exchanged(
        self, batch: object, factors: tf.Tensor | None = None
    ) -> tuple[list[Any], Found]:
        """The same; gradients of equal forms for all batches, as the exchange takes them."""
        values, found = self._trace_step(batch, factors)
        sliced = self._places_of(found) if self._reducer.takes_slices else ()
        return [None if v is None else in_form(v, i in sliced) for i, v in enumerate(values)], found

    def _places_of(self, found: Found) -> tuple[int, ...]:
        return (found.sliced if self.sliced is None else self.sliced) or ()

    def write_gradient(
        self, batch: BatchStack, reducer: Reducer, factors: FloatArray | None = None
    ) -> int:
        with self._moments.told_to(reducer):
            if not reducer.takes_slices:
                return super().write_gradient(batch, reducer, factors)
            self.metrics.build(batch)
            given = (*self._tensors(batch, 0), _tensor_or_none(factors))
            with replaced(self, "_reducer", reducer):
                (flat, *rows), found = self._apart_gradients(batch, *given)
        self.note(found)
        if self.sliced:
            reducer.send_as_slices(self.sliced)
            reducer.slices = as_slices(self.sliced, [np.asarray(t) for t in rows])
        np.copyto(reducer.buffer, np.asarray(flat))
        self._flat = None
        return 0

    def _trace_weighed_apart(
        self, x: object, y: object, sample_weight: object, factors: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], Found]:
        values, found = self._trace_exchanged(pack_batch(x, y, sample_weight), factors)
        places = self._places_of(found)
        dense = [v for i, v in enumerate(values) if i not in places]
        rows = [t for i in places for t in flat_rows(values[i])]
        return [flatten(dense, self.layout.without(places).slots), *rows], found

    def apply_joined(self, reducer: Reducer) -> None:
        self._apply(reducer.buffer, reducer.slices)

    def apply_gradients(self, flat: FloatArray) -> None:
        self.layout.check(flat)
        self._apply(flat, ())

    def _apply(self, flat: FloatArray, slices: Sequence[Slices]) -> None:
        """A step with a flat buffer of the gradients that are not slices."""
        key = tuple(s.place for s in slices), self.known
        if key not in self._applying:
            self._applying[key] = self._compile_apply(*key)
        self._applying[key](*(tf.convert_to_tensor(a) for a in [flat, *as_arrays(slices)]))
        self._flat = None

    def _compile_apply(self, places: tuple[int, ...], known: tuple[bool, ...]) -> Any:
        dense = self.layout.without(places)
        specs = [tf.TensorSpec([dense.size], tf.float32)]
        for i in places:
            shape = [None, self.layout.slots[i].width]
            specs += [tf.TensorSpec([None], tf.int32), tf.TensorSpec(shape, tf.float32)]

        def apply(flat: tf.Tensor, *rows: tf.Tensor) -> None:
            parts = with_slices(self.layout, places, split(flat, dense), rows)
            self._apply_parts(parts, known)

        return tf.function(apply, autograph=False).get_concrete_function(*specs)

    def _apply_parts(self, parts: list[Any], known: tuple[bool, ...]) -> None:
        """Traces a step with gradients and statistics; ``known`` are those that exist."""
        # Keras' own optimizers keep what they compute of a gradient, never the gradient itself.
        kept = not type(innermost_optimizer(self.model)).__module__.startswith("keras.")
        own_parts = [
            tf.nest.map_structure(own, part, expand_composites=True) if kept else part
            for part in parts[: len(self.trained)]
        ]
        gradients, variables = gradients_to_apply(self.model, own_parts, self.trained, known)
        pairs = zip(gradients, variables, strict=True)
        sliced = [v for g, v in pairs if isinstance(g, tf.IndexedSlices)]
        # An optimizer of the user's own may see a difference in rows of zeros.
        fused = not kept and sum(math.prod(v.shape) for v in sliced) >= LEAST_FUSED
        if fused and all(gradient is not None for gradient in gradients):
            apply_fused(self.model.optimizer, gradients, variables)
        else:
            self.model.optimizer.apply(gradients, variables)
        self._assign_statistics(parts)

    def _assign_statistics(self, parts: list[Any]) -> None:
        for variable, part in zip(self.averaged, parts[len(self.trained) :], strict=True):
            variable.assign(own(part))

    def _apply_sound(
        self, joined: Joined, metrics: list[tf.Tensor], known: tuple[bool, ...]
    ) -> None:
        """A step unless no worker had a gradient; ``metrics`` again if this one's was left out."""

        def apply() -> tf.Tensor:
            self._apply_parts(joined.values, known)
            return tf.constant(0)

        def leave() -> tf.Tensor:
            self._assign_statistics(joined.values)
            return tf.constant(0)

        def restore() -> tf.Tensor:
            for variable, value in zip(self.model.metrics_variables, metrics, strict=True):
                variable.assign(value)
            return tf.constant(0)

        tf.cond(joined.weight > 0, apply, leave)
        tf.cond(joined.broken > 0, restore, lambda: tf.constant(0))

    def train_reducing(self, stack: BatchStack, reducer: Reducer) -> None:
        if not self._steps_in_graph(reducer):
            super().train_reducing(stack, reducer)
            return
        self.metrics.build(stack)
        reducer.rows = stack.num_rows // stack.num_batches
        given = (*self._tensors(stack), tf.constant(stack.num_batches), *_weight_and_stop(reducer))
        told = ReducedStep(self, reducer)
        # No longer than the call: the learner outlives the run, and must not hold what it mapped.
        with replaced(self, "_reducer", reducer), replaced(self, "_agree", None):
            if self.found is None:  # the terms of the loss
                self._steps_with(reducer, 0, stack, given)
            told.look_at_sums(stack)
            num_terms = reducer.agree_on_terms(len(self.counted))
            if num_terms and reducer.skips:
                with replaced(self, "_reducer", None):
                    super().train_reducing(stack, reducer)
                return
            steps = self._steps_with(reducer, num_terms, stack, given)
            self._agree = told.agree_on_gradients
            if reducer.in_graph is not None:  # else inside the step, behind the denominators
                self._agree_in_step()
            with self._moments.told_to(reducer):
                stopping, broken_at, own = steps(*given)
        if reducer.in_graph is not None:
            reducer.agree_on_stop(float(stopping))
            if int(broken_at) >= 0:
                reducer.in_graph.tell_not_finite(int(broken_at), bool(own))
        self._flat = None

    def skip_reducing(self, reducer: Reducer) -> None:
        if self._moments.layers or not self._compiles_exchange or reducer.in_graph is None:
            super().skip_reducing(reducer)
            return
        reducer.rows = 0
        num_terms = reducer.agree_on_terms(-1)
        ReducedStep(self, reducer).learn_gradients()
        with replaced(self, "_reducer", reducer):
            agreed = self._skip_with(reducer, num_terms)(*_weight_and_stop(reducer))
        reducer.agree_on_stop(float(agreed))
        self._flat = None

    def add_nothing_up(self, reducer: Reducer) -> None:
        self._moments.skip(reducer)

    def _steps_in_graph(self, reducer: Reducer) -> bool:
        may = in_main_thread() if reducer.in_graph is None else not self._moments.layers
        return may and self._compiles_exchange

    def _agree_in_step(self) -> None:
        agree, self._agree = self._agree, None
        if agree is not None:
            agree()

    def _steps_with(
        self, reducer: Reducer, num_terms: int, stack: BatchStack, given: tuple[Any, ...]
    ) -> Any:
        """The compiled loop over a stack's batches, with an exchange in each step."""
        if self.sliced and reducer.takes_slices:
            reducer.send_as_slices(self.sliced)
        skips = reducer.skips
        steps = self._reducing.get((*_kind(reducer), num_terms))
        if steps is None:
            exchange = self._exchange_of(reducer)

            def run(  # weight: this worker's among all, weights: of the samples
                x: object,
                y: object,
                weights: object,
                count: tf.Tensor,
                weight: tf.Tensor,
                stop: tf.Tensor,
            ) -> tuple[tuple[tf.Tensor, ...], Found]:
                """Whether a worker wants to stop; the first batch whose joined gradient was not
                finite, or -1; whether this worker's own was not."""
                traced: list[Found] = []

                def body(
                    index: tf.Tensor, stopping: tf.Tensor, broken_at: tf.Tensor, own: tf.Tensor
                ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
                    batch = pack_batch(*map_arrays(lambda t: t[index], (x, y, weights)))
                    kept = self.model.metrics_variables if skips else ()
                    before = [tf.identity(v.value) for v in kept]
                    factors = None
                    if num_terms:
                        denominators = forward_terms(self.model, batch, sums=self.sums).stacked()
                        factors = exchange.factors(denominators, self.counted, weight)
                    values, found = self._trace_exchanged(batch, factors)
                    traced.append(found)
                    joined = exchange(values, weight, stop)
                    # Not even a counter, which needs no gradient, changes amid the exchange:
                    # another worker may need the state of before this step.
                    with tf.control_dependencies(joined.values[:1]):
                        if skips:
                            self._apply_sound(joined, before, found.has_gradient)
                        else:
                            self._apply_parts(joined.values, found.has_gradient)
                    first = tf.logical_and(broken_at < 0, joined.broken_of_all > 0)
                    return (
                        index + 1,
                        tf.maximum(stopping, joined.stop),
                        tf.where(first, index, broken_at),
                        tf.where(first, joined.broken, own),
                    )

                start = (tf.constant(0), tf.constant(0.0), tf.constant(-1), tf.constant(0.0))
                ended: tuple[tf.Tensor, ...] = tf.while_loop(
                    lambda index, *_: index < count, body, start, parallel_iterations=1
                )
                return ended[1:], traced[-1]

            steps = self._shaped(run, 1)
            steps.compiled(stack, *given)  # which may change the reducer's parts
            self._reducing[(*_kind(reducer), num_terms)] = steps
        compiled, found = steps.compiled(stack, *given)
        self.note(found)
        return compiled

    def _skip_with(self, reducer: Reducer, num_terms: int) -> Any:
        known = self.known
        kind = (*_kind(reducer), num_terms, known)
        if kind not in self._skipping:
            exchange = self._exchange_of(reducer)
            assert isinstance(exchange, HorovodExchange)  # others skip by themselves

            def run(weight: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
                values = [tf.zeros(s.shape) for s in self.layout.slots]
                if num_terms:
                    weight = exchange.skip_factors(num_terms, weight)
                joined = exchange(values, weight, stop)

                def apply() -> tf.Tensor:
                    self._apply_parts(joined.values, known)
                    return joined.stop

                return tf.cond(joined.weight > 0, apply, lambda: joined.stop)

            self._skipping[kind] = compiled_apart(run)
        return self._skipping[kind]

    def _exchange_of(self, reducer: Reducer) -> NumpyExchange | HorovodExchange:
        if reducer.in_graph is None:
            return NumpyExchange(self.layout, lambda: self._reducer, self._agree_in_step)
        return HorovodExchange(
            self.layout, reducer.in_graph.wire, reducer.parts,
            checks=reducer.in_graph.checks_gradients,
        )  # fmt: skip


def _trace_batches(
    step: Callable[[Any], Any], data: tuple[Any, ...], first: tf.Tensor, end: tf.Tensor
) -> None:
    """Traces a loop: a step with each batch of a stack from ``first`` to before ``end``."""

    def body(index: tf.Tensor) -> tuple[tf.Tensor]:
        step(pack_batch(*map_arrays(lambda t: t[index], data)))
        return (index + 1,)

    tf.while_loop(lambda index: index < end, body, (first,), parallel_iterations=1)


def _tensor_or_none(array: FloatArray | None) -> tf.Tensor | None:
    return None if array is None else tf.convert_to_tensor(array)


def _kind(reducer: Reducer) -> tuple[Any, ...]:
    parts = tuple((p.start, p.stop) for p in reducer.parts)
    exchange = reducer.in_graph
    if exchange is None:
        return (reducer.skips, reducer.takes_slices, parts)
    return (exchange.wire, "horovod", parts, exchange.checks_gradients)


def _weight_and_stop(reducer: Reducer) -> tuple[tf.Tensor, tf.Tensor]:
    if reducer.in_graph is None:
        return tf.constant(0.0), tf.constant(0.0)
    weight = reducer.rows / reducer.in_graph.scale
    return tf.constant(weight, tf.float32), tf.constant(float(reducer.in_graph.stop_wanted))
