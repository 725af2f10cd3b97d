"""Cuts of a functional model into segments, such that little is kept between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from sparkdl.errors import ModelError
from sparkdl.layers.table_layer import TableLayer


@dataclass(frozen=True)
class Span:
    """Operations that follow each other in a model.

    Attributes:
        inputs: Tensors of the model that they need.
        outputs: Tensors that those after them need, and outputs of the model.
        recomputed: Whether the backward pass computes them again.
    """

    inputs: list[Any]
    outputs: list[Any]
    recomputed: bool


def spans_of(model: Any, wanted: int | None) -> list[Span]:
    """The parts of a model.

    Args:
        wanted: How many are recomputed at most; None: as many as keep the fewest bytes.

    Raises:
        ModelError: The model cannot be cut.
    """
    _require_graph(model)
    graph = _Graph(graph_of(model))
    pieces = graph.pieces()
    if len(pieces) < 2:
        raise ModelError(
            "the model can be cut nowhere",
            expected="a tensor that alone joins the layers before and behind it",
            received="several tensors between all layers, or a layer called first and last",
            hint="keras.RematScope wraps each layer by itself",
        )
    if wanted is None:
        numbers = range(2, max(2, len(pieces)) + 1)
        spans = min((graph.joined(pieces, number) for number in numbers), key=graph.kept)
    else:
        spans = graph.joined(pieces, wanted)
    return [graph.span(first, last, recomputed) for first, last, recomputed in spans]


_Piece = tuple[int, int, bool]
"""Numbers of the first operation and the one after the last, and whether it is recomputed."""


def graph_of(model: Any) -> Any:
    """The functional model that a functional or Sequential model is."""
    return model._functional if isinstance(model, keras.Sequential) else model


class _Graph:
    """The operations of a functional model, in the order that its weights have."""

    def __init__(self, model: Any) -> None:
        order = {id(operation): number for number, operation in enumerate(model._operations)}
        self.nodes = [
            node
            for depth in sorted(model._nodes_by_depth, reverse=True)
            for node in sorted(model._nodes_by_depth[depth], key=lambda n: order[id(n.operation)])
            if not node.is_input
        ]
        self.outputs = {id(tensor) for tensor in model.outputs}
        self.last: dict[int, int] = {}  # the number of the last operation that takes a tensor
        for number, node in enumerate(self.nodes):
            self.last.update((id(tensor), number) for tensor in node.input_tensors)
        self.sizes = [sum(map(_elements, node.outputs)) for node in self.nodes]

    def pieces(self) -> list[_Piece]:
        """The smallest parts; those that cannot be recomputed are parts of their own."""
        used: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for part in (node.operation, *getattr(node.operation, "variables", ())):
                used.setdefault(id(part), []).append(number)
        cuts = [0]
        for number in range(1, len(self.nodes)):
            alive = self._alive(number)
            again = any(numbers[0] < number <= numbers[-1] for numbers in used.values())
            if len(alive) == 1 and not again:
                cuts.append(number)
        bounds = zip(cuts, [*cuts[1:], len(self.nodes)], strict=True)
        return [(first, last, self._can_be_recomputed(first, last)) for first, last in bounds]

    def _alive(self, number: int) -> list[Any]:
        """The tensors that cross from the operations before this one to those from it on.

        Masks do not count: they are small, and go to each layer as an argument.
        """
        crossing = [
            tensor
            for node in self.nodes[:number]
            for tensor in node.outputs
            if self.last.get(id(tensor), -1) >= number
        ]
        return [t for t in crossing if id(t) not in self.outputs and t.dtype != "bool"]

    def _can_be_recomputed(self, first: int, last: int) -> bool:
        operations = [node.operation for node in self.nodes[first:last]]
        return not any(isinstance(operation, TableLayer) for operation in operations)

    def joined(self, pieces: Sequence[_Piece], wanted: int) -> list[_Piece]:
        """Parts that follow each other are joined until at most ``wanted`` are recomputed."""
        sizes = [sum(self.sizes[first:last]) for first, last, _ in pieces]
        least, most = max(sizes), sum(sizes)
        while least < most:
            limit = (least + most) // 2
            fits = sum(recomputed for *_, recomputed in self._greedy(pieces, limit)) <= wanted
            least, most = (least, limit) if fits else (limit + 1, most)
        return self._greedy(pieces, least)

    def _greedy(self, pieces: Sequence[_Piece], limit: int) -> list[_Piece]:
        joined: list[_Piece] = []
        for first, last, recomputed in pieces:
            fits = bool(joined) and joined[-1][2] == recomputed
            if fits and recomputed:
                fits = sum(self.sizes[joined[-1][0] : last]) <= limit
            if fits:
                joined[-1] = (joined[-1][0], last, recomputed)
            else:
                joined.append((first, last, recomputed))
        return joined

    def kept(self, spans: Sequence[_Piece]) -> int:
        """Elements of a row: what lies between parts, and inside of the largest recomputed one."""
        inside = max((sum(self.sizes[a:b]) for a, b, again in spans if again), default=0)
        whole = sum(sum(self.sizes[a:b]) for a, b, again in spans if not again)
        return inside + whole + sum(self.sizes[b - 1] for _, b, again in spans if again)

    def span(self, first: int, last: int, recomputed: bool) -> Span:
        """The part of the operations from one number to before another."""
        nodes = self.nodes[first:last]
        needed = {id(t): t for node in nodes for t in node.input_tensors}
        made = [tensor for node in nodes for tensor in node.outputs]
        inside = {id(tensor) for tensor in made}
        return Span(
            [tensor for key, tensor in needed.items() if key not in inside],
            [t for t in made if self.last.get(id(t), -1) >= last or id(t) in self.outputs],
            recomputed,
        )


def _elements(tensor: Any) -> int:
    return math.prod(size or 1 for size in tensor.shape[1:])


def _require_graph(model: Any) -> None:
    kinds = (keras.Sequential, keras.src.models.Functional)
    if type(model) not in kinds or not model.built:
        raise ModelError(
            "this model cannot be cut into segments",
            expected="a built functional or Sequential keras.Model",
            received=type(model).__qualname__,
            hint="make a layer of sparkdl.layers.RecomputedSegment(block) in the model",
        )
    for layer in model.layers:
        if getattr(layer, "_remat_mode", None) is not None:
            raise ModelError(
                f"layer {layer.name!r} is recomputed by itself",
                expected="a model that was made outside of keras.RematScope",
                received=f"mode {layer._remat_mode.mode!r}",
            )
