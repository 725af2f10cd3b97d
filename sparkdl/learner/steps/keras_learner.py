"""The half of a learner that the three Keras backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.callback_writes import changed_pairs
from sparkdl.learner.checks.compile_parts import layers_can_add_loss
from sparkdl.learner.signature import has_own, model_signature
from sparkdl.learner.state.carried_state import CarriedState, values_of
from sparkdl.learner.state.metric_state import build_metrics, flatten_metrics
from sparkdl.learner.state.model_weights import (
    averaged_variables,
    constrained,
    layout_of,
    overwritten_variables,
    trained_variables,
)
from sparkdl.learner.state.optimizer_state import (
    after_scaled_step,
    batch_counter,
    build_if_empty,
    innermost_optimizer,
    load_optimizer_state,
    loss_scale_of,
    optimizers_within,
    pack_arrays,
    read_slots,
    unknown_variables,
    with_slots,
)
from sparkdl.learner.state.seed_streams import SeedStreams
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.learner.state.shown_values import attach_shown_values
from sparkdl.learner.steps.captured_gradients import largest_of_all
from sparkdl.learner.steps.denominators import Numbers, factors
from sparkdl.learner.steps.repeated_rows import has_own_loss, sums_stay, takes_any_rows
from sparkdl.learner.structure import arrange_batch, map_arrays
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, Exchanger, Reducer
from sparkdl.training.reports import MetricState
from sparkdl.weights import FloatArray, Layout


class KerasLearner(ABC):
    """The part of a learner that is alike on all backends, around one compiled ``keras.Model``.

    See :class:`sparkdl.training.learning.Learner` for its methods.

    Args:
        model: Built and compiled. The learner trains it in place.

    Raises:
        ModelError: The model is not compiled or not built.
    """

    def __init__(self, model: keras.Model) -> None:
        require_compiled(model)
        self.model = model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.trained, self.overwritten = trained_variables(model), overwritten_variables(model)
        self.averaged = averaged_variables(model)
        self._layout = layout_of(self.trained, self.averaged)
        self._metrics_ready = False
        self._kept_metrics: list[Any] | None = None
        self._has_gradient: list[bool] = []  # of each trained variable; empty: not known yet
        self._counted: list[bool] | None = None  # of each term of the loss; None: not known yet
        self._sums = True  # of the loss stay sums, see Terms
        self._looked_at_sums = False
        # Those whose gradients are slices (only TensorFlow has any); None: not known yet.
        self._sliced: tuple[int, ...] | None = None
        self._rank = 0
        self._begun = 0  # parts of the present gradient that have left while it was computed

    @property
    def layout(self) -> Layout:
        return self._layout

    @cached_property
    def prepare(self) -> Callable[[BatchStack], BatchStack] | None:
        """Makes batches of rows that the model's preprocessor takes; None: there is none."""
        found = model_signature(self.model).preprocessing
        return None if found is None else found.stack

    # -- what each backend does itself -----------------------------------------------------------

    @abstractmethod
    def read_weights(self, out: FloatArray) -> None: ...

    @abstractmethod
    def write_weights(self, flat: FloatArray) -> None: ...

    @abstractmethod
    def train(self, stack: BatchStack) -> None: ...

    @abstractmethod
    def weighed_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        """:meth:`gradients`, with a factor for each term of the loss that is no mean over rows.

        Where there are overwritten variables, the batch's share of all rows follows the factors.
        """

    @abstractmethod
    def find_terms(self, stack: BatchStack) -> None:
        """Sets ``_counted``: which terms the loss has that are no means over rows; see
        :class:`sparkdl.learner.steps.denominators.Terms`."""

    @abstractmethod
    def denominators(self, stack: BatchStack) -> npt.NDArray[Any]:
        """The denominators of these terms for one batch, before its gradient; 0: a sum."""

    @abstractmethod
    def apply_gradients(self, flat: FloatArray) -> None: ...

    @abstractmethod
    def _evaluate_stack(self, stack: BatchStack) -> None:
        """Adds the rows of ``stack`` to the metric variables."""

    # -- structure -----------------------------------------------------------------------------

    def arranged(self, stack: BatchStack) -> tuple[Any, Any, Any]:
        """The arrays of a stack as ``(x, y, sample_weight)``, see :func:`pack_batch`."""
        return arrange_batch(self.model, stack.x, stack.y, stack.sample_weight)

    def build_metrics(self, stack: BatchStack) -> None:
        """Creates the metric variables, which Keras makes at the first batch."""
        if self._metrics_ready:
            return
        example = (stack.x, stack.y, stack.sample_weight)
        build_metrics(self.model, *map_arrays(_one_batch, example))
        attach_shown_values(self.model)
        self._metrics_ready = True

    def weights_within(self, place: slice) -> Iterator[tuple[slice, FloatArray]]:
        for index, slot in enumerate(self._layout.slots):
            first, stop = max(place.start, slot.offset), min(place.stop, slot.offset + slot.size)
            if first < stop:
                values = self._value_at(index).reshape(-1)[first - slot.offset : stop - slot.offset]
                yield slice(first, stop), values.astype(np.float32)

    def _value_at(self, index: int) -> npt.NDArray[Any]:
        return self._values_of([(*self.trained, *self.averaged)[index]])[0]

    def constrained(self, flat: FloatArray) -> FloatArray:
        return constrained(self.trained, self._layout, flat)

    # -- windows within a stack -------------------------------------------------------------------

    def train_exchanging(self, stack: BatchStack, window: int, exchanger: Exchanger) -> None:
        for first in range(0, stack.num_batches, window):
            self.train(stack.part(first, min(window, stack.num_batches - first)))
            self.read_weights(exchanger.buffer)
            exchanger.exchange()
            self.write_weights(exchanger.buffer)

    # -- steps in two halves ---------------------------------------------------------------------

    def gradients(self, stack: BatchStack, out: FloatArray) -> None:
        self.weighed_gradients(stack, out, None)

    def train_reducing(self, stack: BatchStack, reducer: Reducer) -> None:
        for batch in stack.single_batches():
            reducer.rows = batch.num_rows
            if reducer.skips:
                self.keep_metrics()
            if self.agree_on_terms(batch, reducer):
                self._compute_weighed(batch, reducer)
                self._join_overwritten(reducer, batch.num_rows > 0)
            else:
                self._gradients_for(batch, reducer)
            self._agree_with(reducer)
            for part in range(self._begun, len(reducer.parts)):
                reducer.begin(part)
            if reducer.finish() or not reducer.skips:
                self._apply_joined(reducer)
            else:
                self._write_statistics(reducer.buffer)
            if reducer.skips and reducer.refused:
                self.restore_metrics()

    def _write_statistics(self, flat: FloatArray) -> None:
        weights = np.empty(self._layout.size, np.float32)
        self.read_weights(weights)
        statistics = self._layout.size - self._layout.trained_size
        weights[self._layout.trained_size :] = flat[flat.size - statistics :]
        self.write_weights(weights)

    def skip_reducing(self, reducer: Reducer) -> None:
        reducer.rows = 0
        self._agree_without_batch(reducer)
        for part in range(len(reducer.parts)):
            reducer.begin(part)
        if reducer.finish():
            self._learn_from(reducer)
            self._apply_joined(reducer)

    def _gradients_for(
        self, batch: BatchStack, reducer: Reducer, factors: FloatArray | None = None
    ) -> None:
        self.weighed_gradients(batch, reducer.buffer, factors)

    def _apply_joined(self, reducer: Reducer) -> None:
        self.apply_gradients(reducer.buffer)

    def _agree_with(self, reducer: Reducer) -> None:
        """Tells the other workers which variables have a gradient, and of which form."""
        sliced = (self._sliced or ()) if reducer.takes_slices else ()
        mine = [int(has) + (i in sliced) for i, has in enumerate(self._has_gradient)]
        self._has_gradient = [kind > 0 for kind in reducer.agree_on_gradients(mine)]

    def _learn_from(self, reducer: Reducer) -> None:
        """The same for a worker without a batch, which does not know."""
        kinds = reducer.agree_on_gradients([])
        if kinds:
            self._has_gradient = [kind > 0 for kind in kinds]
            self._sliced = tuple(i for i, kind in enumerate(kinds) if kind > 1)
        if self._sliced and reducer.takes_slices:
            reducer.send_as_slices(self._sliced)

    def _agree_without_batch(self, reducer: Reducer) -> None:
        """Takes part in all that the others agree on and add up, in their order."""
        self._add_nothing_up(reducer, reducer.agree_on_terms(-1))
        self._learn_from(reducer)

    # -- denominators ------------------------------------------------------------------------------

    def agree_on_terms(self, batch: BatchStack, reducer: Reducer) -> int:
        """How many terms of the loss need a factor; 0 where this is the only worker."""
        if self._counted is None:
            self.build_metrics(batch)
            self.find_terms(batch)
        self.look_at_sums(batch, reducer)
        assert self._counted is not None
        return reducer.agree_on_terms(len(self._counted) + bool(self.overwritten))

    def look_at_sums(self, stack: BatchStack, reducer: Reducer) -> None:
        """Finds out whether code of the user's own divides sums of Keras' losses; looks once.

        Raises:
            ModelError: See :func:`sparkdl.learner.steps.repeated_rows.sums_stay`.
        """
        if self._looked_at_sums or reducer.num_workers < 2:
            return
        self._looked_at_sums = True
        if stack.grouped or not (has_own_loss(self.model) and takes_any_rows(self.model)):
            return
        counted = list(self._counted or [])
        variables = [*self.model.non_trainable_variables, *self.overwritten]
        before = [np.array(value) for value in self._values_of(variables)]
        has_gradient, kept = self._has_gradient, self._kept_metrics
        self.keep_metrics()

        def gradient(batch: BatchStack, factors: FloatArray | None) -> FloatArray:
            flat = np.empty(self._layout.size, np.float32)
            if self.overwritten and factors is not None:
                factors = np.append(factors, np.float32(1))
            self.eager_gradients(batch, flat, factors)
            self._set_values(list(zip(variables, before, strict=True)))
            self.restore_metrics()
            return flat[: self._layout.trained_size]

        with self.tables.trying():
            self._sums = sums_stay(gradient, stack.part(0), counted, self.model)
        self._counted = [c for c in counted if c or self._sums]
        self._has_gradient = has_gradient
        self._kept_metrics = kept

    def eager_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        """:meth:`weighed_gradients`, and nothing is compiled for it."""
        self.weighed_gradients(stack, out, factors)

    def compute_weighed(self, batch: BatchStack, reducer: Reducer) -> tuple[Numbers, Numbers]:
        """Writes a gradient with factors, for which all workers tell their denominators.

        Returns:
            This worker's rows and the denominator of each term (0 for a sum over rows), and the
            sums of all workers'.
        """
        counted = list(self.denominators(batch)) if self._counted else []
        share = [0.0] if self.overwritten else []  # as many numbers as there are terms
        mine = np.array([batch.num_rows, *share, *counted], np.float64)
        of_all = reducer.add_up(mine)
        self._gradients_for(batch, reducer, self._factors(mine, of_all))
        return mine, of_all

    def share_in(self, factors: Any) -> Any:
        """The batch's share of all rows, which follows the factors; None where none is wanted."""
        return None if factors is None or not self.overwritten else factors[-1]

    def _factors(self, mine: Numbers, of_all: Numbers) -> FloatArray:
        if not self.overwritten:
            return factors(self._counted or [], mine, of_all)
        share = np.float32(mine[0] / of_all[0])
        mine, of_all = np.delete(mine, 1), np.delete(of_all, 1)
        return np.append(factors(self._counted or [], mine, of_all), share)

    def _join_overwritten(self, reducer: Reducer, has_batch: bool) -> None:
        if self.overwritten and reducer.num_workers > 1:
            mine = self._values_of(self.overwritten)
            joined = largest_of_all(mine, self._rank if has_batch else None, reducer)
            self._set_values(list(zip(self.overwritten, joined, strict=True)))

    def skip_weighed(self, reducer: Reducer, num_terms: int) -> None:
        """Adds up with the others, without a batch, what :meth:`compute_weighed` does."""
        reducer.add_up(np.zeros(1 + num_terms))

    def _compute_weighed(self, batch: BatchStack, reducer: Reducer) -> None:
        """Writes the gradient of a loss whose terms have denominators of their own."""
        if not reducer.skips:
            self.compute_weighed(batch, reducer)
            return
        before = np.empty(self._layout.size, np.float32)
        self.read_weights(before)
        mine, of_all = self.compute_weighed(batch, reducer)
        # What is left out leaves its denominators out, too.
        sound = reducer.is_sound(self)
        left = reducer.add_up(mine if sound else np.zeros_like(mine))
        if sound and left[0] != of_all[0]:
            self.write_weights(before)  # the statistics of before
            self.restore_metrics()
            self._gradients_for(batch, reducer, self._factors(mine, left))

    def _add_nothing_up(self, reducer: Reducer, num_terms: int) -> None:
        """Takes part in what :meth:`_compute_weighed` adds up."""
        if num_terms:
            self.skip_weighed(reducer, num_terms)
            if reducer.skips:
                reducer.add_up(np.zeros(1 + num_terms))
            self._join_overwritten(reducer, False)

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        self._has_gradient = agree(self._has_gradient) or self._has_gradient

    # -- metrics -------------------------------------------------------------------------------

    def metric_state(self) -> MetricState:
        return flatten_metrics(self.model)

    def reset_metrics(self) -> None:
        self._zero_metrics()
        self._kept_metrics = None

    def _zero_metrics(self) -> None:
        self.model.reset_metrics()

    def keep_metrics(self) -> None:
        self._kept_metrics = self._metric_values() if self._metrics_ready else None

    def restore_metrics(self) -> None:
        if self._kept_metrics is None:
            self._zero_metrics()
        else:
            self._set_metric_values(self._kept_metrics)

    def evaluate(self, stacks: Iterable[BatchStack]) -> MetricState:
        training: list[Any] | None = None
        seeds = self._streams.kept()
        for stack in stacks:
            self.build_metrics(stack)
            if training is None:
                training = self._metric_values()
                self._zero_metrics()
            self._evaluate_stack(stack)
        if training is None:
            return np.zeros(0)
        state = self.metric_state()
        self._set_metric_values(training)
        self._streams.give_back(seeds)
        return state

    def _metric_values(self) -> list[Any]:
        return [np.array(v.numpy()) for v in self.model.metrics_variables]

    def _set_metric_values(self, values: list[Any]) -> None:
        for variable, value in zip(self.model.metrics_variables, values, strict=True):
            variable.assign(value)

    # -- optimizer -----------------------------------------------------------------------------

    @property
    def has_schedule(self) -> bool:
        rate = getattr(innermost_optimizer(self.model), "_learning_rate", None)
        return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    @property
    def learning_rate(self) -> float:
        optimizer = innermost_optimizer(self.model)
        optimizer = next(iter(optimizers_within(optimizer)), optimizer)  # of several the first
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    def set_learning_rate(self, value: float) -> None:
        if self.has_schedule:
            raise ConfigError(
                "cannot set the learning rate of a running fit",
                expected="an optimizer with a plain learning rate",
                received="a LearningRateSchedule",
                hint="use either the schedule or a callback that sets the rate, not both",
            )
        innermost_optimizer(self.model).learning_rate = value

    @property
    def step(self) -> int:
        return int(keras.ops.convert_to_numpy(batch_counter(innermost_optimizer(self.model))))

    def set_step(self, step: int) -> None:
        if self.has_schedule:
            batch_counter(innermost_optimizer(self.model)).assign(step)

    @property
    def scales_loss(self) -> bool:
        return innermost_optimizer(self.model) is not self.model.optimizer

    def optimizer_state(self) -> bytes:
        return pack_arrays(self._optimizer_arrays())

    def load_optimizer_state(self, state: bytes) -> None:
        load_optimizer_state(self.model, state)

    # -- what no flat buffer holds -----------------------------------------------------------------

    @cached_property
    def _carried(self) -> CarriedState:
        return CarriedState(self.model, self._values_of)

    @cached_property
    def _streams(self) -> SeedStreams:
        return SeedStreams(self.model, self._values_of, self._set_values)

    def carried_state(self) -> bytes:
        return self._carried.to_bytes(self._streams.travelling)

    def carried_state_at(self, steps: int, wanted: int) -> bytes:
        streams = self._streams
        return self._carried.to_bytes(
            lambda v, value: streams.travelling(v, streams.at(v, value, steps, wanted))
        )

    def load_carried_state(self, state: bytes) -> None:
        pairs = self._carried.pairs(state)
        self._set_values([(v, self._streams.travelling(v, value)) for v, value in pairs])

    def take_stream(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._streams.take(rank, num_ranks)

    def mark_draws(self) -> None:
        self._streams.mark()

    def fill_draws(self, steps: int, steps_of_all: int) -> None:
        self._streams.fill(steps, steps_of_all)

    def skip_draws(self, steps: int) -> None:
        self._streams.skip(steps)

    def _values_of(self, variables: Sequence[Any]) -> list[npt.NDArray[Any]]:
        return values_of(variables)

    def _set_values(self, pairs: list[tuple[Any, npt.NDArray[Any]]]) -> None:
        for variable, value in pairs:
            variable.assign(value)

    def end_scaled_step(self, finite: bool) -> float:
        arrays = self._optimizer_arrays()
        scale, pairs = after_scaled_step(self.model.optimizer, arrays, finite)
        self._set_optimizer_values(pairs)
        return scale

    def _scale_of(self, optimizer: keras.Optimizer) -> float:
        return loss_scale_of(optimizer)

    def optimizer_slots(self, names: list[str]) -> dict[str, FloatArray] | None:
        return read_slots(self.model.optimizer, self.trained, self._optimizer_arrays(), names)

    def load_optimizer_slots(self, slots: dict[str, FloatArray], step: int) -> None:
        arrays = self._optimizer_arrays()
        changed = with_slots(self.model.optimizer, self.trained, arrays, slots, step)
        self.load_optimizer_state(pack_arrays(changed))

    def _optimizer_arrays(self) -> list[npt.NDArray[Any]]:
        return [np.asarray(v.numpy()) for v in self.model.optimizer.variables]

    @property
    def tables(self) -> ModelTables:
        return ModelTables(self.model, self._scale_of)

    # -- what the driver's callbacks wrote -------------------------------------------------------

    def take_changes(self, changes: VariableChanges) -> None:
        model, optimizer = changed_pairs(self.model, changes)
        self._set_values(model)
        self._set_optimizer_values(optimizer)

    def _set_optimizer_values(self, pairs: list[tuple[Any, npt.NDArray[Any]]]) -> None:
        for variable, value in pairs:
            variable.assign(value)

    # -- the Keras model itself ------------------------------------------------------------------

    def sync_model(self) -> None:  # noqa: B027
        """Writes the training state to the Keras model, for tests and benchmarks.

        Nothing to do where the model itself is trained.
        """

    def reload(self) -> None:
        """Notes that the model was loaded: its frozen variables, and the driver's seeds."""
        self._carried.watch()
        self._streams.loaded()


def _one_batch(stacked: npt.NDArray[Any]) -> Any:
    if stacked.dtype == object:
        return keras.KerasTensor(stacked.shape[1:], "string")
    return stacked[0]


def require_compiled(model: keras.Model) -> None:
    """Raises ModelError unless ``model`` is a compiled ``keras.Model`` with built variables.

    It must have a loss: one that it was compiled with, or of its own.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            "cannot train this object", expected="a compiled keras.Model (Keras 3)",
            received=f"{type(model).__module__}.{type(model).__qualname__}",
        )  # fmt: skip
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ModelError(
            f"model {model.name!r} is not compiled",
            expected="model.compile(optimizer, loss) before it is handed over",
            received="no optimizer",
            hint="call model.compile('adam', 'sparse_categorical_crossentropy') first; to predict, "
            "sparkdl.predict(model, df) takes a model that was never compiled",
        )
    if not model.built or not model.variables:
        raise ModelError(
            f"model {model.name!r} has no variables yet", expected="a built model",
            received="an unbuilt one",
            hint="start it with keras.Input(shape), or call it once on an example batch",
        )  # fmt: skip
    build_if_empty(model)
    unknown = unknown_variables(model)
    if unknown and not has_own(model, "train_step"):
        raise ModelError(
            f"the optimizer of model {model.name!r} lacks variables that it is to train",
            expected="model.compile after what changes the variables (quantize('float8'), LoRA)",
            received=f"variable {unknown[0].path!r}, which is newer than the optimizer's state",
            hint="model.compile(...) again makes an optimizer of all variables, as in Keras",
        )
    if not _can_have_loss(model):
        raise ModelError(
            f"model {model.name!r} has no loss",
            expected="model.compile(optimizer, loss), add_loss in a layer, or a compute_loss or "
            "train_step of the model's own",
            received="model.compile without a loss",
            hint="e.g. model.compile('adam', 'sparse_categorical_crossentropy')",
        )


def _can_have_loss(model: keras.Model) -> bool:
    own_step = has_own(model, "compute_loss", "train_step")
    if own_step or model._compile_loss is not None or model.losses:
        return True
    return _is_own(model) or layers_can_add_loss(model)


def _is_own(model: keras.Model) -> bool:
    return not type(model).__module__.startswith("keras.")


def require_one_batch(stack: BatchStack) -> None:
    """Raises ModelError unless ``stack`` is a single batch, as a gradient is of one."""
    if stack.num_batches != 1:
        raise ModelError(
            "a gradient is of one batch", expected="a stack of 1 batch",
            received=f"{stack.num_batches}",
        )  # fmt: skip
