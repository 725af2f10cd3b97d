"""A file of many times the memory, read by one worker: peak memory, rows/s, an epoch's reading.

    python benchmarks/out_of_core.py [--gigabytes 4] [--budget-mb 256] [--kind tfrecord]

The rows are 784 floats and a label. First the file is read into a worker's columns (spilled beyond
the budget), then one shuffled epoch of batches is taken; beside it the same for rows that fit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data import Batches, ColumnSpec, DataSpec, read_partition
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.files.streams import find_files
from sparkdl.spark.columns.files import FileInput, FileSet

SPEC = DataSpec(
    {"x": ColumnSpec(("pixels",), (784,))},
    {"y": ColumnSpec(("label",), (), "int64", "scalars", classes=10)},
)
ROW_BYTES = 3191


def rows(count: int, seed: int) -> pa.RecordBatch:
    """Random rows."""
    values = np.random.default_rng(seed).random((count, 784), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 784)
    return pa.record_batch(
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


def measure(files: FileSet, budget_bytes: int, spill: str) -> None:
    """Reads, takes an epoch, prints."""
    dealt = FileInput.dealt([files], 1, 0.0, 0)
    start = time.perf_counter()
    with read_partition(dealt.batches(0, SPEC), SPEC, budget_bytes, spill) as partition:
        read_s = time.perf_counter() - start
        count = partition.num_rows
        where = "memory" if partition.train.storage.block_rows is None else "disk"
        start = time.perf_counter()
        batches = Batches(partition.train, 64)
        taken = sum(stack.num_rows for stack in batches.stacks(0, 16))
        epoch_s = time.perf_counter() - start
    assert taken == count
    print(
        f"{count:9,d} rows in {where:6s}  read {count / read_s:10,.0f} rows/s"
        f"  shuffled epoch {count / epoch_s:10,.0f} rows/s  peak {peak_mb():7,.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--budget-mb", type=int, default=256)
    parser.add_argument("--kind", choices=["tfrecord", "parquet"], default="tfrecord")
    arguments = parser.parse_args()
    print(f"before: peak {peak_mb():,.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        total = int(arguments.gigabytes * 1e9 / ROW_BYTES)
        files = written(Path(folder, "large"), arguments.kind, total)
        measure(files, arguments.budget_mb << 20, folder)
        measure(written(Path(folder, "small"), arguments.kind, 80_000), 1 << 30, folder)


if __name__ == "__main__":
    main()
