"""``ServedEmbedding``: an embedding whose rows lie in a table outside of the model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from sparkdl.errors import ModelError
from sparkdl.layers.local_rows import LocalRows
from sparkdl.layers.lookups import Ids, lookup, takes_64_bits
from sparkdl.layers.stored_rows import StoredRows
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.tables import rules
from sparkdl.tables.entry import EntryFilter, Eviction, make_entry_filter
from sparkdl.tables.rules import RowRule, SgdRows
from sparkdl.tables.service import RowService, TableSpec
from sparkdl.tables.starts import RowStart
from sparkdl.tables.store import RowStore, merged
from sparkdl.values import require_int, require_name
from sparkdl.weights import FloatArray


def row_rule_of(optimizer: Any, table: str) -> RowRule:
    """The row rule that does as a Keras optimizer.

    Args:
        optimizer: A ``keras.optimizers.Optimizer``; None where nothing is trained.
        table: Name of the table, for the message.

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
            hint="ServedEmbedding(..., optimizer='adagrad')",
        )
    config = optimizer.get_config()
    constants = {
        key: value
        for key, value in config.items()
        if value is None or isinstance(value, (bool, int, float))
    }
    return rules.row_rule_of(type(optimizer).__name__, constants)


def refuse_scaled_loss(optimizer: object, table: str) -> None:
    """Raises ModelError if the gradients of a model's rows are those of a scaled loss."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelError(
            f"table {table!r} cannot be trained with a scaled loss",
            expected="an optimizer without loss scaling",
            received="LossScaleOptimizer (the policy mixed_float16 makes it)",
            hint="mixed_bfloat16 needs no loss scaling",
        )


def fixed_rate(optimizer: Any, table: str) -> float:
    """The learning rate of a table's own optimizer.

    Raises:
        ModelError: It is a schedule.
    """
    rate = optimizer.get_config()["learning_rate"]
    if not isinstance(rate, (int, float)):
        raise ModelError(
            f"table {table!r} has a learning rate that changes",
            expected="a number",
            received="a LearningRateSchedule",
            hint="without optimizer= the layer follows the rate that the model is compiled with",
        )
    return float(rate)


COMBINERS = ("sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package="sparkdl")
class ServedEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """An embedding of any number of ids, whose rows lie in a table outside of the model.

    A row is made when its id is first trained; any 64-bit integer is an id. The model itself holds
    one number of the layer. ``model.fit`` in one process keeps the table in that process;
    ``SparkModel(model, mode='allreduce').fit`` spreads it over the workers, each of which applies
    the gradients of the rows that it owns. The gradient of a row is the sum over all places of the
    batch where its id stands, on every backend (Keras' ``Embedding`` on TensorFlow gives these to
    the optimizer one by one).

    ::

        ids = keras.Input((26,), dtype='int64')
        rows = sparkdl.layers.ServedEmbedding(16, optimizer='adagrad')(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))

    Args:
        dim: Numbers in a row.
        table: Name of the table; layers of a model with one name share its rows. None: the layer's.
        combiner: ``'sum'``, ``'mean'`` or ``'sqrtn'`` (the sum divided by the root of the number)
            of the rows along the last axis of the ids; None: all rows.
        initializer: The start value of rows: ``'uniform'`` (-.05 to .05, as Keras' ``Embedding``),
            ``'normal'`` (deviation .05), ``'zeros'``, or a dict with the name and its constants.
            It depends on the seed, the table's name and the id only.
        optimizer: Of the table: a Keras optimizer or its name. SGD without momentum, Adagrad, Adam
            (each row has its own steps: a row that a batch does not touch stands still) and FTRL
            work. None: the class, constants and learning rate that the model is compiled with.
        entry: Which ids get a row: ``CountFilter(10)``, those that were seen ten times, or
            ``Probability(0.1)``, a tenth of all ids, always the same. Others have zeros, and their
            gradients are dropped. None: all.
        max_rows: Rows of the table at most: of more, those that were seen least leave. None: no
            limit.
        expire_after: Steps without a gradient after which a row leaves. None: it stays.
        pad_id: An id that stands for no row: zeros, and not counted by the combiner.
        seed: Of the start values; None: drawn when the layer is made
            (``keras.utils.set_random_seed`` fixes it).
        **kwargs: Those of ``keras.layers.Layer``.

    Input shape:
        Integers of any shape; ``(batch, n)`` at least with a combiner.

    Output shape:
        The shape of the ids, without its last axis if there is a combiner, and ``dim``.

    Raises:
        ConfigError: An argument is not as described.
        ModelError: The layer is made in a ``keras.RematScope``. When called: the ids are no
            integers, or wider than the backend takes.
    """

    def __init__(
        self,
        dim: int,
        *,
        table: str | None = None,
        combiner: str | None = None,
        initializer: str | Mapping[str, Any] = "uniform",
        optimizer: Any = None,
        entry: EntryFilter | Mapping[str, Any] | None = None,
        max_rows: int | None = None,
        expire_after: int | None = None,
        pad_id: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if getattr(self, "_remat_mode", None) is not None:
            raise ModelError(
                f"layer {self.name!r} cannot be computed again in the backward pass",
                expected="a ServedEmbedding outside of keras.RematScope",
                received="one that is made in such a scope",
                hint="its output is small: make it before the scope begins",
            )
        self.dim = require_int("dim", dim, least=1)
        self.table = table or self.name
        if combiner is not None:
            require_name("combiner", combiner, COMBINERS)
        self.combiner = combiner
        self.initializer = initializer
        # As settings: Keras would save an optimizer that is an attribute of a layer as part of it.
        own = None if optimizer is None else keras.optimizers.get(optimizer)
        self._own = None if own is None else keras.saving.serialize_keras_object(own)
        self.entry = make_entry_filter(entry)
        self.eviction = Eviction(max_rows, expire_after)
        self.pad_id = pad_id
        self.seed = random.randint(1, 2**31 - 1) if seed is None else int(seed)
        self._start = RowStart(self.table, dim, initializer, self.seed)
        self._service: RowService | None = None
        # Python inside a graph of TensorFlow's cannot be compiled by XLA.
        self.supports_jit = keras.backend.backend() != "tensorflow"

    @property
    def optimizer(self) -> Any:
        """The table's own optimizer, or None."""
        return None if self._own is None else keras.saving.deserialize_keras_object(dict(self._own))

    @property
    def table_name(self) -> str:
        """The table's name."""
        return self.table

    def table_spec(self, optimizer: object) -> TableSpec:
        """The table as it is trained with the model's ``optimizer``.

        Raises:
            ModelError: Its rule is none for rows.
        """
        own = self.optimizer
        refuse_scaled_loss(optimizer, self.table)
        used = optimizer if own is None else own
        rule = row_rule_of(used, self.table)
        rate = None if own is None else fixed_rate(own, self.table)
        start = self._start.settings
        store = RowStore(
            self.dim, rule, start, name=self.table, seed=self.seed, entry=self.entry,
            eviction=self.eviction,
        )  # fmt: skip
        return TableSpec(self.table, store.settings, rate)

    def serve_from(self, service: RowService) -> None:
        """From now on the rows are those of ``service``."""
        self._service = service

    def give_rows(self, store: RowStore, rank: int, num_ranks: int) -> None:
        """Puts the rows that the layer has into a store, as far as ``rank`` owns them."""
        if isinstance(self._service, (StoredRows, LocalRows)):
            self._service.give(self.table, store, rank, num_ranks)

    def rows(self, ids: Any) -> FloatArray:
        """The rows of some ids; start values where an id has none, zeros for the padding.

        Args:
            ids: Integers, of shape ``(n,)``.

        Returns:
            Of shape ``(n, dim)``.

        Raises:
            ModelError: The rows lie on other workers.
        """
        wanted = np.asarray(ids, np.int64)
        if isinstance(self._service, LocalRows):
            self._service.serve(self, None)
            found = self._service.store(self.table).pull(wanted)
        elif isinstance(self._service, StoredRows):
            found = self._service.tables[self.table].pull(wanted, "initial")
        elif self._service is None:
            found = self._start.rows(wanted)
        else:
            raise ModelError(
                f"the rows of layer {self.name!r} lie on several workers",
                expected="a layer of the driver's model",
                received="one that is trained",
            )
        if self.pad_id is not None:
            found[wanted == self.pad_id] = 0
        return found

    @property
    def service(self) -> RowService | None:
        """The place of the rows; None before the first call."""
        return self._service

    # -- Keras -------------------------------------------------------------------------------------

    def build(self, input_shape: Any) -> None:
        """Makes the variable that stands for the rows where the framework differentiates."""
        self._anchor = self.add_weight(shape=(), initializer="zeros", name="anchor")

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """See the class."""
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None else shape[:-1]), self.dim)

    def compute_output_spec(self, ids: Any, training: Any = None) -> Any:
        """The output's shape and dtype, without a lookup."""
        return keras.KerasTensor(self.compute_output_shape(ids.shape), dtype=self.compute_dtype)

    def __call__(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        """See the class; Keras would hide an error of ``call`` in one of its own."""
        if hasattr(ids, "dtype"):
            self._check(ids)
        return super().__call__(ids, *args, **kwargs)

    def call(self, ids: Any, training: Any = None) -> Any:
        """The rows of ``ids``."""
        self._find_service()
        call = _Call(self, bool(training))
        anchor = ops.convert_to_tensor(self._anchor)
        rows = ops.cast(lookup(call, ids, anchor, self.dim), self.compute_dtype)
        if self.combiner is None:
            return rows
        total = ops.sum(rows, axis=-2)
        if self.combiner == "sum":
            return total
        if self.pad_id is None:
            count = ops.cast(ops.shape(ids)[-1], rows.dtype)
        else:
            present = ops.cast(ops.not_equal(ids, self.pad_id), rows.dtype)
            count = ops.maximum(ops.sum(present, axis=-1, keepdims=True), 1.0)
        return total / (ops.sqrt(count) if self.combiner == "sqrtn" else count)

    def _check(self, ids: Any) -> None:
        kind = keras.backend.standardize_dtype(ids.dtype)
        wide = (
            keras.backend.backend() == "jax" and kind in ("int64", "uint64") and not takes_64_bits()
        )
        if "int" not in kind or wide:
            raise ModelError(
                f"layer {self.name!r} cannot look up these ids",
                expected="integers" + (" of at most 32 bits with JAX" if wide else ""),
                received=kind,
                hint="jax.config.update('jax_enable_x64', True) lets JAX take 64 bits"
                if wide
                else "keras.Input(..., dtype='int64'): floats lose ids above 2**24",
            )

    def _find_service(self) -> None:
        """Takes the table of a layer of the same name, or a new one, if no other place was told."""
        if self._service is None:
            model = self._get_call_context().entry_layer
            siblings = [] if model is None else ModelTables(model).layers
            name = self.table_name
            found = [s.service for s in siblings if s.service is not None and s.table_name == name]
            self._service = found[0] if found else LocalRows()
        if isinstance(self._service, LocalRows):
            model = self._get_call_context().entry_layer
            self._service.serve(self, model)

    # -- config and files --------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """The arguments of the class, and the place of rows that a fit has written."""
        return {
            **super().get_config(),
            "dim": self.dim,
            "table": self.table,
            "combiner": self.combiner,
            "initializer": self.initializer,
            "optimizer": None if self._own is None else dict(self._own),
            "entry": None if self.entry is None else self.entry.settings,
            "max_rows": self.eviction.max_rows,
            "expire_after": self.eviction.expire_after,
            "pad_id": self.pad_id,
            "seed": self.seed,
            "stored": self._service.reference if isinstance(self._service, StoredRows) else None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServedEmbedding:
        """The counterpart of :meth:`get_config`."""
        own = config.get("optimizer")
        if isinstance(own, dict):
            config = {**config, "optimizer": keras.saving.deserialize_keras_object(own)}
        config = dict(config)
        reference = config.pop("stored", None)
        layer = cls(**config)
        if reference is not None:
            layer.serve_from(StoredRows(reference))
        return layer

    def save_own_variables(self, store: Any) -> None:
        """The layer's variable, and the rows of a table that lies in this process."""
        super().save_own_variables(store)
        if isinstance(self._service, LocalRows):
            for key, array in self._service.arrays(self.table_name).items():
                store[key] = array

    def load_own_variables(self, store: Any) -> None:
        """The counterpart of :meth:`save_own_variables`."""
        arrays = {key: np.asarray(store[key]) for key in store.keys() if not key.isdigit()}  # noqa: SIM118
        super().load_own_variables({key: store[key] for key in store.keys() if key.isdigit()})  # noqa: SIM118
        if arrays:
            service = LocalRows()
            service.load(self.table_name, arrays)
            self._service = service


class _Call:
    """One call of the layer in a step: its ids, each once, and their rows."""

    def __init__(self, layer: ServedEmbedding, training: bool) -> None:
        self._table, self._dim, self._pad = layer.table_name, layer.dim, layer.pad_id
        self._layer, self._training = layer, training
        self._pulled: tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]] | None = None

    @property
    def _service(self) -> RowService:
        """That of the layer now, which may be another than when the step was compiled."""
        assert self._layer.service is not None
        return self._layer.service

    def pull(self, ids: Ids) -> FloatArray:
        """See :class:`sparkdl.layers.lookups.HostRows`."""
        flat = np.asarray(ids).reshape(-1).astype(np.int64)
        present = np.ones(flat.size, bool) if self._pad is None else flat != self._pad
        unique, inverse = np.unique(flat[present], return_inverse=True)
        rows, number = self._service.pull(self._table, unique, training=self._training)
        self._pulled = number, present, inverse.astype(np.int64)
        found = np.zeros((flat.size, self._dim), np.float32)
        found[present] = rows[inverse]
        return found.reshape(*np.shape(ids), self._dim)

    def push(self, ids: Ids, gradients: FloatArray) -> None:
        """See :class:`sparkdl.layers.lookups.HostRows`."""
        assert self._pulled is not None
        number, present, inverse = self._pulled
        own = np.asarray(gradients, np.float32).reshape(-1, self._dim)[present]
        _, summed, counts = merged(inverse, own)  # the places of the ids, which are in their order
        self._service.push(number, summed, counts)
