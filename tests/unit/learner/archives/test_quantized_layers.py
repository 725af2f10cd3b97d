"""Layers that another layer makes arrive quantized; Keras' own file of such a model is not loaded."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.learner.archives import rebuilt
from sparkdl.learner.archives.archive import decode_model, encode_model, restore_state

X = np.random.default_rng(0).normal(size=(4, 3, 4)).astype("float32")


def attention(*, adapters: bool) -> Any:
    keras.utils.set_random_seed(1)
    given = keras.Input((3, 4))
    heads = layers.MultiHeadAttention(2, 3)
    outputs = layers.Dense(2)(heads(given, given))
    model = keras.Model(given, outputs)
    if adapters:
        heads._query_dense.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_layers_that_a_layer_makes_arrive_quantized(
    mode: str, large: bool, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # whose values are not compared
        monkeypatch.setattr(rebuilt, "LARGE_BYTES", 0)
    model = attention(adapters=adapters)
    encode_model(model)
    model.quantize(mode)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    archive = encode_model(model)
    copy, wanted = decode_model(archive), model.predict(X, verbose=0)
    np.testing.assert_array_equal(copy.predict(X, verbose=0), wanted)
    for one in (model, copy) if adapters else ():
        one.fit(X, X[..., :2], batch_size=2, epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.variables, copy.variables, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (mine, its)), atol=1e-6)
    restore_state(copy, archive)
    np.testing.assert_array_equal(copy.predict(X, verbose=0), wanted)
