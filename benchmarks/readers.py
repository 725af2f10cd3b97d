"""Files that one rank reads ahead by one, two and four readers, and by as many as are of use.

    python benchmarks/readers.py [--turns 3] [--rows 80000] [--latency-ms 50]

- A store that sleeps: each row group of a Parquet file takes ``--latency-ms`` before it is decoded.
- Requests that sleep: the same files through fsspec, where each request for bytes sleeps; beside it
  ``pyarrow.dataset.Scanner`` with ``fragment_readahead=4``, and with its own choice.
- The local disk (files lie in the system's cache): Parquet, and Arrow with and without compression,
  read into a worker's columns as ``fit`` does, in ten times as many turns, as each is short. "The
  caller's thread" reads nothing ahead; mapped Arrow files are read so whatever is asked for, which
  shows how exact the figures are.

Rows are 784 floats and a label. In each turn every way runs once, in another order; a figure is the
median of its turns, and a ratio that of the ratios within turns. Seconds of processors tell more
than rates where other programs use the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from sparkdl.data import ColumnSpec, DataSpec, read_partition
from sparkdl.data.plain_arrow import FileColumns
from sparkdl.data.shards import read_files
from sparkdl.files.listing import find_files
from sparkdl.spark.forms import files as file_forms
from sparkdl.spark.forms.arrow_files import FileShard, ParquetPiece, parquet_pieces
from sparkdl.spark.forms.files import FileInput, FileSet

SPEC = DataSpec(
    {"x": ColumnSpec(("pixels",), (784,))},
    {"y": ColumnSpec(("label",), (), "int64", "scalars", classes=10)},
)
FILES = 16
Ways = dict[str, Callable[[], int]]


class SleepingFiles(LocalFileSystem):
    """Files of this machine, each request for whose bytes sleeps before it is answered."""

    protocol = "sleeping"
    latency_s = 0.0
    requests = 0
    _counting = threading.Lock()

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        return _SleepingFile(open(path, mode))


class _SleepingFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        with SleepingFiles._counting:
            SleepingFiles.requests += 1
        time.sleep(SleepingFiles.latency_s)
        return bytes(self._file.read(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def rows(count: int, seed: int) -> pa.Table:
    """Random rows."""
    values = np.random.default_rng(seed).random((count, 784), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 784)
    return pa.table(
        {"label": pa.array(np.arange(count) % 10), "pixels": column.cast(pa.list_(pa.float32()))}
    )


def write(folder: Path, kind: str, count: int, group_rows: int, codec: str | None) -> Path:
    """Files of equal size; returns the folder."""
    folder.mkdir()
    for number in range(FILES):
        table = rows(count // FILES, number)
        if kind == "parquet":
            pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=group_rows)
            continue
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_file(
            str(folder / f"{number:02d}.arrow"), table.schema, options=options
        ) as writer:
            writer.write_table(table, group_rows)
    return folder


def dealt(path: str, kind: str) -> FileInput:
    """All files as one worker gets them."""
    files = FileSet(kind, tuple(find_files(path)), pa.schema([]))  # type: ignore[arg-type]
    return FileInput.dealt([files], 1, 0.0, 0)


def counted(batches: Iterator[pa.RecordBatch]) -> int:
    """Takes all batches; returns their rows."""
    return sum(batch.num_rows for batch in batches)


def of_sleeping_groups(folder: Path, latency_s: float, readers: int | None) -> int:
    """Reads row groups that take a time each, whatever they hold."""

    def read(piece: ParquetPiece) -> Iterator[pa.RecordBatch]:
        time.sleep(latency_s)
        yield from piece.read()

    def opened(shard: FileShard) -> list[Callable[[], Iterator[pa.RecordBatch]]]:
        columns = FileColumns(["label", "pixels"])
        pieces = parquet_pieces(shard, columns)  # which join small row groups
        groups = [(piece, number) for piece in pieces for number in piece.groups]
        return [partial(read, replace(piece, groups=(number,))) for piece, number in groups]

    found = find_files(str(folder))
    files = [partial(opened, FileShard(file, file.size_bytes)) for file in found]
    return counted(read_files(files, readers))


def of_sleeping_requests(folder: Path, readers: int | None) -> int:
    """Reads files of which each request takes a time."""
    return counted(dealt(f"sleeping://{folder}", "parquet").batches(0, SPEC, readers))


def of_scanner(folder: Path, **options: int) -> int:
    """The same by pyarrow's scanner, with the order of the files kept."""
    system = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(SleepingFiles()))
    data = pa.dataset.dataset(str(folder), filesystem=system, format="parquet")
    return counted(data.scanner(columns=["label", "pixels"], **options).to_batches())


def into_columns(folder: Path, kind: str, readers: int | None) -> int:
    """What ``fit`` does with the rows of files; 0 readers: in the caller's thread."""
    files = dealt(str(folder), kind)
    with contextlib.ExitStack() as stack:
        if readers == 0:
            stack.enter_context(_without_readers())
        partition = stack.enter_context(read_partition(files.batches(0, SPEC, readers), SPEC))
        return partition.num_rows


@contextlib.contextmanager
def _without_readers() -> Iterator[None]:
    def read(files: Any, readers: int | None = None) -> Iterator[Any]:
        for open_file in files:
            for piece in open_file():
                yield from piece()

    kept = file_forms.read_files
    file_forms.read_files = lambda files, readers=None: (item for item in read(files))
    try:
        yield
    finally:
        file_forms.read_files = kept


def compare(title: str, ways: Ways, baseline: str, turns: int) -> None:
    """Runs the ways in turns; prints rates and their ratios to one of them."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        names = list(ways)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in names:
            began, computed = time.perf_counter(), time.process_time()
            count = ways[name]()
            if turn:  # the first one warms caches
                rates[name].append(count / (time.perf_counter() - began))
                cpu_s[name].append(time.process_time() - computed)
    print(f"\n### {title} (load average {os.getloadavg()[0]:.1f})\n")
    print(
        f"| way | rows/s | times {baseline} | of the turns | CPU seconds |\n|---|---|---|---|---|"
    )
    for name, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates[baseline], strict=True)]
        print(
            f"| {name} | {statistics.median(found):,.0f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | {statistics.median(cpu_s[name]):.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    fsspec.register_implementation("sleeping", SleepingFiles, clobber=True)
    SleepingFiles.latency_s = latency_s = asked.latency_ms / 1000
    readers: dict[str, int | None] = {
        "1 reader": 1, "2 readers": 2, "4 readers": 4, "auto": None,
    }  # fmt: skip
    print(f"{asked.rows} rows in {FILES} files, {os.cpu_count()} CPUs, pyarrow {pa.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = write(folder / "few", "parquet", 16_000, 100, None)
        if asked.only in ("", "groups"):
            compare(
                f"{FILES * 10} row groups of {asked.latency_ms:g} ms each",
                {n: partial(of_sleeping_groups, few, latency_s, r) for n, r in readers.items()},
                "1 reader", asked.turns,
            )  # fmt: skip
        if asked.only in ("", "requests"):
            large = write(folder / "large", "parquet", asked.rows, 2_500, None)
            SleepingFiles.requests = 0
            of_sleeping_requests(large, 1)
            told = f"requests of {asked.latency_ms:g} ms each: {SleepingFiles.requests}"
            SleepingFiles.requests = 0
            of_scanner(large, fragment_readahead=4)
            compare(
                f"{told}; of the scanner: {SleepingFiles.requests}",
                {
                    **{n: partial(of_sleeping_requests, large, r) for n, r in readers.items()},
                    "Scanner, fragment_readahead=4": partial(
                        of_scanner, large, fragment_readahead=4
                    ),
                    "Scanner": partial(of_scanner, large),
                },
                "1 reader", asked.turns,
            )  # fmt: skip
        for kind, codec in (("parquet", None), ("arrow", None), ("arrow", "lz4")):
            what = f"{kind}-{codec}"
            if asked.only in ("", "disk", what):
                place = write(folder / what, kind, asked.rows, 2_500, codec)
                ways = {"the caller's thread": 0, **readers}
                if kind == "arrow":
                    ways = {"1 reader": 1, "auto": None}
                compare(
                    f"the local disk, {kind}" + (f" ({codec})" if codec else ""),
                    {n: partial(into_columns, place, kind, r) for n, r in ways.items()},
                    "1 reader", 10 * asked.turns,
                )  # fmt: skip


if __name__ == "__main__":
    main()
