"""The parts of which the models of the parity tests are made: layers, losses, metrics, optimizers.

Values are small and functions smooth, so that rounding does not grow in the few steps of a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers
from own_parts import (
    Counting,
    MeanOutput,
    Measuring,
    OwnLoss,
    Penalized,
    Scaled,
    Tempered,
    own_function,
)

VOCABULARY = 8
FEATURES = 6
LENGTH = 5


# -- layers ----------------------------------------------------------------------------------------

Apply = Callable[[Any], Any]
FREE = frozenset({"float32", "float64", "mixed_float16", "mixed_bfloat16"})


@dataclass(frozen=True)
class Block:
    """A step of a model: tensor -> tensor.

    Args:
        takes: Kinds of tensors that it takes: ``'vector'`` (n, f), ``'sequence'`` (n, t, f),
            ``'image'`` (n, h, w, c).
        make: Makes the layers once, and returns what applies them.
        gives: The kind of tensor that comes out; empty for the same.
        by: ``'batch'`` where its result for a row depends on the other rows of the batch,
            ``'order'`` where it depends on the batches before, ``'random'`` where it draws random
            numbers.
        simple: Whether it is one layer, for models that are a list of layers.
    """

    takes: str
    make: Callable[[], Apply]
    gives: str = ""
    by: str = ""
    simple: bool = True


def _one(kind: Any, *arguments: Any, **named: Any) -> Callable[[], Apply]:
    return lambda: kind(*arguments, **named)


def _residual() -> Apply:
    inner = layers.Dense(FEATURES, activation="tanh")
    fit = layers.Dense(FEATURES)

    def apply(x: Any) -> Any:
        x = fit(x)
        return layers.Add()([x, inner(x)])

    return apply


def _shared() -> Apply:
    dense, fit = layers.Dense(FEATURES, activation="tanh"), layers.Dense(FEATURES)
    return lambda x: dense(dense(fit(x)))


def _nested() -> Apply:
    fit = layers.Dense(4)
    given = keras.Input((4,))
    inner = keras.Model(given, layers.Dense(4, activation="tanh")(layers.Dense(3)(given)))
    return lambda x: inner(fit(x))


def _attention() -> Apply:
    attention, norm = layers.MultiHeadAttention(2, 3), layers.LayerNormalization()
    return lambda x: norm(x + attention(x, x)) if x.shape[-1] else None


def _causal() -> Apply:
    attention = layers.MultiHeadAttention(2, 3)
    return lambda x: attention(x, x, use_causal_mask=True)


def _grouped() -> Apply:
    attention = layers.GroupQueryAttention(3, 2, 1)
    return lambda x: attention(x, x)


def _dot_attention() -> Apply:
    attention = layers.Attention(use_scale=True)
    return lambda x: attention([x, x])


def _partly() -> Apply:
    dense, last = layers.Dense(5, activation="tanh"), layers.Dense(5)

    def apply(x: Any) -> Any:
        x = last(dense(x))
        dense.trainable = False
        return x

    return apply


def _kernel_frozen() -> Apply:
    dense = layers.Dense(5, activation="tanh")

    def apply(x: Any) -> Any:
        x = dense(x)
        dense.kernel.trainable = False
        return x

    return apply


def _lora() -> Apply:
    dense = layers.Dense(5, activation="tanh")

    def apply(x: Any) -> Any:
        x = dense(x)
        dense.enable_lora(2)
        return x

    return apply


def _adapted() -> Apply:
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(5).normal(1.0, 2.0, (20, FEATURES)).astype("float32"))
    return layer


def _frozen_norm() -> Apply:
    layer = layers.BatchNormalization()
    layer.trainable = False
    return layer


_DENSE = {"activation": "tanh"}
BLOCKS: dict[str, Block] = {
    "dense": Block("vector sequence", _one(layers.Dense, 5, **_DENSE)),
    "relu": Block("vector sequence", _one(layers.Dense, 7, activation="gelu")),
    "penalty": Block(
        "vector sequence",
        _one(
            layers.Dense,
            4,
            kernel_regularizer=keras.regularizers.L1L2(1e-2, 1e-2),
            bias_regularizer="l2",
            activity_regularizer=keras.regularizers.L2(1e-2),
        ),
    ),
    "constraint": Block(
        "vector sequence",
        _one(
            layers.Dense,
            4,
            kernel_constraint=keras.constraints.MaxNorm(0.8),
            bias_constraint="non_neg",
            bias_initializer="ones",
        ),
    ),
    "unit norm": Block(
        "vector sequence", _one(layers.Dense, 4, kernel_constraint=keras.constraints.UnitNorm())
    ),
    "orthogonal": Block(
        "vector",
        _one(layers.Dense, 4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.01)),
    ),
    "einsum": Block("vector", _one(layers.EinsumDense, "ab,bc->ac", 5, bias_axes="c")),
    "prelu": Block("vector", _one(layers.PReLU, alpha_initializer="ones")),
    "layer norm": Block("vector sequence image", _one(layers.LayerNormalization, epsilon=0.1)),
    "rms norm": Block("vector sequence", _one(layers.RMSNormalization, epsilon=0.1)),
    "group norm": Block("image", _one(layers.GroupNormalization, 1, epsilon=0.1)),
    "unit": Block("vector", _one(layers.UnitNormalization)),
    "batch norm": Block(
        "vector image", _one(layers.BatchNormalization, momentum=0.8, epsilon=0.1), by="batch"
    ),
    "frozen norm": Block("vector image", _frozen_norm),
    "spectral": Block("vector", lambda: layers.SpectralNormalization(layers.Dense(4)), by="batch"),
    "normalization": Block("features", _adapted, gives="vector"),
    "dropout": Block("vector sequence image", _one(layers.Dropout, 0.3), by="random"),
    "seeded dropout": Block("vector", _one(layers.Dropout, 0.3, seed=42), by="random"),
    "noise": Block("vector", _one(layers.GaussianNoise, 0.1), by="random"),
    "activity": Block("vector sequence", _one(layers.ActivityRegularization, 1e-2, 1e-2)),
    "own layer": Block("vector sequence image", _one(Scaled, 0.8)),
    "own loss": Block("vector sequence", _one(Penalized)),
    "measuring": Block("vector sequence", _one(Measuring)),
    "lambda": Block(
        "vector sequence image", lambda: layers.Lambda(lambda x: x * 0.5 + 0.1, name="scaling")
    ),
    "rescaling": Block("image", _one(layers.Rescaling, 0.5, offset=0.1)),
    "counting": Block("vector", _one(Counting)),
    "tempered": Block("vector", _one(Tempered)),
    "residual": Block("vector", _residual, simple=False),
    "shared": Block("vector", _shared, simple=False),
    "nested": Block("vector", _nested, simple=False),
    "lora": Block("vector sequence", _lora, simple=False),
    "frozen": Block("vector sequence", _partly, simple=False),
    "frozen kernel": Block("vector", _kernel_frozen, simple=False),
    "conv": Block("image", _one(layers.Conv2D, 3, 2, **_DENSE)),
    "strided": Block("image", _one(layers.Conv2D, 3, 3, strides=2, padding="same", groups=1)),
    "depthwise": Block("image", _one(layers.DepthwiseConv2D, 2, depth_multiplier=2)),
    "separable": Block("image", _one(layers.SeparableConv2D, 3, 2)),
    "transposed": Block("image", _one(layers.Conv2DTranspose, 2, 2)),
    "pooling": Block("image", _one(layers.AveragePooling2D, 2, padding="same")),
    "flatten": Block("image", _one(layers.Flatten), gives="vector"),
    "global": Block("image", _one(layers.GlobalAveragePooling2D), gives="vector"),
    "conv1d": Block("sequence", _one(layers.Conv1D, 4, 2, padding="causal", **_DENSE)),
    "masking": Block("sequence", _one(layers.Masking)),
    "lstm": Block("sequence", _one(layers.LSTM, 4), gives="vector"),
    "lstm sequence": Block("sequence", _one(layers.LSTM, 4, return_sequences=True)),
    "gru": Block("sequence", _one(layers.GRU, 4), gives="vector"),
    "rnn": Block("sequence", _one(layers.SimpleRNN, 4), gives="vector"),
    "stateful": Block(
        "sequence", _one(layers.GRU, 4, stateful=True), gives="vector", by="order", simple=False
    ),
    "bidirectional": Block("sequence", lambda: layers.Bidirectional(layers.GRU(3)), gives="vector"),
    "stacked cells": Block(
        "sequence",
        lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(3)], return_sequences=True),
    ),
    "recurrent dropout": Block(
        "sequence",
        _one(layers.GRU, 4, dropout=0.2, recurrent_dropout=0.2, seed=3),
        gives="vector",
        by="random",
    ),
    "distributed": Block(
        "sequence", lambda: layers.TimeDistributed(layers.Dense(4, activation="tanh"))
    ),
    "attention": Block("sequence", _attention, simple=False),
    "causal attention": Block("sequence", _causal, simple=False),
    "grouped attention": Block("sequence", _grouped, simple=False),
    "dot attention": Block("sequence", _dot_attention, simple=False),
    "average": Block("sequence", _one(layers.GlobalAveragePooling1D), gives="vector"),
    "maximum": Block("sequence", _one(layers.GlobalMaxPooling1D), gives="vector"),
}
INPUTS: dict[str, tuple[tuple[int, ...], str, str]] = {
    "vector": ((FEATURES,), "float32", "vector"),
    "image": ((6, 6, 2), "float32", "image"),
    "bytes": ((4, 4, 1), "uint8", "image"),
    "sequence": ((LENGTH, 3), "float32", "sequence"),
    "tokens": ((LENGTH,), "int32", "sequence"),
    "masked tokens": ((LENGTH,), "int32", "sequence"),
}
"""Name of an input -> its shape, its dtype, and the kind of tensor that its first layer gives."""


# -- losses ----------------------------------------------------------------------------------------

CLASSES = 3


@dataclass(frozen=True)
class Head:
    """What a model ends with, and what its labels are.

    Args:
        takes: The kind of tensor that it takes.
        units: Outputs of the last layer.
        activation: Of the last layer.
        labels: ``'numbers'``, ``'shares'``, ``'signs'``, ``'bits'``, ``'classes'``, ``'one-hot'``,
            ``'ignored'``: classes, some of them -1, ``'positions'`` or ``'ignored positions'``:
            one of a class for each position.
        loss: Its losses by name.
        metrics: Its metrics by name.
    """

    takes: str
    units: int
    activation: str | None
    labels: str
    loss: dict[str, Callable[[dict[str, Any]], Any]]
    metrics: dict[str, Callable[[], Any]]


def _loss(kind: str, /, **options: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda more: getattr(keras.losses, kind)(**options, **more)


def _metric(kind: str, /, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(keras.metrics, kind)(*arguments, **options)


_SPARSE_METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: "accuracy",
    "sparse top k": _metric("SparseTopKCategoricalAccuracy", 2),
    "sparse crossentropy": _metric("SparseCategoricalCrossentropy", name="ce"),
}
HEADS: dict[str, Head] = {
    "numbers": Head(
        "vector", 2, None, "numbers",
        {
            "mse": _loss("MeanSquaredError"), "mae": _loss("MeanAbsoluteError"),
            "huber": _loss("Huber", delta=0.5), "logcosh": _loss("LogCosh"),
            "cosine": _loss("CosineSimilarity"), "own class": lambda more: OwnLoss(1.5, **more),
            "own function": lambda more: own_function,
        },
        {
            "mae": lambda: "mae", "r2": _metric("R2Score"), "rmse": _metric("RootMeanSquaredError"),
            "cosine": _metric("CosineSimilarity"), "own": MeanOutput,
            "function": lambda: own_function,
        },
    ),
    "shares": Head(
        "vector", 3, "softmax", "shares",
        {"kl": _loss("KLDivergence"), "poisson": _loss("Poisson"), "dice": _loss("Dice"),
         "crossentropy": _loss("CategoricalCrossentropy", label_smoothing=0.1)},
        {"kl": _metric("KLDivergence"), "own": MeanOutput},
    ),
    "signs": Head(
        "vector", 1, "tanh", "signs",
        {"hinge": _loss("Hinge"), "squared hinge": _loss("SquaredHinge")},
        {"hinge": _metric("Hinge"), "own": MeanOutput},
    ),
    "bits": Head(
        "vector", 1, "sigmoid", "bits",
        {"crossentropy": _loss("BinaryCrossentropy", label_smoothing=0.1),
         "focal": _loss("BinaryFocalCrossentropy", apply_class_balancing=True)},
        {"accuracy": lambda: "accuracy", "auc": _metric("AUC", name="auc"),
         "precision": _metric("Precision", thresholds=[0.3, 0.5], name="precision"),
         "recall": _metric("Recall", name="recall"), "f1": _metric("F1Score", threshold=0.5),
         "iou": _metric("BinaryIoU", name="iou")},
    ),
    "flat numbers": Head(
        "vector",
        1,
        None,
        "flat numbers",
        {"mse": _loss("MeanSquaredError"), "huber": _loss("Huber", delta=0.5)},
        {"mae": lambda: "mae", "r2": _metric("R2Score")},
    ),
    "flat bits": Head(
        "vector",
        1,
        "sigmoid",
        "flat bits",
        {"crossentropy": _loss("BinaryCrossentropy")},
        {"accuracy": lambda: "accuracy", "auc": _metric("AUC", name="auc")},
    ),
    "logits": Head(
        "vector", 2, None, "several bits",
        {"crossentropy": _loss("BinaryCrossentropy", from_logits=True),
         "focal": _loss("BinaryFocalCrossentropy", from_logits=True, gamma=1.5)},
        {"auc": _metric("AUC", from_logits=True, multi_label=True, num_labels=2, name="auc"),
         "accuracy": _metric("BinaryAccuracy", threshold=0.0, name="accuracy")},
    ),
    "classes": Head(
        "vector", CLASSES, "softmax", "classes",
        {"crossentropy": _loss("SparseCategoricalCrossentropy")}, _SPARSE_METRICS,
    ),
    "class logits": Head(
        "vector", CLASSES, None, "classes",
        {"crossentropy": _loss("SparseCategoricalCrossentropy", from_logits=True)},
        {"accuracy": lambda: "accuracy"},
    ),
    "ignored": Head(
        "vector", CLASSES, "softmax", "ignored",
        {"crossentropy": _loss("SparseCategoricalCrossentropy", ignore_class=-1)},
        {"iou": _metric("MeanIoU", CLASSES, ignore_class=-1, sparse_y_pred=False, name="iou")},
    ),
    "one-hot": Head(
        "vector", CLASSES, "softmax", "one-hot",
        {"crossentropy": _loss("CategoricalCrossentropy", label_smoothing=0.1),
         "focal": _loss("CategoricalFocalCrossentropy"), "hinge": _loss("CategoricalHinge"),
         "tversky": _loss("Tversky")},
        {"accuracy": lambda: "accuracy", "auc": _metric("AUC", name="auc"),
         "f1": _metric("F1Score", average="macro", name="f1"),
         "top k": _metric("TopKCategoricalAccuracy", 2), "recall": _metric("Recall", class_id=1)},
    ),
    "positions": Head(
        "sequence", CLASSES, "softmax", "positions",
        {"crossentropy": _loss("SparseCategoricalCrossentropy")}, _SPARSE_METRICS,
    ),
    "ignored positions": Head(
        "sequence", CLASSES, None, "ignored positions",
        {"crossentropy": _loss(
            "SparseCategoricalCrossentropy", from_logits=True, ignore_class=-1)},
        {},
    ),
    "sequences": Head(
        "sequence", 2, None, "number sequences",
        {"mse": _loss("MeanSquaredError"), "huber": _loss("Huber", delta=0.5)},
        {"mae": lambda: "mae"},
    ),
}  # fmt: skip


# -- optimizers ------------------------------------------------------------------------------------

_EPSILON = {"epsilon": 1e-3}
"""Large: a gradient that is nothing but rounding stays small in what the optimizer does."""
OPTIMIZERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "sgd": lambda rate, more: keras.optimizers.SGD(rate, **more),
    "momentum": lambda rate, more: keras.optimizers.SGD(rate, 0.9, nesterov=True, **more),
    "adam": lambda rate, more: keras.optimizers.Adam(rate, **_EPSILON, **more),
    "amsgrad": lambda rate, more: keras.optimizers.Adam(rate, amsgrad=True, **_EPSILON, **more),
    "adamw": lambda rate, more: keras.optimizers.AdamW(
        rate, **{"weight_decay": 0.1, **_EPSILON, **more}
    ),
    "adagrad": lambda rate, more: keras.optimizers.Adagrad(rate, **_EPSILON, **more),
    "rmsprop": lambda rate, more: keras.optimizers.RMSprop(
        rate, momentum=0.5, centered=True, **_EPSILON, **more
    ),
    "adadelta": lambda rate, more: keras.optimizers.Adadelta(rate, **_EPSILON, **more),
    "adamax": lambda rate, more: keras.optimizers.Adamax(rate, **_EPSILON, **more),
    "nadam": lambda rate, more: keras.optimizers.Nadam(rate, **_EPSILON, **more),
    "lion": lambda rate, more: keras.optimizers.Lion(rate, **more),
    "schedule free": lambda rate, more: keras.optimizers.ScheduleFreeAdamW(
        rate, warmup_steps=3, **_EPSILON, **more
    ),
    "ftrl": lambda rate, more: keras.optimizers.Ftrl(rate, **more),
    "lamb": lambda rate, more: keras.optimizers.Lamb(rate, **_EPSILON, **more),
    "adafactor": lambda rate, more: keras.optimizers.Adafactor(rate, **more),
}
if "Muon" in vars(keras.optimizers):  # since Keras 3.11
    OPTIMIZERS["muon"] = lambda rate, more: keras.optimizers.Muon(rate, **_EPSILON, **more)
if "MultiOptimizer" in vars(keras.optimizers):
    OPTIMIZERS["multi"] = lambda rate, more: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(rate, 0.9),
            {
                ".*kernel": keras.optimizers.Adam(rate, **_EPSILON),
                ".*bias": keras.optimizers.SGD(rate),
            },
        ),
        **more,
    )
OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "global clipnorm": {"global_clipnorm": 0.1},
    "decay": {"weight_decay": 0.1},
    "exclusion": {"weight_decay": 0.2},  # and exclude_from_weight_decay
    "ema": {"use_ema": True, "ema_momentum": 0.8},
    "ema overwrite": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 2},
    "loss scale": {"loss_scale_factor": 64.0},
}
SCHEDULES: dict[str, Callable[[float], Any]] = {
    "": lambda rate: rate,
    "exponential": lambda rate: keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.7),
    "cosine": lambda rate: keras.optimizers.schedules.CosineDecay(
        rate / 2, 9, warmup_target=rate, warmup_steps=2
    ),
    "pieces": lambda rate: keras.optimizers.schedules.PiecewiseConstantDecay(
        [2, 5], [rate, rate / 2, rate / 4]
    ),
}
