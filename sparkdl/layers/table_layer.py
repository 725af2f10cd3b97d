"""``TableLayer``: what the layers share whose values lie in a table outside of the model."""

from __future__ import annotations

import random
from typing import Any, Self

import keras
import numpy as np
from keras.src.backend.common import global_state

from sparkdl.errors import ModelError
from sparkdl.layers.local_rows import LocalRows, StoredRows
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.tables import rules
from sparkdl.tables.rules import RowRule, SgdRows
from sparkdl.tables.service import IdArray, RowService, TableSpec
from sparkdl.tables.store import RowStore, require_table_name
from sparkdl.weights import FloatArray


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
        self._service: RowService | None = None
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
        return rule, None if own is None else fixed_rate(own, self.table)

    def serve_from(self, service: RowService) -> None:
        self._service = service

    def give_rows(self, store: RowStore, rank: int, num_ranks: int) -> None:
        if isinstance(self._service, (StoredRows, LocalRows)):
            self._service.give(self.table, store, rank, num_ranks)

    @property
    def service(self) -> RowService | None:
        return self._service

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
        if isinstance(self._service, LocalRows):
            self._service.serve(self, None)
            return self._service.store(self.table).pull(ids)
        if isinstance(self._service, StoredRows):
            return self._service.tables[self.table].pull(ids, "initial")
        if self._service is None:
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
        if self._service is None:
            model = self._get_call_context().entry_layer
            siblings = [] if model is None else ModelTables(model).layers
            name = self.table_name
            found = [s.service for s in siblings if s.service is not None and s.table_name == name]
            self._service = found[0] if found else LocalRows()
        if isinstance(self._service, LocalRows):
            model = self._get_call_context().entry_layer
            self._service.serve(self, model)

    def get_config(self) -> dict[str, Any]:
        """The arguments of all layers with a table, and the place of rows that a fit has
        written."""
        return {
            **super().get_config(),
            "table": self.table,
            "optimizer": None if self._own is None else dict(self._own),
            "seed": self.seed,
            "stored": self._service.reference if isinstance(self._service, StoredRows) else None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
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
    config = optimizer.get_config()
    constants = {
        key: value
        for key, value in config.items()
        if value is None or isinstance(value, (bool, int, float))
    }
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


def fixed_rate(optimizer: Any, table: str) -> float:
    """The learning rate of a table's own optimizer.

    Raises:
        ModelError: It is a schedule.
    """
    rate = optimizer.get_config()["learning_rate"]
    if not isinstance(rate, (int, float)):
        raise ModelError(
            f"table {table!r} has a learning rate that changes", expected="a number",
            received="a LearningRateSchedule",
            hint="without optimizer= the layer follows the rate that the model is compiled with",
        )  # fmt: skip
    return float(rate)
