"""What stands in for what an older Spark lacks; on any Spark, without a session."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from sparkdl.errors import ResourceError
from sparkdl.spark.inference import function
from sparkdl.spark.session import versions


@pytest.fixture
def spark_35(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "spark_version", lambda: (3, 5))


def empty_lists() -> pa.RecordBatch:
    """Two rows of an array of arrays as Spark 3.5 sends them: ``.nbytes`` would crash here."""
    kind = pa.list_(pa.int64())
    inner = pa.Array.from_buffers(kind, 0, [None, None], children=[pa.array([], pa.int64())])
    offsets = pa.array([0, 0, 0], pa.int32()).buffers()[1]
    outer = pa.Array.from_buffers(pa.list_(kind), 2, [None, offsets], children=[inner])
    return pa.RecordBatch.from_arrays([pa.array([1, 2]), outer], ["id", "steps"])


@pytest.mark.usefixtures("spark_35")
def test_offsets_that_spark_leaves_out_are_made() -> None:
    (made,) = versions.whole_batches(iter([empty_lists()]))
    assert made.nbytes > 0
    assert made["steps"].flatten().flatten().to_pylist() == []
    assert made.to_pydict() == {"id": [1, 2], "steps": [[], []]}


@pytest.mark.usefixtures("spark_35")
def test_whole_batches_stay_as_they_are() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [[[1], []], None], "y": ["a", None], "z": [[], []]})
    for part in (batch, batch.slice(1), batch.slice(2)):
        (made,) = versions.whole_batches(iter([part]))
        assert made is part


def test_a_newer_spark_is_asked_for() -> None:
    versions.require_spark((3, 5), "what it has", "")
    with pytest.raises(ResourceError, match=r"(?s)the format needs a newer.*99\.1 or.*hint: older"):
        versions.require_spark((99, 1), "the format", "older")


def test_columns_of_arrow_and_of_spark() -> None:
    kinds = pa.schema(
        [
            ("fixed", pa.list_(pa.float32(), 3)),
            ("large", pa.large_list(pa.list_(pa.int8()))),
            ("plain", pa.timestamp("us")),
        ]
    )
    schema = versions.spark_schema_of(kinds)
    assert schema.simpleString() == (
        "struct<fixed:array<float>,large:array<array<tinyint>>,plain:timestamp_ntz>"
    )
    back = versions.arrow_schema_of(schema)
    assert back.field("fixed").type.value_type == pa.float32()
    assert versions.arrow_type_of(T.TimestampType()) == pa.timestamp("us", "UTC")
    assert versions.spark_type_of(pa.large_list(pa.string())) == T.ArrayType(T.StringType())


def test_tables_travel_as_arrows_bytes() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [1, None, 3], "y": [[0.5], [], None]})
    packed = list(versions._pack(iter([batch, batch.slice(1)])))
    assert pa.Table.from_batches(versions._unpack(iter(packed))).to_pydict() == {
        "x": [1, None, 3, None, 3], "y": [[0.5], [], None, [], None],
    }  # fmt: skip


# -- functions on pandas' series --------------------------------------------------------------


def test_series_become_arrow() -> None:
    vector = pd.DataFrame({"type": [1.0, None], "values": [[1.0, 2.0], None]})
    assert function.to_arrow(vector).to_pylist() == [
        {"type": 1.0, "values": [1.0, 2.0]}, None,
    ]  # fmt: skip
    assert function.to_arrow(pd.Series([1.5, float("nan")])).to_pylist() == [1.5, None]
    assert function.to_arrow(pd.Series([b"ab", None])).type == pa.binary()


def test_columns_of_nulls_wait_for_their_type() -> None:
    nothing, some = pd.Series([None, None]), pd.Series([[1.0], [2.0]])
    numbers = pd.Series([1.0, 2.0])
    typed = list(function._typed([(nothing, numbers), (some, numbers), (nothing, numbers)]))
    assert [columns[0].type for columns in typed] == [pa.list_(pa.float64())] * 3
    assert [columns[0].null_count for columns in typed] == [2, 0, 2]
    (alone,) = function._typed([nothing])
    assert (alone[0].type, alone[0].null_count) == (pa.list_(pa.float32()), 2)
    assert list(function._typed([])) == []


def test_predictions_become_series() -> None:
    whole = function.to_series(pa.array([1, None, 3], pa.int32()))
    assert whole.tolist() == [1, None, 3]
    assert function.to_series(pa.array([0.5, 1.5])).tolist() == [0.5, 1.5]
    assert function.to_series(pa.array([[1.0], None])).tolist() == [[1.0], None]
