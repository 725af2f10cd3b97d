"""``BatchNormalization(synchronized=True)`` is followed by several workers, or refused.

Followed, the mean and the variance of a channel are those of the rows of all workers in this step
(:class:`sparkdl.learner.steps.tensorflow_exchange.SynchronizedMoments`).
"""

from __future__ import annotations

from typing import Any

import keras

from sparkdl.errors import ConfigError


def synchronized_layers(model: Any) -> list[Any]:
    """The layers of a model that normalise by the rows of all workers while they train."""
    return [
        layer
        for layer in model._flatten_layers(include_self=False, recursive=True)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.synchronized
        and layer.trainable
    ]


def require_synchronized(model: Any, num_workers: int, way: str, *, followed: bool) -> None:
    """Refuses a model whose layers would normalise by the rows of one worker alone.

    Args:
        model: Built.
        num_workers: Workers that train it; one has all rows.
        way: How they train, for the message.
        followed: Whether each of its steps is one of all workers together, from the first layer on.

    Raises:
        ConfigError: Nobody can follow a layer's ``synchronized=True``.
    """
    layers = synchronized_layers(model) if num_workers > 1 else []
    if not layers:
        return
    where, reason = layers[0], way
    if keras.backend.backend() != "tensorflow":
        followed, reason = False, f"backend {keras.backend.backend()!r}, where Keras has none"
    for outer in model._flatten_layers(include_self=False, recursive=True):
        if isinstance(outer, (keras.layers.Wrapper, keras.layers.RNN)):
            inside = synchronized_layers(outer)
            if inside:  # it is called in a loop of its own
                where, followed = inside[0], False
                reason = f"a layer inside of {type(outer).__name__} {outer.name!r}"
    if followed:
        return
    raise ConfigError(
        f"layer {where.name!r} of model {model.name!r} has synchronized=True, which "
        f"{num_workers} workers cannot follow here",
        expected="TensorFlow, and mode='allreduce' or 'synchronous' with their own rules, an "
        "exchange at each batch, and on_nan='raise' or 'ignore'",
        received=reason,
        hint="synchronized=False normalises the batch of each worker; mode='allreduce' follows it",
    )
