"""Streams: scored with the bits of a table, and trained on by micro-batches, each one once."""

from __future__ import annotations

import operator
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from spark_models import make_mlp

import sparkdl
from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError

ROWS, WIDTH, FILES = 16, 4, 6
NOW = {"availableNow": True}


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(FILES, ROWS, WIDTH)).astype("float32")
    return x, (x.sum(-1) > 0).astype("int64")


@pytest.fixture
def folder(spark: Any, tmp_path: Path) -> Any:
    written: list[str] = []

    def write(x: np.ndarray, y: np.ndarray, name: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = pa.table({"features": x.tolist(), "label": y, "id": list(range(len(y)))})
        rows = rows.cast(pa.schema([("features", pa.list_(pa.float32())), ("label", pa.int64()),
                                    ("id", pa.int64())]))  # fmt: skip
        (tmp_path / "in").mkdir(exist_ok=True)
        path = tmp_path / "in" / name
        pq.write_table(rows, path)
        written.append(name)
        os.utime(path, (1_700_000_000 + len(written),) * 2)  # Spark takes files by their times

    return write


SCHEMA = "features array<float>, label long, id long"


def stream_of(spark: Any, tmp_path: Path) -> Any:
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    return reader.parquet(str(tmp_path / "in"))


def network(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(8, activation="tanh"),
                              keras.layers.Dense(2, activation="softmax")])  # fmt: skip
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def test_a_stream_is_scored_with_the_bits_of_a_table(
    spark: Any, data: Any, folder: Any, tmp_path: Path
) -> None:
    """Each file is a micro-batch of the stream, and a partition of the table.

    A table that is cut otherwise differs in the last bits: a matrix product of 32 rows computes
    the rows at the end of its blocks in another order, so a row's bits depend on its place.
    """
    x, y = data
    for i in range(3):  # files of 16, 15 and 14 rows
        folder(x[i][i:], y[i][i:], f"{i}.parquet")
    model = make_mlp(WIDTH, 3)
    options = {"batch_size": 32, "probability_column": "p", "class_column": "c"}
    stream = sparkdl.predict(model, stream_of(spark, tmp_path), **options)
    assert stream.isStreaming
    query = (
        stream.writeStream.format("memory").queryName("scored").trigger(**NOW)
        .option("checkpointLocation", str(tmp_path / "q")).start()
    )  # fmt: skip
    query.awaitTermination()
    files = [spark.read.parquet(str(tmp_path / "in" / f"{i}.parquet")) for i in range(3)]
    table = files[0].union(files[1]).union(files[2])
    assert table.rdd.getNumPartitions() == 3
    by_row = operator.itemgetter("features")
    got = sorted(spark.table("scored").collect(), key=by_row)
    assert len(got) == 45
    assert got == sorted(sparkdl.predict(model, table, **options).collect(), key=by_row)
    cut_otherwise = sparkdl.predict(model, table.coalesce(1), **options).collect()
    for mine, theirs in zip(got, sorted(cut_otherwise, key=by_row), strict=True):
        np.testing.assert_allclose(mine.p, theirs.p, rtol=1e-6)
        assert mine.c == theirs.c


def test_micro_batches_equal_fit_in_the_same_order_over_a_restart(
    spark: Any, data: Any, folder: Any, tmp_path: Path
) -> None:
    """Stopped between training a micro-batch and Spark's note of it, the worst moment."""
    x, y = data
    for i in range(FILES):
        folder(x[i], y[i], f"{i}.parquet")
    plain = network()
    losses = [
        plain.fit(x[i], y[i], batch_size=ROWS, shuffle=False, verbose=0).history["loss"][0]
        for i in range(FILES)
    ]
    seen: list[int] = []

    def fail_at_2(batch_id: int, history: Any) -> None:
        seen.append(batch_id)
        if batch_id == 2:
            raise RuntimeError("the driver dies")

    def start(**options: Any) -> Any:
        model = SparkModel(network(1 if seen else 0), mode="allreduce", num_workers=2,
                           communicator="builtin", batch_size=ROWS // 2)  # fmt: skip
        return model.fit_stream(
            stream_of(spark, tmp_path), checkpoint_dir=str(tmp_path / "run"), trigger=NOW, **options
        )

    first = start(on_batch=fail_at_2)
    with pytest.raises(RuntimeError, match="the driver dies"):
        first.await_termination()
    assert not first.is_active
    second = start(on_batch=lambda batch_id, history: seen.append(batch_id))
    assert second.await_termination(200)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert second.batches_done == FILES
    np.testing.assert_allclose(
        first.history["loss"] + second.history["loss"], losses, rtol=1e-5, atol=1e-6
    )
    for mine, theirs in zip(second.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    again = start()
    assert again.await_termination(200)
    assert again.history == {}  # nothing new
    shutil.rmtree(tmp_path / "run" / "model")
    folder(x[0], y[0], "new.parquet")
    lost = start()
    with pytest.raises(ConfigError, match="do not belong together"):
        lost.await_termination(200)


def test_what_no_stream_can_be_trained_with(spark: Any, folder: Any, data: Any, tmp_path: Path
) -> None:  # fmt: skip
    x, y = data
    folder(x[0], y[0], "0.parquet")
    stream = stream_of(spark, tmp_path)
    model = SparkModel(network(), num_workers=1)
    options = {"checkpoint_dir": str(tmp_path / "run")}
    with pytest.raises(DataError, match=r"(?s)stream of rows.*spark.readStream"):
        model.fit_stream(spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")), **options)
    with pytest.raises(DataError, match="did you mean 'features'"):
        model.fit_stream(stream, features="feature", **options)
    with pytest.raises(ConfigError, match="go on after a restart"):
        model.fit_stream(stream, checkpoint_dir=None)
    with pytest.raises(ConfigError, match=r"callbacks=\[EarlyStopping\(\.\.\.\)\]"):
        model.fit_stream(stream, callbacks=[keras.callbacks.EarlyStopping], **options)
    with pytest.raises(ConfigError, match="batch_size"):
        model.fit_stream(stream, batch_size=0, **options)
    with pytest.raises(ConfigError, match="verbose must say"):
        model.fit_stream(stream, verbose="loud", **options)
    with pytest.raises(ConfigError, match="availableNow"):
        model.fit_stream(stream, trigger="now", **options)
    with pytest.raises(DataError, match="fit_stream"):
        model.fit(stream)
    assert not (tmp_path / "run").exists()
