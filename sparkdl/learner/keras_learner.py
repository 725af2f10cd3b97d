"""What the three backends share: layout, metrics, structure of inputs, optimizer state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.optimizer_state import pack_arrays, read_slots, with_slots
from sparkdl.learner.signature import list_names, takes_list
from sparkdl.protocols import Arrays, BatchStack, Reducer
from sparkdl.weights import FloatArray, Layout


class KerasLearner:
    """The backend-independent half of a learner around one compiled ``keras.Model``.

    Args:
        model: Built and compiled. The learner trains it in place.

    Raises:
        ModelError: The model is not compiled or not built.
    """

    def __init__(self, model: Any) -> None:
        require_compiled(model)
        self.model = model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.trained = list(model.trainable_variables)
        self.averaged = averaged_variables(model)
        self._layout = layout_of(self.trained, self.averaged)
        self._metrics_ready = False
        self._has_gradient: list[bool] = []

    @property
    def layout(self) -> Layout:
        return self._layout

    # -- structure -----------------------------------------------------------------------------

    def inputs(self, x: Arrays) -> Any:
        """The dict of input arrays in the structure that the model's ``call`` takes."""
        return arrange_inputs(self.model, x)

    def targets(self, y: Arrays) -> Any:
        """The dict of label arrays in the structure of the model's outputs."""
        struct = getattr(self.model, "_outputs_struct", None)
        return arrange(y, struct, _names(self.model, "output"))

    def data(self, x: Arrays, y: Arrays, sample_weight: Arrays | None) -> tuple[Any, Any, Any]:
        """The ``(x, y, sample_weight)`` triple of Keras' ``train_step``."""
        weights = None if sample_weight is None else self.targets(sample_weight)
        return self.inputs(x), self.targets(y), weights

    def build_metrics(self, window: BatchStack) -> None:
        """Creates the metric variables, which Keras makes at the first batch."""
        if self._metrics_ready:
            return
        weight = window.sample_weight
        batch = self.data(
            {k: v[0] for k, v in window.x.items()},
            {k: v[0] for k, v in window.y.items()},
            None if weight is None else {k: v[0] for k, v in weight.items()},
        )
        self.model._symbolic_build(data_batch=batch)
        self._metrics_ready = True

    # -- steps in two halves ---------------------------------------------------------------------

    def gradients(self, window: BatchStack, out: FloatArray) -> None:
        raise NotImplementedError

    def apply_gradients(self, flat: FloatArray) -> None:
        raise NotImplementedError

    def train_reducing(self, window: BatchStack, reducer: Reducer) -> None:
        for batch in window.single_batches():
            reducer.rows = batch.num_rows
            self.gradients(batch, reducer.buffer)
            self._has_gradient = reducer.agree_on_gradients(self._has_gradient)
            for part, place in enumerate(reducer.parts):
                reducer.begin(part, reducer.buffer[place])
            reducer.finish()
            self.apply_gradients(reducer.buffer)

    def skip_reducing(self, reducer: Reducer) -> None:
        reducer.rows = 0
        self._has_gradient = reducer.agree_on_gradients([]) or self._has_gradient
        for part, place in enumerate(reducer.parts):
            reducer.begin(part, reducer.buffer[place])
        if reducer.finish():
            self.apply_gradients(reducer.buffer)

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        self._has_gradient = agree(self._has_gradient) or self._has_gradient

    # -- metrics -------------------------------------------------------------------------------

    def metric_state(self) -> npt.NDArray[np.float64]:
        return flatten_metrics(self.model)

    def reset_metrics(self) -> None:
        self.model.reset_metrics()

    def evaluate(self, windows: Iterable[BatchStack]) -> npt.NDArray[np.float64]:
        saved: list[Any] | None = None
        for window in windows:
            self.build_metrics(window)
            if saved is None:
                saved = [np.array(v.numpy()) for v in self.model.metrics_variables]
                self.reset_metrics()
            self._evaluate_stack(window)
        if saved is None:
            return np.zeros(0)
        state = self.metric_state()
        for variable, value in zip(self.model.metrics_variables, saved, strict=True):
            variable.assign(value)
        return state

    def _evaluate_stack(self, window: BatchStack) -> None:
        raise NotImplementedError

    # -- optimizer -----------------------------------------------------------------------------

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate follows a schedule instead of being a variable."""
        rate = getattr(_innermost(self.model.optimizer), "_learning_rate", None)
        return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    @property
    def learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(_innermost(self.model.optimizer).learning_rate))

    def set_learning_rate(self, value: float) -> None:
        if self.has_schedule:
            raise ConfigError(
                "cannot set the learning rate of a running fit",
                expected="an optimizer with a plain learning rate",
                received="a LearningRateSchedule",
                hint="use either the schedule or a callback that sets the rate, not both",
            )
        _innermost(self.model.optimizer).learning_rate = value

    @property
    def step(self) -> int:
        return int(keras.ops.convert_to_numpy(_innermost(self.model.optimizer).iterations))

    def set_step(self, step: int) -> None:
        if self.has_schedule:
            _innermost(self.model.optimizer).iterations.assign(step)

    def optimizer_state(self) -> bytes:
        return pack_arrays(self._optimizer_arrays())

    def optimizer_slots(self, names: list[str]) -> dict[str, FloatArray] | None:
        return read_slots(self.model.optimizer, self.trained, self._optimizer_arrays(), names)

    def load_optimizer_slots(self, slots: dict[str, FloatArray], step: int) -> None:
        arrays = self._optimizer_arrays()
        changed = with_slots(self.model.optimizer, self.trained, arrays, slots, step)
        self.load_optimizer_state(pack_arrays(changed))

    def _optimizer_arrays(self) -> list[npt.NDArray[Any]]:
        return [np.asarray(v.numpy()) for v in self.model.optimizer.variables]

    def load_optimizer_state(self, state: bytes) -> None:
        load_optimizer_state(self.model, state)

    def read_weights(self, out: FloatArray) -> None:
        raise NotImplementedError

    def dump_state(self) -> bytes:
        """Weights and optimizer state, for a worker that joins in the middle of a run."""
        weights = np.empty(self._layout.size, np.float32)
        self.read_weights(weights)
        return weights.tobytes() + self.optimizer_state()

    def load_state(self, state: bytes) -> None:
        """The counterpart of :meth:`dump_state`."""
        split = self._layout.size_bytes
        self.write_weights(np.frombuffer(state[:split], np.float32).copy())
        self.load_optimizer_state(state[split:])

    def sync_model(self) -> None:
        """Nothing to do where the model itself is trained."""

    def reload(self) -> None:
        """Nothing to do where the model itself is trained."""

    # -- prediction ----------------------------------------------------------------------------

    def predict(self, x: Arrays) -> Arrays:
        outputs = self._predict(self.inputs(x))
        return name_outputs(self.model, outputs)

    def _predict(self, x: Any) -> Any:
        raise NotImplementedError

    def write_weights(self, flat: FloatArray) -> None:
        raise NotImplementedError


def require_compiled(model: Any) -> None:
    """Raises ModelError unless ``model`` is a compiled ``keras.Model`` with built variables."""
    if not isinstance(model, keras.Model):
        raise ModelError(
            "cannot train this object",
            expected="a compiled keras.Model (Keras 3)",
            received=f"{type(model).__module__}.{type(model).__qualname__}",
        )
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ModelError(
            f"model {model.name!r} is not compiled",
            expected="model.compile(optimizer, loss) before it is handed over",
            received="no optimizer",
            hint="call model.compile('adam', 'sparse_categorical_crossentropy') first",
        )
    if not model.built or not model.variables:
        raise ModelError(
            f"model {model.name!r} has no variables yet",
            expected="a built model",
            received="an unbuilt one",
            hint="start it with keras.Input(shape), or call it once on an example batch",
        )


def require_one_batch(window: BatchStack) -> None:
    """Raises ModelError unless ``window`` is a single batch, as a gradient is of one."""
    if window.num_batches != 1:
        raise ModelError(
            "a gradient is of one batch",
            expected="a window of 1 batch",
            received=f"{window.num_batches}",
        )


def match_gradients(
    model: Any, captured: Iterable[tuple[Any, Any]], trained: Iterable[Any]
) -> list[Any]:
    """The gradient of each variable of ``trained``, None where it has none.

    Args:
        model: The model, for the message.
        captured: ``(gradient, variable)`` pairs that ``train_step`` gave to the optimizer.
        trained: The variables, in the layout's order.

    Raises:
        ModelError: ``train_step`` did not step the model's optimizer exactly once.
    """
    found: dict[int, Any] = {}
    steps = 0
    for gradient, variable in captured:
        steps = max(steps, 2 if id(variable) in found else 1)
        found[id(variable)] = gradient
    if steps != 1:
        raise ModelError(
            f"the train_step of model {model.name!r} has no gradient to exchange",
            expected="one step of model.optimizer per batch",
            received="none" if steps == 0 else "several",
            hint="a custom train_step like this trains in the modes that exchange weights: "
            "mode='asynchronous', or a frequency above one batch",
        )
    return [found.get(id(variable)) for variable in trained]


def averaged_variables(model: Any) -> list[Any]:
    """Running statistics: float variables made untrainable by their layer (not merely frozen)."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if isinstance(layer, keras.metrics.Metric):
            continue
        for variable in layer._non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                found[id(variable)] = variable
    return [v for v in model.non_trainable_variables if id(v) in found]


def layout_of(trained: Iterable[Any], averaged: Iterable[Any]) -> Layout:
    """The layout of a model's variables (anything with ``path``, ``shape`` and ``dtype``)."""
    return Layout.of(
        [(v.path, v.shape, str(v.dtype)) for v in trained],
        [(v.path, v.shape, str(v.dtype)) for v in averaged],
    )


def model_layout(model: Any) -> Layout:
    """The layout of a built model, the same on the driver and on every worker."""
    return layout_of(model.trainable_variables, averaged_variables(model))


def read_model(model: Any, layout: Layout) -> FloatArray:
    """A model's variables as one flat buffer."""
    variables = [*model.trainable_variables, *averaged_variables(model)]
    return layout.flatten([np.asarray(v.numpy(), np.float32) for v in variables])


def write_model(model: Any, layout: Layout, flat: FloatArray) -> None:
    """Sets a model's variables from one flat buffer."""
    variables = [*model.trainable_variables, *averaged_variables(model)]
    for variable, value in zip(variables, layout.views(flat), strict=True):
        variable.assign(value)


def flatten_metrics(model: Any) -> npt.NDArray[np.float64]:
    """All metric variables of a model as one float64 vector."""
    return flatten_arrays(v.numpy() for v in model.metrics_variables)


def flatten_arrays(arrays: Iterable[npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Arrays one after the other as one float64 vector."""
    parts = [np.asarray(array, np.float64).ravel() for array in arrays]
    return np.concatenate(parts) if parts else np.zeros(0)


def metric_results(model: Any, state: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The values of the model's metrics for a (merged) metric state.

    The model's metrics must be built. They are reset afterwards. What ``state`` is too short for
    counts as zero: workers without rows have no metrics.
    """
    offset = 0
    wanted = sum(int(np.prod(v.shape)) for v in model.metrics_variables)
    state = np.pad(state, (0, max(0, wanted - state.size)))
    for variable in model.metrics_variables:
        size = int(np.prod(variable.shape))
        part = state[offset : offset + size].reshape(variable.shape)
        variable.assign(part.astype(keras.backend.standardize_dtype(variable.dtype)))
        offset += size
    results: dict[str, Any] = {}
    for name, value in model.get_metrics_result().items():
        array = np.asarray(keras.ops.convert_to_numpy(value), np.float64)
        results[name] = float(array) if array.ndim == 0 else array.tolist()
    model.reset_metrics()
    return results


def build_metrics(model: Any, x: Arrays, y: Arrays, sample_weight: Arrays | None) -> None:
    """Creates a model's metric variables from one example batch (values do not matter)."""
    inputs = arrange_inputs(model, x)
    struct, names = getattr(model, "_outputs_struct", None), _names(model, "output")
    weights = None if sample_weight is None else arrange(sample_weight, struct, names)
    model._symbolic_build(data_batch=(inputs, arrange(y, struct, names), weights))


def load_optimizer_state(model: Any, state: bytes) -> None:
    """Sets a model's optimizer variables from :meth:`KerasLearner.optimizer_state`."""
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
        values = [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
    if len(values) != len(optimizer.variables):
        raise ModelError(
            "the optimizer state does not fit the optimizer",
            expected=f"{len(optimizer.variables)} variables",
            received=f"{len(values)}",
        )
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)


def arrange(arrays: Arrays, struct: Any, names: list[str]) -> Any:
    """Puts named arrays into the structure (tensor, list or dict) that a model works with."""
    if len(arrays) == 1 and not isinstance(struct, dict):
        return next(iter(arrays.values()))
    if isinstance(struct, (list, tuple)) and set(names) == set(arrays):
        return [arrays[name] for name in names]
    return dict(arrays)


def arrange_inputs(model: Any, x: Arrays) -> Any:
    """Puts named input arrays into the structure that a model's ``call`` takes."""
    struct = getattr(model, "_inputs_struct", None)
    if struct is None and takes_list(model):
        return [x[name] for name in list_names(len(x))]
    return arrange(x, struct, _names(model, "input"))


def name_outputs(model: Any, outputs: Any) -> Arrays:
    """A model's outputs as a dict by output name."""
    if isinstance(outputs, dict):
        return {k: keras.ops.convert_to_numpy(v) for k, v in outputs.items()}
    names = _names(model, "output")
    if isinstance(outputs, (list, tuple)):
        if len(names) != len(outputs):
            names = [f"output_{i}" for i in range(len(outputs))]
        return {n: keras.ops.convert_to_numpy(v) for n, v in zip(names, outputs, strict=True)}
    return {names[0] if names else "output": keras.ops.convert_to_numpy(outputs)}


def _names(model: Any, side: str) -> list[str]:
    """The names of a model's inputs or outputs; empty for a subclassed model."""
    names = getattr(model, f"{side}_names", None)
    if names:
        return [str(n) for n in names]
    tensors = getattr(model, f"_{side}s", None) or []
    return [str(getattr(t, "name", i)) for i, t in enumerate(tensors)]


def _innermost(optimizer: Any) -> Any:
    """The optimizer that steps, inside a LossScaleOptimizer or another wrapper."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer
