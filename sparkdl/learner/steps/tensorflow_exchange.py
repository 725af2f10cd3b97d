"""Joins gradients of all workers inside a compiled TensorFlow step.

Both classes take the gradients of the trained variables and the running statistics and return them
joined over all workers, one by way of NumPy, one with Horovod's operations. As that happens inside
the graph, a stack of many batches is one call from Python.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from sparkdl.failures import carried
from sparkdl.learner.framework import overlaid, replaced
from sparkdl.learner.state.synchronized_norms import synchronized_layers
from sparkdl.learner.steps.denominators import factors
from sparkdl.training.learning import Reducer
from sparkdl.training.parts import Leaving, fill_part, leaving
from sparkdl.training.slices import Slices
from sparkdl.weights import FloatArray, Layout, Slot

Numbers = npt.NDArray[Any]
_MOST_SUMMED = 64000.0
"""Largest mean in float16 (which reaches to 65504): shares are rounded, and so are their sums."""
LEAST_FUSED = 800_000
"""Elements of tables from which on XLA compiles the optimizer's step: Keras' optimizers go over a
whole table at each step, however few rows its gradient has, a dozen times in a plain graph. Adam
over 840,000 elements takes 3.7 ms of a processor, and 2.7 ms with XLA, which takes .6 s once."""


def dense_of(value: object, slot: Slot) -> tf.Tensor:
    """A tensor in float32: zeros for None (no gradient), a sparse one made dense."""
    if value is None:
        return tf.zeros(slot.shape)
    return tf.cast(tf.convert_to_tensor(value), tf.float32)


def flat_rows(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """Indices and rows of a gradient as they travel: int32, and float32 of two dimensions."""
    count = tf.shape(slices.indices)[0]
    rows = tf.reshape(tf.cast(slices.values, tf.float32), [count, -1])
    return tf.cast(slices.indices, tf.int32), rows


def sliced_gradient(indices: tf.Tensor, rows: tf.Tensor, slot: Slot) -> tf.IndexedSlices:
    """The counterpart of :func:`flat_rows`, in a variable's shape and dtype."""
    values = tf.cast(tf.reshape(rows, [-1, *slot.shape[1:]]), slot.dtype)
    return tf.IndexedSlices(values, tf.reshape(indices, [-1]), tf.constant(slot.shape, tf.int32))


def in_form(value: object, sliced: bool) -> Any:
    """A gradient as slices or as a tensor, whichever it is: equal in value."""
    if isinstance(value, tf.IndexedSlices) == sliced:
        return value
    if sliced:
        return tf.IndexedSlices(value, tf.range(tf.shape(value)[0]), tf.shape(value))
    return tf.convert_to_tensor(value)


def sliced_places(values: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of the gradients that are slices."""
    return tuple(i for i, v in enumerate(values) if isinstance(v, tf.IndexedSlices))


def with_slices(
    layout: Layout, places: Sequence[int], dense: Sequence[tf.Tensor], slices: Sequence[tf.Tensor]
) -> list[Any]:
    """Gradients and statistics in the layout's order.

    Args:
        layout: Layout of all of them.
        places: Which of them are slices.
        dense: The others.
        slices: Indices and rows of each, one after the other.
    """
    of = zip(places, slices[::2], slices[1::2], strict=True)
    found = {i: sliced_gradient(indices, rows, layout.slots[i]) for i, indices, rows in of}
    rest = iter(dense)
    return [found[i] if i in found else next(rest) for i in range(len(layout.slots))]


def as_slices(places: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> list[Slices]:
    """The arrays of :func:`flat_rows`, of each variable in turn, as they travel."""
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [Slices(i, *pair) for i, pair in zip(places, pairs, strict=True)]


def as_arrays(slices: Sequence[Slices]) -> list[npt.NDArray[Any]]:
    """The counterpart of :func:`as_slices`."""
    return [array for s in slices for array in (s.indices, s.rows)]


LARGE_BYTES = 16 << 20
"""Size of a model from which on no flat tensor of all its variables is made in a step."""


def flatten(values: list[Any], slots: Sequence[Slot]) -> tf.Tensor:
    """Tensors (see :func:`dense_of`) as one flat tensor."""
    parts = flat_parts(values, slots)
    return tf.concat(parts, 0) if parts else tf.zeros([0])


def flat_parts(values: list[Any], slots: Sequence[Slot]) -> list[tf.Tensor]:
    """Tensors (see :func:`dense_of`), each flat."""
    pairs = zip(values, slots, strict=True)
    return [tf.reshape(dense_of(value, slot), [-1]) for value, slot in pairs]


def copy_flat(
    found: tf.Tensor | list[tf.Tensor], slots: Sequence[Slot], buffer: FloatArray
) -> None:
    """Copies what :func:`flatten`, or :func:`flat_parts`, has made to a flat buffer."""
    if isinstance(found, list):
        copy_slots([np.asarray(part) for part in found], slots, buffer)
    else:
        np.copyto(buffer, np.asarray(found))


def assign_each(variables: Sequence[Any], parts: Iterable[Any]) -> None:
    """Gives variables the values that they have in a flat buffer, one after the other."""
    for variable, value in zip(variables, parts, strict=True):
        part = tf.cast(tf.convert_to_tensor(value), variable.dtype)
        if part.dtype == tf.float64:  # what rounds to the same float32 is more exact
            same = tf.cast(variable.value, tf.float32) == tf.cast(part, tf.float32)
            part = tf.where(same, variable.value, part)
        variable.assign(part)


def copy_slots(values: Sequence[FloatArray], slots: Sequence[Slot], buffer: FloatArray) -> None:
    """Copies each variable's values to its place in a flat buffer.

    To join them in the graph first would write all of them once more.
    """
    for value, slot in zip(values, slots, strict=True):
        buffer[slot.offset : slot.offset + slot.size] = value.reshape(-1)


def split(flat: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
    """The counterpart of :func:`flatten`, each in its variable's shape and dtype."""
    if not layout.slots:  # all gradients are slices
        return []
    parts = tf.split(flat, [s.size for s in layout.slots])
    pairs = zip(parts, layout.slots, strict=True)
    return [tf.cast(tf.reshape(part, slot.shape), slot.dtype) for part, slot in pairs]


def own(value: tf.Tensor) -> tf.Tensor:
    """A copy, for a variable that keeps it: it may be a view of a buffer that is used again.

    TensorFlow reads what a Python function returns where it lies, and a variable takes over the
    tensor that it is assigned.
    """
    return tf.raw_ops.DeepCopy(x=value)


def apply_fused(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """One optimizer step, compiled by XLA.

    XLA compiles for each number of rows. So the rows of slices are filled up to a power of two by
    rows of zeros, which change nothing: the number depends on that of the rows alone, so that all
    workers do the same.
    """
    given: list[tf.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            given += [_filled_up(gradient.indices), _filled_up(gradient.values)]
        else:
            given.append(gradient)

    def step(*tensors: tf.Tensor) -> None:
        rest = iter(tensors)
        found: list[Any] = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                indices, shape = next(rest), tf.constant(tuple(variable.shape), tf.int32)
                found.append(tf.IndexedSlices(next(rest), indices, shape))
            else:
                found.append(next(rest))
        optimizer.apply(found, variables)

    tf.function(step, autograph=False, jit_compile=True)(*given)


def _filled_up(rows: tf.Tensor) -> tf.Tensor:
    count = tf.shape(rows)[0]
    powers = tf.constant([2**n for n in range(31)], tf.int32)
    room = tf.reduce_min(tf.where(powers >= count, powers, powers[-1]))
    return tf.pad(rows, [[0, room - count]] + [[0, 0]] * (len(rows.shape) - 1))


class SynchronizedMoments:
    """``BatchNormalization(synchronized=True)``: moments over the rows of all workers, in a step.

    Worker ``k`` has ``n_k`` values of a channel, of mean ``m_k`` and variance ``v_k``. All add up
    ``n``, ``n m`` and ``n (v + m²)`` in float64, which gives ``N``, the mean ``M`` and the variance
    ``V`` of one process. Backward, with ``a_k = n_k / N`` and the upstream gradients ``M'`` and
    ``V'`` of each worker's own mean loss over its ``r_k`` rows, which are joined weighed by rows::

        M'' = Σ r M' / r_k,  V'' = Σ r V' / r_k
        m_k' = a_k (M'' + 2 (m_k - M) V''),  v_k' = a_k V''

    Each sum has one size, and begins with 1 while more follow in the step: so a worker without a
    batch adds zeros until the others are done.

    Args:
        model: Its layers call Keras' own moments where no reducer is told.
    """

    def __init__(self, model: object) -> None:
        self.layers = synchronized_layers(model)
        self._width = 1 + 3 * max((layer.moving_mean.shape[0] for layer in self.layers), default=0)
        self._reducer: Reducer | None = None

    def told_to(self, reducer: Reducer) -> contextlib.AbstractContextManager[None]:
        """Within, the sums are those of all workers of ``reducer``."""
        return replaced(self, "_reducer", reducer, reducer.num_workers > 1)

    def trace(self, step: Callable[[Any], Any], batch: object) -> None:
        """Traces a step, whose layers make their sums."""
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(overlaid(layer, _moments=partial(self._moments, layer)))
            step(batch)
        if self.layers:
            tf.numpy_function(carried(self._end), [], tf.float32)

    def skip(self, reducer: Reducer) -> None:
        """Takes part in the sums of a step, without a batch."""
        while self.layers and reducer.add_up(np.zeros(self._width))[0] > 0:
            pass

    def _moments(self, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = type(layer)._moments(layer, inputs, mask)
        if in_stateless_scope():  # only shapes, or denominators, are asked for
            return mean, variance
        values = tf.ones_like(inputs)
        if mask is not None:
            values *= tf.cast(tf.expand_dims(mask, -1), values.dtype)
        count = tf.reduce_sum(values, layer._reduction_axes)
        size = [layer.moving_mean.shape[0]]
        joined = self._joined(count, tf.reshape(mean, size), tf.reshape(variance, size))
        return tf.reshape(joined[0], mean.shape), tf.reshape(joined[1], variance.shape)

    def _joined(self, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> Any:
        kind = mean.dtype

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def joined(mean: tf.Tensor, variance: tf.Tensor) -> Any:
            found = tf.numpy_function(carried(self._join), [count, mean, variance], [kind] * 3)
            for tensor in found:
                tensor.set_shape(mean.shape)
            of_all, share = found[0], found[2]

            def gradient(*upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                back = tf.numpy_function(carried(self._join_back), upstream, [kind] * 2)
                for tensor in back:
                    tensor.set_shape(mean.shape)
                return share * (back[0] + 2 * (mean - of_all) * back[1]), share * back[1]

            return (of_all, found[1]), gradient

        return joined(mean, variance)

    def _join(self, count: Numbers, mean: Numbers, variance: Numbers) -> list[Numbers]:
        if self._reducer is None:
            return [mean, variance, np.ones_like(mean)]
        n, m, v = (np.asarray(a, np.float64) for a in (count, mean, variance))
        total, first, second = np.split(self._add_up([n, n * m, n * (v + m * m)]), 3)
        some = np.maximum(total, 1.0)  # all rows may be masked
        of_all = first / some
        spread = np.maximum(second / some - of_all * of_all, 0.0)
        return [a.astype(mean.dtype) for a in (of_all, spread, n / some)]

    def _join_back(self, *upstream: Numbers) -> list[Numbers]:
        if self._reducer is None:
            return list(upstream)
        rows = self._reducer.rows
        total = self._add_up([np.asarray(g, np.float64) * rows for g in upstream])
        return [a.astype(upstream[0].dtype) for a in np.split(total / rows, 2)]

    def _add_up(self, parts: list[Numbers]) -> Numbers:
        assert self._reducer is not None
        numbers = np.concatenate([[1.0], *parts])
        padded = np.zeros(self._width)
        padded[: numbers.size] = numbers
        return self._reducer.add_up(padded)[1 : numbers.size]

    def _end(self) -> np.float32:
        if self._reducer is not None:
            self._reducer.add_up(np.zeros(self._width))
        return np.float32(0)


class Joined(NamedTuple):
    """The result of an exchange.

    Args:
        values: The joined gradients and statistics; those that are slices as ``IndexedSlices``.
        weight: The sum of all workers' weights.
        stop: Above 0 if a worker wants to stop.
        broken: 1 if this worker's own gradient was not finite, else 0.
        broken_of_all: Workers whose gradient was not finite.
    """

    values: list[Any]
    weight: tf.Tensor
    stop: tf.Tensor
    broken: tf.Tensor
    broken_of_all: tf.Tensor


class NumpyExchange:
    """Calls the reducer from inside the graph, for each part as soon as its gradients are there.

    Args:
        layout: Layout of the flat buffer.
        reducer: Gives the reducer of the present run. One call serves all runs whose reducers have
            the same parts.
        agree: Called in each step before its first part is handed over.
    """

    def __init__(
        self, layout: Layout, reducer: Callable[[], Reducer], agree: Callable[[], None]
    ) -> None:
        self._whole, self._reducer, self._agree = layout, reducer, agree
        self._layout = layout
        self._places: tuple[int, ...] = ()
        self._parts: list[slice] = []

    def __call__(self, values: list[Any], weight: tf.Tensor, stop: tf.Tensor) -> Joined:
        """The joined values; the weight and all flags travel with the reducer.

        Where gradients may be left out, ``weight`` is 0 in a step without any, and ``broken`` is 1
        where this worker's was.
        """
        none = tf.zeros([])
        reducer = self._reducer()
        self._places = sliced_places(values)
        if self._places:
            reducer.send_as_slices(self._places)
        self._layout = self._whole.without(self._places)
        self._parts = list(reducer.parts)
        slots = self._layout.slots
        rest = [v for i, v in enumerate(values) if i not in self._places]
        dense = [dense_of(v, s) for v, s in zip(rest, slots, strict=True)]
        rows = [t for i in self._places for t in flat_rows(values[i])]
        kinds = [tf.int32, tf.float32] * len(self._places)
        if reducer.skips or len(self._parts) == 1:
            kinds = [tf.float32] * 3 + kinds
            flat, has, refused, *got = tf.numpy_function(
                carried(self._join), [*dense, *rows], kinds
            )
            flat.set_shape([self._layout.size])
            has.set_shape([])
            refused.set_shape([])
            joined = with_slices(self._whole, self._places, split(flat, self._layout), got)
            if reducer.skips:
                return Joined(joined, has, none, refused, none)
            return Joined(joined, weight, none, none, none)
        last: list[Any] = []
        for group in leaving(self._parts, slots):
            given = [dense[i] for i in group.variables]
            with tf.control_dependencies(last):
                last = [tf.numpy_function(carried(self._begin(group)), given, tf.float32)]
        with tf.control_dependencies(last):
            kinds = [tf.float32] * len(slots) + kinds
            joined = tf.numpy_function(carried(self._finish_slots), rows, kinds)
        joined, got = joined[: len(slots)], joined[len(slots) :]
        for value, slot in zip(joined, slots, strict=True):
            value.set_shape(slot.shape)
        typed = [tf.cast(v, s.dtype) for v, s in zip(joined, slots, strict=True)]
        return Joined(with_slices(self._whole, self._places, typed, got), weight, none, none, none)

    def factors(
        self, denominators: tf.Tensor, counted: Sequence[bool], weight: tf.Tensor
    ) -> tf.Tensor:
        """The factor of each term of the loss; see :mod:`sparkdl.learner.steps.denominators`.

        Args:
            denominators: This worker's; 0 for a sum over rows.
            counted: Which terms have one.
            weight: Not used: the reducer knows the rows.
        """

        def add_up(own: FloatArray) -> FloatArray:
            reducer = self._reducer()
            mine = np.array([reducer.rows, *own], np.float64)
            return factors(counted, mine, reducer.add_up(mine))

        found = tf.numpy_function(carried(add_up), [denominators], tf.float32)
        found.set_shape([len(counted)])
        return found

    def _begin(self, group: Leaving) -> Callable[..., Any]:
        slots = [self._layout.slots[i] for i in group.variables]
        places = [self._parts[number] for number in group.parts]

        def begin(*values: FloatArray) -> Any:
            reducer = self._reducer()
            if group.parts[0] == 0:
                self._agree()
            for number, place in zip(group.parts, places, strict=True):
                fill_part(place, slots, values, reducer.buffer)
                reducer.begin(number)
            return np.float32(0)

        return begin

    def _finish_slots(self, *rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        # Views of the buffer: to split it in the graph would copy all of it.
        reducer = self._reducer()
        reducer.slices = as_slices(self._places, rows)
        reducer.finish()
        slots = self._layout.slots
        views = [reducer.buffer[s.offset : s.offset + s.size].reshape(s.shape) for s in slots]
        return [*views, *as_arrays(reducer.slices)]

    def _join(self, *values: npt.NDArray[Any]) -> list[Any]:
        self._agree()
        reducer, count = self._reducer(), len(self._layout.slots)
        copy_slots(values[:count], self._layout.slots, reducer.buffer)
        reducer.slices = as_slices(self._places, values[count:])
        for part in range(len(self._parts)):
            reducer.begin(part)
        flags = np.float32(reducer.finish()), np.float32(reducer.refused)
        # The graph reads this buffer without a copy, and has read it before the next step writes
        # to it: the loop over a stack's batches runs one iteration at a time.
        return [reducer.buffer, *flags, *as_arrays(reducer.slices)]


class HorovodExchange:
    """Horovod's all-reduce operations, fused per part; ranks weighted by their rows.

    Args:
        layout: Layout of the flat buffer.
        wire: ``'float16'``, ``'bfloat16'`` or None: what gradients travel as.
        parts: See :class:`sparkdl.training.learning.Reducer`.
        checks: Whether to look for NaN and infinity in this worker's gradients.
    """

    def __init__(
        self, layout: Layout, wire: str | None, parts: list[slice], *, checks: bool
    ) -> None:
        self._layout, self._parts, self._checks = layout, parts, checks
        self._wire = None if wire is None else tf.as_dtype(wire)
        self._hvd = importlib.import_module("horovod.tensorflow")

    def __call__(self, values: list[Any], weight: tf.Tensor, stop: tf.Tensor) -> Joined:
        """The joined values and flags of all workers."""
        slots = self._layout.slots
        dense = [dense_of(v, s) for v, s in zip(values, slots, strict=True)]
        trained = [t for t, s in zip(dense, slots, strict=True) if self._is_trained(s.offset)]
        broken = _not_finite(trained) if self._checks else tf.zeros([])
        joined: list[Any] = [None] * len(slots)
        totals: Any = None  # the sums of all workers' weights and flags
        # They travel together with the first part, which saves a round of messages.
        mine, factor = [tf.stack([weight, stop, broken])], weight
        if self._wire is not None:
            # Not here: a sum of float16 could overflow, so each worker sends its share of the mean,
            # and has to know the sum of the weights before.
            totals, mine = self._sum(mine, "totals")[0], []
            factor = tf.math.divide_no_nan(weight, totals[0])
        for index, part in enumerate(self._parts):
            chosen = [i for i, s in enumerate(slots) if part.start <= s.offset < part.stop]
            wire = self._wire if self._is_trained(part.start) else None
            sent = _scaled([dense[i] for i in chosen], factor)
            if wire is not None:
                sent = [_in_range(t, factor, wire) for t in sent]
            got = self._sum([*mine, *sent], f"part.{index}")
            if mine:
                totals, got, mine = got[0], got[1:], []
            for i, tensor in zip(chosen, got, strict=True):
                if self._wire is None:
                    tensor = tf.math.divide_no_nan(tensor, totals[0])
                joined[i] = tf.cast(tensor, slots[i].dtype)
        return Joined(joined, totals[0], totals[1], broken, totals[2])

    def factors(
        self, denominators: tf.Tensor, counted: Sequence[bool], weight: tf.Tensor
    ) -> tf.Tensor:
        """The factor of each term of the loss; see :mod:`sparkdl.learner.steps.denominators`.

        Args:
            denominators: This worker's; 0 for a sum over rows.
            counted: Which terms have one.
            weight: This worker's, in proportion to its rows.
        """
        of_all = self._sum([tf.concat([weight[None], denominators], 0)], "denominators")[0]
        more_rows = tf.math.divide_no_nan(of_all[0], weight)
        shares = tf.math.divide_no_nan(denominators, of_all[1:])
        return tf.where(counted, shares * more_rows, more_rows)

    def skip_factors(self, num_terms: int, weight: tf.Tensor) -> tf.Tensor:
        """Takes part in the sums of denominators without a batch; returns ``weight``, which is 0.

        TensorFlow leaves out an operation without state whose result nobody needs, even if another
        one has to wait for it. So the weight that the exchange takes is made of the sums.
        """
        of_all = self._sum([tf.fill([1 + num_terms], weight)], "denominators")[0]
        return tf.minimum(weight, of_all[0])

    def _is_trained(self, offset: int) -> bool:
        return offset < self._layout.trained_size

    def _sum(self, tensors: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        if not tensors:
            return []
        # Horovod matches operations by name. A step without a batch is another graph, whose names
        # are equal only without the scope.
        reduced: list[tf.Tensor] = self._hvd.grouped_allreduce(
            tensors, op=self._hvd.Sum, name=f"sparkdl.{name}", ignore_name_scope=True
        )
        return reduced


def _scaled(dense: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """Each times this worker's weight. At weight 0 they are zeros, even where one is infinite
    (0 · inf is no number)."""
    if not dense:
        return []
    scaled: list[tf.Tensor] = tf.cond(
        factor > 0, lambda: [t * factor for t in dense], lambda: [tf.zeros_like(t) for t in dense]
    )
    return scaled


def _in_range(share: tf.Tensor, factor: tf.Tensor, wire: tf.DType) -> tf.Tensor:
    """A worker's share of a mean in half precision; finite where it is, as is the sum of all."""
    if wire == tf.float16:
        most = _MOST_SUMMED * factor
        cut = tf.clip_by_value(share, -most, most)
        share = tf.where(tf.math.is_inf(share), share, cut)
    return tf.cast(share, wire)


def _not_finite(tensors: list[tf.Tensor]) -> tf.Tensor:
    """1 if a number is not finite, else 0: one sum where all is well."""
    if not tensors:
        return tf.zeros([])
    total = tf.add_n([tf.reduce_sum(t) for t in tensors])

    def look() -> tf.Tensor:  # a sum of finite numbers may overflow
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])
        return tf.cast(tf.logical_not(finite), tf.float32)

    return tf.cond(tf.math.is_finite(total), lambda: tf.zeros([]), look)
