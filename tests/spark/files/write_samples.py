"""Writes small files with DuckDB, fastparquet, Hugging Face's datasets and delta-rs.

``bash tests/writers.sh`` runs it in an environment of its own, and the tests of
``test_writers.py`` on the files; those in ``written/`` are of one such run::

    python tests/spark/files/write_samples.py tests/spark/files/written

Rows have the numbers 0 to 5 in ``id``; see ``values_of`` in ``test_writers.py``.
"""

from __future__ import annotations

import os
import shutil
import sys

import numpy as np
import pandas as pd
import pyarrow as pa

ROWS = range(6)


def write_duckdb(folder: str) -> None:
    import duckdb

    columns = """
        i AS id, i::TINYINT AS i8, i::UTINYINT AS u8, i::UBIGINT AS u64, i::HUGEINT AS huge,
        (i + 0.5)::FLOAT AS f32, (i / 4)::DECIMAL(10, 2) AS exact, i % 2 = 0 AS flag,
        's' || i AS name, [i::FLOAT, i + 1::FLOAT] AS x,
        [i::FLOAT, i + 1::FLOAT]::FLOAT[2] AS fixed,
        DATE '2020-01-01' + i::INT AS day, 'a'::ENUM('a', 'b') AS kind,
        (TIMESTAMP '2020-01-01' + INTERVAL (i) SECOND)::TIMESTAMP_NS AS nanos,
        TIME '10:00:00' AS clock, uuid() AS uuid, INTERVAL (i) DAY AS span"""
    connection = duckdb.connect()
    connection.execute(
        f"COPY (SELECT {columns} FROM range(6) r(i)) TO '{folder}/duckdb.parquet' (FORMAT parquet)"
    )
    few = "SELECT i AS id, [i::FLOAT, i + 1::FLOAT] AS x, i % 2 AS part FROM range(6) r(i)"
    connection.execute(
        f"COPY ({few}) TO '{folder}/duckdb_brotli.parquet' (FORMAT parquet, COMPRESSION brotli)"
    )
    connection.execute(
        f"COPY ({few}) TO '{folder}/duckdb_parts' (FORMAT parquet, PARTITION_BY (part))"
    )


def write_fastparquet(folder: str) -> None:
    import fastparquet

    frame = pd.DataFrame(
        {
            "id": ROWS,
            "u8": np.arange(6, dtype=np.uint8),
            "f32": np.arange(6, dtype=np.float32) + 0.5,
            "flag": [v % 2 == 0 for v in ROWS],
            "name": [f"s{v}" for v in ROWS],
            "nanos": pd.date_range("2020", periods=6),
            "span": pd.to_timedelta(ROWS, unit="s"),
        }
    )
    fastparquet.write(f"{folder}/fastparquet.parquet", frame)
    fastparquet.write(f"{folder}/fastparquet_lz4.parquet", frame[["id", "f32"]], compression="LZ4")
    fastparquet.write(
        f"{folder}/fastparquet_hive.parquet", frame[["id", "f32", "u8"]], file_scheme="hive",
        row_group_offsets=[0, 3],
    )  # fmt: skip


def write_datasets(folder: str) -> None:
    import datasets

    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "x": datasets.List(datasets.Value("float32")),
            "name": datasets.Value("string"),
            "kind": datasets.ClassLabel(names=["a", "b"]),
            "matrix": datasets.Array2D((1, 2), "float32"),
        }
    )
    rows = datasets.Dataset.from_dict(
        {
            "id": list(ROWS),
            "x": [[v, v + 1.0] for v in ROWS],
            "name": [f"s{v}" for v in ROWS],
            "kind": [v % 2 for v in ROWS],
            "matrix": [[[v, v + 1.0]] for v in ROWS],
        },
        features=features,
    )
    rows.save_to_disk(f"{folder}/datasets", num_shards=2)
    # what map writes beside the rows that it reads
    datasets.load_from_disk(f"{folder}/datasets").map(lambda row: {"id": row["id"] + 100})


def write_delta(folder: str) -> None:
    import deltalake

    rows = pa.table({"id": list(ROWS), "x": [[v, v + 1.0] for v in ROWS]})
    deltalake.write_deltalake(f"{folder}/delta", rows)
    deltalake.DeltaTable(f"{folder}/delta").delete("id < 2")


if __name__ == "__main__":
    target = sys.argv[1]
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    for write in (write_duckdb, write_fastparquet, write_datasets, write_delta):
        write(target)
