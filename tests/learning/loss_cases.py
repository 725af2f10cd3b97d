"""Losses whose denominators are not the rows of a batch: workers, and plain Keras on all rows.

Runs with the tests of TensorFlow, and once for each other backend in a process of its own:
``KERAS_BACKEND=jax pytest loss_cases.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from harness import learners_again
from keras import layers, losses, ops
from keras import optimizers as o

from sparkdl.collective.strategy import AllReduceStrategy
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner.state.metric_state import build_metrics, metric_results
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP
from sparkdl.testing.inproc import InprocParameterServer, connect_threads
from sparkdl.training.finite import FiniteCheck
from sparkdl.worker import train

BATCH, EPOCHS, LENGTH, CLASSES = 8, 2, 6, 3
SIZES = {2: [45, 21], 3: [37, 0, 18]}
Data = dict[str, Any]  # x, y and w: an array, or output name -> array; w may be None


# -- models ---------------------------------------------------------------------------------------


def _crossentropy(**arguments: Any) -> Any:
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def words(loss: Any, optimizer: Any = None, *, policy: str | None = None, **compiled: Any) -> Any:
    """A label for each position, and a mask of those that are no words."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(20, 4, mask_zero=True)(inputs)
    h = layers.Dense(5, activation="tanh", dtype=policy)(h)
    outputs = layers.Dense(CLASSES, dtype="float32")(h)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer or o.SGD(0.3), loss, **compiled)
    return model


def numbers(loss: Any, **hidden: Any) -> Any:
    """One label for each row."""
    inputs = keras.Input((LENGTH,))
    h = layers.Dense(5, activation="tanh", **hidden)(inputs)
    model = keras.Model(inputs, layers.Dense(CLASSES)(h))
    model.compile(o.SGD(0.02, momentum=0.5), loss, metrics=["accuracy"])
    return model


def positions(loss: Any, **compiled: Any) -> Any:
    """A label for each position, without a mask."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(20, 4)(inputs)
    model = keras.Model(inputs, layers.Dense(CLASSES)(h))
    model.compile(o.SGD(0.3), loss, **compiled)
    return model


def several() -> Any:
    """Two outputs: masked positions, and a sum over rows; regularizers, and a loss of a layer."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(20, 4, mask_zero=True)(inputs)
    h = layers.Dense(5, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2")(h)
    tags = layers.Dense(CLASSES, name="tags")(h)
    pooled = layers.GlobalAveragePooling1D()(h)
    grade = layers.Dense(1, name="grade")(Small()(pooled))
    model = keras.Model(inputs, {"tags": tags, "grade": grade})
    model.compile(
        o.SGD(0.05),
        {"tags": _crossentropy(), "grade": losses.MeanSquaredError(reduction="sum")},
        loss_weights={"tags": 2.0, "grade": 0.1},
        metrics={"tags": ["accuracy"]},
    )
    return model


@keras.saving.register_keras_serializable("loss_cases")
class Small(layers.Layer):
    """Keeps its inputs small: adds a mean over rows to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.3 * ops.mean(ops.square(inputs)))
        return inputs


class Own(keras.Model):
    """A ``compute_loss`` of its own: Keras' loss, and one more with a mask."""

    def __init__(self, **names: Any) -> None:
        super().__init__(**names)
        self.embed = layers.Embedding(20, 4, mask_zero=True)
        self.out = layers.Dense(CLASSES)
        self.more = _crossentropy(reduction="mean_with_sample_weight")

    def call(self, inputs: Any) -> Any:
        return self.out(self.embed(inputs))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        first = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        weights = ops.cast(ops.not_equal(x, 3), "float32")
        return first + 0.5 * self.more(ops.zeros_like(y), y_pred, weights) + 0.01


def own() -> Any:
    model = Own()
    model(np.ones((1, LENGTH), "int32"))
    model.compile(o.SGD(0.3), _crossentropy())
    return model


# -- data -----------------------------------------------------------------------------------------


def data_of(case: Case, sizes: list[int]) -> list[Data]:
    """The rows of each worker: words of few positions on the first, of many on the others."""
    rng = np.random.default_rng(1)
    least = int(case.labels == "both")  # the mean over no words is no number
    parts = []
    for rank, rows in enumerate(sizes):
        if case.floats:
            x: Any = rng.normal(size=(rows, LENGTH)).astype("float32") + rank
        else:
            x = rng.integers(1, 20, (rows, LENGTH))
            lengths = rng.integers(least, 3, rows) if rank == 0 else rng.integers(4, 7, rows)
            x = (x * (np.arange(LENGTH) < lengths[:, None])).astype("int32")
        tags = rng.integers(0, CLASSES, (rows, LENGTH)).astype("int32")
        tags[rng.random(tags.shape) < (0.7 if rank == 0 else 0.1)] = case.ignored
        grade = rng.normal(size=(rows, 1)).astype("float32")
        y = {"tags": tags, "grade": grade, "both": {"tags": tags, "grade": grade}}
        y["row"] = rng.integers(0, CLASSES, rows).astype("int32")
        low, high = (0.1, 0.5) if rank == 0 else (1.0, 3.0)
        shape = {"rows": (rows,), "positions": (rows, LENGTH), "": ()}[case.weights]
        w = rng.uniform(low, high, shape).astype("float32") if case.weights else None
        parts.append({"x": x, "y": y[case.labels], "w": w})
    return parts


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Args:
        make: The compiled model.
        labels: ``'row'``, ``'tags'`` (one for each position), ``'both'``: of two outputs.
        weights: Sample weights of ``'rows'``, of ``'positions'``, or none.
        floats: Whether the inputs are numbers, not words.
        ignored: The class of a position that is often there on the first worker.
        bound: Between weights of workers and of Keras.
    """

    make: Callable[[], Any]
    labels: str = "tags"
    weights: str = ""
    floats: bool = False
    ignored: int = 0
    bound: float = 2e-6


CASES = {
    "sum": Case(lambda: numbers(_crossentropy(reduction="sum")), "row", floats=True),
    "sum, weights, regularizer": Case(
        lambda: numbers(_crossentropy(reduction="sum"), kernel_regularizer="l2"),
        "row", "rows", floats=True,
    ),
    "mean with sample weight": Case(
        lambda: numbers(_crossentropy(reduction="mean_with_sample_weight")),
        "row", "rows", floats=True,
    ),
    "activity regularizer": Case(
        lambda: numbers(_crossentropy(), activity_regularizer="l2"), "row", floats=True
    ),
    "mask": Case(lambda: words(_crossentropy())),
    "mask, weights": Case(lambda: words(_crossentropy()), weights="positions"),
    "mask, mean with sample weight": Case(
        lambda: words(_crossentropy(reduction="mean_with_sample_weight")), weights="positions"
    ),
    "mask, sum": Case(lambda: words(_crossentropy(reduction="sum"), o.SGD(0.01))),
    "mask, weighted metrics": Case(
        lambda: words(_crossentropy(), weighted_metrics=["accuracy"]), weights="positions"
    ),
    "mask, accumulated": Case(
        lambda: words(_crossentropy(), o.SGD(0.3, gradient_accumulation_steps=2))
    ),
    "mask, half precision": Case(
        lambda: words(
            _crossentropy(),
            o.LossScaleOptimizer(o.SGD(0.3), initial_scale=256.0),
            policy="mixed_float16",
        ),
        bound=3e-3,
    ),
    "positions, weights": Case(lambda: positions(_crossentropy()), weights="positions"),
    "positions, mean with sample weight": Case(
        lambda: positions(_crossentropy(reduction="mean_with_sample_weight")), weights="positions"
    ),
    "ignored class": Case(lambda: positions(_crossentropy(ignore_class=-1)), ignored=-1),
    "two outputs": Case(several, "both"),
    "own compute_loss": Case(own),
}  # fmt: skip


# -- both ways to train ---------------------------------------------------------------------------


def _cut(arrays: Any, part: slice) -> Any:
    if isinstance(arrays, dict):
        return {name: array[part] for name, array in arrays.items()}
    return None if arrays is None else arrays[part]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    return None if parts[0] is None else np.concatenate(parts)


def _is_finite(weights: Any) -> bool:
    return weights is None or bool(np.isfinite(weights).all())


def started(case: Case) -> Any:
    keras.utils.set_random_seed(3)
    model = case.make()
    model.optimizer.build(model.trainable_variables)
    return model


def by_keras(case: Case, parts: list[Data]) -> tuple[np.ndarray, dict[str, float], np.ndarray]:
    """Weights and logs of the last epoch, with every step's rows of all workers as one batch."""
    model = started(case)
    # A graph for any number of rows does not know it, by which Keras weighs each output's loss.
    model.run_eagerly = keras.backend.backend() == "tensorflow"
    first = read_model(model, model_layout(model))
    logs: dict[str, Any] = {}
    reset = model.reset_metrics
    object.__setattr__(model, "reset_metrics", lambda: None)  # train_on_batch would, each time
    for _ in range(EPOCHS):
        reset()
        for step in range(max(-(-len(p["x"]) // BATCH) for p in parts)):
            cut = slice(step * BATCH, (step + 1) * BATCH)
            here = [p for p in parts if len(p["x"][cut]) and _is_finite(_cut(p["w"], cut))]
            x, y, w = (_joined([_cut(p[k], cut) for p in here]) for k in ("x", "y", "w"))
            logs = model.train_on_batch(x, y, sample_weight=w, return_dict=True)
    return read_model(model, model_layout(model)), logs, first


def by_workers(
    case: Case, parts: list[Data], way: str, on_nan: str = "raise"
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Each worker's weights, and the logs of the last epoch of all of them together."""
    with learners_again.of(_starter(case), len(parts)) as learners:
        weights = _train(learners, parts, way, on_nan)
        states = [learner.metrics.state() for learner in learners]
    longest = max(len(state) for state in states)
    total = np.sum([np.pad(s, (0, longest - len(s))) for s in states], axis=0)
    return weights, metric_results(_told(case, parts), total)


@functools.cache
def _starter(case: Case) -> Callable[[], Any]:
    return lambda: started(case)


def _train(learners: list[Any], parts: list[Data], way: str, on_nan: str) -> list[np.ndarray]:
    """The weights of each worker."""
    for rank, learner in enumerate(learners):
        learner.take_stream(rank, len(parts))
    layout = learners[0].layout
    center = read_model(learners[0].model, layout)
    settings = LoopSettings(epochs=EPOCHS, batch_size=BATCH, shuffle=False, follow_schedule=False)
    errors: list[BaseException] = []

    def loop(rank: int, synchronizer: Any) -> None:
        rows = rows_from_numpy(parts[rank]["x"], parts[rank]["y"], parts[rank]["w"])
        batches = Batches(rows, BATCH, shuffle=False, rank=rank)
        train(
            learners[rank], synchronizer, batches, settings,
            num_rows=len(rows), num_workers=len(parts),
        )  # fmt: skip

    def run(work: Callable[[int], None]) -> None:
        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(r,)) for r in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if errors:
            raise errors[0]
        assert not any(t.is_alive() for t in threads), "a worker hangs"

    if way == "synchronous":
        rule = BSP(payload="gradient")
        with InprocParameterServer(ServerConfig(layout, rule, len(parts)), center) as server:

            def in_rounds(rank: int) -> None:
                with server.client(rank) as client:
                    check = FiniteCheck(on_nan, layout.trained_size)
                    loop(rank, ServerSynchronizer(rule, client, layout, False, check=check))

            run(in_rounds)
    else:
        communicators = connect_threads(len(parts))

        def reduced(rank: int) -> None:
            check = FiniteCheck(on_nan, layout.trained_size)
            strategy = AllReduceStrategy(b"0" * 32, layout, on_nan=on_nan)
            communicator = communicators[rank]
            try:
                steps = strategy._steps(communicator, layout, check)
                loop(
                    rank,
                    AllReduceSynchronizer(communicator, layout, steps=steps, check=check),
                )
            except BaseException:
                communicator.close()
                raise

        run(reduced)
        for communicator in communicators:
            communicator.close()
    weights = []
    for learner in learners:
        flat = np.empty(layout.size, np.float32)
        learner.read_weights(flat)
        weights.append(flat)
    return weights


def _told(case: Case, parts: list[Data]) -> Any:
    """A model with metric variables, to ask what the logs of a state are."""
    model = started(case)
    batch = {}
    for key, name in (("x", "features"), ("y", "label"), ("w", "sample_weight")):
        arrays = _cut(parts[0][key], slice(0, BATCH))
        batch[key] = arrays if isinstance(arrays, dict) or arrays is None else {name: arrays}
    build_metrics(model, batch["x"], batch["y"], batch["w"])
    return model


def check(case: Case, size: int, way: str) -> None:
    """Workers learn what one process learns of the same rows, and say of it the same."""
    parts = data_of(case, SIZES[size])
    expected, logs, first = by_keras(case, parts)
    moved = np.abs(expected - first).max()
    assert moved > 0.01
    weights, told = by_workers(case, parts, way)
    for own_weights in weights:
        np.testing.assert_allclose(own_weights, expected, rtol=0, atol=case.bound)
    assert set(told) == set(logs)
    for name, value in logs.items():
        assert told[name] == pytest.approx(float(value), rel=max(1e-5, case.bound)), name


@pytest.mark.parametrize(("size", "way"), [(2, "allreduce"), (3, "synchronous")])
@pytest.mark.parametrize("name", CASES)
def test_workers_divide_by_what_one_process_would(name: str, size: int, way: str) -> None:
    check(CASES[name], size, way)


@pytest.mark.parametrize(("size", "way"), [(2, "allreduce"), (3, "synchronous")])
def test_a_batch_that_is_left_out_leaves_its_denominator_out(size: int, way: str) -> None:
    case = CASES["mask, weights"]
    parts = data_of(case, SIZES[size])
    parts[-1]["w"][BATCH : 2 * BATCH] = np.nan  # the last worker's second batch
    expected, logs, _ = by_keras(case, parts)
    weights, told = by_workers(case, parts, way, on_nan="skip")
    for own_weights in weights:
        np.testing.assert_allclose(own_weights, expected, rtol=0, atol=case.bound)
    assert told["loss"] == pytest.approx(float(logs["loss"]), rel=1e-5)
