"""A file of many times the memory, read by one worker: peak memory, rows/s, an epoch's reading.

    python benchmarks/out_of_core.py [--gigabytes 4] [--budget-mb 256] [--kind tfrecord] [--cnn]

The rows are 784 floats and a label. First the file is read into a worker's columns (spilled beyond
the budget), then one shuffled epoch of batches is taken; beside it the same for rows that fit.
With ``--cnn`` a small convolutional network is trained on rows of both, in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data import Batches, ColumnSpec, DataSpec, Partition, read_partition
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.files.listing import find_files
from sparkdl.spark.forms.files import FileInput, FileSet

SPEC = DataSpec(
    {"x": ColumnSpec(("pixels",), (784,))},
    {"y": ColumnSpec(("label",), (), "int64", "scalars", classes=10)},
)
ROW_BYTES = 3191


def rows(count: int, seed: int) -> pa.RecordBatch:
    """Random rows."""
    values = np.random.default_rng(seed).random((count, 784), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 784)
    return pa.RecordBatch.from_pydict(
        {"label": pa.array(np.arange(count) % 10), "pixels": column.cast(pa.list_(pa.float32()))}
    )


def write(folder: Path, kind: str, total: int) -> None:
    """Files of 256 MB; in a process of its own, whose memory does not count."""
    part = rows(20_000, 0)
    encoded = bytes(encode_batch(part, "Example")) if kind == "tfrecord" else b""
    for number in range(max(1, total // (4 * 20_000))):
        path = folder / f"part-{number:05d}.{kind}"
        if kind == "tfrecord":
            with path.open("wb") as file:
                for _ in range(4):
                    file.write(encoded)
        else:
            pq.write_table(pa.Table.from_batches([part] * 4), path, row_group_size=20_000)


def written(folder: Path, kind: str, total: int) -> FileSet:
    """The files, once they are written."""
    folder.mkdir()
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(folder, kind, total))
    writer.start()
    writer.join()
    return FileSet(kind, tuple(find_files(str(folder))), rows(1, 0).schema)  # type: ignore[arg-type]


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(files: FileSet, budget_bytes: int, spill: str) -> Partition:
    """Reads, takes an epoch, prints."""
    dealt = FileInput.dealt([files], 1, 0.0, 0)
    start = time.perf_counter()
    partition = read_partition(dealt.batches(0, SPEC), SPEC, budget_bytes, spill)
    read_s, read_mb = time.perf_counter() - start, peak_mb()
    count = partition.num_rows
    start = time.perf_counter()
    taken = sum(stack.num_rows for stack in Batches(partition.train, 64).stacks(0, 16))
    epoch_s = time.perf_counter() - start
    assert taken == count
    print(
        f"{count:9,d} rows {'on disk' if partition.is_spilled else 'in memory':9s}"
        f"  read {count / read_s:10,.0f} rows/s (peak so far {read_mb:7,.0f} MB)"
        f"  shuffled epoch {count / epoch_s:10,.0f} rows/s (peak so far {peak_mb():7,.0f} MB)",
        flush=True,
    )
    return partition


def train(ways: dict[str, Partition], rows_each: int = 61_440, turns: int = 3) -> None:
    """Trains a network on rows of each partition, in turns; prints the medians."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, partition in ways.items():
            start = time.perf_counter()
            done = 0
            for stack in Batches(partition.train, 64).stacks(turn, 16):
                x, y = stack.x["x"], stack.y["y"]
                for at in range(len(x)):
                    model.train_on_batch(x[at], y[at])
                done += stack.num_rows
                if done >= rows_each:
                    break
            if turn:  # the first one compiles
                rates[name].append(done / (time.perf_counter() - start))
    for name, found in rates.items():
        print(f"a convolutional network, rows {name}: {statistics.median(found):,.0f} rows/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--budget-mb", type=int, default=256)
    parser.add_argument("--kind", choices=["tfrecord", "parquet"], default="tfrecord")
    parser.add_argument("--cnn", action="store_true")
    arguments = parser.parse_args()
    print(f"before: peak {peak_mb():,.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        total = int(arguments.gigabytes * 1e9 / ROW_BYTES)
        files = written(Path(folder, "large"), arguments.kind, total)
        with (
            measured(files, arguments.budget_mb << 20, folder) as large,
            measured(
                written(Path(folder, "small"), arguments.kind, 80_000), 1 << 30, folder
            ) as few,
        ):
            if arguments.cnn:
                train({"on disk": large, "in memory": few})


if __name__ == "__main__":
    main()
