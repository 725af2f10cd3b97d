"""The metric variables of a Keras model as one vector, and the metrics' values for such a vector.

Each worker sends the vector of its own rows; the driver adds the vectors up. So a loss that a
``train_step`` of the user's own returns but keeps in no metric would stay at 0: a step made here
puts it into the model's own loss tracker, the mean over rows, unless the user's step has updated
that tracker itself.
"""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.custom_objects import comes_with_keras, compile_settings
from sparkdl.learner.framework import overlaid
from sparkdl.learner.signature import has_own, model_signature
from sparkdl.learner.structure import arrange_batch, map_arrays
from sparkdl.training.learning import Arrays, BatchStack
from sparkdl.training.reports import MetricState

_BY_SHAPE = {"loss": ("crossentropy", "ce"), "metric": ("accuracy", "acc")}
"""Names for which ``compile`` itself chooses by the shapes of labels and outputs."""
_LIBRARIES = ("keras", "tensorflow", "jax", "jaxlib", "torch", "numpy", "sparkdl")


def _unknown_name(model: keras.Model) -> ModelError | None:
    settings, losses, metrics = compile_settings(model), keras.src.losses, keras.src.metrics
    modules = {"loss": losses, "metrics": metrics, "weighted_metrics": metrics}
    names = [(a, name) for a in modules for name in keras.tree.flatten(settings.get(a))]
    for argument, name in names:
        module, kind = modules[argument], "loss" if argument == "loss" else "metric"
        if not isinstance(name, str) or name.lower() in _BY_SHAPE[kind] or _knows(module, name):
            continue
        known = {n for n in (*module.ALL_OBJECTS_DICT, *_BY_SHAPE[kind]) if n.islower()}
        close = [repr(n) for n in difflib.get_close_matches(name.lower(), known)]
        return ModelError(
            f"model {model.name!r} is compiled with a {kind} that Keras does not know",
            expected=f"the name of a {kind} of Keras; your own as a function or object, unquoted",
            received=f"{kind} {name!r}",
            hint=f"did you mean {' or '.join(close)}?" if close else "",
        )
    return None


def _knows(module: Any, name: str) -> bool:
    try:
        module.get(name)
    except Exception:
        return False
    return True


def _failed_part(model: keras.Model, y: Arrays, error: Exception) -> ModelError | None:
    """Blames the metric, or the loss of the user's own, in whose methods the error was raised.

    Returns:
        None if neither is to blame: the batch does not fit the model or a loss of Keras.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    part = next((p for p in (f.f_locals.get("self") for f in frames) if _is_part(p)), None)
    own = part is not None and not comes_with_keras(getattr(part, "_fn", getattr(part, "fn", part)))
    is_metric = isinstance(part, keras.metrics.Metric)
    if part is None or not (is_metric or own):
        return None
    labels = ", ".join(f"{name} {tuple(array.shape[1:])}" for name, array in y.items())
    outputs = model_signature(model).outputs.values()
    shapes = ", ".join(f"{spec.name} {spec.shape}" for spec in outputs)
    return ModelError(
        f"{'metric' if is_metric else 'loss'} {part.name!r} of model {model.name!r} cannot be "
        "computed",
        expected=f"one that takes, for each row, labels {labels} and outputs {shapes}",
        received=f"{type(error).__name__}: {str(error)[:600]}",
        hint=_place_of(error) if own else
        "metrics such as AUC, Precision and Recall compare labels and outputs of one shape: with "
        "loss='categorical_crossentropy' labels are one-hot, also from a column of class numbers",
    )  # fmt: skip


def _place_of(error: Exception) -> str:
    places = [
        f"it was raised in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES
    ]
    return places[-1] if places else ""


def _is_part(thing: object) -> bool:
    is_one = isinstance(thing, (keras.losses.Loss, keras.metrics.Metric))
    return is_one and not type(thing).__module__.endswith("compile_utils")


def build_metrics(model: keras.Model, x: Arrays, y: Arrays, sample_weight: Arrays | None) -> None:
    """Creates a model's metric variables from one example batch, whose values do not matter.

    Raises:
        ModelError: A metric, or a loss of the user's own, cannot be computed for such a batch, or
            Keras knows none of such a name.
        Exception: What Keras raises where the batch does not fit the model.
    """
    try:
        try:
            model._symbolic_build(data_batch=arrange_batch(model, x, y, sample_weight))
        except Exception:
            if not model.run_eagerly:
                raise
            _build_again(model)  # code that wants numbers, as it has in each step
            _build_on_zeros(model, x, y, sample_weight)
    except Exception as error:
        _build_again(model)
        mistake = _unknown_name(model) or _failed_part(model, y, error)
        if mistake is None:
            raise
        raise mistake from error
    if has_own(model, "compute_metrics"):
        with contextlib.suppress(Exception):  # a step raises it where the user can see it
            _find_shown_values(model, x, y, sample_weight)


def _build_on_zeros(model: keras.Model, x: Arrays, y: Arrays, sample_weight: Arrays | None) -> None:
    inputs, labels, weights = _zeros(model, x, y, sample_weight)
    outputs = model(inputs, training=False)
    model.compute_metrics(inputs, labels, outputs, sample_weight=weights)
    model.compute_loss(inputs, labels, outputs, sample_weight=weights, training=False)
    model.reset_metrics()


def _zeros(model: keras.Model, x: Arrays, y: Arrays, sample_weight: Arrays | None) -> Any:
    """The batch in the model's structure, with zeros for all values."""

    def zeros(array: Any) -> npt.NDArray[Any]:
        sizes = [size or 1 for size in array.shape]
        return np.zeros(sizes, keras.backend.standardize_dtype(array.dtype))

    return map_arrays(zeros, arrange_batch(model, x, y, sample_weight))


def _build_again(model: keras.Model) -> None:
    """Makes Keras build loss and metrics at the next batch, and so find the same error again."""
    for part in (model._compile_metrics, model._compile_loss):
        if part is not None:
            part.built = False
    if model._compile_loss is not None:
        model._compile_loss.metrics.clear()  # to which building adds one for each output


def larger_is_better(model: keras.Model, name: str) -> bool | None:
    """Whether a metric is to grow, as Keras' object for it says; None where nothing tells.

    Args:
        model: Compiled.
        name: In a History, also of validation rows.
    """
    name = name.removeprefix("val_")
    outputs = list(model_signature(model).outputs)
    if name == "loss" or name in [f"{output}_loss" for output in outputs]:
        return False
    direction = getattr(_metrics_by_name(model).get(name), "_direction", None)
    return None if direction is None else bool(direction == "up")


def _metrics_by_name(model: keras.Model) -> dict[str, Any]:
    """Name in a History -> metric, of layers and of ``compile``; builds these, as labels do."""
    compiled = model._compile_metrics
    named = {metric.name: metric for metric in model.metrics}
    if compiled is None:
        return named
    with contextlib.suppress(Exception):  # a metric that is none
        if not compiled.built:
            specs = model_signature(model).outputs.values()
            tensors = [keras.KerasTensor((None, *(spec.shape or (1,)))) for spec in specs]
            outputs = tensors if len(tensors) > 1 else tensors[0]
            struct = getattr(model, "_outputs_struct", None)
            outputs = outputs if struct is None else struct
            compiled.build(outputs, outputs)
        with contextlib.ExitStack() as stack:
            for metric in compiled.metrics:  # Keras gives results their names
                stack.enter_context(overlaid(metric, result=lambda metric=metric: metric))
            named |= compiled.result()
    return named


def flatten_arrays(arrays: Iterable[npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Arrays one after the other as one float64 vector."""
    parts = [np.asarray(array, np.float64).ravel() for array in arrays]
    return np.concatenate(parts) if parts else np.zeros(0)


def metric_results(model: keras.Model, state: MetricState) -> dict[str, Any]:
    """The values of the model's metrics for a metric state, also for a sum of several workers'.

    The metric variables of ``model`` must exist (:func:`build_metrics`); they are zeroed
    afterwards. A state of no worker at all is empty and counts as zeros.
    """
    before, offset = len(model._metrics), 0
    attach_shown_values(model)
    try:
        wanted = sum(int(np.prod(v.shape)) for v in model.metrics_variables)
        state = np.pad(state, (0, max(0, wanted - state.size)))
        for variable in model.metrics_variables:
            size = int(np.prod(variable.shape))
            part = state[offset : offset + size].reshape(variable.shape)
            variable.assign(part.astype(keras.backend.standardize_dtype(variable.dtype)))
            offset += size
        told = model.get_metrics_result()
        results = _plain({n: v for n, v in told.items() if n not in _hidden.get(model, ())})
        model.reset_metrics()
    finally:
        model._metrics[before:] = []
    first = {"loss": results["loss"]} if "loss" in results else {}  # Keras 3.10 sorts by name
    return {**first, **results}


def _plain(results: Mapping[str, Any]) -> dict[str, Any]:
    """As numbers and lists; a metric that is a dict of values counts as several, as in Keras."""
    plain: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            plain |= _plain(value)
        else:
            array = np.asarray(keras.ops.convert_to_numpy(value), np.float64)
            plain[name] = float(array) if array.ndim == 0 else array.tolist()
    return plain


class ShownValue(keras.metrics.Metric):  # type: ignore[misc]
    """A value that a ``compute_metrics`` of the user's own shows beside those of metrics.

    Keras shows what it returned for the last batch; of several workers that is the mean, weighted
    by rows. As workers add metric variables up, each such value has a metric: on a worker's model
    as long as it lives, on the driver's while results are made.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, value: object, rows: object) -> None:
        """Takes the value that was shown after a batch of ``rows`` rows."""
        self.rows.assign_add(rows)
        self.total.assign(keras.ops.cast(value, self.total.dtype) * self.rows)

    def result(self) -> Any:
        return keras.ops.divide_no_nan(self.total, self.rows)


_found: WeakKeyDictionary[Any, list[ShownValue]] = WeakKeyDictionary()
_hidden: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The metrics that a ``compute_metrics`` of the user's own leaves out; never the loss."""


def _find_shown_values(
    model: keras.Model, x: Arrays, y: Arrays, sample_weight: Arrays | None
) -> None:
    if model in _found:
        return
    inputs, labels, weights = _zeros(model, x, y, sample_weight)
    outputs = model(inputs, training=False)
    try:
        logs = model.compute_metrics(inputs, labels, outputs, sample_weight=weights)
        known = model.get_metrics_result()
    finally:
        model.reset_metrics()
    more = {name: value for name, value in (logs or {}).items() if name not in known}
    _found[model] = [ShownValue(n) for n, v in more.items() if getattr(v, "shape", ()) == ()]
    _hidden[model] = set(known) - {"loss", *(logs or known)}


def attach_shown_values(model: keras.Model) -> None:
    """Makes the values that were found metrics of the model."""
    present = model._metrics
    for value in _found.get(model, ()):
        if not any(metric is value for metric in present):
            list.append(present, value)  # Keras' own list refuses it, for a model that is built


class ModelMetrics:
    """The metric variables of a model in training, which Keras makes at the first batch.

    See :class:`sparkdl.training.learning.LearnerMetrics`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._ready = False
        self._kept: list[Any] | None = None

    def build(self, stack: BatchStack) -> None:
        """Creates the variables, unless they are there."""
        if not self._ready:
            example = (stack.x, stack.y, stack.sample_weight)
            build_metrics(self._model, *map_arrays(_one_batch, example))
            attach_shown_values(self._model)
            self._ready = True
            self.take_over()

    def take_over(self) -> None:
        """Called when Keras itself has set the variables."""

    def state(self) -> MetricState:
        return flatten_arrays(self.values())

    def reset(self) -> None:
        self.zero()
        self._kept = None

    def zero(self) -> None:
        """Zeroes the variables; what was kept stays."""
        self._model.reset_metrics()
        self.take_over()

    def keep(self) -> None:
        self._kept = self.values() if self._ready else None

    def restore(self) -> None:
        if self._kept is None:
            self.zero()
        else:
            self.set_values(self._kept)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Keeps the variables within, and gives them back; what was kept before stays so."""
        former = self._kept
        self.keep()
        try:
            yield
        finally:
            self.restore()
            self._kept = former

    def values(self) -> list[Any]:
        """Copies of the variables' values."""
        return [np.array(v.numpy()) for v in self._model.metrics_variables]

    def set_values(self, values: list[Any]) -> None:
        """Sets what :meth:`values` has returned."""
        for variable, value in zip(self._model.metrics_variables, values, strict=True):
            variable.assign(value)


def _one_batch(stacked: npt.NDArray[Any]) -> Any:
    if stacked.dtype == object:
        return keras.KerasTensor(stacked.shape[1:], "string")
    return stacked[0]


def logged_step(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """The model's ``train_step`` or ``test_step``, whose loss reaches the loss tracker.

    Args:
        model: Compiled.
    """
    step: Callable[[Any], Any] = getattr(model, name)
    tracker = _tracker(model, name)
    if tracker is None and not has_own(model, "compute_metrics"):
        return step

    def logged(data: object) -> Any:
        before = None if tracker is None else keras.ops.copy(tracker.count)
        logs = step(data)
        _count_shown(model, logs, data, tracker, before)
        return logs

    return logged


def stateless_logged_step(
    model: keras.Model, name: str, metrics_at: int
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The same for JAX, whose steps take the training state and return the next.

    Args:
        model: Compiled.
        metrics_at: Where the metric variables are in the state.
    """
    step: Callable[[Any, Any], tuple[Any, Any]] = getattr(model, name)
    tracker = _tracker(model, name)
    if tracker is None and not has_own(model, "compute_metrics"):
        return step

    def logged(state: Any, data: object) -> tuple[Any, Any]:
        variables, count = model.metrics_variables, getattr(tracker, "count", None)
        values = zip(variables, state[metrics_at], strict=True)
        before = next((value for variable, value in values if variable is count), None)
        logs, after = step(state, data)
        pairs = list(zip(variables, after[metrics_at], strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            _count_shown(model, logs, data, tracker, before)
        metrics = [scope.get_current_value(variable) for variable in variables]
        return logs, (*after[:metrics_at], metrics, *after[metrics_at + 1 :])

    return logged


def _count_shown(model: keras.Model, logs: object, data: object, tracker: Any, before: Any) -> None:
    """Counts what a step shows beside metrics, and its loss unless it has updated the tracker.

    Args:
        tracker: The loss tracker, of a step of the user's own.
        before: The rows that it had counted before the step.
    """
    if not isinstance(logs, dict):
        return
    rows = keras.ops.cast(keras.ops.shape(keras.tree.flatten(data)[0])[0], "float32")
    for value in _found.get(model, ()):
        if value.name in logs:
            value.update_state(logs[value.name], rows)
    if tracker is not None and logs.get("loss") is not None:
        untracked = keras.ops.cast(keras.ops.equal(tracker.count, before), "float32")
        tracker.update_state(logs["loss"], sample_weight=rows * untracked)


def _tracker(model: keras.Model, name: str) -> Any:
    tracker = model._loss_tracker if has_own(model, name) else None
    return tracker if any(metric is tracker for metric in model.metrics) else None
