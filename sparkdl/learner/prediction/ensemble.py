"""Several models of one architecture, and the one that predicts their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from sparkdl.errors import ModelError
from sparkdl.files.run_state import RunState
from sparkdl.learner.signature import distinct
from sparkdl.learner.state.carried_state import load_carried_state
from sparkdl.learner.state.model_weights import model_layout, write_model
from sparkdl.learner.state.optimizer_state import innermost_optimizer


def vote(models: list[keras.Model], voting: str) -> keras.Model:
    """A model that predicts what the members agree on, compiled as the first one is.

    Args:
        models: With equal inputs and outputs; they become parts of the result.
        voting: ``'soft'``: the mean of their predictions. ``'hard'``: for each class the share of
            the members whose prediction of it is the largest; one output, classes last.

    Raises:
        ModelError: A subclassed model.
    """
    for number, model in enumerate(models):
        require_cloneable(model)
        model.name = f"{model.name}_member_{number}"  # layers of a model have names of their own
    first = models[0]
    inputs = _inputs_like(first.inputs[0] if len(first.inputs) == 1 else first._inputs_struct)
    outputs = [model(inputs) for model in models]
    if voting == "hard":
        outputs = [
            keras.tree.map_structure(
                lambda t: keras.ops.one_hot(keras.ops.argmax(t, axis=-1), t.shape[-1]), output
            )
            for output in outputs
        ]
    mean = keras.tree.map_structure(
        lambda *tensors: keras.ops.mean(keras.ops.stack(tensors), axis=0), *outputs
    )
    ensemble = keras.Model(inputs, mean, name="ensemble")
    _compile_as(first, ensemble)
    return ensemble


def _inputs_like(tensors: object) -> Any:
    return keras.tree.map_structure(
        lambda t: keras.Input(batch_shape=t.shape, dtype=t.dtype, name=t.name), tensors
    )


def _compile_as(model: keras.Model, ensemble: keras.Model) -> None:
    optimizer = innermost_optimizer(model)
    fresh = type(optimizer).from_config(optimizer.get_config())
    ensemble.compile(**{**model._compile_config.config, "optimizer": fresh})


def require_cloneable(model: keras.Model) -> None:
    """Raises ModelError unless ``model`` is a Sequential or functional one."""
    functional = getattr(model, "_inputs_struct", None) is not None
    if not (functional or isinstance(model, keras.Sequential)):
        raise ModelError(
            "an ensemble cannot be made of this model",
            expected="a Sequential or functional keras.Model", received=type(model).__name__,
            hint="the mean of the members' predictions is built from its inputs and outputs",
        )  # fmt: skip


def build_ensemble(model: keras.Model, states: Sequence[RunState]) -> tuple[Any, list[Any]]:
    """Copies of ``model``, and a model of their mean: ``mean(x) = Σ member_i(x) / k``.

    Args:
        model: Compiled and built; Sequential or functional. Not changed.
        states: States of each member: weights, and the variables that these do not hold.

    Returns:
        The mean, compiled as ``model`` is (with a fresh optimizer), and its members, which it
        contains: what trains them changes the mean.

    Raises:
        ModelError: A subclassed model.
    """
    require_cloneable(model)
    layout = model_layout(model)
    members = []
    for number, state in enumerate(states):
        member = keras.models.clone_model(model)
        member.name = f"{model.name}_{number}"  # the layers of a model have names of their own
        member.set_weights(model.get_weights())
        load_carried_state(member, state.carried)
        write_model(member, layout, state.weights)
        members.append(member)
    struct = getattr(model, "_inputs_struct", None)
    inputs = _inputs_like(model.inputs[0] if struct is None else struct)
    names = iter(distinct(getattr(model, "output_names", ())))
    outputs = keras.tree.map_structure(
        lambda *tensors: (
            keras.layers.Average(name=next(names, None))(tensors)
            if len(tensors) > 1
            else tensors[0]
        ),
        *(member(inputs) for member in members),
    )
    mean = keras.Model(inputs, outputs, name=f"{model.name}_ensemble")
    _compile_as(model, mean)
    return mean, members
