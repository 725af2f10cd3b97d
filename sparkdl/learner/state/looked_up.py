"""``IdReader``: the ids that a model's layers will look up in a batch, found without its step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sparkdl.learner.structure import arrange_inputs
from sparkdl.tables.service import IdArray, LooksUpRows, ServesRows
from sparkdl.training.learning import Arrays, BatchStack


class IdReader:
    """The ids of a batch, for the calls of layers that stand in the model's own graph.

    Ids that are an input of the model are read from the batch. Those that layers without weights
    make from inputs (a hash, a cross) are computed by these layers alone. Others are left out, as
    those of a model whose ``call`` is Python.

    Args:
        model: A ``keras.Model``.
        layers: Its layers with rows in tables.
    """

    def __init__(self, model: Any, layers: Sequence[ServesRows]) -> None:
        graph = getattr(model, "_functional", None) or model
        self._model = model
        self._calls: list[tuple[LooksUpRows, Callable[[Arrays], Any]]] = []
        depths = getattr(graph, "_nodes_by_depth", {}).values()
        for node in itertools.chain.from_iterable(depths):
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
