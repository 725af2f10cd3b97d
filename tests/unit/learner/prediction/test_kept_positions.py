"""Which outputs have a value for each position of an input: found from the model's shapes."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers

from sparkdl.learner.archives.archive import model_bytes
from sparkdl.learner.prediction.model_source import KerasSource, outline_of

pytestmark = pytest.mark.keras


def found(model: Any) -> dict[str, str]:
    source = KerasSource(model)
    return dict(source.encode(list(source.signature.outputs)).positions)


def words(name: str = "words", **options: Any) -> Any:
    return keras.Input((None,), name=name, **options)


def embedded(x: Any) -> Any:
    return layers.Embedding(9, 4)(x)


def test_outputs_of_one_input() -> None:
    x = words()
    tags = layers.Dense(3, name="tags")(layers.LSTM(4, return_sequences=True)(embedded(x)))
    halved = layers.Conv1D(3, 2, strides=2, padding="same", name="halved")(embedded(x))
    shorter = layers.Conv1D(3, 3, name="shorter")(embedded(x))
    mean = layers.Dense(5, name="mean")(layers.GlobalAveragePooling1D()(embedded(x)))
    model = keras.Model(x, [tags, halved, shorter, mean])
    assert found(model) == {"tags": "words"}
    assert found(keras.Sequential([keras.Input((None, 2)), layers.Dense(3)])) != {}
    uncompiled = keras.Sequential([keras.Input((None, 2)), layers.Dense(3)])
    outline = outline_of(model_bytes(uncompiled), {}, safe_mode=True)
    assert outline is not None
    assert list(outline.positions.values()) == list(outline.signature.inputs)
    assert found(keras.Sequential([keras.Input((7,)), layers.Dense(3)])) == {}


def test_outputs_of_several_inputs_and_a_mask() -> None:
    """Also where they must be equally long, and where the mask has the length of its input."""
    first, second = words("first"), words("second")
    a, b = (layers.Dense(2, name=n)(embedded(x)) for n, x in (("a", first), ("b", second)))
    assert found(keras.Model([first, second], [b, a])) == {"a": "first", "b": "second"}
    added = layers.Dense(2, name="c")(layers.Add()([embedded(first), embedded(second)]))
    assert found(keras.Model([first, second], added)) == {"c": "first"}
    x, mask = words(), keras.Input((None,), dtype="bool", name="words_mask")
    masked = layers.Dense(2, name="d")(
        layers.LSTM(4, return_sequences=True)(embedded(x), mask=mask)
    )
    assert found(keras.Model([x, mask], masked)) == {"d": "words"}
