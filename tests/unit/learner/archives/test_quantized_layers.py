"""Layers that another layer makes arrive quantized; Keras itself cannot load such a model."""

from __future__ import annotations

from collections import OrderedDict
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
@pytest.mark.parametrize("adapters", [False, True])
def test_layers_that_a_layer_makes_arrive_quantized(
    mode: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as it is, and as a large one, whose values are not compared."""
    model = attention(adapters=adapters)
    encode_model(model)
    model.quantize(mode)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    sent = []
    for large_bytes in (rebuilt.LARGE_BYTES, 0):
        monkeypatch.setattr(rebuilt, "LARGE_BYTES", large_bytes)
        monkeypatch.setattr(rebuilt, "_known", OrderedDict())
        archive = encode_model(model)
        sent.append((archive, decode_model(archive)))
    wanted = model.predict(X, verbose=0)
    for _, copy in sent:
        np.testing.assert_array_equal(copy.predict(X, verbose=0), wanted)
    for one in (model, *(copy for _, copy in sent)) if adapters else ():
        one.fit(X, X[..., :2], batch_size=2, epochs=2, shuffle=False, verbose=0)
    for archive, copy in sent:
        for mine, its in zip(model.variables, copy.variables, strict=True):
            np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (mine, its)), atol=1e-6)
        restore_state(copy, archive)
        np.testing.assert_array_equal(copy.predict(X, verbose=0), wanted)


def test_a_head_beside_a_quantized_backbone_of_keras_hub() -> None:
    """The backbone has a map of policies, which its task's other layers get, too."""
    hub = pytest.importorskip("keras_hub", reason="pip install sparkdl[hub]")
    backbone = hub.models.BertBackbone(
        vocabulary_size=9, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=4,
        max_sequence_length=4, num_segments=2,
    )  # fmt: skip
    model = hub.models.BertTextClassifier(backbone, num_classes=2)
    backbone.enable_lora(2)
    model.compile("sgd", "mse")
    model.quantize("int8")
    ids = np.ones((2, 4), "int32")
    rows = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": ids}
    copy = decode_model(encode_model(model))
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(m(rows)) for m in (model, copy)))
