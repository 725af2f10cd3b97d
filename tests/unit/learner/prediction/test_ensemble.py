"""The mean of several models."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from sparkdl.errors import ModelError
from sparkdl.files.model_file import pack_arrays
from sparkdl.files.run_state import RunState
from sparkdl.learner.prediction.ensemble import build_ensemble
from sparkdl.learner.state.model_weights import model_layout


def sequential() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def functional() -> keras.Model:
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    y, z = keras.layers.Dense(1, name="y")(joined), keras.layers.Dense(2, name="z")(joined)
    return keras.Model({"a": a, "b": b}, {"y": y, "z": z})


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_the_mean_predicts_the_mean_of_its_members(kind: str, tmp_path: object) -> None:
    rng = np.random.default_rng(0)
    model = sequential() if kind == "sequential" else functional()
    loss = "sparse_categorical_crossentropy" if kind == "sequential" else {"y": "mse", "z": "mse"}
    model.compile("adam", loss)
    layout = model_layout(model)
    weights = [rng.uniform(0.1, 1, layout.size).astype("float32") for _ in range(3)]
    mean, members = build_ensemble(model, [RunState(1, flat) for flat in weights])
    x = rng.normal(size=(7, 5)).astype("float32")
    data = x if kind == "sequential" else {"a": x, "b": 2 * x}
    predictions = [member.predict(data, verbose=0) for member in members]
    path = f"{tmp_path}/mean.keras"
    mean.save(path)
    for ensemble in (mean, keras.models.load_model(path)):
        together = ensemble.predict(data, verbose=0)
        pairs = (
            [(together, predictions)]
            if kind == "sequential"
            else [(together[n], [p[n] for p in predictions]) for n in ("y", "z")]
        )
        for one, several in pairs:
            np.testing.assert_allclose(one, np.mean(several, axis=0), rtol=1e-5)
        assert ensemble.compiled
    labels = np.zeros(7) if kind == "sequential" else {"y": np.zeros((7, 1)), "z": np.zeros((7, 2))}
    assert np.isfinite(mean.evaluate(data, labels, verbose=0, return_dict=True)["loss"])


def test_outputs_of_one_name_have_a_mean_each() -> None:
    rows = keras.Input((4, 2))
    model = keras.Model(rows, keras.layers.LSTM(3, return_state=True)(rows))
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.1, 1, model_layout(model).size).astype("float32") for _ in range(2)]
    mean, members = build_ensemble(model, [RunState(1, flat) for flat in weights])
    x = rng.normal(size=(5, 4, 2)).astype("float32")
    several = zip(*(member.predict(x, verbose=0) for member in members), strict=True)
    for one, parts in zip(mean.predict(x, verbose=0), several, strict=True):
        np.testing.assert_allclose(one, np.mean(parts, axis=0), rtol=1e-5)


def test_a_subclassed_model_is_refused() -> None:
    class Own(keras.Model):
        def call(self, x: object) -> object:
            return x

    with pytest.raises(ModelError, match="Sequential or functional"):
        build_ensemble(Own(), [])


def test_a_member_has_its_own_counters() -> None:
    model = sequential()
    model.compile("adam", "mse")
    layout = model_layout(model)
    seed = next(i for i, v in enumerate(model.variables) if "seed" in v.path)
    states = [
        RunState(
            1, np.zeros(layout.size, np.float32),
            carried=pack_arrays({f"model {seed}": np.array([7, draws])}),
        )
        for draws in (3, 4)
    ]  # fmt: skip
    _, members = build_ensemble(model, states)
    assert [np.asarray(m.variables[seed].numpy()).tolist() for m in members] == [[7, 3], [7, 4]]
