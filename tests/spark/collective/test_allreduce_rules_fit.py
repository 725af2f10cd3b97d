"""``SparkModel(mode='allreduce', rule=...)``: every rule on executors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from spark_models import make_mlp

from sparkdl import SparkModel, load_spark_model
from sparkdl.collective.rules import DiLoCoExchangeRule, OneBitAdam, StragglerDrop, rule_names
from sparkdl.errors import ConfigError

CONFIGURED: dict[str, Any] = {
    "diloco": {"frequency": 8},
    "onebit_adam": {"rule": OneBitAdam(freeze_step=150)},
    "straggler_drop": {"rule": StragglerDrop(patience=10.0, grace_s=1.0)},
    "streaming_diloco": {
        "rule": {"name": "streaming_diloco", "fragments": 2, "period": 2},
        "frequency": 4,
    },
}

ALWAYS = ("local_sgd", "onebit_adam", "sliced")
"""One of each kind; the others, which the same code runs, are slow tests."""
RULES = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in rule_names()
]


def fitted(frame: Any, rule: Any, *, epochs: int, optimizer: Any = "adam", **options: Any) -> Any:
    model = make_mlp(optimizer=optimizer)
    given = {"num_workers": 2, "communicator": "builtin", **options}
    spark_model = SparkModel(model, "allreduce", rule=rule, **given)
    spark_model.fit(frame, epochs=epochs, verbose=0)
    return spark_model


def largest_partition(frame: Any) -> int:
    return max(frame.rdd.glom().map(len).collect())


@pytest.mark.parametrize("name", RULES)
def test_every_rule_learns(digits_df: Any, name: str) -> None:
    options = dict(CONFIGURED.get(name, {}))
    spark_model = fitted(digits_df, options.pop("rule", name), epochs=16, batch_size=16, **options)
    accuracy = spark_model.evaluate(digits_df)["accuracy"]
    print(f"{name}: {accuracy:.3f}")
    assert accuracy > 0.93
    assert spark_model.get_config()["rule"]["name"] == name
    if name in ("sliced", "onebit_adam"):  # the Keras optimizer has what the rule kept
        optimizer = spark_model.model.optimizer
        assert int(optimizer.iterations.numpy()) == 16 * -(-largest_partition(digits_df) // 16)
        assert np.abs(optimizer._momentums[0].numpy()).max() > 0


@pytest.mark.parametrize(
    ("name", "frequency"),
    [("mean", 3), ("sliced", 1), pytest.param("sliced", 2, marks=pytest.mark.slow)],
)
def test_exact_rules_take_the_steps_of_plain_keras(
    digits_df: Any, digits: Any, name: str, frequency: int
) -> None:
    """A worker's rows are one epoch's batches: accumulated, each epoch is one known step."""
    x, y = digits
    size = -(-len(x) // (2 * frequency)) + 8  # no more batches than are accumulated
    # smooth: rounding (1e-7 in NumPy's Adam) that turns one row's ReLU changes a whole column
    model = make_mlp(optimizer=keras.optimizers.Adam(0.01), activation="tanh")
    spark_model = SparkModel(
        model, "allreduce", frequency, rule=name, num_workers=2, batch_size=size,
        communicator="builtin",
    )  # fmt: skip
    spark_model.fit(digits_df, epochs=5, verbose=0)
    spark_model.fit(digits_df, epochs=5, verbose=0)
    alone = make_mlp(optimizer=keras.optimizers.Adam(0.01), activation="tanh")
    alone.fit(x, y, epochs=10, batch_size=len(x), verbose=0)
    for mine, known in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, known, rtol=0, atol=1e-5)
    mine, known = (m.optimizer.variables for m in (model, alone))
    for a, b in zip(mine, known, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-5, err_msg=a.path)


@pytest.mark.slow
def test_outer_momentum_goes_on_in_a_second_fit(digits_df: Any, tmp_path: Any) -> None:
    """Whole batches, plain SGD, so every step is known: two fits are one, also from files."""
    options: dict[str, Any] = {"batch_size": 2000, "optimizer": keras.optimizers.SGD(0.1)}
    at_once = fitted(digits_df, DiLoCoExchangeRule(), epochs=8, **options)
    options["optimizer"] = keras.optimizers.SGD(0.1)
    twice = fitted(digits_df, DiLoCoExchangeRule(), epochs=4, **options)
    twice.fit(digits_df, epochs=4, verbose=0)
    folder = str(tmp_path)
    first, resumed = (
        SparkModel(
            make_mlp(optimizer=keras.optimizers.SGD(0.1)), "allreduce", rule=DiLoCoExchangeRule(),
            num_workers=2, batch_size=2000,
        )
        for _ in range(2)
    )  # fmt: skip
    first.fit(digits_df, epochs=4, verbose=0, checkpoint_dir=folder)
    resumed.fit(digits_df, epochs=8, verbose=0, checkpoint_dir=folder, resume=True)
    options["optimizer"] = keras.optimizers.SGD(0.1)
    fitted(digits_df, DiLoCoExchangeRule(), epochs=4, **options).save(f"{folder}/half.keras")
    loaded = load_spark_model(f"{folder}/half.keras")
    loaded.fit(digits_df, epochs=4, verbose=0)
    for other in (twice, resumed, loaded):
        for a, b in zip(at_once.model.get_weights(), other.model.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    ["easgd", *(pytest.param(r, marks=pytest.mark.slow) for r in ("sliced", "straggler_drop"))],
)
def test_workers_without_rows_block_nobody(spark: Any, digits: Any, rule: str) -> None:
    x, y = digits
    frame = spark.createDataFrame(
        [(x[i].tolist(), int(y[i])) for i in range(3)], "features array<float>, label int"
    )
    spark_model = SparkModel(make_mlp(), "allreduce", rule=rule, num_workers=4)
    history = spark_model.fit(frame, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]


@pytest.mark.parametrize(
    ("rule", "frequency"),
    [
        ("local_sgd", 5),
        pytest.param("mean", 4, marks=pytest.mark.slow),
        pytest.param("sliced", 1, marks=pytest.mark.slow),
    ],
)
def test_a_callback_stops_all_workers(digits_df: Any, rule: str, frequency: int) -> None:
    class StopsAtOnce(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    repeated = digits_df
    for _ in range(5):
        repeated = repeated.unionAll(repeated)
    model = make_mlp()
    spark_model = SparkModel(model, "allreduce", frequency, rule=rule, num_workers=2, batch_size=2)
    history = spark_model.fit(repeated, epochs=9, verbose=0, callbacks=[StopsAtOnce()])
    assert len(history.history["loss"]) == 1


def test_the_center_is_validated_checkpointed_and_resumed(digits_df: Any, tmp_path: Any) -> None:
    class Weights(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen = self.model.get_weights()

    train, test = digits_df.randomSplit([0.8, 0.2], seed=2)
    weights = Weights()
    options: dict[str, Any] = {"rule": "easgd", "num_workers": 2, "batch_size": 16}
    spark_model = SparkModel(make_mlp(), "allreduce", **options)
    history = spark_model.fit(
        train, epochs=4, verbose=0, validation_data=test, callbacks=[weights],
        checkpoint_dir=str(tmp_path),
    ).history  # fmt: skip
    for a, b in zip(weights.seen, spark_model.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert history["val_loss"][-1] == pytest.approx(spark_model.evaluate(test)["loss"], rel=1e-4)
    again = SparkModel(make_mlp(), "allreduce", **options)
    more = again.fit(train, epochs=6, verbose=0, checkpoint_dir=str(tmp_path), resume=True)
    assert len(more.history["loss"]) == 2
    assert more.history["loss"][0] < history["loss"][0]


def test_a_number_of_workers_that_does_not_fit_is_refused_before_a_job(digits_df: Any) -> None:
    with pytest.raises(ConfigError, match="pair the ranks"):
        SparkModel(make_mlp(), "allreduce", rule="adasum", num_workers=3).fit(digits_df)
