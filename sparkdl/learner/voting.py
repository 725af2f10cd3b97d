"""One model of several that need not be alike: their predictions vote."""

from __future__ import annotations

import keras

from sparkdl.learner.ensemble import require_cloneable
from sparkdl.learner.optimizer_state import innermost_optimizer


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
    inputs = keras.tree.map_structure(
        lambda t: keras.Input(batch_shape=t.shape, dtype=t.dtype, name=t.name),
        first.inputs[0] if len(first.inputs) == 1 else first._inputs_struct,
    )
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
    settings = dict(first._compile_config.config)
    optimizer = innermost_optimizer(first)
    settings["optimizer"] = type(optimizer).from_config(optimizer.get_config())
    ensemble.compile(**settings)
    return ensemble
