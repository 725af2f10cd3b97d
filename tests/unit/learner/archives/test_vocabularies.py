"""Lookups travel with the vocabulary that they have, not with the one that they were made with."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.learner.archives.archive import decode_model, encode_model, model_bytes
from sparkdl.learner.preprocessing import LayerEncoder

tf = pytest.importorskip("tensorflow")
WORDS, OTHERS = ["a", "b", "c"], ["d", "c", "a"]
TEXTS = np.array([["a b"], ["c d"], ["b"]], object)
LOOKUPS = {
    "texts": lambda: layers.TextVectorization(vocabulary=WORDS, output_sequence_length=2),
    "weights of words": lambda: layers.TextVectorization(
        vocabulary=WORDS, idf_weights=[1.0, 2.0, 3.0], output_mode="tf_idf"
    ),
    "strings": lambda: layers.StringLookup(vocabulary=np.array(WORDS), output_mode="one_hot"),
    "integers": lambda: layers.IntegerLookup(vocabulary=(1, 2, 3)),
    "inverted": lambda: layers.StringLookup(vocabulary=WORDS, invert=True),
}


def change(layer: Any) -> None:
    weights = [[3.0, 1.0, 2.0]] if getattr(layer, "_output_mode", "") == "tf_idf" else []
    integers = isinstance(layer, layers.IntegerLookup)
    layer.set_vocabulary([3, 2, 4] if integers else OTHERS, *weights)


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_vocabulary_that_was_set_later(name: str, tmp_path: Path) -> None:
    layer = LOOKUPS[name]()
    numbers = name in ("integers", "inverted")
    given = keras.Input((1,), dtype="int64" if numbers else "string")
    model = keras.Model(given, layer(given))
    rows = tf.constant([[1], [2], [3]] if numbers else TEXTS)
    before, old = encode_model(model).key, model(rows).numpy()
    assert encode_model(model).key == before
    change(layer)
    wanted = model(rows).numpy()
    assert not np.array_equal(wanted, old)
    archive = encode_model(model)
    assert archive.key != before
    (tmp_path / "m.keras").write_bytes(model_bytes(model))
    for copy in (decode_model(archive), keras.models.load_model(tmp_path / "m.keras")):
        np.testing.assert_array_equal(copy(rows).numpy(), wanted)
    np.testing.assert_array_equal(model(rows).numpy(), wanted)


def test_a_vocabulary_of_a_layer_before_a_model_and_of_a_file(tmp_path: Path) -> None:
    layer, path = LOOKUPS["texts"](), tmp_path / "words.txt"
    change(layer)
    copy = pickle.loads(pickle.dumps(LayerEncoder(layer))).made_again()
    np.testing.assert_array_equal(copy(TEXTS), layer(TEXTS))
    path.write_text("b\na\n")
    given = keras.Input((1,), dtype="string")
    model = keras.Model(given, layers.StringLookup(vocabulary=str(path))(given))
    archive, rows = encode_model(model), tf.constant([["a"], ["b"], ["c"]])
    path.unlink()
    np.testing.assert_array_equal(decode_model(archive)(rows), model(rows))
