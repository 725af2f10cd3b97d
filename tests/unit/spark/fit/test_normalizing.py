"""Models that bring their inputs to mean 0 by themselves."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from sparkdl.spark.fit.fit_warnings import normalizes

pytestmark = pytest.mark.keras


def model(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])


@pytest.mark.parametrize(
    ("layers", "answer"),
    [
        ([], False),
        ([keras.layers.Rescaling(1 / 255)], False),
        ([keras.layers.Rescaling(1 / 127.5, offset=-1.0)], True),
        ([keras.layers.BatchNormalization()], True),
        ([keras.Sequential([keras.layers.LayerNormalization()])], True),
    ],
    ids=["none", "scaled only", "scaled and shifted", "by batch", "in an inner model"],
)
def test_layers_that_subtract_a_mean(layers: list[Any], answer: bool) -> None:
    assert normalizes(model(*layers)) is answer
