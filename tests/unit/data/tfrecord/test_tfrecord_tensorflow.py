"""Beside TensorFlow: the same bytes as its writer, and read by tf.data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data.tfrecord.blocks import decompressed, read_blocks
from sparkdl.data.tfrecord.decoding import ListKind, decode_block, depth_of, kind_of
from sparkdl.data.tfrecord.encoding import encode_batch

pytestmark = pytest.mark.keras

# Names of which none begins another one: protobuf's own order differs between its languages there.
BATCH = pa.RecordBatch.from_pydict(
    {
        "a_integer": pa.array([1, -1, 2**63 - 1, -(2**63), None, 0]),
        "b_float": pa.array([1.5, None, -0.0, 3.4e38, 1e-40, np.nan], pa.float32()),
        "c_text": pa.array(["", "é✓", None, "x" * 300, "abc", "x" * 20000]),
        "d_raw": pa.array([b"", b"\xff\x00", None, b"x" * 127, b"x" * 128, b"abc"]),
        "e_integers": pa.array([[], None, [1, 2, 3], [-5], list(range(300)), [2**62]]),
        "f_floats": pa.array([[], None, [1], [-5], list(range(300)), [0]], pa.list_(pa.float32())),
        "g_texts": pa.array([[], None, ["a", ""], ["ü"], ["x"] * 200, [""]]),
        "h_truth": pa.array([True, False, None, True, False, None]),
    }
)


def example(tf: Any, row: dict[str, Any]) -> bytes:
    features = {}
    for name, value in row.items():
        if value is None:
            continue
        depth, kind = depth_of(BATCH.schema.field(name).type)
        values = value if depth else [value]
        if kind_of(kind) == ListKind.BYTES:
            texts = [v.encode() if isinstance(v, str) else v for v in values]
            features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))
        elif kind_of(kind) == ListKind.FLOAT:
            features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            numbers = [int(v) for v in values]
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=numbers))
    message = tf.train.Example(features=tf.train.Features(feature=features))
    found: bytes = message.SerializeToString(deterministic=True)
    return found


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_what_tensorflow_writes_is_read_and_written(tmp_path: Path, compression: str) -> None:
    tf = pytest.importorskip("tensorflow")
    path = str(tmp_path / "records")
    with tf.io.TFRecordWriter(path, compression) as writer:
        for row in BATCH.to_pylist():
            writer.write(example(tf, row))
    content = bytes(encode_batch(BATCH, "Example"))
    with open(path, "rb") as file:
        assert decompressed(file).read() == content
    with open(path, "rb") as file:
        block = next(read_blocks(decompressed(file), path))
    assert repr(decode_block(block, BATCH.schema, "Example").to_pylist()) == repr(BATCH.to_pylist())


def test_parts_of_a_list_are_joined_as_protocol_buffers_say(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")

    def field(number: int, *content: bytes) -> bytes:
        whole = b"".join(content)
        return bytes([number << 3 | 2, len(whole)]) + whole

    parts = [field(2, tf.train.FloatList(value=[v]).SerializeToString()) for v in (1.0, 2.0)]
    record = field(1, field(1, field(1, b"x"), field(2, *parts)))
    read = tf.train.Example.FromString(record).features.feature["x"].float_list.value
    path = str(tmp_path / "records")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(record)
    with open(path, "rb") as file:
        block = next(read_blocks(decompressed(file), path))
    ours = decode_block(block, pa.schema([("x", pa.list_(pa.float32()))]), "Example")
    assert ours.to_pylist() == [{"x": list(read)}]


def test_tf_data_reads_what_is_written(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    path = tmp_path / "records"
    path.write_bytes(encode_batch(BATCH, "Example"))
    records = list(tf.data.TFRecordDataset(str(path)))
    parsed = tf.io.parse_example(
        [record.numpy() for record in records],
        {
            "e_integers": tf.io.VarLenFeature(tf.int64),
            "c_text": tf.io.FixedLenFeature([], tf.string, default_value="none"),
        },
    )
    assert parsed["c_text"].numpy()[:3].tolist() == [b"", "é✓".encode(), b"none"]
    assert int(tf.sparse.reduce_max(parsed["e_integers"])) == 2**62


def test_sequences_are_read_by_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")
    batch = pa.RecordBatch.from_pydict(
        {"id": pa.array([7]), "frames": pa.array([[[1, 2], [], [3]]]), "w": pa.array([[["ü"]]])}
    )
    content = io.BytesIO(encode_batch(batch, "SequenceExample"))
    record = next(iter(read_blocks(content, "f")))
    text = record.buffer[record.starts[0] : record.starts[0] + record.lengths[0]].tobytes()
    found = tf.train.SequenceExample.FromString(text)
    frames = found.feature_lists.feature_list["frames"].feature
    assert [list(f.int64_list.value) for f in frames] == [[1, 2], [], [3]]
    assert list(found.context.feature["id"].int64_list.value) == [7]
    assert found.SerializeToString(deterministic=True) == text
