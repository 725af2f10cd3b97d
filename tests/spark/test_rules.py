"""Rules and codecs through fit, on executors. What each rule learns is in tests/learning."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from spark_models import make_mlp

from sparkdl import SparkModel
from sparkdl.errors import ConfigError
from sparkdl.rules import AEASGD, Downpour


def losses(
    frame: Any, rule: Any = None, *, mode: str = "asynchronous", epochs: int = 8, rate: float = 0.1,
    **options: Any,
) -> list[float]:  # fmt: skip
    model = make_mlp(optimizer=keras.optimizers.SGD(rate))
    spark_model = SparkModel(model, mode, rule=rule, num_workers=2, batch_size=32, **options)
    history = spark_model.fit(frame, epochs=epochs, verbose=0).history["loss"]
    result: list[float] = history
    return result


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("adam", {"rate": 0.003}),
        ("eamsgd", {"frequency": 8}),
        ("diloco", {"mode": "synchronous", "frequency": 5}),
        *(  # one of each kind is tried above
            pytest.param(rule, options, marks=pytest.mark.slow)
            for rule, options in (
                ("dynsgd", {}),
                ("dc_asgd", {}),
                (AEASGD(rho=1.0, learning_rate=0.4), {"frequency": 4}),
                ("averaging", {"mode": "synchronous"}),
            )
        ),
    ],
    ids=str,
)
def test_rules_learn_on_executors(digits_df: Any, rule: Any, options: dict[str, Any]) -> None:
    history = losses(digits_df, rule, **options)
    assert history[-1] < 0.5 * history[0]


@pytest.mark.parametrize(
    ("mode", "codec", "transport"),
    [
        ("asynchronous", "fp16", "socket"),
        ("synchronous", {"name": "topk", "ratio": 0.05}, "http"),
        pytest.param("synchronous", "fp16", "socket", marks=pytest.mark.slow),
        pytest.param(
            "asynchronous", {"name": "topk", "ratio": 0.05}, "http", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_compressed_training_learns_as_well(
    digits_df: Any, mode: str, codec: Any, transport: str
) -> None:
    options: dict[str, Any] = {"mode": mode, "parameter_server_mode": transport}
    plain = losses(digits_df, **options)
    encoded = losses(digits_df, compression=codec, **options)
    print(f"{mode} {codec}: {encoded[-1]:.4f}, without {plain[-1]:.4f}")
    assert encoded[-1] < 1.3 * plain[-1]


def test_single_is_plain_training_of_all_rows(spark: Any, digits: Any) -> None:
    x, y = digits
    x, y = x[:320], y[:320]
    rows = [(a.tolist(), int(b)) for a, b in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label int").coalesce(1)
    model, reference = (make_mlp(optimizer=keras.optimizers.SGD(0.1)) for _ in range(2))
    spark_model = SparkModel(model, rule="single", batch_size=32, repartition=False)
    spark_model.fit(frame, epochs=2, shuffle=False, verbose=0)
    reference.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(ConfigError, match="one worker"):
        SparkModel(make_mlp(), rule="single", num_workers=2).fit(frame, verbose=0)


def test_averaging_equals_the_mean_of_both_workers_epochs(spark: Any, digits_df: Any) -> None:
    parts = digits_df.rdd.glom().collect()
    model, reference = (make_mlp(optimizer=keras.optimizers.SGD(0.1)) for _ in range(2))
    spark_model = SparkModel(
        model, "synchronous", rule="averaging", batch_size=64, repartition=False
    )
    spark_model.fit(digits_df, epochs=2, shuffle=False, verbose=0)
    mean = reference.get_weights()
    for _ in range(2):
        trained = []
        for part in parts:
            reference.set_weights(mean)
            reference.fit(
                np.array([r.features for r in part], "float32"),
                np.array([r.label for r in part]),
                batch_size=64, shuffle=False, verbose=0,
            )  # fmt: skip
            trained.append(reference.get_weights())
        sizes = [len(part) for part in parts]
        mean = [np.average(pair, axis=0, weights=sizes) for pair in zip(*trained, strict=True)]
    for a, b in zip(model.get_weights(), mean, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_ensemble_gives_several_models_and_their_mean(digits_df: Any) -> None:
    train, test = digits_df.randomSplit([0.8, 0.2], seed=1)
    model = make_mlp()
    before = [w.copy() for w in model.get_weights()]
    spark_model = SparkModel(model, rule="ensemble", num_workers=3, batch_size=32)
    history = spark_model.fit(train, epochs=24, verbose=0)
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    rows = test.limit(20).collect()
    x = np.array([r.features for r in rows], "float32")
    predictions = [m.predict(x, verbose=0) for m in spark_model.ensemble]
    assert len(predictions) == 3
    assert all(np.abs(predictions[0] - other).max() > 1e-3 for other in predictions[1:])
    np.testing.assert_allclose(spark_model.predict(x), np.mean(predictions, axis=0), rtol=1e-5)
    assert spark_model.evaluate(test)["accuracy"] > 0.9
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)  # the model that was given has members, no weights
    with pytest.raises(ConfigError, match="one fit"):
        spark_model.fit(train, verbose=0)


def test_wrong_combinations_are_refused_before_a_job(digits_df: Any) -> None:
    with pytest.raises(ConfigError, match="needs an optimizer of its own"):
        SparkModel(make_mlp(), rule="eamsgd", num_workers=2).fit(digits_df, verbose=0)
    with pytest.raises(ConfigError, match="without momentum"):
        SparkModel(make_mlp(), "synchronous", compression="dgc")


def test_settings_are_saved_with_the_model(digits_df: Any, tmp_path: Any) -> None:
    from sparkdl import load_spark_model

    spark_model = SparkModel(
        make_mlp(), rule=Downpour(), compression={"name": "topk", "ratio": 0.02}
    )
    spark_model.save(str(tmp_path / "m.keras"))
    loaded = load_spark_model(str(tmp_path / "m.keras"))
    assert loaded.get_config() == spark_model.get_config()
    assert loaded.get_config()["compression"] == {"name": "topk", "ratio": 0.02, "k": None}
