"""A stage's Keras file as rows of parquet files: ``idx`` int32, ``chunk`` binary of 1 MiB each."""

from __future__ import annotations

import contextlib
import hashlib
import io
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.files.archive_parts import damaged_model, sane_bytes
from sparkdl.spark.files.hadoop import HadoopFileSystem
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.versions import frame_of_table, table_of_frame

CHUNK_BYTES = 1 << 20
_CHUNKS_PER_FILE = 32
"""So a file, and what the driver sends or receives at once, has 32 MiB: one task of a job carries
it, and ``spark.rpc.message.maxSize`` (128 MiB unless set) bounds a task."""
_CODECS = frozenset({"UNCOMPRESSED", "SNAPPY"})
"""What sparkdl writes, and what Spark does unless told otherwise; snappy packs at most 1:21."""


def folder_here(spark: Any, path: str) -> str | None:
    """The place of one of Spark's paths on this machine's disks; None if it is elsewhere.

    What is here is read and written without a job: Spark would take the bytes through a socket and
    a second process.
    """
    return None if is_connect(spark) else HadoopFileSystem(spark).on_disk(path)


def write_here(folder: str, content: bytes) -> None:
    """Bytes as rows ``(idx, chunk)``, in files of a few chunks each."""
    os.makedirs(folder)
    for number, table in enumerate(_tables(content)):
        pq.write_table(
            table, f"{folder}/part-{number:05d}.parquet", compression="none",
            use_dictionary=False, write_statistics=["idx"],
        )  # fmt: skip


def write_elsewhere(spark: Any, path: str, content: bytes) -> None:
    """The same by Spark: a job per file, so that no task grows large."""
    for number, table in enumerate(_tables(content)):
        writer = frame_of_table(spark, table).coalesce(1).write
        writer = writer.option("compression", "uncompressed")
        writer.mode("append" if number else "error").parquet(path)


def _tables(content: bytes) -> Iterator[pa.Table]:
    """The rows, file by file; their chunks are parts of ``content``, not copies."""
    whole = pa.py_buffer(content)
    step = CHUNK_BYTES * _CHUNKS_PER_FILE
    for start in range(0, max(len(content), 1), step):
        part = whole.slice(start, min(step, len(content) - start))
        offsets = [*range(0, part.size, CHUNK_BYTES), part.size]
        buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], part]
        chunks = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
        first = start // CHUNK_BYTES
        indices = pa.array(range(first, first + len(chunks)), pa.int32())
        yield pa.table({"idx": indices, "chunk": chunks})


def read_chunks(spark: Any, path: str, said: Mapping[str, Any], stage_path: str) -> bytes:
    """The bytes in the files of a folder, one copy of them, hashed while they are read.

    Raises:
        ModelError: Bytes are missing or were changed, or there are many more than the files have.
    """
    folder = folder_here(spark, path)
    here = folder is not None and os.path.isdir(folder)
    model, digest = f"the model in {stage_path!r}", hashlib.sha256()
    content, done = _room(said["bytes"], model), 0

    def hash_part(start: int, stop: int) -> None:
        with room[start:stop] as part:
            digest.update(part)

    with content.getbuffer() as room, ThreadPoolExecutor(1, "sparkdl-digest") as beside:
        hashed = beside.submit(hash_part, 0, 0)
        size = len(room)
        if here:
            tables = _tables_here(str(folder), size, model)
        else:
            tables = _tables_elsewhere(spark, path, size, model)
        for chunks in _in_order(tables, model):
            start = done
            for chunk in chunks:
                if done + chunk.size <= size:
                    room[done : done + chunk.size] = memoryview(chunk).cast("B")
                done += chunk.size
            # In one piece: a thread that hashes holds no lock of Python's
            hashed = beside.submit(hash_part, start, done)
            if done > size:
                break
        hashed.result()
    if done != said["bytes"] or digest.hexdigest() != said["sha256"]:
        raise damaged_model(
            f"{model} is not whole",
            f"{said['bytes']} bytes, as they were written",
            f"{done} bytes" + ("" if done != said["bytes"] else ", others than were written"),
        )
    return content.getvalue()


def _room(size: int, model: str) -> io.BytesIO:
    """A buffer of a known size to write to, which becomes ``bytes`` without a copy.

    The system gives memory as it is written, so a size that is a lie costs none.
    """
    try:
        return io.BytesIO(bytes(operator.index(size)))
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise damaged_model(
            f"{model} is not whole", "a size that fits into the memory", f"{size!r} bytes"
        ) from error


def _tables_elsewhere(spark: Any, path: str, size: int, model: str) -> Iterator[pa.Table]:
    """Rows, a few chunks a job."""
    from pyspark.sql import functions as f

    frame = spark.read.parquet(path)
    file = f.struct("_metadata.file_path", "_metadata.file_size")
    told = frame.agg(f.count(f.lit(1)).alias("rows"), f.collect_set(file).alias("files"))
    (found,) = told.collect()
    _require_sane(size, sum(file.file_size for file in found.files), model)
    rows = -(-size // CHUNK_BYTES)
    if found.rows != rows:
        raise damaged_model(f"{model} is not whole", f"{rows} chunks", f"{found.rows}")
    whole = f.length("chunk") <= CHUNK_BYTES
    for first in range(0, rows, _CHUNKS_PER_FILE):
        wanted = (frame["idx"] >= first) & (frame["idx"] < first + _CHUNKS_PER_FILE)
        yield table_of_frame(frame.where(wanted & whole))


def _tables_here(folder: str, size: int, model: str) -> Iterator[pa.Table]:
    """Rows of all files in a folder of this machine, a few chunks at once, each file's by its
    first chunk.
    """
    with _parquet_read(model):
        paths = [
            f"{folder}/{name}"
            for name in os.listdir(folder)
            if name.endswith(".parquet")
            and not name.startswith((".", "_"))
            and os.path.isfile(f"{folder}/{name}")  # a pipe would be read for ever
        ]
        packed = sum(os.path.getsize(path) for path in paths)
    _require_sane(size, packed, model)
    with _parquet_read(model):
        firsts = {}
        for path in paths:
            for batch in _opened(path).iter_batches(1, columns=["idx"]):
                firsts[path] = int(batch["idx"][0].as_py())
                break
        for path in sorted(firsts, key=lambda path: firsts[path]):
            for batch in _opened(path).iter_batches(_CHUNKS_PER_FILE, columns=["idx", "chunk"]):
                yield pa.Table.from_batches([batch])


@contextlib.contextmanager
def _parquet_read(model: str) -> Iterator[None]:
    """Around what is done with files of parquet: their errors say that the model is not whole."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise damaged_model(f"{model} is not whole", "files of parquet", str(error)) from error


def _opened(path: str) -> pq.ParquetFile:
    """A file of which no page is much larger than it is itself.

    Raises:
        ValueError: It is packed in a way that could hide any size.
    """
    file = pq.ParquetFile(path, memory_map=True)
    told = file.metadata
    for group in range(told.num_row_groups):
        for column in range(told.num_columns):
            codec = told.row_group(group).column(column).compression
            if codec not in _CODECS:
                raise ValueError(f"{path} is compressed by {codec}")
    return file


def _require_sane(size: int, packed: int, model: str) -> None:
    """Refuses what would fill the memory."""
    if size > sane_bytes(packed):
        raise damaged_model(
            f"{model} would fill the memory",
            f"at most {sane_bytes(packed)} bytes in files of {packed} bytes",
            f"{size} bytes",
        )


def _in_order(tables: Iterable[pa.Table], model: str) -> Iterator[list[pa.Buffer]]:
    """The bytes in each table's chunks, those of all tables without a gap."""
    done = 0
    for table in tables:
        received = table["idx"].to_pylist()
        rows = table if received == sorted(received) else table.sort_by("idx")
        expected = range(done, done + rows.num_rows)
        received.sort()
        if received != list(expected):
            raise damaged_model(f"{model} is not whole", f"chunks {expected}", f"chunks {received}")
        done = expected.stop
        yield [_values(part) for part in rows["chunk"].cast(pa.binary()).chunks]


def _values(chunks: pa.Array) -> pa.Buffer:
    """The bytes of binary values, one after the other, without the copies that scalars are."""
    _, offsets, values = chunks.buffers()
    if offsets is None or values is None or not len(chunks):
        return pa.py_buffer(b"")
    found = np.frombuffer(offsets, np.int32)[chunks.offset : chunks.offset + len(chunks) + 1]
    return values.slice(int(found[0]), int(found[-1] - found[0]))
