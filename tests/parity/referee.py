"""The two sides of a case: plain Keras on the global batches, and sparkdl; and their comparison."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from case import Arrays, Case, build, callbacks_of, class_weight, cut, rows
from local_spark import LocalSession, LocalSparkModel, Workers, without_spark
from own_parts import CUSTOM, Checkpoints, Reads

from sparkdl import Network, SparkModel
from sparkdl.data import Batches, read_partition
from sparkdl.errors import ModelError, SparkDLError
from sparkdl.files.model_file import read_model
from sparkdl.layers import recompute_segments
from sparkdl.learner.archives.archive import encode_model
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state.metric_state import metric_results
from sparkdl.spark.fit.plan import _SEED_STEP
from sparkdl.spark.fit.trained_model import prepare_metrics
from sparkdl.spark.forms.arrays import by_name
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.forms.wire import named_batches
from sparkdl.spark.inference.evaluate import evaluate_source
from sparkdl.spark.spark_model import load_as

EPOCHS = 2
LIMITS = {"bfloat16": 8e-3, "float16": 1e-3}
"""How far two results may be apart where it is not 1e-5: the step from 1 to the next number, which
is 2 ** -7 for bfloat16 and 2 ** -10 for float16."""


@dataclass
class Outcome:
    """All that a user can see of a training.

    Args:
        variables: Path -> value of the model's variables, without those of random seeds.
        optimizer: The optimizer's variables, in order.
        histories: Of each fit.
        evaluated: What ``evaluate`` says of rows that were not trained on.
        predicted: By output.
        seen: What a callback saw.
    """

    variables: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    histories: list[dict[str, list[float]]]
    evaluated: dict[str, Any]
    predicted: list[np.ndarray]
    seen: list[Any] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether all weights are numbers."""
        return all(np.isfinite(value).all() for value in self.variables.values())


@dataclass(frozen=True)
class Refused:
    """One error before a job."""

    error: SparkDLError


def values_of(variables: Sequence[Any]) -> dict[str, np.ndarray]:
    named = {}
    for number, variable in enumerate(variables):
        if "seed" in variable.path.rsplit("/", 1)[-1]:
            continue
        value = np.asarray(keras.ops.convert_to_numpy(variable.value))
        named[f"{number} {variable.path}"] = value.astype("float64")
    return named


# -- plain Keras -----------------------------------------------------------------------------------


class Orders:
    """In which order sparkdl takes the rows of a worker: that is its own choice.

    Args:
        case: What is trained.
        model: For which the rows are.
        every: The rows of all workers.
        sizes: How many rows each worker has.
    """

    def __init__(
        self, case: Case, model: Any, every: tuple[Arrays, Arrays, Arrays], sizes: tuple[int, ...]
    ) -> None:
        session = LocalSession(None, sizes, ())
        signature = model_signature(model)
        with without_spark(session):
            data = by_name(as_keras(case, *every), signature)
            source = form_of(data).open(signature, Columns())
        self._rows = []
        for stream in source.frame.partitions():
            with pa.ipc.open_stream(stream) as batches:
                partition = read_partition(named_batches(batches, source.spec), source.spec)
            if case.shuffle:
                partition.find_order()
            self._rows.append(partition.under(source.spec).train)
        self._places = [_keys(*part) for part in parts_of(every, sizes)]

    def order(self, rank: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        """The numbers of the rows of a rank, as it trains them in an epoch."""
        rows = self._rows[rank]
        taken = Batches(
            rows, len(rows), seed=seed, rank=rank, prefetch=0, by_content=True, shuffle=shuffle
        )
        (stack,) = taken.stacks(epoch, 1)
        groups = (stack.x, stack.y, stack.sample_weight or {})
        x, y, weights = ({n: a[0] for n, a in group.items()} for group in groups)
        left = list(self._places[rank])
        order = []
        for key in _keys(x, y, weights):
            order.append(left.index(key))
            left[order[-1]] = b""
        return np.asarray(order)


def _keys(*groups: Mapping[str, np.ndarray]) -> list[bytes]:
    """The content of each row: rows that differ in their weight alone are told apart, too."""
    arrays = [array for group in groups for _, array in sorted(group.items())]
    if not len(arrays[0]):
        return []
    arrays = [a.reshape(len(a), -1).astype("float32") for a in arrays]
    return [row.tobytes() for row in np.concatenate(arrays, axis=1)]


class GlobalBatches(keras.utils.PyDataset):
    """Step t has the t-th batch of each worker, as one batch."""

    def __init__(
        self,
        case: Case,
        parts: list[tuple[Arrays, Arrays, Arrays]],
        orders: Orders,
        seed: int,
        stirred: int = 0,
    ) -> None:
        super().__init__()
        self._case, self._parts, self._epoch, self._orders = case, parts, 0, orders
        self._seed, self._stirred = seed, stirred

    def begin(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return max(-(-_count(part) // self._case.batch) for part in self._parts)

    def __getitem__(self, step: int) -> Any:
        picked = []
        for rank, part in enumerate(self._parts):
            order = self._order(rank, _count(part))
            places = order[step * self._case.batch : (step + 1) * self._case.batch]
            if self._stirred:
                places = np.random.default_rng([self._stirred, step]).permutation(places)
            if len(places):
                picked.append([{n: a[places] for n, a in arrays.items()} for arrays in part])
        joined = [
            {name: np.concatenate([arrays[name] for arrays in group]) for name in group[0]}
            for group in zip(*picked, strict=True)
        ]
        return as_keras(self._case, *joined)

    def _order(self, rank: int, count: int) -> np.ndarray:
        if not self._case.shuffle or not count:
            return np.arange(count)
        return self._orders.order(rank, self._seed, self._epoch)


def _count(part: tuple[Arrays, Arrays, Arrays]) -> int:
    return len(next(iter(part[0].values())))


def as_keras(case: Case, x: Arrays, y: Arrays, w: Arrays) -> tuple[Any, ...]:
    """Rows as Keras takes them: single arrays, tuples in the model's order, or dicts by name."""

    def plain(arrays: Arrays) -> Any:
        if case.form == "named":
            return {
                f"in_{name}".replace(" ", "_") if arrays is x else name: array
                for name, array in arrays.items()
            }
        values = list(arrays.values())
        if arrays is not x and len(values) < len(case.heads):
            return dict(arrays)  # some outputs have no labels
        return values[0] if len(values) == 1 else tuple(values)

    return (plain(x), plain(y), plain(w)) if w else (plain(x), plain(y))


class ListOfBatches(keras.utils.PyDataset):
    """Batches as they are."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Any:
        return self._batches[number]


class WorkersBatches(ListOfBatches):
    """The batches on which the workers validate: each worker's, of its own rows."""

    def __init__(self, case: Case, model: Any) -> None:
        every, sizes = rows(case, case.held_out, 1), case.held_out_sizes
        orders = Orders(case, model, every, sizes)
        batches = []
        for rank, part in enumerate(parts_of(every, sizes)):
            order = np.arange(sizes[rank])
            if case.shuffle and len(order):
                order = orders.order(rank, 0, 0, shuffle=False)
            for first in range(0, len(order), case.batch):
                places = order[first : first + case.batch]
                picked = [{n: a[places] for n, a in arrays.items()} for arrays in part]
                batches.append(as_keras(case, *picked))
        super().__init__(batches)


class _Begins(keras.callbacks.Callback):
    def __init__(self, batches: GlobalBatches) -> None:
        super().__init__()
        self._batches = batches

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches.begin(epoch)


def train_with_keras(case: Case, nudge: float = 0.0, stirred: int = 0) -> Outcome:
    """Plain Keras, in this process, mostly eagerly: to trace so small a model takes longer.

    Args:
        case: What is trained.
        nudge: By which share the first weights are others, to see what rounding alone does.
        stirred: Seed of another order of the rows within each batch, to see the same; 0 for none.
    """
    model = build(case)
    for number, variable in enumerate(model.trainable_variables if nudge else ()):
        signs = np.random.default_rng(number).choice([-1.0, 1.0], variable.shape)
        variable.assign(variable * (1.0 + nudge * signs).astype("float32"))
    _set_eagerly(case, model)
    every = rows(case, sum(case.sizes))
    parts = parts_of(every, case.sizes)
    orders = Orders(case, model, every, case.sizes)
    validation: Any = None
    if case.held_out:
        validation = as_keras(case, *rows(case, case.held_out, 1))
        if case.loss_depends_on_batches:
            validation = WorkersBatches(case, model)
    seen: list[Any] = []
    histories = []
    trained = 0
    for what in case.fits:
        if what == "save":
            model = reloaded(model)
            _set_eagerly(case, model)
            continue
        batches = GlobalBatches(case, parts, orders, _SEED_STEP * trained, stirred)
        callbacks = callbacks_of(case)
        first, last = epochs_of(what)
        history = model.fit(
            batches, epochs=last, initial_epoch=first, verbose=0, shuffle=False,
            callbacks=[_Begins(batches), *callbacks], class_weight=class_weight(case),
            validation_data=validation,
            validation_batch_size=None if case.loss_depends_on_batches else case.batch,
        )  # fmt: skip
        trained += len(history.epoch)
        histories.append(history.history)
        seen += seen_by(callbacks)
    batches = [as_keras(case, *part) for part in batches_of(case, *fresh_rows(case))]
    if _counts_batches_alike(case):
        model.run_eagerly, model.test_function = False, None
    evaluated = model.evaluate(ListOfBatches(batches), verbose=0, return_dict=True)
    reset_states(model)
    predicted = model.predict(ListOfBatches([batch[:1] for batch in batches]), verbose=0)
    return outcome_of(model, histories, evaluated, predicted, seen)


def _counts_batches_alike(case: Case) -> bool:
    """Whether Keras weighs each batch alike in the losses of several outputs: in compiled steps."""
    losses = [head for head in case.heads if not head.endswith(":none")]
    return len(losses) > 1 and not case.eager and keras.backend.backend() == "tensorflow"


def _set_eagerly(case: Case, model: Any) -> None:
    """Lets Keras run eagerly, unless that gives other numbers; several workers count rows."""
    model.run_eagerly = len(case.sizes) > 1 or not _counts_batches_alike(case)


def seen_by(callbacks: list[Any]) -> list[Any]:
    """What callbacks saw, and the files that they wrote."""
    seen = [c.seen for c in callbacks if isinstance(c, Reads)]
    return seen + [c.files() for c in callbacks if isinstance(c, Checkpoints)]


def fresh_rows(case: Case) -> tuple[tuple[Arrays, Arrays, Arrays], tuple[int, ...]]:
    """Rows that nobody was trained on, and how many of them each worker evaluates."""
    if case.fixed:
        return rows(case, 2 * case.batch, 2), (2 * case.batch,)
    return rows(case, 7, 2), ((5, 2) if len(case.sizes) > 1 else (7,))


def batches_of(
    case: Case, every: tuple[Arrays, Arrays, Arrays], sizes: tuple[int, ...]
) -> list[tuple[Arrays, Arrays, Arrays]]:
    """The batches in which workers evaluate rows."""
    size = evaluated_at_once(case)
    found: list[Any] = []
    for part in parts_of(every, sizes):
        for first in range(0, _count(part), size):
            place = slice(first, first + size)
            found.append(tuple({n: a[place] for n, a in arrays.items()} for arrays in part))
    return found


def reset_states(model: Any) -> None:
    """Keras' ``evaluate`` changes the states of stateful layers; workers evaluate with copies."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            layer.reset_state()


def evaluated_at_once(case: Case) -> int:
    return case.batch if case.fixed else 3


def epochs_of(what: str) -> tuple[int, int]:
    return {"fit": (0, EPOCHS), "on": (EPOCHS, EPOCHS + 1), "again": (0, 1)}[what]


def parts_of(
    every: tuple[Arrays, Arrays, Arrays], sizes: tuple[int, ...]
) -> list[tuple[Arrays, Arrays, Arrays]]:
    """The rows of each worker."""
    return [
        tuple({name: array[place] for name, array in arrays.items()} for arrays in every)  # type: ignore[misc]
        for place in cut(sizes)
    ]


def reloaded(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        return keras.models.load_model(path, custom_objects=CUSTOM, safe_mode=False)


def outcome_of(
    model: Any, histories: Any, evaluated: Any, predicted: Any, seen: list[Any]
) -> Outcome:
    several = [*predicted.values()] if isinstance(predicted, dict) else predicted
    several = several if isinstance(several, (list, tuple)) else [several]
    return Outcome(
        values_of(model.variables),
        values_of(model.optimizer.variables),
        [{k: np.asarray(v, "float64").tolist() for k, v in h.items()} for h in histories],
        {k: np.asarray(v, "float64").tolist() for k, v in evaluated.items()},
        [np.asarray(keras.ops.convert_to_numpy(p), "float64") for p in several],
        seen,
    )


# -- sparkdl ---------------------------------------------------------------------------------------


def train_with_sparkdl(case: Case, mode: str, workers: Workers) -> Outcome | Refused:
    """``SparkModel`` in ``mode``, on the workers' processes."""
    session = LocalSession(workers, case.sizes, case.held_out_sizes)
    model = build(case)
    if case.segments:
        with contextlib.suppress(ModelError):  # a subclass, or nothing joins its parts alone
            model = recompute_segments(model, case.segments)
    every = rows(case, sum(case.sizes))
    validation: dict[str, Any] = {}
    if case.held_out and case.split:
        count = sum(case.sizes) + case.held_out
        every = joined(every, rows(case, case.held_out, 1))
        validation["validation_split"] = (case.held_out - 0.5) / count
    elif case.held_out:
        validation["validation_data"] = as_keras(case, *rows(case, case.held_out, 1))
    data = as_keras(case, *every)
    seen: list[Any] = []
    histories = []
    jobs = workers.jobs
    settings: dict[str, Any] = {"mode": mode, "batch_size": case.batch, "frequency": "batch"}
    if mode != "allreduce":
        settings["network"] = Network(num_servers=case.servers)
    try:
        spark_model: SparkModel = LocalSparkModel.of(session)(
            model, num_workers=len(case.sizes), custom_objects=CUSTOM, **settings
        )
        for what in case.fits:
            if what == "save":
                spark_model = _reloaded(spark_model, session)
                continue
            callbacks = callbacks_of(case)
            first, last = epochs_of(what)
            history = spark_model.fit(
                data, epochs=last, initial_epoch=first, verbose=0, shuffle=case.shuffle,
                callbacks=callbacks or None, class_weight=class_weight(case),
                **validation,
            )  # fmt: skip
            histories.append(history.history)
            seen += seen_by(callbacks)
    except SparkDLError as error:
        if workers.jobs > jobs:
            raise
        return Refused(error)
    fresh, session.sizes = fresh_rows(case)
    size = evaluated_at_once(case)
    evaluated = evaluate_on_workers(spark_model, as_keras(case, *fresh), session, size)
    reset_states(spark_model.model)
    predicted = spark_model.predict(as_keras(case, *fresh)[0], batch_size=size)
    return outcome_of(spark_model.model, histories, evaluated, predicted, seen)


def joined(
    first: tuple[Arrays, Arrays, Arrays], last: tuple[Arrays, Arrays, Arrays]
) -> tuple[Arrays, Arrays, Arrays]:
    """The rows of both."""
    groups = zip(first, last, strict=True)
    return tuple({n: np.concatenate([a[n], b[n]]) for n in a} for a, b in groups)  # type: ignore[return-value]


def evaluate_on_workers(
    spark_model: SparkModel, data: Any, session: LocalSession, batch_size: int
) -> dict[str, Any]:
    """``evaluate`` as of a DataFrame: each partition on a worker."""
    model = spark_model.model
    with without_spark(session):
        signature = model_signature(model)
        source = form_of(by_name(data, signature)).open(signature, Columns())
        prepare_metrics(model, source, batch_size)
        archive = encode_model(model, spark_model.custom_objects)
        state = evaluate_source(source, archive, batch_size=batch_size, use_gpu="auto")
    results: dict[str, Any] = metric_results(model, state)
    return results


def _reloaded(spark_model: SparkModel, session: LocalSession) -> SparkModel:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        spark_model.save(path)
        return load_as(LocalSparkModel.of(session), read_model(path), path, CUSTOM, False)


# -- comparison ------------------------------------------------------------------------------------


def differences(case: Case, keras_: Outcome, ours: Outcome) -> list[str]:
    """What differs beyond rounding, a line each."""
    limit = next((limit for name, limit in LIMITS.items() if name in case.policy), 1e-5)
    found: list[str] = []

    def compare(what: str, expected: Any, received: Any, scale: float = 1.0) -> None:
        a, b = np.asarray(expected, "float64"), np.asarray(received, "float64")
        if a.shape != b.shape:
            found.append(f"{what}: shape {b.shape}, Keras {a.shape}")
            return
        off = np.abs(a - b) > scale * limit * (1.0 + np.abs(a))
        off |= np.isnan(a) != np.isnan(b)
        if off.any():
            place = np.unravel_index(int(np.argmax(np.abs(a - b))), a.shape) if a.shape else ()
            found.append(f"{what}: {b[place]:.7g}, Keras {a[place]:.7g}")

    def compare_named(what: str, expected: dict[str, Any], received: dict[str, Any]) -> None:
        if sorted(expected) != sorted(received):
            found.append(f"{what}: {sorted(received)}, Keras {sorted(expected)}")
            return
        for (name, a), (_, b) in zip(
            sorted(expected.items()), sorted(received.items()), strict=True
        ):
            compare(f"{what} {name}", a, b)

    compare_named("weights", keras_.variables, ours.variables)
    mine, theirs = list(ours.optimizer.items()), list(keras_.optimizer.items())
    if len(mine) != len(theirs):
        found.append(f"optimizer: {[*ours.optimizer]}, Keras {[*keras_.optimizer]}")
    for (_, a), (name, b) in zip(mine, theirs, strict=False):
        compare(f"optimizer {name}", b, a)
    for number, (a, b) in enumerate(zip(keras_.histories, ours.histories, strict=True)):
        compare_named(f"history of fit {number}", a, b)
    compare_named("evaluate", keras_.evaluated, ours.evaluated)
    for number, (a, b) in enumerate(zip(keras_.predicted, ours.predicted, strict=True)):
        compare(f"predict {number}", a, b)
    for mine, theirs in zip(ours.seen, keras_.seen, strict=True):
        if isinstance(theirs, dict):
            compare_named("file", *(_numbered(files) for files in (theirs, mine)))
        else:
            compare_seen(mine, theirs, found, limit)
    return found


def _numbered(files: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{name} {i}": array for name, held in files.items() for i, array in enumerate(held)}


def compare_seen(ours: list[Any], expected: list[Any], found: list[str], limit: float) -> None:
    """What callbacks saw, call by call."""
    for mine, theirs in zip(ours, expected, strict=False):
        a, b = mine, theirs
        if len(a) == 4 and len(b) == 4:
            if abs(a[3] - b[3]) > 100 * limit * (1 + abs(b[3])):
                found.append(f"a callback saw {a}, Keras {b}")
            a, b = a[:3], b[:3]
        if a != b:
            found.append(f"a callback saw {a}, Keras {b}")
    if len(ours) != len(expected):
        found.append(f"a callback was called {len(ours)} times, Keras {len(expected)}")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
