"""Layers with a table: what they share, and their tables where a model trains in one process.

Such tables are of this process, or in files that a fit has written: looked up there, never loaded
whole.
"""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import keras
import numpy as np
import numpy.typing as npt
from keras.src.backend.common import global_state

from sparkdl.errors import ModelError
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.tables import rules
from sparkdl.tables.checkpoints import TableReference
from sparkdl.tables.classes import (
    ClassPart,
    ClassSpec,
    Measured,
    Softmax,
    find_measured,
    joined,
    measure,
)
from sparkdl.tables.files import TableReader
from sparkdl.tables.index import owner
from sparkdl.tables.rules import RowRule, SgdRows
from sparkdl.tables.service import IdArray, RowService, ServesRows, TableSpec
from sparkdl.tables.store import RowStore, merged, require_table_name
from sparkdl.weights import FloatArray

Arrays = dict[str, npt.NDArray[Any]]
_OF_ROWS = ("ids", "values", "state", "counts", "clocks")


class LocalRows:
    """Tables in this process.

    The gradients of a step are kept until the next step pulls rows, or the rows are read: a step
    of several layers on one table is one step of its rows.
    """

    def __init__(self) -> None:
        self._layers: dict[str, ServesRows] = {}
        self._model: weakref.ref[Any] | None = None
        self._stores: dict[str, RowStore] = {}
        self._loaded: dict[str, Arrays] = {}
        self._rates: dict[str, float | None] = {}
        self._trained_by: dict[str, Any] = {}
        self._pulled: dict[int, tuple[str, IdArray]] = {}
        self._number = 0
        self._waiting: dict[str, list[tuple[IdArray, FloatArray, IdArray]]] = {}
        self._rate_now: dict[str, float] = {}
        self._steps_before = 0.0  # of the optimizer, when the first of the waiting gradients came
        self._classes: dict[str, tuple[RowStore, ClassPart]] = {}
        self._measured: dict[str, Measured] = {}

    def serve(self, layer: ServesRows, model: object) -> None:
        """Keeps the table of ``layer``, called within ``model`` (None: by itself)."""
        self._layers.setdefault(layer.table_name, layer)
        if isinstance(model, keras.Model):
            self._model = weakref.ref(model)

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        self.flush()
        self._number += 1
        if training:
            self._pulled[self._number] = table, ids
            self._pulled.pop(self._number - 1000, None)  # of steps that had no backward pass
        return self._store(table).pull(ids, create=training), self._number

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        table, ids = self._pulled.pop(pulled)
        self._rate_now[table] = self._rate(table)
        optimizer = self._optimizer()
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            if keras.backend.backend() == "jax":
                raise ModelError(
                    f"table {table!r} cannot follow the scale of the loss of model.fit with JAX",
                    expected="an optimizer without loss scaling",
                    received="LossScaleOptimizer (the policy mixed_float16 makes it)",
                    hint="Keras' compiled steps hide the scale there; SparkModel.fit follows it",
                )
            if not self._waiting:
                self._steps_before = _number(optimizer.inner_optimizer.iterations)
            gradients = gradients / np.float32(_number(optimizer.dynamic_scale))
        self._waiting.setdefault(table, []).append((ids, gradients, counts))

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        softmax = joined([self._part(table, classes).measure(features, labels, training=training)])
        self._number += 1
        if training:
            self._measured[table] = Measured(self._number, table, features, labels, softmax)
        return softmax, self._number

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        of = find_measured(self._measured, measured)
        del self._measured[of.table]
        shares = np.ones(len(upstream), np.float32)
        rate = None if trying else self._rate(of.table)
        _, part = self._classes[of.table]
        return part.learn(of.features, of.labels, of.softmax, upstream, shares, rate)

    def _part(self, table: str, classes: ClassSpec) -> ClassPart:
        store = self._store(table)
        former = self._classes.get(table)
        if former is None or former[0] is not store:
            former = self._classes[table] = store, ClassPart(store, classes)
        return former[1]

    def flush(self) -> None:
        """Gives the rows the step whose gradients are kept."""
        waiting, self._waiting = self._waiting, {}
        optimizer = self._optimizer() if waiting else None
        if (
            isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            and _number(optimizer.inner_optimizer.iterations) == self._steps_before
        ):
            return  # the scaled loss had overflowed: there was no step
        for table, parts in waiting.items():
            together = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            unique, gradients, counts = merged(*together)
            self._store(table).push(unique, gradients, self._rate_now[table], counts)

    def store(self, table: str) -> RowStore:
        """The table as of the last step."""
        self.flush()
        return self._store(table)

    def arrays(self, table: str) -> Arrays:
        """All rows of the table with their state, and the settings of its rule, for a file."""
        if table in self._loaded and table not in self._stores:
            return self._loaded[table]
        if table not in self._stores:
            return {}
        store = self.store(table)
        rows, waiting = store.export(), store.waiting.export()
        found: Arrays = {
            "ids": rows.ids,
            "values": rows.values,
            "state": rows.state,
            "rule": np.frombuffer(json.dumps(store.rule.settings).encode(), np.uint8),
        }
        if rows.counts is not None and rows.clocks is not None:
            found |= {"counts": rows.counts, "clocks": rows.clocks}
        if len(waiting[0]):  # ids that were seen too seldom for a row
            found |= {"waiting": waiting[0], "seen": waiting[1]}
        return found

    def give(self, table: str, store: RowStore, rank: int, num_ranks: int) -> None:
        """Puts the rows that ``rank`` owns into a store."""
        arrays = self.arrays(table)
        if arrays:
            own = owner(arrays["ids"], num_ranks) == rank
            parts = {key: arrays[key][own] for key in _OF_ROWS if key in arrays}
            parts |= {key: arrays[key] for key in ("rule",) if key in arrays}
            if "waiting" in arrays:
                own = owner(arrays["waiting"], num_ranks) == rank
                parts |= {key: arrays[key][own] for key in ("waiting", "seen")}
            take_rows(store, parts)

    def load(self, table: str, arrays: Arrays) -> None:
        """Takes the rows of a file, see :meth:`arrays`."""
        self._loaded[table] = arrays

    def put(self, layer: ServesRows, ids: IdArray, values: FloatArray) -> None:
        """Sets rows of the table of a layer, whose state begins again."""
        self.serve(layer, None)
        self.flush()
        self._store(layer.table_name).load(ids, values)

    def _store(self, table: str) -> RowStore:
        optimizer = self._optimizer()
        former = self._stores.get(table)
        if former is None or self._trained_by.get(table) is not optimizer:
            spec = self._layers[table].table_spec(optimizer)
            self._trained_by[table], self._rates[table] = optimizer, spec.learning_rate
            if former is None or spec.settings != former.settings:
                self._stores[table] = store = spec.store()
                if former is not None:  # compiled anew: the rows stay, their state begins again
                    rows = former.export()
                    store.load(rows.ids, rows.values)
                elif table in self._loaded:
                    take_rows(store, self._loaded.pop(table))
        return self._stores[table]

    def _optimizer(self) -> Any:
        model = None if self._model is None else self._model()
        return getattr(model, "optimizer", None)

    def _rate(self, table: str) -> float:
        own = self._rates[table]
        if own is not None:
            return own
        if keras.backend.backend() == "jax":
            raise ModelError(
                f"table {table!r} cannot follow the learning rate of model.fit with JAX",
                expected="a layer with optimizer=keras.optimizers.Adagrad(0.1) or another",
                received="optimizer=None",
                hint="Keras' compiled steps hide the rate there; SparkModel.fit follows it",
            )
        optimizer = self._optimizer()
        assert optimizer is not None  # it has just computed a gradient
        return _number(getattr(optimizer, "inner_optimizer", optimizer).learning_rate)


def _number(variable: object) -> float:
    return float(keras.ops.convert_to_numpy(variable))


def take_rows(store: RowStore, arrays: Arrays) -> None:
    """Puts the rows of a file into a store; their state only if the rule is the same."""
    told = json.loads(arrays["rule"].tobytes()) if "rule" in arrays else None
    same = told == json.loads(json.dumps(store.rule.settings))
    store.load(
        arrays["ids"], arrays["values"], arrays["state"] if same else None, arrays.get("counts"),
        arrays.get("clocks"),
    )  # fmt: skip
    if "waiting" in arrays:
        store.waiting.count(arrays["waiting"], arrays["seen"].astype(np.int64))
    if "clocks" in arrays and len(arrays["clocks"]):
        store.clock = max(store.clock, int(arrays["clocks"].max()))


class StoredRows:
    """The tables of a trained model, in the folder to which the workers have written them.

    Args:
        reference: What the run's state says of them, see :class:`TableReference`.

    Raises:
        ProtocolError: It is no reference.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._found = TableReference.from_bytes(reference.encode())

    @cached_property
    def tables(self) -> Mapping[str, TableReader]:
        """Name -> table.

        Raises:
            ResourceError: The folder is gone, or its files are not whole.
        """
        return {name: TableReader(self._found.folder_of(name)) for name in self._found.tables}

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        return self.tables[table].pull(ids), list(self._found.tables).index(table)

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """Refuses to train."""
        raise self._untrainable(list(self._found.tables)[pulled])

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        if training:
            raise self._untrainable(table)
        chunks = self.tables[table].chunks(classes.chunk)
        return joined([measure(chunks, features, labels, classes.margin)]), -1

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        """Never called: :meth:`measure` refuses to train."""
        raise NotImplementedError

    def give(self, table: str, store: RowStore, rank: int, num_ranks: int) -> None:
        """Puts the rows that ``rank`` owns into a store."""
        self._found.load(table, store, rank, num_ranks)

    @staticmethod
    def _untrainable(table: str) -> ModelError:
        return ModelError(
            f"table {table!r} lies in files that a fit has written, and cannot be trained here",
            expected="SparkModel(model, mode='allreduce').fit(..., checkpoint_dir=...)",
            received="model.fit in one process",
        )


class TableLayer(keras.layers.Layer):  # type: ignore[misc]
    """A layer whose values are rows of a table.

    Args:
        table: Name of the table. None: the layer's.
        optimizer: Optimizer of the table: a Keras optimizer or its name. None: that of the model.
        seed: Seed of the start values; None: drawn.
        **kwargs: Arguments of ``keras.layers.Layer``.

    Raises:
        ModelError: The layer is made in a ``keras.RematScope``.
    """

    all_rows = False
    """Whether each step touches all rows that it is to change."""

    def __init__(
        self, *, table: str | None, optimizer: object, seed: int | None, **kwargs: object
    ) -> None:
        super().__init__(**kwargs)
        if getattr(self, "_remat_mode", None) is not None:
            raise ModelError(
                f"layer {self.name!r} cannot be computed again in the backward pass",
                expected=f"a {type(self).__name__} outside of keras.RematScope",
                received="one that is made in such a scope",
                hint="its output is small: make it before the scope begins",
            )
        self.table = require_table_name(self.name if table is None else table)
        # As settings: Keras would save an optimizer that is an attribute of a layer as part of it.
        own = None if optimizer is None else keras.optimizers.get(optimizer)
        self._own = None if own is None else keras.saving.serialize_keras_object(own)
        self.seed = random.randint(1, 2**31 - 1) if seed is None else int(seed)
        self.service: RowService | None = None
        self.trying = False
        self.scaled = False
        # Python inside a graph of TensorFlow's cannot be compiled by XLA.
        self.supports_jit = keras.backend.backend() != "tensorflow"

    @property
    def optimizer(self) -> Any:
        """The table's own optimizer, or None."""
        if self._own is None:
            return None
        scope = global_state.get_global_attribute("stateless_scope")
        try:  # within an eager step of JAX, where Keras makes no variables
            global_state.set_global_attribute("stateless_scope", None)
            return keras.saving.deserialize_keras_object(dict(self._own))
        finally:
            global_state.set_global_attribute("stateless_scope", scope)

    @property
    def table_name(self) -> str:
        return self.table

    def table_spec(self, optimizer: object) -> TableSpec:
        raise NotImplementedError

    def rule_and_rate(self, optimizer: object) -> tuple[RowRule, float | None]:
        """The rule of the rows, and their own learning rate if they have one.

        Raises:
            ModelError: Rows cannot be trained by it.
            ConfigError: It does what needs more than the rows of one batch.
            UnknownNameError: Rows have no rule as this one.
        """
        own = self.optimizer
        if self.all_rows:  # their step is taken before it is known whether the loss overflowed
            refuse_scaled_loss(optimizer, self.table)
        self.scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        within = getattr(optimizer, "inner_optimizer", optimizer)
        rule = row_rule_of(within if own is None else own, self.table, self.all_rows)
        return rule, None if own is None else _fixed_rate(own, self.table)

    def serve_from(self, service: RowService) -> None:
        self.service = service

    def give_rows(self, store: RowStore, rank: int, num_ranks: int) -> None:
        if isinstance(self.service, (StoredRows, LocalRows)):
            self.service.give(self.table, store, rank, num_ranks)

    def require_trainable_in(self, model: keras.Model) -> None:
        """Raises ModelError if the model is compiled with what the layer cannot be trained by."""

    def may_learn(self, told: bool, differentiated: bool) -> bool:
        """Whether a gradient may follow a call, as that of Keras' own layers does in both cases.

        Args:
            told: Whether the call said ``training=True``. A subclassed model whose ``call`` has no
                such argument says nothing in ``fit``; ``base(x, training=False)`` trains the base.
            differentiated: Whether the framework keeps the call for a gradient. PyTorch keeps each
                that nobody forbids, so there it counts in a module that is in training alone.
        """
        return told or (differentiated and (keras.backend.backend() != "torch" or self.training))

    def start_rows(self, ids: IdArray) -> FloatArray:
        """The start values of some ids, of shape ``(n, dim)``."""
        raise NotImplementedError

    def rows(self, ids: IdArray) -> FloatArray:
        """The rows of some ids; start values where an id has none.

        Args:
            ids: Ids of shape ``(n,)``.

        Returns:
            Of shape ``(n, dim)``.

        Raises:
            ModelError: The rows lie on other workers.
        """
        if isinstance(self.service, LocalRows):
            self.service.serve(self, None)
            return self.service.store(self.table).pull(ids)
        if isinstance(self.service, StoredRows):
            return self.service.tables[self.table].pull(ids, "initial")
        if self.service is None:
            return self.start_rows(ids)
        raise ModelError(
            f"the rows of layer {self.name!r} lie on several workers",
            expected="a layer of the driver's model", received="one that is trained",
        )  # fmt: skip

    def build(self, input_shape: object) -> None:
        """Makes the variable that stands for the rows where the framework differentiates."""
        self._anchor = self.add_weight(shape=(), initializer="zeros", name="anchor", autocast=False)

    def find_service(self) -> None:
        """Takes the table of a layer of the same name, or a new one, if no other place was told."""
        if self.service is None:
            model = self._get_call_context().entry_layer
            siblings = [] if model is None else ModelTables(model).layers
            name = self.table_name
            found = [s.service for s in siblings if s.service is not None and s.table_name == name]
            self.service = found[0] if found else LocalRows()
        if isinstance(self.service, LocalRows):
            model = self._get_call_context().entry_layer
            self.service.serve(self, model)

    def get_config(self) -> dict[str, Any]:
        """Arguments of all layers with a table, and the place of rows that a fit has written."""
        return {
            **super().get_config(),
            "table": self.table,
            "optimizer": None if self._own is None else dict(self._own),
            "seed": self.seed,
            "stored": self.service.reference if isinstance(self.service, StoredRows) else None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The counterpart of :meth:`get_config`."""
        config = dict(config)
        if isinstance(own := config.get("optimizer"), dict):
            config["optimizer"] = keras.saving.deserialize_keras_object(own)
        reference = config.pop("stored", None)
        layer = cls(**config)
        if reference is not None:
            layer.serve_from(StoredRows(reference))
        return layer

    def save_own_variables(self, store: Any) -> None:
        """The layer's variable, and the rows of a table that lies in this process."""
        super().save_own_variables(store)
        if isinstance(self.service, LocalRows):
            for key, array in self.service.arrays(self.table_name).items():
                store[key] = array

    def load_own_variables(self, store: Any) -> None:
        """The counterpart of :meth:`save_own_variables`."""
        arrays = {key: np.asarray(store[key]) for key in store.keys() if not key.isdigit()}  # noqa: SIM118
        super().load_own_variables({key: store[key] for key in store.keys() if key.isdigit()})  # noqa: SIM118
        if arrays:
            service = LocalRows()
            service.load(self.table_name, arrays)
            self.service = service


def row_rule_of(optimizer: Any, table: str, all_rows: bool = False) -> RowRule:
    """The row rule that does as a Keras optimizer.

    Args:
        optimizer: A ``keras.optimizers.Optimizer``; None where nothing is trained.
        table: Name of the table, for the message.
        all_rows: Whether each step touches all rows that it is to change.

    Raises:
        ModelError: The optimizer is of the user's own, or scales the loss.
        ConfigError: It does what needs more than the rows of one batch (weight decay, momentum,
            clipping, averages).
        UnknownNameError: Rows have no rule as this one.
    """
    if optimizer is None:
        return SgdRows()
    refuse_scaled_loss(optimizer, table)
    if not type(optimizer).__module__.startswith("keras."):
        raise ModelError(
            f"table {table!r} cannot be trained with this optimizer",
            expected="keras.optimizers.SGD, Adagrad, Adam or Ftrl",
            received=f"the class {type(optimizer).__qualname__} of the user's own",
            hint="give the layer one: optimizer='adagrad'",
        )
    config = optimizer.get_config().items()
    constants = {k: v for k, v in config if v is None or isinstance(v, (bool, int, float))}
    return rules.row_rule_of(type(optimizer).__name__, constants, all_rows=all_rows)


def refuse_scaled_loss(optimizer: object, table: str) -> None:
    """Raises ModelError if an optimizer of rows scales the loss."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelError(
            f"table {table!r} cannot be trained with a scaled loss",
            expected="an optimizer without loss scaling",
            received="LossScaleOptimizer (the policy mixed_float16 makes it)",
            hint="mixed_bfloat16 needs no loss scaling",
        )


def _fixed_rate(optimizer: Any, table: str) -> float:
    rate = optimizer.get_config()["learning_rate"]
    if not isinstance(rate, (int, float)):
        raise ModelError(
            f"table {table!r} has a learning rate that changes", expected="a number",
            received="a LearningRateSchedule",
            hint="without optimizer= the layer follows the rate that the model is compiled with",
        )  # fmt: skip
    return float(rate)
