"""fit in every server mode on a real cluster: it learns, it reports, it goes on."""

from __future__ import annotations

import gc
import importlib.util
import re
import threading
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sklearn.datasets import load_digits
from spark_models import make_mlp

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError


@pytest.mark.oldest
@pytest.mark.parametrize("mode", ["asynchronous", "hogwild", "synchronous"])
def test_every_mode_learns(digits_df: Any, mode: str) -> None:
    train, test = digits_df.randomSplit([0.8, 0.2], seed=1)
    spark_model = SparkModel(make_mlp(), mode, num_workers=2, batch_size=32)
    history = spark_model.fit(train, epochs=12, verbose=0)
    losses = history.history["loss"]
    assert len(losses) == len(history.history["accuracy"]) == 12
    assert losses[-1] < 0.4 * losses[0]
    assert spark_model.evaluate(test)["accuracy"] > 0.9
    assert spark_model.history is history


def test_workers_that_do_not_learn_are_told(digits_df: Any) -> None:
    """A network of zeros, at a rate at which it stays there, has the loss of guessing."""
    model = make_mlp(optimizer=keras.optimizers.SGD(1e-9))
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    with pytest.warns(
        RuntimeWarning, match=r"not learned: after 2 epochs its loss is 2\.3"
    ) as told:
        SparkModel(model, num_workers=2).fit(digits_df, epochs=2, verbose=0)
    assert [w.filename for w in told if w.category is RuntimeWarning] == [__file__]


@pytest.mark.parametrize(
    ("frequency", "transport"), [("epoch", "http"), (5, "socket"), ("batch", "shm")]
)
def test_every_frequency_and_every_transport_learns(
    digits_df: Any, frequency: Any, transport: str
) -> None:
    """Transports carry frames and know nothing of frequencies: each of both once."""
    spark_model = SparkModel(make_mlp(), "asynchronous", frequency, transport, num_workers=2)
    losses = spark_model.fit(digits_df, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert spark_model.summary.transports == {transport}


def test_synchronous_equals_one_process(spark: Any, digits_df: Any) -> None:
    """The frame's own partitions, unshuffled: the batches that one process would see are known."""
    model = make_mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    reference = make_mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    parts = digits_df.rdd.glom().collect()
    spark_model = SparkModel(model, "synchronous", batch_size=32, repartition=False)
    spark_model.fit(digits_df, epochs=2, verbose=0, shuffle=False)
    steps = max(-(-len(p) // 32) for p in parts)
    for _ in range(2):
        for t in range(steps):
            rows = [r for p in parts for r in p[t * 32 : (t + 1) * 32]]
            reference.train_on_batch(
                np.array([r.features for r in rows], "float32"), np.array([r.label for r in rows])
            )
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert int(model.optimizer.iterations) == 2 * steps
    np.testing.assert_allclose(
        np.asarray(model.optimizer.variables[2]), np.asarray(reference.optimizer.variables[2]),
        atol=1e-5,
    )  # fmt: skip


def test_history_is_weighted_by_rows(spark: Any) -> None:
    """Learning rate 0: the loss of every epoch is the loss over all rows, however partitioned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(101, 64)).astype("float32")
    y = rng.integers(0, 10, 101)
    model = make_mlp(optimizer=keras.optimizers.SGD(0.0))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    schema = "features array<float>, label int"
    rows = [(0 if i < 90 else 2, (x[i].tolist(), int(y[i]))) for i in range(101)]
    parts = spark.sparkContext.parallelize(rows).partitionBy(3, int).values()
    skewed = spark.createDataFrame(parts, schema)
    frame = spark.createDataFrame([row for _, row in rows], schema)
    assert skewed.rdd.glom().map(len).collect() == [90, 0, 11]
    spark_model = SparkModel(model, "asynchronous", batch_size=16, repartition=False)
    history = spark_model.fit(skewed, epochs=2, verbose=0, validation_data=frame)
    for key in ("loss", "accuracy"):
        np.testing.assert_allclose(history.history[key], [expected[key]] * 2, rtol=1e-4)
        np.testing.assert_allclose(history.history[f"val_{key}"], [expected[key]] * 2, rtol=1e-4)


def test_a_second_fit_continues_with_the_optimizer_state(digits_df: Any) -> None:
    model = make_mlp()
    spark_model = SparkModel(model, "synchronous", num_workers=2, batch_size=64)
    first = spark_model.fit(digits_df, epochs=3, verbose=0)
    iterations = int(model.optimizer.iterations)
    assert iterations == 3 * -(-(1797 // 2 + 1) // 64)
    moment = np.abs(np.asarray(model.optimizer.variables[2])).sum()
    assert moment > 0
    second = spark_model.fit(digits_df, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == iterations // 3 * 5
    assert second.history["loss"][0] < first.history["loss"][-1] * 1.05
    assert second.epoch == [3, 4] or second.epoch == [0, 1]


def test_a_fit_keeps_no_frame_of_the_arrays(spark: Any) -> None:
    """The driver's JVM holds the rows as long as Python has a frame of them."""
    digits = load_digits()
    x, y = (digits.data[:200] / 16).astype("float32"), digits.target[:200]

    def frames() -> int:
        gc.collect()
        return sum(issubclass(type(held), DataFrame) for held in gc.get_objects())

    before = frames()
    spark_model = SparkModel(make_mlp(), num_workers=2, batch_size=32)
    spark_model.fit((x, y), epochs=1, verbose=0)
    assert spark_model.profile is not None
    assert frames() == before


def test_early_stopping_stops_all_workers(digits_df: Any) -> None:
    model = make_mlp(optimizer=keras.optimizers.SGD(0.0))
    stopper = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=1e-3)
    for mode in ("asynchronous", "synchronous"):
        history = SparkModel(model, mode, num_workers=2, batch_size=128).fit(
            digits_df, epochs=500, verbose=0, callbacks=[stopper]
        )
        assert 3 <= len(history.history["loss"]) <= 5
        assert stopper.stopped_epoch > 0


def test_callbacks_change_the_learning_rate_of_the_workers(digits_df: Any) -> None:
    """Rate 0 from the second epoch on: from the third on, the synchronous loss stands still."""
    model = make_mlp(optimizer=keras.optimizers.SGD(0.5))
    seen: list[dict[str, Any]] = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 if epoch == 0 else 0.0),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
    ]
    spark_model = SparkModel(model, "synchronous", num_workers=2, batch_size=64)
    history = spark_model.fit(
        digits_df, epochs=4, verbose=0, callbacks=callbacks, validation_split=0.1
    )
    losses = history.history["val_loss"]
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-5)
    assert [set(s) >= {"loss", "accuracy", "val_loss"} for s in seen] == [True] * 4
    assert float(model.optimizer.learning_rate) == 0.0


@pytest.mark.parametrize(
    "mode",
    ["asynchronous", pytest.param("hogwild", marks=pytest.mark.slow), "synchronous", "allreduce"],
)
def test_a_scheduler_s_rates_are_those_of_plain_keras(
    digits_df: Any, digits: Any, mode: str
) -> None:
    """The exact modes train at them: a batch of all rows makes the steps of one process known."""

    def run(fit: Any, optimizer: Any) -> tuple[Any, list[float]]:
        model = make_mlp(optimizer=optimizer)
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return model, fit(model, rates).history["learning_rate"]

    x, y = digits
    alone, expected = run(
        lambda model, rates: model.fit(
            x, y, epochs=6, batch_size=len(x), verbose=0, callbacks=[rates]
        ),
        keras.optimizers.SGD(0.8, momentum=0.9),
    )
    model, seen = run(
        lambda model, rates: SparkModel(model, mode, num_workers=2, batch_size=len(x)).fit(
            digits_df, epochs=6, verbose=0, callbacks=[rates]
        ),
        keras.optimizers.SGD(0.8, momentum=0.9),
    )
    assert seen == expected
    np.testing.assert_allclose(seen, [0.8 * 0.5**n for n in range(1, 7)], rtol=1e-6)
    assert float(model.optimizer.learning_rate) == float(alone.optimizer.learning_rate)
    if mode in ("synchronous", "allreduce"):
        for mine, known in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, known, rtol=0, atol=1e-5)


def test_metrics_with_large_states_reach_the_driver(digits_df: Any) -> None:
    """An AUC of 20,000 thresholds: 640 KB of states in each epoch, for training and validation."""
    model = make_mlp()
    model.add(keras.layers.Dense(1, "sigmoid"))
    metric = keras.metrics.AUC(num_thresholds=20_000, name="auc")
    model.compile("adam", "binary_crossentropy", metrics=[metric])
    rows = digits_df.withColumn("label", (F.col("label") > 4).cast("int"))
    spark_model = SparkModel(model, "synchronous", num_workers=2)
    history = spark_model.fit(rows, epochs=3, verbose=0, validation_split=0.2).history
    assert len(history["auc"]) == len(history["val_auc"]) == 3
    assert history["auc"][-1] > history["auc"][0] > 0.4
    assert spark_model.evaluate(rows)["auc"] == pytest.approx(history["val_auc"][-1], abs=0.1)


def poisoned_row(digits_df: Any, number: int) -> Any:
    """The digits with NaN in one row."""
    nan = F.transform("features", lambda v: v * float("nan")).cast("array<float>")
    return digits_df.withColumn(
        "features", F.when(F.col("id") == number, nan).otherwise(F.col("features"))
    )


@pytest.mark.skipif(not importlib.util.find_spec("horovod"), reason="make horovod")
def test_nan_is_told_by_the_rank_whose_data_have_it_where_horovod_joins_in_the_step(
    digits_df: Any,
) -> None:
    """All ranks see NaN after the same step; only one of them has it in its rows."""
    ranks: set[str] = set()
    # Rows of a cached frame stay where they are, so that each rank has one of these.
    ids = digits_df.select("id").rdd.mapPartitions(lambda rows: [next(iter(rows)).id]).collect()
    assert len(ids) == 2
    for number in ids:
        poisoned = poisoned_row(digits_df, number).cache()
        with pytest.raises(DataError, match=r"epoch 1 of 2, batch \d+: .*input") as raised:
            SparkModel(make_mlp(), "allreduce", num_workers=2, communicator="horovod").fit(
                poisoned, epochs=2, verbose=0
            )
        poisoned.unpersist()
        ranks |= set(re.findall(r"\(worker (\d)\)", str(raised.value)))
    assert ranks == {"0", "1"}


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous", "allreduce"])
def test_nan_in_a_row_is_one_error_that_names_it_or_is_left_out(digits_df: Any, mode: str) -> None:
    poisoned = poisoned_row(digits_df, 7)
    options = {"communicator": "builtin"} if mode == "allreduce" else {}
    with pytest.raises(DataError, match=r"epoch 1 of 2, batch \d+: .*input") as raised:
        SparkModel(make_mlp(), mode, num_workers=2, **options).fit(poisoned, epochs=2, verbose=0)
    assert "(worker " in str(raised.value)
    skipping = SparkModel(make_mlp(), mode, num_workers=2, on_nan="skip", **options)
    history = skipping.fit(poisoned, epochs=2, verbose=0)
    assert skipping.summary is not None
    assert skipping.summary.refused == 2  # one update in each epoch
    assert np.isfinite(history.history["loss"]).all()
    assert all(np.isfinite(w).all() for w in skipping.model.get_weights())


def test_checkpoints_and_csv_callbacks_see_the_trained_weights(
    digits_df: Any, tmp_path: Any
) -> None:
    model = make_mlp()
    path = tmp_path / "best.keras"
    log = tmp_path / "log.csv"
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(path), monitor="val_loss", save_best_only=True),
        keras.callbacks.CSVLogger(str(log)),
    ]
    spark_model = SparkModel(model, "asynchronous", num_workers=2)
    history = spark_model.fit(
        digits_df, epochs=3, verbose=0, validation_data=digits_df, callbacks=callbacks
    )
    assert len(log.read_text().splitlines()) == 4
    saved = keras.models.load_model(path)
    x = np.array([r.features for r in digits_df.collect()], "float32")
    y = np.array([r.label for r in digits_df.collect()])
    loss = saved.evaluate(x, y, verbose=0)[0]
    assert loss < 1.15 * min(history.history["val_loss"])


def test_resume_goes_on_from_the_last_checkpoint(digits_df: Any, tmp_path: Any) -> None:
    folder = f"file://{tmp_path}/run"
    first = SparkModel(make_mlp(), "synchronous", num_workers=2, batch_size=64)
    first.fit(digits_df, epochs=2, verbose=0, checkpoint_dir=folder)
    fresh = SparkModel(make_mlp(), "synchronous", num_workers=2, batch_size=64)
    history = fresh.fit(digits_df, epochs=5, verbose=0, checkpoint_dir=folder, resume=True)
    assert history.epoch == [2, 3, 4]
    assert int(fresh.model.optimizer.iterations) == 5 * 15
    with pytest.warns(UserWarning, match="nothing left to train: 5 epochs are done"):
        again = fresh.fit(digits_df, epochs=5, verbose=0, checkpoint_dir=folder, resume=True)
    assert again.epoch == []


def test_learning_rate_schedules_follow_all_workers_together(digits_df: Any) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([20, 40], [0.1, 0.01, 0.001])
    model = make_mlp(optimizer=keras.optimizers.SGD(schedule))
    SparkModel(model, "asynchronous", num_workers=2, batch_size=64).fit(
        digits_df, epochs=2, verbose=0
    )
    # 1,797 rows in two partitions of about 899: 15 batches each, two epochs, two workers
    assert 56 <= int(model.optimizer.iterations) <= 62


def test_progress_bar_shows_loss_accuracy_and_speed(digits_df: Any, capfd: Any) -> None:
    SparkModel(make_mlp(), num_workers=2).fit(digits_df, epochs=2, verbose=1)
    shown = capfd.readouterr().out
    for text in ("Epoch 1/2", "Epoch 2/2", "loss:", "accuracy:", "rows/s"):
        assert text in shown


def test_fit_refuses_what_it_would_ignore(digits_df: Any) -> None:
    with pytest.raises(ConfigError, match="validation_freq"):
        SparkModel(make_mlp()).fit(digits_df, validation_freq=2)


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_whole_epochs_between_exchanges_are_averaged(spark: Any, mode: str) -> None:
    """Every worker finds the weights in its first epoch; four of them added up are 4 times that."""
    weights = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    x = np.random.default_rng(0).normal(size=(2048, 4)).astype(np.float32)
    frame = spark.createDataFrame(
        [(row.tolist(), float(row @ weights)) for row in x], "features array<float>, label double"
    )
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    spark_model = SparkModel(model, mode, "epoch", num_workers=4, batch_size=4)
    spark_model.fit(frame, epochs=1, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], weights, rtol=0.01)


def test_two_synchronous_fits_at_once_take_turns(digits_df: Any) -> None:
    """Each of them needs more than half of the four slots: without a pool both would wait."""
    models = [SparkModel(make_mlp(), mode="synchronous", num_workers=3) for _ in range(2)]
    outcomes: list[Any] = [None, None]

    def fit(index: int) -> None:
        try:
            outcomes[index] = models[index].fit(digits_df, epochs=1, verbose=0)
        except BaseException as error:
            outcomes[index] = error

    threads = [threading.Thread(target=fit, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    for outcome in outcomes:
        assert len(outcome.history["loss"]) == 1, outcome
