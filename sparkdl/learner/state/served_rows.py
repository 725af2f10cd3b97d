"""The layers of a model whose rows lie in tables outside of it, and the ids that they look up."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkdl.errors import ModelError
from sparkdl.learner.framework import replaced
from sparkdl.learner.structure import arrange_inputs
from sparkdl.tables.service import IdArray, LooksUpRows, RowService, ServesRows, TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.training.learning import Arrays, BatchStack


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model; see :class:`sparkdl.training.learning.LearnerTables`.

    Args:
        model: A compiled ``keras.Model``.
    """

    model: keras.Model

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
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(replaced(layer, "trying", True))
            yield

    def serve_from(self, service: RowService) -> None:
        for layer in self.layers:
            layer.serve_from(service)


class IdReader:
    """The ids of a batch, for the calls of layers that stand in the model's own graph.

    Ids that are an input of the model are read from the batch. Those that layers without weights
    make from inputs (a hash, a cross) are computed by these layers alone. Others are left out, as
    those of a model whose ``call`` is Python.
    """

    def __init__(self, model: keras.Model, layers: Sequence[ServesRows]) -> None:
        graph = getattr(model, "_functional", None) or model
        self._model = model
        self._calls: list[tuple[LooksUpRows, Callable[[Arrays], Any]]] = []
        depths = sorted(getattr(graph, "_nodes_by_depth", {}).items(), reverse=True)
        for node in itertools.chain.from_iterable(nodes for _, nodes in depths):
            layer = node.operation
            if isinstance(layer, LooksUpRows) and any(layer is known for known in layers):
                read = self._reader(graph, node.input_tensors[0])
                if read is not None:
                    self._calls.append((layer, read))

    def __call__(self, batch: BatchStack) -> list[tuple[str, IdArray]]:
        """Table and ids of each call, each id once and in order.

        Args:
            batch: A stack of one.
        """
        x = {name: array[0] for name, array in batch.x.items()}
        return [
            (layer.table_name, layer.wanted_ids(np.asarray(read(x)))) for layer, read in self._calls
        ]

    def _reader(self, graph: Any, ids: Any) -> Callable[[Arrays], Any] | None:
        for place, given in enumerate(graph.inputs):
            if given is ids:
                return lambda x: keras.tree.flatten(arrange_inputs(self._model, x))[place]
        try:
            before = keras.Model(graph.inputs, ids)
        except ValueError:  # the ids are of a model within the model
            return None
        if before.weights:
            return None

        def read(x: Arrays) -> Any:
            inputs = keras.tree.flatten(arrange_inputs(self._model, x))
            return keras.ops.convert_to_numpy(before(inputs, training=True))

        return read
