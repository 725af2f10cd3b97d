"""Every name of Keras' lists: as Keras, or one error before a job, or said why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from local_spark import LocalSession, LocalSparkModel, Workers, without_spark
from referee import evaluate_on_workers
from walk import GROUPS, LISTS, WHY, problems, unknown

from sparkdl.errors import ConfigError

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "keras.md"

LONG = ("layers of picture", "layers of movie", "layers of film")
"""Of one drawing layer each, or of many that are compiled for seconds."""


@pytest.mark.parametrize("list_name", LISTS)
def test_every_name_is_tried_or_told_of(list_name: str) -> None:
    assert unknown(list_name) == []
    assert all(WHY[list_name].values())


@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=pytest.mark.slow) if g in LONG else g for g in GROUPS]
)
def test_as_keras(group: str, workers: Workers, tmp_path: Path) -> None:
    assert problems(group, str(tmp_path), workers) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_on_another_backend(backend: str) -> None:
    pytest.importorskip(backend)
    done = subprocess.run(
        [sys.executable, str(HERE / "walk.py")], env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


# -- keras.config ----------------------------------------------------------------------------------


def test_every_switch_is_in_the_table() -> None:
    _, _, text = PAGE.read_text().partition("## Switches of `keras.config`")
    told = set(re.findall(r"`(\w+)`", text.partition("\n## ")[0]))
    names = {name for name in dir(keras.config) if not name.startswith("_")}
    assert names - told == set()


@pytest.fixture
def limits() -> Iterator[None]:
    if "set_max_epochs" not in dir(keras.config):
        pytest.skip("since Keras 3.11")
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def rows(count: int, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(salt)
    return rng.normal(size=(count, 4)).astype("float32"), rng.normal(size=(count, 1)).astype("f")


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("epochs", "steps"), [(2, None), (None, 2), (None, 99)])
def test_limits_hold(epochs: int | None, steps: int | None, workers: Workers) -> None:
    keras.config.set_max_epochs(epochs)
    keras.config.set_max_steps_per_epoch(steps)
    (x, y), held_out, plain, model = rows(19), rows(11, 1), build(), build()
    arguments = {"epochs": 2 if steps else 3, "verbose": 0, "shuffle": False}
    with pytest.warns(UserWarning, match="Limiting"):
        expected = plain.fit(x, y, batch_size=4, validation_data=held_out, **arguments).history
    session = LocalSession(workers, (19,), (11,))
    ours = LocalSparkModel.of(session)(model, mode="synchronous", num_workers=1, batch_size=4)
    history = ours.fit((x, y), validation_data=held_out, **arguments).history
    assert len(history["loss"]) == 2
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-5)
    wanted = plain.evaluate(x, y, batch_size=4, verbose=0)
    session.sizes = (19,)
    assert ours.evaluate((x, y))["loss"] == pytest.approx(wanted, rel=1e-5)
    on_workers = evaluate_on_workers(ours, (x, y), session, 4)
    assert on_workers["loss"] == pytest.approx(wanted, rel=1e-5)
    assert len(ours.predict(x)) == len(plain.predict(x, batch_size=4, verbose=0))


@pytest.mark.usefixtures("limits")
def test_rows_of_a_frame_are_predicted_all_or_none(workers: Workers) -> None:
    keras.config.set_max_steps_per_epoch(2)
    session = LocalSession(workers, (19,), ())
    ours = LocalSparkModel.of(session)(build(), num_workers=1)
    import pyarrow as pa

    with without_spark(session), pytest.raises(ConfigError, match="set_max_steps_per_epoch"):
        ours.predict(pa.table({"features": [[0.0] * 4]}))


# -- losses of several outputs, and labels of a size that only the rows have -----------------------


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="others weigh by rows")
def test_losses_of_several_outputs_count_batches_alike(workers: Workers) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(70, 4)).astype("f"), rng.normal(size=(70, 1)).astype("f")
    y[64:] *= 9

    def two() -> keras.Model:
        keras.utils.set_random_seed(1)
        given = keras.Input((4,))
        heads = [keras.layers.Dense(1, name=name)(given) for name in ("a", "b")]
        model = keras.Model(given, heads)
        model.compile("sgd", ["mse", "mae"])
        return model

    wanted = two().evaluate(x, (y, y), verbose=0, return_dict=True)
    session = LocalSession(workers, (70,), ())
    ours = LocalSparkModel.of(session)(two(), num_workers=1, mode="synchronous")
    assert ours.evaluate((x, (y, y))) == pytest.approx(wanted, rel=1e-5)
    assert evaluate_on_workers(ours, (x, (y, y)), session, 32) == pytest.approx(wanted, rel=1e-5)
    # a learner that two workers trained evaluates alike
    session.sizes = (32, 38)
    both = LocalSparkModel.of(session)(two(), num_workers=2, mode="synchronous")
    weights = both.model.get_weights()
    both.fit((x, (y, y)), verbose=0)
    both.model.set_weights(weights)
    assert evaluate_on_workers(both, (x, (y, y)), session, 32)["a_loss"] != wanted["a_loss"]
    session.sizes = (64, 6)
    found = evaluate_on_workers(both, (x, (y, y)), session, 32)
    assert found == pytest.approx(wanted, rel=1e-5)


def same_sign(y_true: object, y_pred: object) -> object:
    return keras.ops.cast(keras.ops.sign(y_true) == keras.ops.sign(y_pred), "float32")  # type: ignore[comparison-overlap]


def own_loss(y_true: object, y_pred: object) -> object:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, -1)  # type: ignore[operator]


@pytest.mark.parametrize("metric", [same_sign, "r2_score"])
def test_a_metric_of_labels_whose_loss_takes_any_size(metric: object, workers: Workers) -> None:
    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", own_loss, metrics=[metric])
        return model

    (x, _), y = rows(16), np.random.default_rng(2).normal(size=(16, 2)).astype("f")
    expected = model().fit(x, y, batch_size=16, verbose=0).history
    ours = LocalSparkModel.of(LocalSession(workers, (16,), ()))(
        model(), mode="synchronous", num_workers=1, batch_size=16
    )
    history = ours.fit((x, y), verbose=0).history
    assert {*history} == {*expected}
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-5), name
