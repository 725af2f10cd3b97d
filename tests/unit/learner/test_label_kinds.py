"""What labels each loss of Keras takes; of one that is not known they stay as they are."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import pytest

from sparkdl.errors import ModelError
from sparkdl.learner.signature import model_signature

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


def test_an_output_that_is_listed_twice_needs_a_second_name() -> None:
    given = keras.Input((4,))
    out = keras.layers.Dense(3, name="out")(given)
    with pytest.raises(ModelError, match=r"one name(?s:.*)\['out'\](?s:.*)Identity"):
        model_signature(keras.Model(given, [out, out]))
    named = keras.layers.Identity(name="again")(out)
    assert list(model_signature(keras.Model(given, [out, named])).outputs) == ["out", "again"]
