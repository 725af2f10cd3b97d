"""What a person reads when a fit, a prediction, a SQL function or a stream fails."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
from needed import needs_spark
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.ml import Pipeline

import sparkdl
from sparkdl import SparkModel
from sparkdl.errors import DataError, WorkerError
from sparkdl.ml import KerasRegressor

WHAT = "sparkdl.errors.DataError: column 'features', row 13 of the partition: the model takes no"
pytestmark = needs_spark(4, 0, "the JVM's exception is what Python raises there")
OWN = os.path.dirname(sparkdl.__file__)
HINT = "  hint: df.dropna() and df.fillna() do not look inside arrays"


class Raising(keras.layers.Layer):
    """A layer whose code fails with the rows, in the middle of a compiled call."""

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        def look_up(values: Any) -> Any:
            raise KeyError("no such key")

        found = tf.numpy_function(look_up, [x], tf.float32)
        found.set_shape(x.shape)
        return found


def model_of(*layers: Any) -> Any:
    network = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    return network


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    """A row whose array has a gap."""
    values = [([float(n), None if n == 13 else 1.0], 1.0) for n in range(20)]
    return spark.createDataFrame(values, "features array<double>, label double").coalesce(1)


def shown(call: Callable[[], object], kind: type[Exception]) -> list[str]:
    """The lines that a terminal shows."""
    with pytest.raises(kind) as caught:
        call()
    return "".join(traceback.format_exception(caught.value)).splitlines()


def test_a_fit_that_fails_shows_its_error_and_no_frames_between(rows: Any) -> None:
    stage = KerasRegressor(model=model_of(), epochs=1, numWorkers=1, verbose=0)
    for fit in (
        lambda: SparkModel(model_of(), num_workers=1).fit(rows, verbose=0),
        lambda: Pipeline(stages=[stage]).fit(rows),
    ):
        lines = shown(fit, DataError)
        files = [line for line in lines if line.startswith(f'  File "{OWN}')]
        assert len(files) <= 3, lines  # of the call itself
        assert lines[-4].startswith(WHAT)
        assert lines[-1].startswith(HINT)


def test_the_code_of_a_user_that_fails_in_a_compiled_call_is_in_the_first_line(rows: Any) -> None:
    spark_model = SparkModel(
        model_of(Raising()), num_workers=1, custom_objects={"Raising": Raising}
    )
    said = "Graph execution error: KeyError: 'no such key' (at node "
    good = rows.where("features[1] is not null")
    with pytest.raises(WorkerError) as caught:
        spark_model.fit(good, verbose=0)
    text = str(caught.value)
    assert said in text.splitlines()[0]
    assert len(text.splitlines()) < 40
    assert "in look_up" in text
    lines = shown(lambda: spark_model.predict(good).collect(), PythonException)
    (first,) = [n for n, line in enumerate(lines) if line.startswith("sparkdl.errors.WorkerError")]
    assert said in lines[first]
    assert len(lines) - first < 40


def test_a_query_that_fails_ends_with_column_row_and_hint(spark: Any, rows: Any) -> None:
    model = model_of()
    sparkdl.register_udf(spark, "scored", model)
    rows.createOrReplaceTempView("rows_with_a_gap")
    for query in (
        SparkModel(model, num_workers=1).predict(rows).collect,
        spark.sql("SELECT scored(features) FROM rows_with_a_gap").collect,
    ):
        with pytest.raises(PythonException) as caught:
            query()
        before, _, after = str(caught.value).partition("sparkdl.errors.DataError: ")
        assert before.count("  File") == 1, before
        assert "row 13 of the partition" in after.splitlines()[0]
        assert after.splitlines()[3].startswith(HINT)


def test_a_stream_that_fails_says_column_row_and_hint(
    spark: Any, rows: Any, tmp_path: Path
) -> None:
    rows.write.parquet(f"{tmp_path}/rows")
    stream = spark.readStream.schema(rows.schema).parquet(f"{tmp_path}/rows")
    writer = SparkModel(model_of(), num_workers=1).predict(stream).writeStream.format("noop")
    query = writer.option("checkpointLocation", f"{tmp_path}/done").start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(120)
    before, _, after = str(caught.value).partition(WHAT)
    assert after, before
    assert before.count("  File") == 1
    assert HINT in after
