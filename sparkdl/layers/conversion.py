"""Models with ``keras.layers.Embedding`` made into models with rows in tables, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from sparkdl.errors import ModelError, ResourceError
from sparkdl.layers.local_rows import LocalRows
from sparkdl.layers.recompute import inlined
from sparkdl.layers.served_embedding import ServedEmbedding
from sparkdl.layers.sharded_classifier import ClassLoss, ShardedClassifier
from sparkdl.settings.values import require_int

MOST_PLAIN_BYTES = 4 << 30
"""Bytes of the embeddings of a plain model at most."""


def serve_embeddings(model: keras.Model, larger_than_mb: float = 2.0, **settings: Any) -> Any:
    """A copy of a model whose large embeddings lie in tables.

    Args:
        model: A functional or Sequential ``keras.Model``, compiled or not.
        larger_than_mb: ``keras.layers.Embedding`` layers of more megabytes are replaced; smaller
            ones stay in the model.
        **settings: Arguments of :class:`ServedEmbedding` for the layers that are made
            (``optimizer``, ``entry`` and so on).

    Returns:
        The copy, compiled as ``model`` is. Its rows start from the weights of the embeddings; its
        optimizer starts anew.

    Raises:
        ModelError: The model is of another kind, or an embedding has what rows in a table cannot
            have: masks, regularizers, constraints, quantization, adapters.
    """
    _require_cloneable(model)

    def replaced(layer: keras.layers.Layer) -> Any:
        is_plain = type(layer) is keras.layers.Embedding
        large = is_plain and 4e-6 * layer.input_dim * layer.output_dim > larger_than_mb
        if not large:
            return layer.__class__.from_config(layer.get_config())
        _require_plain_rows(layer)
        served = ServedEmbedding(
            layer.output_dim, table=layer.name, name=layer.name, trainable=layer.trainable,
            dtype=layer.dtype_policy, **settings,
        )  # fmt: skip
        rows = LocalRows()
        values = keras.ops.convert_to_numpy(layer.embeddings).astype(np.float32)
        rows.load(served.table_name, {"ids": np.arange(len(values)), "values": values})
        served.serve_from(rows)
        return served

    return _cloned(model, replaced)


def to_plain_model(model: keras.Model, ids: int | None = None) -> Any:
    """A copy of a model whose rows and classes in tables have become layers of Keras'.

    Layers in segments (:func:`recompute_segments`) are the model's own again.

    A :class:`ShardedClassifier` becomes a ``Dense`` without bias, whose outputs are the logits of
    all classes (with a margin: on normalized features, the scaled cosines).

    Args:
        model: A functional or Sequential ``keras.Model`` with :class:`ServedEmbedding` or
            :class:`ShardedClassifier` layers, or with segments.
        ids: The embeddings have the rows of the ids from 0 to ``ids - 1``; of an id without a row
            its start value, and zeros for the padding. None: the model has no embeddings.

    Returns:
        The copy, for other runtimes too, compiled as ``model`` is; its optimizer starts anew. The
        loss of a classifier becomes the cross-entropy of the logits, without the margin, which is
        for training. A model with a classifier and other outputs is left uncompiled.

    Raises:
        ModelError: The model is of another kind, or a layer has a combiner.
        ConfigError: ``ids`` is missing.
        ResourceError: The layers would have more than 4 GB.
    """
    _require_cloneable(model)
    model = inlined(model)
    embeddings = [layer for layer in model.layers if isinstance(layer, ServedEmbedding)]
    heads = [layer for layer in model.layers if isinstance(layer, ShardedClassifier)]
    count = require_int("ids", ids, least=1) if embeddings else 0
    size = sum(4 * count * layer.dim for layer in embeddings)
    size += sum(4 * layer.num_classes * layer.dim for layer in heads)
    if size > MOST_PLAIN_BYTES:
        raise ResourceError(
            "the rows of the tables do not fit a plain model",
            expected=f"at most {MOST_PLAIN_BYTES:,} bytes", received=f"{size:,} bytes",
        )  # fmt: skip
    made: list[tuple[Any, Any]] = []

    def replaced(layer: keras.layers.Layer) -> Any:
        if isinstance(layer, ShardedClassifier):
            return _plain_classifier(layer)
        if not isinstance(layer, ServedEmbedding):
            return layer.__class__.from_config(layer.get_config())
        if layer.combiner is not None:
            raise ModelError(
                f"layer {layer.name!r} combines rows, which keras.layers.Embedding does not",
                expected="combiner=None, and the combination as a layer of its own",
                received=f"combiner={layer.combiner!r}",
            )
        plain = keras.layers.Embedding(
            count, layer.dim, name=layer.name, trainable=layer.trainable, dtype=layer.dtype_policy
        )
        made.append((plain, layer))
        return plain

    copy = _cloned(model, replaced)
    for plain, layer in made:
        plain.set_weights([layer.rows(np.arange(count))])
    return copy


def _plain_classifier(layer: ShardedClassifier) -> Any:
    dense = keras.layers.Dense(layer.num_classes, use_bias=False, name="centers")
    inputs, centers = keras.Input((layer.dim,)), layer.centers(np.arange(layer.num_classes))
    if layer.margin is None:
        plain = keras.Sequential([inputs, dense], name=layer.name)
    else:
        plain = keras.Sequential(
            [inputs, keras.layers.UnitNormalization(name="direction"), dense], name=layer.name
        )
        centers /= np.maximum(np.linalg.norm(centers, axis=1, keepdims=True), 1e-12)
        centers *= layer.margin.scale
    dense.set_weights([centers.T])
    return plain


def _cloned(model: keras.Model, replaced: Callable[[Any], Any]) -> Any:
    copy = keras.models.clone_model(model, clone_function=replaced)
    kept: list[tuple[Any, Any]] = []
    for layer, former in zip(copy.layers, model.layers, strict=True):
        if type(layer) is type(former):
            layer.set_weights(former.get_weights())
            kept += zip(former.trainable_variables, layer.trainable_variables, strict=True)
    copy.dtype_policy = model.dtype_policy
    if not getattr(model, "compiled", False):
        return copy
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer))
    if isinstance(model.loss, ClassLoss):
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=model.loss.reduction)
        copy.compile(optimizer, loss, metrics=["accuracy"])
    elif not any(isinstance(loss, ClassLoss) for loss in keras.tree.flatten(model.loss)):
        settings = keras.saving.deserialize_keras_object(model.get_compile_config())
        copy.compile(**{**settings, "optimizer": optimizer})
        _exclude_from_decay(model.optimizer, copy.optimizer, kept)
    return copy


def _exclude_from_decay(
    former: keras.Optimizer, optimizer: keras.Optimizer, kept: list[tuple[Any, Any]]
) -> None:
    """Keras keeps these variables outside of an optimizer's configuration."""
    former, optimizer = (getattr(o, "inner_optimizer", o) for o in (former, optimizer))
    excluded: set[Any] = getattr(former, "_exclude_from_weight_decay", set())
    variables = [new for old, new in kept if former._var_key(old) in excluded]
    pattern = getattr(former, "_exclude_from_weight_decay_pattern", None)
    if variables or pattern is not None:
        names = [pattern.pattern] if pattern is not None else None
        optimizer.exclude_from_weight_decay(variables or None, names)


def _require_cloneable(model: keras.Model) -> None:
    kinds = (keras.Sequential, keras.src.models.Functional)
    if not isinstance(model, kinds) or not model.built:
        raise ModelError(
            "the layers of this model cannot be replaced",
            expected="a built functional or Sequential keras.Model",
            received=type(model).__qualname__, hint="write the layer that you want into the model",
        )  # fmt: skip


def _require_plain_rows(layer: keras.layers.Layer) -> None:
    has = {
        "mask_zero": layer.mask_zero,
        "embeddings_regularizer": layer.embeddings_regularizer,
        "embeddings_constraint": layer.embeddings_constraint,
        "activity_regularizer": layer.activity_regularizer,
        "lora_enabled": layer.lora_enabled,
        "quantization_mode": layer.quantization_mode,
    }
    if found := [name for name, value in has.items() if value]:
        raise ModelError(
            f"the rows of layer {layer.name!r} cannot lie in a table",
            expected="an Embedding without masks, regularizers, constraints and adapters",
            received=", ".join(found),
            hint="a smaller layer stays in the model: larger_than_mb=...",
        )
