"""``recompute_segments``: a model, cut so that its backward pass computes segments again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend import get_keras_mask, set_keras_mask

from sparkdl.errors import ModelError
from sparkdl.layers.backends import recompute
from sparkdl.layers.local_rows import TableLayer
from sparkdl.learner.state.carried_state import hidden_states
from sparkdl.learner.steps.denominators import active_terms
from sparkdl.settings.values import require_int


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


def spans_of(model: keras.Model, wanted: int | None) -> list[Span]:
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


def graph_of(model: keras.Model) -> Any:
    """The functional model that a functional or Sequential model is."""
    return model._functional if isinstance(model, keras.Sequential) else model


class _Graph:
    """The operations of a functional model, in the order that its weights have."""

    def __init__(self, model: keras.Model) -> None:
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
        tables = [isinstance(node.operation, TableLayer) for node in self.nodes]
        return [(first, last, not any(tables[first:last])) for first, last in bounds]

    def _alive(self, number: int) -> list[Any]:
        """The tensors that cross from the operations before this one to those from it on.

        Masks do not count: they are small, and go to each layer as an argument.
        """
        made = (tensor for node in self.nodes[:number] for tensor in node.outputs)
        crossing = [tensor for tensor in made if self.last.get(id(tensor), -1) >= number]
        return [t for t in crossing if id(t) not in self.outputs and t.dtype != "bool"]

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


def _require_graph(model: keras.Model) -> None:
    if type(model) not in (keras.Sequential, keras.src.models.Functional) or not model.built:
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


@keras.saving.register_keras_serializable("sparkdl")
class RecomputedSegment(keras.layers.Layer):  # type: ignore[misc]
    """Layers of which a training step keeps the inputs alone.

    The backward pass computes what is inside once more. What the layers keep besides their
    weights (moving averages, the state of random generators) enters the segment as values and
    leaves it once, so that ``BatchNormalization`` counts a batch once, and ``Dropout`` draws the
    same mask both times.

    Args:
        block: The layers, as a functional model.
        **kwargs: Arguments of ``keras.layers.Layer``.
    """

    def __init__(self, block: keras.Model, **kwargs: object) -> None:
        # The layers inside cast as their own policies say; this layer casts nothing.
        super().__init__(**{**kwargs, "dtype": "float32", "autocast": False})
        self.block = block
        self.built = True
        self.supports_masking = True  # those of the layers are among the inputs

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The outputs of the layers."""
        if not training:
            return self.block.call(inputs, training=training)
        structure, tensors = inputs, keras.tree.flatten(inputs)
        places = [n for n, tensor in enumerate(tensors) if get_keras_mask(tensor) is not None]
        masks = [get_keras_mask(tensors[place]) for place in places]
        trained = self.block.trainable_variables
        kept = [*self.block.non_trainable_variables]
        if keras.backend.backend() != "jax":  # whose steps have neither, as Keras compiles them
            kept += [*self.block.metrics_variables, *hidden_states(self.block)]
        weights = [keras.ops.convert_to_tensor(variable.value) for variable in trained]
        # As they are now: what comes after the segment writes to the variables themselves.
        before = [keras.ops.copy(variable.value) for variable in kept]
        number_of_losses = 0
        leaving_masks: list[int] = []
        terms = active_terms()
        first_term = 0 if terms is None else len(terms.counted)
        again = False

        def compute(*values: Any) -> tuple[list[Any], list[Any]]:
            nonlocal number_of_losses, leaving_masks, again
            counting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if terms is not None and again:
                counting = terms.repeating(first_term)  # with the factors of the first time
            again = True
            given = iter(values)
            entering = [next(given) for _ in tensors]
            for place in places:
                set_keras_mask(entering[place], next(given))
            state = zip([*trained, *kept], given, strict=True)
            with counting, keras.StatelessScope(state, collect_losses=True) as scope:
                inside = keras.tree.pack_sequence_as(structure, entering)
                outputs = keras.tree.flatten(self.block.call(inside, training=training))
            for layer in self.block._flatten_layers():
                layer._loss_ids.clear()  # addresses of tensors that end with this scope
            self._require_known(scope, [*trained, *kept])
            number_of_losses = len(scope.losses)
            leaving_masks = [n for n, o in enumerate(outputs) if get_keras_mask(o) is not None]
            left = [scope.get_current_value(variable) for variable in kept]
            left += [get_keras_mask(outputs[number]) for number in leaving_masks]
            return [*outputs, *scope.losses], left

        results, left = recompute(compute, tensors, [*masks, *weights, *before])
        for variable, value in zip(kept, left, strict=False):
            variable.assign(value)
        outputs = results[: len(results) - number_of_losses]
        for loss in results[len(outputs) :]:
            self.add_loss(loss)
        for number, mask in zip(leaving_masks, left[len(kept) :], strict=True):
            set_keras_mask(outputs[number], mask)
        return outputs[0] if len(outputs) == 1 else outputs

    def _require_known(self, scope: Any, variables: Sequence[Any]) -> None:
        known = {id(variable) for variable in variables}
        if not scope.state_mapping.keys() <= known and keras.backend.backend() != "jax":
            raise ModelError(
                f"a layer of {self.name!r} changes a variable that its lists of variables lack",
                expected="layers that make their variables by add_weight, or as attributes",
                received=f"{len(scope.state_mapping.keys() - known)} other variables",
                hint="leave these layers out of the model that is cut",
            )

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        """The outputs of the layers, without values."""
        return self.block.compute_output_spec(inputs)

    def compute_mask(self, inputs: object, previous_mask: object) -> None:
        """None: :meth:`call` has given each output its own."""

    def get_config(self) -> dict[str, Any]:
        """Settings that make an equal segment."""
        block = keras.saving.serialize_keras_object(self.block)
        return {"name": self.name, "trainable": self.trainable, "block": block}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RecomputedSegment:
        return cls(keras.saving.deserialize_keras_object(config.pop("block")), **config)


@keras.saving.register_keras_serializable(package="sparkdl")
class NamedOutput(keras.layers.Identity):  # type: ignore[misc]
    """An output that a segment makes, under the name of the layer that makes it there."""


def recompute_segments(model: keras.Model, segments: int | None = None) -> Any:
    """The same layers, of which a training step keeps the tensors between segments alone.

    Activations of a network of n equal blocks take the memory of 2 sqrt(n) blocks with sqrt(n)
    segments, for one more forward pass (Chen et al., 2016, "Training deep nets with sublinear
    memory cost"). ``keras.RematScope`` wraps each layer by itself, and so keeps the outputs of
    all layers.

    Args:
        model: A functional or Sequential ``keras.Model``, compiled or not. It is cut where one
            tensor alone joins what is before and behind (inputs and outputs of the model do not
            count), nowhere between two calls of one layer, and where no mask passes.
        segments: How many there are at most. None: the number that keeps the fewest bytes, as the
            outputs of the layers count.

    Returns:
        A model of the same layers, weights and optimizer, which are shared with ``model``,
        compiled as ``model`` is. Layers whose values lie in tables stay outside of the segments.
        :func:`to_plain_model` gives a model without segments.

    Raises:
        ModelError: The model is of another kind, was made in a ``keras.RematScope``, or can be
            cut nowhere.
        ConfigError: ``segments`` is no number from 2 on.
    """
    wanted = None if segments is None else require_int("segments", segments, least=2)
    spans = spans_of(model, wanted)
    inputs = graph_of(model).inputs
    made = dict(zip(map(id, inputs), inputs, strict=True))
    count = 0
    for span in spans:
        entering = [made[id(tensor)] for tensor in span.inputs]
        block = keras.Model(_one(span.inputs), _one(span.outputs))
        if span.recomputed:
            count += 1
            block.name = f"block_{count}"
            leaving = RecomputedSegment(block, name=f"segment_{count}")(_one(entering))
        else:
            leaving = block.call(_one(entering))
        made.update(zip(map(id, span.outputs), keras.tree.flatten(leaving), strict=True))
    name_outputs(graph_of(model).outputs, made)
    return _model_of(model, made)


def name_outputs(outputs: Sequence[Any], made: dict[int, Any]) -> None:
    """Gives outputs that segments make the names that they have in the model.

    Keras calls an output as the layer that makes it: losses, labels and metrics go by that name.

    Args:
        outputs: Tensors of the model.
        made: Number of a tensor -> the tensor that stands for it; changed for outputs.
    """
    taken: set[str] = set()
    for tensor in outputs:
        found, name = made[id(tensor)], tensor._keras_history[0].name
        if isinstance(found._keras_history[0], RecomputedSegment) and name not in taken:
            made[id(tensor)] = NamedOutput(name=name)(found)
        taken.add(name)


def inlined(model: keras.Model) -> Any:
    """A model without segments: their layers are its own again.

    Args:
        model: A functional or Sequential model.

    Returns:
        A model of the same layers and weights, compiled as ``model`` is; ``model`` itself if it
        has no segments.
    """
    if not any(isinstance(layer, RecomputedSegment) for layer in model.layers):
        return model

    def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operation, RecomputedSegment):
            return operation.block.call(args[0])
        return args[0] if isinstance(operation, NamedOutput) else operation(*args, **kwargs)

    graph = graph_of(model)
    found = graph._run_through_graph(graph.inputs, lambda operation: operation, call)
    made = dict(zip(map(id, graph.outputs), keras.tree.flatten(found), strict=True))
    return _model_of(model, made)


def _model_of(model: keras.Model, made: dict[int, Any]) -> Any:
    graph = graph_of(model)
    outputs = keras.tree.map_structure(lambda tensor: made[id(tensor)], graph._outputs_struct)
    copy = keras.Model(graph._inputs_struct, outputs, name=model.name)
    copy.dtype_policy = model.dtype_policy
    if not model.trainable:
        copy.trainable = False  # True would thaw the layers that are frozen by themselves
    if getattr(model, "compiled", False):
        # With what optimizers have outside of their configurations; the variables are the same.
        copy.compile(**{**model._compile_config.config, "optimizer": model.optimizer})
    return copy


def _one(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else list(tensors)
