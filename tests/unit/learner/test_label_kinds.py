"""What labels each loss of Keras takes; of one that is not known they stay as they are."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.learner.signature import model_signature
from sparkdl.learner.structure import name_outputs

KINDS = {
    "sparse": {"SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy"},
    "binary": {"BinaryCrossentropy", "BinaryFocalCrossentropy"},
    "own": {"CTC", "Circle"},
    "dense": {
        "CategoricalCrossentropy", "CategoricalFocalCrossentropy", "CategoricalHinge",
        "CosineSimilarity", "Dice", "Hinge", "Huber", "KLDivergence", "LogCosh",
        "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError",
        "MeanSquaredLogarithmicError", "Poisson", "SquaredHinge", "Tversky",
    },
}  # fmt: skip


def kind_of(loss: Any) -> str:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="out")])
    model.compile("sgd", loss)
    (kind,) = model_signature(model).label_kinds.values()
    return kind


def test_every_loss_of_keras() -> None:
    for name, cls in vars(keras.losses).items():
        if inspect.isclass(cls) and name != "Loss":
            expected = [kind for kind, names in KINDS.items() if name in names]
            assert [kind_of(cls())] == expected, name


@pytest.mark.parametrize(
    ("loss", "kind"), [("ctc", "own"), (keras.losses.huber, "dense"), ("bce", "binary")]
)
def test_functions_and_names(loss: Any, kind: str) -> None:
    assert kind_of(loss) == kind


def test_a_loss_of_a_later_keras() -> None:
    class Unheard(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.mean(y_pred, -1)

    Unheard.__module__ = "keras.src.losses.losses"
    assert kind_of(Unheard()) == "own"


def test_outputs_of_one_name_get_one_each() -> None:
    """Keras calls all outputs of an operation alike, and one that is listed twice."""
    given = keras.Input((4,))
    out = keras.layers.Dense(3, name="out")(given)
    assert list(model_signature(keras.Model(given, [out, out])).outputs) == ["out", "out_1"]
    rows = keras.Input((5, 2))
    states = keras.Model(rows, keras.layers.LSTM(3, return_state=True, name="lstm")(rows))
    assert list(model_signature(states).outputs) == ["lstm", "lstm_1", "lstm_2"]
    named = name_outputs(states, states(np.zeros((1, 5, 2))))
    assert [array.shape for array in named.values()] == [(1, 3)] * 3
