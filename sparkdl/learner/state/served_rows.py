"""The layers of a model whose rows lie in tables outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ModelError
from sparkdl.learner.state.looked_up import IdReader
from sparkdl.learner.state.optimizer_state import innermost_optimizer, loss_scale_of
from sparkdl.tables.service import RowService, ServesRows, TableSpec
from sparkdl.tables.store import RowStore


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model; see :class:`sparkdl.training.learning.LearnerTables`.

    Args:
        model: A compiled ``keras.Model``.
        scale_of: Reads the scale of a ``LossScaleOptimizer``, which a learner may keep elsewhere.
    """

    model: Any
    scale_of: Callable[[Any], float] = loss_scale_of

    @property
    def layers(self) -> list[ServesRows]:
        """The layers with rows in tables, each once."""
        found = {id(layer): layer for layer in self.model._flatten_layers(include_self=False)}
        return [layer for layer in found.values() if isinstance(layer, ServesRows)]

    @property
    def specs(self) -> list[TableSpec]:
        specs: dict[str, TableSpec] = {}
        for layer in self.layers:
            spec = layer.table_spec(self.model.optimizer)
            former = specs.setdefault(spec.name, spec)
            if former != spec:
                raise ModelError(
                    f"two layers of the model differ about the table {spec.name!r}",
                    expected="one width, start, seed and optimizer for all layers of one table",
                    received=f"{former} and {spec}",
                    hint="one layer, called several times, shares its rows by itself",
                )
        return [specs[name] for name in sorted(specs)]

    @property
    def loss_scale(self) -> float | None:
        optimizer = self.model.optimizer
        if innermost_optimizer(self.model) is optimizer:
            return None
        return self.scale_of(optimizer)

    def require_trainable(self) -> None:
        """Raises ModelError if the model is compiled with what its layers cannot have."""
        for layer in self.layers:
            layer.require_trainable_in(self.model)

    def id_reader(self) -> IdReader:
        return IdReader(self.model, self.layers)

    def give_rows(self, stores: Mapping[str, RowStore], rank: int, num_ranks: int) -> None:
        for layer in self.layers:
            layer.give_rows(stores[layer.table_name], rank, num_ranks)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within, gradients are computed whose steps are not taken."""
        layers = self.layers
        for layer in layers:
            layer.trying = True
        try:
            yield
        finally:
            for layer in layers:
                layer.trying = False

    def serve_from(self, service: RowService) -> None:
        for layer in self.layers:
            layer.serve_from(service)
