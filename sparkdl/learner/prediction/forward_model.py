"""The part of a Keras model that a prediction needs: some outputs, some layers, no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.errors import ModelError, UnknownNameError
from sparkdl.learner.signature import Signature

LAYER = "layer "
"""Stands before the name of a layer, where outputs and layers are named together."""


def forward_model(
    model: Any, signature: Signature, outputs: Sequence[str], layers: Sequence[str]
) -> Any:
    """A model with the same inputs that computes no more than what is wanted.

    A plain functional or Sequential model becomes a new one around the same layers, with one output
    or a dict of them: by the outputs' names, and ``'layer <name>'`` for layers. It is not compiled,
    so no optimizer state travels to those who only predict. A model of a class of the user's, which
    may have a ``call`` or ``predict_step`` of its own, stays as it is.

    Args:
        model: A built ``keras.Model``.
        signature: Of the model.
        outputs: Names of the outputs wanted.
        layers: Names of the layers whose output is wanted.

    Raises:
        UnknownNameError: No such output or layer.
        ModelError: A layer whose output is not one tensor, or a model without a graph of layers.
    """
    import keras

    for name in outputs:
        if name not in signature.outputs:
            raise UnknownNameError("output of the model", name, signature.outputs)
    plain = type(model) in (keras.Model, keras.Sequential, keras.src.models.Functional)
    if not plain or not getattr(model, "inputs", None):
        if layers:
            raise ModelError(
                f"the layers of model {model.name!r} cannot be read",
                expected="a functional or Sequential model, whose layers make a graph",
                received=f"a model of the class {type(model).__qualname__}",
                hint="keras.Model(inputs, [tensors]) makes a functional model of the layers",
            )
        return model
    graph = model._functional if isinstance(model, keras.Sequential) else model
    tensors = dict(zip(signature.outputs, model.outputs, strict=True))
    wanted = {name: tensors[name] for name in outputs}
    wanted |= {LAYER + name: _tensor_of(graph, name) for name in layers}
    # Without names of their own, equal models have equal keys.
    outgoing = next(iter(wanted.values())) if len(wanted) == 1 else wanted
    return keras.Model(graph._inputs_struct, outgoing)


def _tensor_of(graph: Any, name: str) -> Any:
    """The one tensor that a layer of a functional model gives."""
    every = [node for nodes in graph._nodes_by_depth.values() for node in nodes]
    nodes = [node for node in every if node.operation.name == name]
    if not nodes:
        raise UnknownNameError("layer", name, [layer.name for layer in graph.layers])
    tensors = [tensor for node in nodes for tensor in node.outputs]
    if len(tensors) != 1:
        raise ModelError(
            f"layer {name!r} has several outputs",
            expected="a layer that is called once, and gives one tensor",
            received=f"{len(nodes)} calls, {len(tensors)} tensors",
            hint="choose the layer after it, or make a keras.Model with the tensor as an output",
        )
    return tensors[0]
