"""A model with rows in tables that lie on parameter servers: trained, saved, gone on with."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import keras
import numpy as np
import pytest
from faulty import AtEpoch, python_workers
from test_several_servers import servers_of
from test_tables import frame as frame
from test_tables import make_model, make_rows

from sparkdl import Network, SparkModel
from sparkdl.errors import ConfigError
from sparkdl.layers import ServedEmbedding, ShardedClassifier


def of_one_process(epochs: int) -> Any:
    ids, labels = make_rows()
    model = make_model()
    model.fit(ids, labels, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_trains_what_keras_would(
    mode: str, servers: int, spark: Any, tmp_path: Any
) -> None:
    ids, labels = make_rows()
    network = Network(num_servers=servers)
    spark_model = SparkModel(
        make_model(), mode, num_workers=1, batch_size=16, frequency=4, network=network
    )
    spark_model.fit((ids, labels), epochs=2, shuffle=False, verbose=0, checkpoint_dir=str(tmp_path))
    expected = of_one_process(2)
    np.testing.assert_allclose(
        spark_model.model.predict(ids, verbose=0), expected.predict(ids, verbose=0), atol=1e-5
    )
    for mine, theirs in zip(spark_model.model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def kept(spark: Any, ids: np.ndarray, labels: np.ndarray) -> Any:
    """Rows in partitions that stay as they are: Spark cuts arrays by the executors it has then."""
    rows = [(row.tolist(), float(label)) for row, label in zip(ids, labels, strict=True)]
    frame = spark.createDataFrame(rows, "features array<bigint>, label double").cache()
    frame.count()
    return frame


@pytest.mark.parametrize("servers", [1, 3])
def test_rounds_step_rows_as_one_process_does(servers: int, spark: Any, tmp_path: Any) -> None:
    """Two workers: weights and rows are those of all-reduce, which are those of one process."""
    ids, labels = make_rows()
    rows = kept(spark, ids[:221], labels[:221])  # the last batches differ
    found = []
    for mode in ("allreduce", "synchronous"):
        network = Network() if mode == "allreduce" else Network(num_servers=servers)
        spark_model = SparkModel(
            make_model(tracks=True), mode, num_workers=2, batch_size=16, network=network
        )
        spark_model.fit(
            rows, epochs=3, shuffle=False, verbose=0, checkpoint_dir=str(tmp_path / mode)
        )
        table = spark_model.tables["ads"].to_dataframe().orderBy("id").collect()
        found.append((spark_model, table))
    (one, one_rows), (two, two_rows) = found
    for mine, theirs in zip(two.model.weights, one.model.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert [r["id"] for r in two_rows] == [r["id"] for r in one_rows]
    assert [(r["seen"], r["step"]) for r in two_rows] == [(r["seen"], r["step"]) for r in one_rows]
    np.testing.assert_allclose(
        [r["row"] for r in two_rows], [r["row"] for r in one_rows], atol=1e-5
    )


def test_rows_follow_a_schedule_in_rounds(spark: Any, tmp_path: Any) -> None:
    """A warm-up from 0 to 2 over the first fit, then a fall, in which the second fit goes on."""
    ids, labels = make_rows()
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, 30, warmup_target=2.0, warmup_steps=16, alpha=0.1
    )
    rows, found = kept(spark, ids, labels), []
    for mode in ("allreduce", "synchronous"):
        spark_model = SparkModel(make_model(rate), mode, num_workers=2, batch_size=15)
        for _ in range(2):
            spark_model.fit(
                rows, epochs=2, shuffle=False, verbose=0, checkpoint_dir=str(tmp_path / mode)
            )
        found.append(spark_model.model.predict(ids, verbose=0))
    assert np.ptp(found[0]) > 0.3  # it has learned
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


@pytest.mark.tries_again
@pytest.mark.parametrize("victims", [1, 2])
def test_killed_workers_cost_a_round_nothing(victims: int, spark: Any, tmp_path: Any) -> None:
    """A round waits for the next attempt, which takes weights of the other worker, and the rows
    of the servers as they are. If none is left, rows and weights go back to the checkpoint."""
    ids, labels = (np.tile(array, (20,) + (1,) * (array.ndim - 1)) for array in make_rows())
    rows = kept(spark, ids, labels)
    killed: list[int] = []

    def kill_later() -> None:
        def kill() -> None:
            for victim in python_workers()[-victims:]:
                killed.append(victim.pid)
                victim.kill()

        if not killed:
            threading.Timer(0.2, kill).start()

    models = []
    for mode in ("allreduce", "synchronous"):
        network = Network() if mode == "allreduce" else Network(num_servers=2)
        callbacks = [AtEpoch(1, kill_later)] if mode == "synchronous" else []
        spark_model = SparkModel(make_model(), mode, num_workers=2, batch_size=16, network=network)
        spark_model.fit(
            rows, epochs=4, shuffle=False, verbose=0, callbacks=callbacks,
            checkpoint_dir=str(tmp_path / mode),
        )  # fmt: skip
        models.append(spark_model)
    assert len(killed) == victims
    few = ids[:240]
    alone, together = (m.model.predict(few, verbose=0) for m in models)
    np.testing.assert_allclose(together, alone, atol=1e-4)
    sums = [m.tables["ads"].get("sum") for m in models]
    assert sums[1] == pytest.approx(sums[0], rel=1e-4)


def test_one_worker_in_rounds_trains_what_keras_would(spark: Any, tmp_path: Any) -> None:
    ids, labels = make_rows()
    spark_model = SparkModel(make_model(), "synchronous", num_workers=1, batch_size=16)
    spark_model.fit((ids, labels), epochs=2, shuffle=False, verbose=0, checkpoint_dir=str(tmp_path))
    np.testing.assert_allclose(
        spark_model.model.predict(ids, verbose=0), of_one_process(2).predict(ids, verbose=0),
        atol=1e-5,
    )  # fmt: skip


def test_a_model_of_rows_alone_may_have_more_servers_than_weights(
    spark: Any, tmp_path: Any
) -> None:
    """Minus the sum of its rows is the loss, and each step adds 1: rows are counters."""
    ids = np.arange(-40, 80, dtype=np.int64)[:, np.newaxis]
    x = keras.Input((1,), dtype="int64")
    own = keras.optimizers.SGD(8.0)
    rows = ServedEmbedding(2, table="counters", initializer="zeros", optimizer=own)(x)
    model = keras.Model(x, keras.layers.Flatten()(rows))
    model.compile("sgd", lambda true, found: -keras.ops.sum(found, axis=-1))
    spark_model = SparkModel(
        model, num_workers=2, batch_size=8, network=Network(num_servers=3),
        rule={"name": "downpour", "damping": False},
    )  # fmt: skip
    spark_model.fit(
        (ids, np.zeros(120, np.float32)), epochs=3, verbose=0, checkpoint_dir=str(tmp_path)
    )
    table = spark_model.tables["counters"]
    assert len(table) == 120
    # the last batch of each worker has 4 of its 60 rows: they count twice as much
    assert {*np.unique(table.pull(ids[:, 0]))} <= {3.0, 4.0, 5.0, 6.0}
    assert table.get("sum") == 2 * 3 * (2 * 56 + 2 * 4 * 2)


def test_geo_trains_rows_in_windows(spark: Any, tmp_path: Any) -> None:
    """One worker: the windows change nothing. Two learn, and the servers have the rows of both."""
    ids, labels = make_rows()
    options = {"batch_size": 16, "frequency": 5, "network": Network(num_servers=2), "rule": "geo"}
    fit = {"shuffle": False, "verbose": 0}
    one = SparkModel(make_model(), num_workers=1, **options)
    one.fit((ids, labels), epochs=2, checkpoint_dir=str(tmp_path / "one"), **fit)
    np.testing.assert_allclose(
        one.model.predict(ids, verbose=0), of_one_process(2).predict(ids, verbose=0), atol=1e-5
    )
    two = SparkModel(make_model(), num_workers=2, **options)
    history = two.fit((ids, labels), epochs=6, checkpoint_dir=str(tmp_path / "two"), **fit).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert two.tables["ads"].look_up(np.unique(ids))[1].all()
    counted = SparkModel(make_model(max_rows=10), num_workers=1, **options)
    with pytest.raises(ConfigError, match="cannot be trained in windows"):
        counted.fit((ids, labels), checkpoint_dir=str(tmp_path / "no"), **fit)


def test_workers_share_rows_on_executors_and_a_fit_goes_on(frame: Any, tmp_path: Any) -> None:
    folder = str(tmp_path)
    network = Network(num_servers=2, servers="executors")
    spark_model = SparkModel(
        make_model(), num_workers=2, batch_size=16, frequency=2, network=network
    )
    first = spark_model.fit(
        frame, epochs=4, verbose=0, checkpoint_dir=folder, validation_split=0.2
    ).history
    assert first["loss"][-1] < first["loss"][0]
    servers = spark_model.summary.servers
    assert sum(server.table_rows for server in servers) > 30
    assert all(server.bytes_received and server.memory_bytes for server in servers)
    ids, _ = make_rows()
    table = spark_model.tables["ads"]
    found, known = table.look_up(np.unique(ids))
    assert len(table) == known.sum() > 30
    assert table.statistics().get("nrm2") == pytest.approx(float(np.linalg.norm(found)), rel=1e-4)
    alone = spark_model.model.predict(ids, verbose=0)[:, 0]
    spread = [float(np.ravel(r["prediction"])[0]) for r in spark_model.predict(frame).collect()]
    np.testing.assert_allclose(np.sort(spread), np.sort(alone), atol=1e-6)

    # another number of servers, and over the ranks: the same files
    more = SparkModel(
        make_model(), num_workers=1, batch_size=16, network=Network(num_servers=3)
    ).fit(frame, epochs=6, verbose=0, checkpoint_dir=folder, resume=True)
    assert len(more.history["loss"]) == 2
    assert more.history["loss"][-1] < first["loss"][0]
    ranks = SparkModel(make_model(), "allreduce", num_workers=2, batch_size=16)
    last = ranks.fit(frame, epochs=7, verbose=0, checkpoint_dir=folder, resume=True)
    assert last.history["loss"][-1] < first["loss"][0]


def test_rows_that_the_model_brings_are_where_the_servers_begin(spark: Any, tmp_path: Any) -> None:
    ids, labels = make_rows()
    spark_model = SparkModel(of_one_process(1), num_workers=1, batch_size=16, frequency=1)
    spark_model.fit((ids, labels), epochs=1, shuffle=False, verbose=0, checkpoint_dir=str(tmp_path))
    np.testing.assert_allclose(
        spark_model.model.predict(ids, verbose=0),
        of_one_process(2).predict(ids, verbose=0),
        atol=1e-5,
    )


def test_a_killed_server_takes_rows_and_weights_back_to_the_checkpoint(
    spark: Any, tmp_path: Any
) -> None:
    """What comes out is what comes out without the death: no step twice, none lost."""
    ids, labels = make_rows()
    killed: list[int] = []

    def kill() -> None:
        if not killed:
            killed.append(servers_of()[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    spark_model = SparkModel(
        make_model(), num_workers=1, batch_size=16, frequency=4, network=Network(num_servers=2)
    )
    with pytest.warns(RuntimeWarning, match="a parameter server was lost"):
        spark_model.fit(
            (ids, labels), epochs=4, shuffle=False, verbose=0, checkpoint_dir=str(tmp_path),
            callbacks=[AtEpoch(2, kill)],
        )  # fmt: skip
    assert killed
    np.testing.assert_allclose(
        spark_model.model.predict(ids, verbose=0),
        of_one_process(4).predict(ids, verbose=0),
        atol=1e-5,
    )


def test_what_servers_cannot_train_is_refused(frame: Any, tmp_path: Any) -> None:
    options = {"verbose": 0, "checkpoint_dir": str(tmp_path)}
    for settings in ({"mode": "synchronous", "rule": "averaging"}, {"rule": "sgd"}):
        with pytest.raises(ConfigError, match="this fit cannot train"):
            SparkModel(make_model(), num_workers=1, **settings).fit(frame, **options)
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        SparkModel(make_model(), num_workers=1).fit(frame, verbose=0)
    x = keras.Input((3,), name="features")
    classes = keras.Model(x, ShardedClassifier(5, table="faces")(x))
    classes.compile("sgd")
    with pytest.raises(ConfigError, match="without a ShardedClassifier"):
        SparkModel(classes, num_workers=1).fit(frame, **options)
