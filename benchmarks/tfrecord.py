"""TFRecords: the reader beside tf.data + parse_example, the writer beside protobuf.

Everything runs in one process on one core, in turns; a figure is the median of its turns. Files
lie in the system's cache.

    python benchmarks/tfrecord.py [--rows 20000] [--turns 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import numpy as np
import pyarrow as pa
import tensorflow as tf

from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.blocks import decompressed, read_blocks
from sparkdl.data.tfrecord.decoding import decode_block
from sparkdl.data.tfrecord.encoding import encode_batch


def pixels(rows: int) -> pa.RecordBatch:
    """784 floats and a label."""
    values = np.random.default_rng(0).random((rows, 784), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 784)
    return pa.RecordBatch.from_pydict(
        {"label": pa.array(np.arange(rows) % 10), "pixels": column.cast(pa.list_(pa.float32()))}
    )


def clicks(rows: int) -> pa.RecordBatch:
    """20 integers, each a feature of its own."""
    random = np.random.default_rng(1)
    return pa.RecordBatch.from_pydict(
        {f"field{i:02d}": pa.array(random.integers(0, 10 ** (1 + i % 9), rows)) for i in range(20)}
    )


def parse_specification(schema: pa.Schema) -> dict[str, object]:
    """What parse_example must be told."""
    return {
        field.name: tf.io.FixedLenFeature([784], tf.float32)
        if pa.types.is_list(field.type)
        else tf.io.FixedLenFeature([], tf.int64)
        for field in schema
    }


def read_by_tensorflow(path: str, schema: pa.Schema) -> int:
    """tf.data: records, batched, parsed."""
    specification = parse_specification(schema)
    data = tf.data.TFRecordDataset(path).batch(1024)
    data = data.map(lambda records: tf.io.parse_example(records, specification))
    name = schema[0].name
    return sum(len(batch[name]) for batch in data.prefetch(1))


def read_by_sparkdl(path: str, schema: pa.Schema, verify: bool) -> int:
    """The blocks of the file, decoded."""
    with open(path, "rb") as file:
        blocks = read_blocks(decompressed(file), path, verify=verify)
        return sum(decode_block(block, schema, "Example").num_rows for block in blocks)


def write_by_tensorflow(path: str, batch: pa.RecordBatch) -> None:
    """A message per row, and TensorFlow's writer."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(batch.num_rows):
            features = {}
            for name, values in columns.items():
                value = values[i]
                if isinstance(value, list):
                    feature = tf.train.Feature(float_list=tf.train.FloatList(value=value))
                else:
                    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                features[name] = feature
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def write_by_sparkdl(path: str, batch: pa.RecordBatch) -> None:
    """The rows, some thousand at a time."""
    with open(path, "wb") as file:
        for start in range(0, batch.num_rows, 2048):
            file.write(encode_batch(batch.slice(start, 2048), "Example"))


def rates(ways: dict[str, Callable[[], object]], rows: int, turns: int) -> dict[str, float]:
    """Rows per second of each way: medians of turns taken one after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: rows / statistics.median(found) for name, found in seconds.items()}


def compare(label: str, batch: pa.RecordBatch, turns: int, few: int) -> None:
    """Prints one table."""
    rows = batch.num_rows
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "rows.tfrecord"))
        write_by_sparkdl(path, batch)
        size = os.path.getsize(path) / rows
        compiled = loops.COMPILED_FROM
        found = rates(
            {
                "tf.data + parse_example": lambda: read_by_tensorflow(path, batch.schema),
                "sparkdl": lambda: read_by_sparkdl(path, batch.schema, True),
                "sparkdl, CRCs of data not looked at": lambda: read_by_sparkdl(
                    path, batch.schema, False
                ),
            },
            rows,
            turns,
        )
        loops.COMPILED_FROM = 1 << 62
        found |= rates(
            {"sparkdl without numba": lambda: read_by_sparkdl(path, batch.schema, True)},
            rows,
            turns,
        )
        loops.COMPILED_FROM = compiled
        show(f"{label}, {size:.0f} bytes a record: read", found)
        other, part = str(Path(folder, "other.tfrecord")), batch.slice(0, few)
        slow = rates(
            {"protobuf": lambda: write_by_tensorflow(other, part)}, few, max(1, turns // 2)
        )
        fast = rates({"sparkdl": lambda: write_by_sparkdl(other, batch)}, rows, turns)
        loops.COMPILED_FROM = 1 << 62
        plain = rates(
            {"sparkdl without numba": lambda: write_by_sparkdl(other, batch)}, rows, turns
        )
        loops.COMPILED_FROM = compiled
        show(f"{label}: write", slow | fast | plain)


def show(title: str, found: dict[str, float]) -> None:
    """One table: rows per second, and how many times the first line."""
    print(f"\n{title}")
    first = next(iter(found.values()))
    for name, rate in found.items():
        print(f"  {name:38s} {rate:12,.0f} rows/s {rate / first:8.1f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    loops.count_bytes(loops.COMPILED_FROM)
    few = min(arguments.rows, 2000)
    compare("784 floats and a label", pixels(arguments.rows), arguments.turns, few)
    compare("20 integers", clicks(arguments.rows * 4), arguments.turns, few)


if __name__ == "__main__":
    main()
