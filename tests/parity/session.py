"""A session of a notebook: calls on a model, each done by plain Keras and by sparkdl side by side.

Both models live in this process and share the user's code, which is run as cells of ``__main__``
(``users_cell.py``). The workers are processes that are kept, as Spark keeps its Python workers: of
the user's code they have what travelled. After each call all that a user sees of one model is held
against the other; plain Keras runs eagerly, so that it reads what the user's code is now.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from case import Arrays, Case, cut
from keras import layers
from keras.src.backend.common import global_state
from local_spark import TASK_S, WORKERS, LocalSession, LocalSparkModel, Workers, _stream
from pyspark.sql import types as T
from referee import (
    GlobalBatches,
    ListOfBatches,
    Orders,
    Outcome,
    _Begins,
    differences,
    evaluate_on_workers,
    parts_of,
    values_of,
)

from sparkdl import SparkModel
from sparkdl.errors import SparkDLError
from sparkdl.files.model_file import read_model
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.process import payload
from sparkdl.spark.fit.plan import _SEED_STEP
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.inference.function import UdfTask
from sparkdl.spark.inference.predict import PredictionChoice, PredictTask
from sparkdl.spark.spark_model import load_as

HERE = Path(__file__).parent
FEATURES = 3
EVALUATED = (5, 2)
"""Rows of each partition that is evaluated and predicted."""
Rows = tuple[Arrays, Arrays, Arrays]


@dataclass(frozen=True, repr=False)
class Call:
    """A call of a session: its name and its arguments. Its text makes it again."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"call({self.name!r}{given})"


def call(name: str, /, **arguments: Any) -> Call:
    """A :class:`Call`."""
    return Call(name, arguments)


class KerasFailed(Exception):
    """Plain Keras cannot do it: there is nothing to compare with."""


# -- the user's code -------------------------------------------------------------------------------

_BESIDE = """
from keras import ops

RATE = {rate}


def error(t, p):
    return ops.mean(ops.square(t - p), axis=-1)


def scaled(v):
    return v * {rate} + 0.1 * RATE
"""


class Notebook:
    """The namespace in which the user's cells run, and the module beside them."""

    def __init__(self) -> None:
        self._text = (HERE / "users_cell.py").read_text()
        self._folder = tempfile.TemporaryDirectory(prefix="beside-")
        self._edits = 0
        self._edit(1.0)
        sys.path.insert(0, self._folder.name)
        sys.modules.pop("beside", None)
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.closures: dict[str, Any] = {}
        self.run(self._text)

    def run(self, text: str) -> None:
        """Runs a cell."""
        name = f"<cell {len(linecache.cache)}>"  # as IPython does, so that its source is found
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), self.names)

    def close(self) -> None:
        sys.path.remove(self._folder.name)
        sys.modules.pop("beside", None)
        self._folder.cleanup()

    def change(self, what: str, value: float) -> None:
        """Changes what the user's code refers to."""
        names = self.names
        if what == "ALPHA":
            names["ALPHA"] = value
        elif what == "TABLE":
            names["TABLE"]["beta"] = value
        elif what == "innermost":
            self.run(f"def innermost(t, p):\n    return {value} * ops.square(t - p)")
        elif what == "helper":
            self.run(f"def helper(t, p):\n    return {value} * innermost(t, p)")
        elif what == "by_global":
            self.run(f"def by_global(t, p):\n    return {value} * ops.mean((t - p) ** 2, axis=-1)")
        elif what == "method":
            self.run(f"def call(self, v):\n    return v * {value}\nByGlobal.call = call")
        elif what == "class":
            self.run(
                "class Scaled(keras.layers.Layer):\n"
                f"    factor = {value}\n"
                "    def call(self, v):\n        return v * self.factor + 0.1"
            )
        elif what == "module constant":
            names["beside"].RATE = value
        elif what == "module":
            self._edit(value)
            importlib.reload(names["beside"])
        elif what == "cell":
            self.run(self._text.replace("ALPHA = 1.0", f"ALPHA = {value}"))
        else:
            kind, _, attribute = what.partition(".")
            setattr(names[kind], attribute, value)

    def _edit(self, rate: float) -> None:
        path = Path(self._folder.name, "beside.py")
        path.write_text(_BESIDE.format(rate=rate))
        self._edits += 1
        os.utime(path, (self._edits, self._edits))  # Python's caches go by the time
        linecache.checkcache(str(path))

    def loss(self, name: str, reduction: str, scale: float) -> Any:
        """A loss by its name in the cells, or in Keras."""
        if name == "closure":
            self.closures["by_closure"] = self.names["closed_over"](scale)
            return self.closures["by_closure"]
        if name == "OwnLoss":
            return self.names[name](reduction or "sum_over_batch_size")
        if name == "lambda":
            self.run("loss = lambda t, p: ALPHA * ops.mean(ops.square(t - p), axis=-1)")
            return self.names["loss"]
        if name in self.names:
            return self.names[name]
        kinds = {"mse": "MeanSquaredError", "bce": "BinaryCrossentropy", "huber": "Huber"}
        more = {"reduction": reduction} if reduction else {}
        return getattr(keras.losses, kinds[name])(**more)

    def metric(self, name: str) -> Any:
        if name == "OwnMetric":
            return self.names[name](name="own")
        return self.names.get(name, name)

    def objects(self) -> dict[str, Any]:
        """What the user gives to ``load_model``."""
        own = {
            name: thing for name, thing in self.names.items()
            if getattr(thing, "__module__", "") == "__main__" and callable(thing)
        }  # fmt: skip
        return own | self.closures


CHANGES = (
    "ALPHA", "TABLE", "innermost", "helper", "by_global", "method", "class", "module constant",
    "module", "cell", "Scaled.factor", "OwnLoss.factor", "OwnMetric.factor", "Network.gain",
)  # fmt: skip
REFERS = {
    "by_global": ("ALPHA", "by_global"), "by_helpers": ("ALPHA", "innermost", "helper"),
    "by_table": ("TABLE",), "by_default": ("cell",), "by_module": ("module", "module constant"),
    "closure": ("cell",), "lambda": ("ALPHA",), "named lambda": ("ALPHA",),
    "OwnLoss": ("OwnLoss.factor",),
    "own_metric": ("ALPHA",), "OwnMetric": ("OwnMetric.factor",), "act": ("ALPHA",),
    "ByGlobal": ("ALPHA", "method"), "ByHelper": ("TABLE",),
    "ByModule": ("module", "module constant"), "Scaled": ("Scaled.factor", "class"),
    "Derived": ("Scaled.factor", "cell"), "Network": ("Network.gain", "ALPHA"),
    "Weighing": ("ALPHA",),
}  # fmt: skip
"""Part of the user's code -> changes that it sees."""
LAYERS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda names: layers.Dense(4, activation="tanh"),
    "act": lambda names: layers.Dense(4, activation=names["act"]),
    "lambda": lambda names: layers.Lambda(names["curve"]),
    "named lambda": lambda names: layers.Lambda(names["act"]),
    "dropout": lambda names: layers.Dropout(0.3, seed=5),
    "batch norm": lambda names: layers.BatchNormalization(),
    **{
        name: lambda names, name=name: names[name]()
        for name in ("ByGlobal", "ByHelper", "ByModule", "Scaled", "Derived")
    },
}
ALONE = ("dropout", "batch norm")
"""Layers that give the same as in one process with one worker only, by design."""
LOSSES = (
    "mse", "bce", "huber", "by_global", "by_helpers", "by_table", "by_default", "by_module",
    "closure", "lambda", "OwnLoss",
)  # fmt: skip
# Not "mape": with labels of 0 SGD makes weights of 1e7, where the next float32 is 1 to 4 away, and
# the sums of two workers are 1 to 4 off; with Adam or clipped the same fits are 6e-8 off.
METRICS = ("mae", "own_metric", "OwnMetric", "auc")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.02, epsilon=1e-2),
    "clipped": lambda: keras.optimizers.SGD(0.05, clipnorm=0.5),
    "decayed": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01, epsilon=1e-2),
}
FORMS = ("functional", "sequential", "Network", "Weighing")


# -- rows ------------------------------------------------------------------------------------------


def rows(count: int, salt: int, weighted: bool = False) -> Rows:
    """Inputs, labels of 0 and 1, and weights if wanted."""
    rng = np.random.default_rng([7, salt])
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    y = rng.integers(0, 2, (count, 1)).astype("float32")
    w = rng.uniform(0.2, 2.0, count).astype("float32")
    return {"x": x}, {"y": y}, {"w": w} if weighted else {}


def plain(every: Rows) -> tuple[np.ndarray, ...]:
    """The rows as Keras takes them."""
    return tuple(array for group in every for array in group.values())


# -- where a session runs --------------------------------------------------------------------------


class Place:
    """The processes of :class:`Workers`, as the place of a session's workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def jobs(self) -> int:
        """Jobs that were started."""
        return self._workers.jobs

    def spark_model(self, model: Any, **settings: Any) -> SparkModel:
        return self._kind()(model, **settings)

    def load(self, path: str, custom_objects: dict[str, Any]) -> SparkModel:
        return load_as(self._kind(), read_model(path), path, custom_objects, False)

    def _kind(self) -> type[LocalSparkModel]:
        return LocalSparkModel.of(LocalSession(self._workers, (), ()))

    def fit(
        self, ours: Any, form: str, every: Rows, sizes: Sequence[int], validation: Rows | None,
        held_sizes: Sequence[int], **arguments: Any,
    ) -> Any:  # fmt: skip
        """Trains on the rows, whose first ``sizes[0]`` are the first worker's.

        Args:
            ours: The ``SparkModel``.
            form: In which the rows are given: here always as arrays.
            every: The rows.
            sizes: Rows of each worker.
            validation: Rows to validate on.
            held_sizes: How many of these each worker has.
            **arguments: Of ``fit``.
        """
        type(ours)._session = LocalSession(self._workers, sizes, held_sizes)
        held_out = plain(validation) if validation else None
        return ours.fit(plain(every), validation_data=held_out, **arguments).history

    def evaluate(self, ours: SparkModel, every: Rows, batch: int) -> dict[str, Any]:
        session = LocalSession(self._workers, EVALUATED, ())
        return evaluate_on_workers(ours, plain(every), session, batch)

    def predictor(self, ours: SparkModel, how: str, batch: int) -> Any:
        """What travels to a worker that predicts, as a stage or as a function of SQL."""
        source, choice = KerasSource(ours.model), PredictionChoice()
        archive = source.encode(choice.outputs_of(source.signature))
        columns = choice.columns(archive, source.signature)
        if how == "function":
            return payload.dump(UdfTask(archive, columns[0], batch, "auto"))
        schema = T.StructType([T.StructField("features", T.ArrayType(T.FloatType()))])
        spec = make_spec(schema, archive.signature, "features", None)
        return payload.dump(PredictTask(archive, spec, batch, "auto", tuple(columns)))

    def predict(self, predictor: Any) -> np.ndarray:
        """The predictions of the workers, in the order of the rows."""
        (x, _, _) = rows(sum(EVALUATED), 2)
        frames = [
            _stream(pa.table({"features": pa.array(list(x["x"][part]), pa.list_(pa.float32()))}))
            for part in cut(EVALUATED)
        ]
        told = [f.result(TASK_S) for f in self._workers.run(predictor, frames, False)]
        values = [row for of in told for batch in of for row in batch]
        found = [v.get("predictions", v.get("prediction")) for v in values]
        plainly = [next(iter(v.values())) if isinstance(v, dict) else v for v in found]
        return np.asarray(plainly, "float64").reshape(len(plainly), -1)

    def kill(self, number: int) -> None:
        """Kills a worker that does nothing."""
        self._workers.replace(number)

    def restart(self) -> None:
        """Ends the session of Spark with its workers, and begins another one."""
        for number in range(WORKERS):
            self._workers.replace(number)


# -- the session -----------------------------------------------------------------------------------


@dataclass
class _Function:
    """A function of SQL that was made earlier, and what the model gave then."""

    predictor: Any
    expected: np.ndarray


class Session:
    """One session; not to be used after a call that Keras cannot do, or that found a difference.

    Args:
        place: Of the workers that train, evaluate and predict.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._notebook = Notebook()
        self._seed, self._trained = 1, 0
        self._ours: SparkModel | None = None
        self._key: tuple[Any, ...] = ()
        self._functions: list[_Function] = []
        self._settings = (
            keras.config.floatx(), keras.config.epsilon(), keras.config.dtype_policy()
        )  # fmt: skip
        self.refused: list[str] = []
        self.ref: Any = None
        self.model: Any = None
        self.stack: tuple[str, ...] = ()
        self._compiled: dict[str, Any] = {}
        self._keeps = False  # whether the optimizer is one of before a quantization

    def close(self) -> None:
        """Gives back what belongs to the process."""
        self._notebook.close()
        floatx, epsilon, policy = self._settings
        keras.config.set_floatx(floatx)
        keras.config.set_epsilon(epsilon)
        keras.config.set_dtype_policy(policy)

    def do(self, one: Call) -> list[str]:
        """Does a call with both; what differs afterwards, a line each.

        Raises:
            KerasFailed: Plain Keras cannot do it.
        """
        found = getattr(self, f"_{one.name}")(**one.arguments)
        return [*(found or []), *self._states_differ()]

    # -- models ----------------------------------------------------------------------------------

    def _build(
        self, form: str, stack: tuple[str, ...], activation: str = "", **compiled: Any
    ) -> None:
        self.stack, self._ours, self._keeps = stack, None, False
        self._compiled = {}
        self.ref, self.model = (self._made(form, stack, activation) for _ in range(2))
        self._compile(**compiled)

    def _made(self, form: str, stack: tuple[str, ...], activation: str) -> Any:
        keras.utils.set_random_seed(self._seed)
        global_state.set_global_attribute("object_name_uids", None)
        names = self._notebook.names
        parts = [LAYERS[name](names) for name in stack]
        parts.append(layers.Dense(1, activation=names.get(activation, activation or None)))
        if form == "sequential":
            return keras.Sequential([keras.Input((FEATURES,)), *parts])
        if form == "Network":
            model = names["Network"](parts)
            model(np.zeros((1, FEATURES), "float32"))
            return model
        x = given = keras.Input((FEATURES,))
        for part in parts:
            x = part(x)
        return names.get(form, keras.Model)(given, x)

    def _compile(
        self, loss: str = "", metrics: tuple[str, ...] | None = None, optimizer: str | None = None,
        reduction: str | None = None, weighted: bool | None = None, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Compiles both; what is not given is as before, and the optimizer goes on."""
        given = {"loss": loss or None, "metrics": metrics, "reduction": reduction,
                 "weighted": weighted}  # fmt: skip
        defaults = {"loss": "mse", "metrics": (), "reduction": "", "weighted": False}
        self._compiled = {
            **defaults, **self._compiled, **{k: v for k, v in given.items() if v is not None}
        }  # fmt: skip
        self._keeps = self._keeps and optimizer is None
        for model in (self.ref, self.model):
            chosen = model.optimizer if optimizer is None else OPTIMIZERS[optimizer]()
            kind = "weighted_metrics" if self._compiled["weighted"] else "metrics"
            model.compile(
                chosen or OPTIMIZERS["sgd"](),
                self._notebook.loss(self._compiled["loss"], self._compiled["reduction"], scale),
                **{kind: [self._notebook.metric(m) for m in self._compiled["metrics"]]},
            )
        self.ref.run_eagerly = True

    def _change(self, what: str, value: float, optimizer: str | None = None) -> None:
        self._notebook.change(what, value)
        if self.ref is not None:
            self._compile(optimizer=optimizer)

    def _freeze(self, number: int, trainable: bool) -> None:
        for model in (self.ref, self.model):
            found = list(model._flatten_layers(include_self=False, recursive=False))
            found[number % len(found)].trainable = trainable
        self._compile(optimizer="sgd")  # one that was built has slots for other variables

    def _lora(self) -> None:
        for model in (self.ref, self.model):
            keras.utils.set_random_seed(self._seed)
            for layer in _dense(model):
                if not layer.lora_enabled and layer.quantization_mode is None:
                    layer.enable_lora(2)
        self._compile(optimizer="sgd")

    def _quantize(self, compiles: bool = True) -> None:
        """Quantizes both; where they are not compiled again, the optimizer goes on."""
        for model in (self.ref, self.model):
            model.quantize("int8")
        if compiles:
            self._compile(optimizer="sgd")
        self._keeps = not compiles

    def _save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            custom = self._notebook.objects()
            with _by_keras():
                self.ref.save(path)
                self.ref = keras.models.load_model(path, custom_objects=custom, safe_mode=False)
            ours = self._spark_model("synchronous", 2, 4, True)
            ours.save(path)
            self._ours = self._place.load(path, custom)
            self.model = self._ours.model
        self.ref.run_eagerly = True

    def _set_weights(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for a, b in zip(self.ref.trainable_variables, self.model.trainable_variables, strict=True):
            value = rng.normal(0, 0.5, a.shape).astype("float32")
            a.assign(value)
            b.assign(value)

    def _rate(self, value: float) -> None:
        for model in (self.ref, self.model):
            model.optimizer.learning_rate = value

    def _seeded(self, seed: int) -> None:
        self._seed = seed
        keras.utils.set_random_seed(seed)

    def _config(self, name: str, value: Any) -> None:
        getattr(keras.config, f"set_{name}")(value)
        if self.ref is not None:
            self._compile()

    def _clear(self) -> None:
        keras.utils.clear_session()

    def _kill(self, number: int) -> None:
        self._place.kill(number)

    def _restart(self) -> None:
        """Ends the session of Spark, with all functions of SQL that were made in it."""
        self._functions.clear()
        self._place.restart()

    # -- training --------------------------------------------------------------------------------

    def _spark_model(self, mode: str, count: int, batch: int, fresh: bool) -> SparkModel:
        """The ``SparkModel`` of the session, or a new one around its model."""
        key = (mode, count, batch)
        if fresh or self._ours is None or self._key != key:
            self._ours = self._place.spark_model(
                self.model, num_workers=count, mode=mode, frequency="batch", batch_size=batch
            )
            self._key, self._trained = key, 0
        return self._ours

    def _present(self) -> SparkModel:
        """The ``SparkModel`` of the session as it is."""
        return self._spark_model(*(self._key or ("synchronous", 2, 4)), False)

    def _fit(
        self, mode: str, sizes: tuple[int, ...], batch: int = 4, epochs: int = 1,
        weighted: bool = False, classes: bool = False, held_out: int = 0, shuffle: bool = False,
        fresh: bool = False, form: str = "arrays",
    ) -> list[str]:  # fmt: skip
        how = Case(sizes=sizes, batch=batch, shuffle=shuffle)
        every = rows(sum(sizes), 0, weighted)
        validation = rows(held_out, 1) if held_out else None
        even = held_out // len(sizes)
        held_sizes = (*[even] * (len(sizes) - 1), held_out - even * (len(sizes) - 1))
        ours = self._spark_model(mode, len(sizes), batch, fresh)
        orders = Orders(how, self.ref, every, sizes) if shuffle else None
        seed, common = _SEED_STEP * self._trained, {
            "epochs": epochs, "verbose": 0, "class_weight": {0: 0.5, 1: 2.0} if classes else None,
        }  # fmt: skip
        jobs, failed = self._place.jobs, None
        try:
            history = self._place.fit(
                ours, form, every, sizes, validation, held_sizes, shuffle=shuffle, **common
            )
        except SparkDLError as error:
            if self._place.jobs == jobs:
                self.refused.append(str(error))
                return []
            failed = error
        self._trained += epochs
        with _by_keras():
            batches = GlobalBatches(how, parts_of(every, sizes), orders, seed)  # type: ignore[arg-type]
            told: Any = None
            if validation:
                order = Orders(how, self.ref, validation, held_sizes) if shuffle else None
                told = ListOfBatches(_batches(validation, held_sizes, batch, order))
            expected = self.ref.fit(
                batches, shuffle=False, callbacks=[_Begins(batches)], validation_data=told,
                **common,
            ).history  # fmt: skip
        if failed is not None:
            raise failed
        return self._differ(histories=([expected], [history]))

    # -- evaluation and prediction -----------------------------------------------------------------

    def _evaluate(self, how: str, batch: int = 3, weighted: bool = False) -> list[str]:
        every = rows(sum(EVALUATED), 2, weighted)
        sizes = (sum(EVALUATED),) if how == "arrays" else EVALUATED
        with _by_keras():
            batches = ListOfBatches(_batches(every, sizes, batch))
            expected = self.ref.evaluate(batches, verbose=0, return_dict=True)
        ours = self._present()
        if how == "arrays":
            received = ours.evaluate(plain(every), batch_size=batch)
        else:
            received = self._place.evaluate(ours, every, batch)
        return self._differ(evaluated=(expected, received))

    def _predict(self, how: str, batch: int = 3) -> list[str]:
        expected = self._expected(batch)
        if how == "arrays":
            (x, _, _) = rows(sum(EVALUATED), 2)
            received = self._present().predict(x["x"], batch_size=batch)
        else:
            predictor = self._place.predictor(self._present(), how, batch)
            received = self._place.predict(predictor)
        return self._differ(predicted=([expected], [received]))

    def _make_function(self) -> None:
        expected = self._expected(3)
        predictor = self._place.predictor(self._present(), "function", 3)
        self._functions.append(_Function(predictor, expected))

    def _use_function(self, number: int) -> list[str]:
        if not self._functions:
            return []
        made = self._functions[number % len(self._functions)]
        return self._differ(predicted=([made.expected], [self._place.predict(made.predictor)]))

    def _expected(self, batch: int) -> np.ndarray:
        with _by_keras():
            (x, _, _) = rows(sum(EVALUATED), 2)
            return np.asarray(self.ref.predict(x["x"], batch_size=batch, verbose=0))

    # -- comparison ------------------------------------------------------------------------------

    def _states_differ(self) -> list[str]:
        return [] if self.ref is None else self._differ()

    def _differ(
        self, histories: Any = ([], []), evaluated: Any = ({}, {}), predicted: Any = ([], [])
    ) -> list[str]:
        if self.model.optimizer.built and not self.ref.optimizer.built:
            self.ref.optimizer.build(self.ref.trainable_variables)  # as Keras' first step does

        slots = self.ref.optimizer.variables
        if self._keeps:  # Keras has those of kernels, too, which nothing trains any more
            left = {_slot(v) for v in self.model.optimizer.variables}
            slots = [v for v in slots if _slot(v) in left]

        def outcome(model: Any, place: int) -> Outcome:
            return Outcome(
                values_of(model.variables),
                values_of(slots if model is self.ref else model.optimizer.variables),
                [dict(h) for h in histories[place]], evaluated[place],
                [np.asarray(p, "float64") for p in predicted[place]],
            )  # fmt: skip

        return differences(Case(), outcome(self.ref, 0), outcome(self.model, 1))


def _slot(variable: Any) -> str:
    """The path of an optimizer's variable without the optimizer's name."""
    return str(variable.path).partition("/")[2]


def _dense(model: Any) -> list[Any]:
    found = model._flatten_layers(include_self=False)
    return [layer for layer in found if isinstance(layer, layers.Dense)]


def _batches(
    every: Rows, sizes: tuple[int, ...], batch: int, orders: Orders | None = None
) -> list[tuple[np.ndarray, ...]]:
    """The batches of each worker, one after the other."""
    found = []
    for rank, part in enumerate(parts_of(every, sizes)):
        order = np.arange(sizes[rank])
        if orders is not None and len(order):
            order = orders.order(rank, 0, 0, shuffle=False)
        for first in range(0, len(order), batch):
            found.append(tuple(a[order[first : first + batch]] for a in plain(part)))
    return found


@contextlib.contextmanager
def _by_keras() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise KerasFailed(f"{type(error).__name__}: {str(error)[:300]}") from error
