"""Feeding rows of 784 floats: TensorFlowOnSpark's queue, a bare queue, a feed, an Arrow file.

    python benchmarks/feeding.py [--rows 100000] [--turns 3] [--spark] [--frame] [--stream]

``--spark`` also runs ``sparkdl.run(fn, data=...)`` on ``local[2]``, from the job's start to the
last batch, beside the same job without rows: with the path of a Parquet file and of an Arrow file,
which the ranks read, and (``--frame``) with a DataFrame, whose rows Spark deals. The function
copies each batch, as the reader of the Arrow file does, so that all values are read. The rates are
divided by those of TensorFlowOnSpark's queue, of the bare queue and of the Arrow file in the same
run.

TensorFlowOnSpark puts each row into a ``JoinableQueue`` in a manager's process: the feeding process
and the reading one reach it by proxies, one call for each ``put``, ``get`` and ``task_done``. Where
``tensorflowonspark.TFManager`` can be imported (``pip install --no-deps tensorflowonspark``, in an
environment apart) it is that one; else the same of this file. Its other modules need
``pkg_resources``, so the loop of its ``DataFeed.next_batch`` is written out here. The first line
that is printed says which it was.

``--stream`` measures the way of a stream's rows from a task to a rank's process: over the framed
socket, as it is, and with an Arrow stream in shared memory, of which only the name would travel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl import Feeding, Limits
from sparkdl.data.feed import Feed, RowSpool, to_numpy
from sparkdl.launch.feeds.stream_feed import StreamIntake, send_rows
from sparkdl.transport.address import Listeners, ListenOptions
from sparkdl.transport.server import Server

BATCH = 256


def batches(rows: int) -> list[pa.RecordBatch]:
    """The rows as Spark sends them, 10,000 in a batch."""
    values = np.random.default_rng(0).random((10_000, 784), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 784)
    batch = pa.RecordBatch.from_pydict({"x": column.cast(pa.list_(pa.float32()))})
    return [batch] * max(1, rows // 10_000)


def queue_per_row(rows: int) -> float:
    """Rows per second through a queue between processes, an item each, stacked by the reader."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue(1024)
    feeder = context.Process(target=put_rows, args=(queue, rows))
    feeder.start()
    queue.get()
    start, count = time.perf_counter(), 0
    while count < rows:
        batch = [queue.get() for _ in range(min(BATCH, rows - count))]
        count += len(np.array(batch, np.float32))
    seconds = time.perf_counter() - start
    feeder.join()
    return rows / seconds


class OwnManager(BaseManager):
    """Holds queues for other processes, as TensorFlowOnSpark's ``TFManager`` does."""


_queues: dict[str, Any] = {}


def own_queue(name: str) -> Any:
    """A queue of this process, which is the one that started the manager or the manager's."""
    return _queues[name]


def start_manager() -> tuple[Any, str]:
    """A running manager with the queue ``'input'``, and whose it is."""
    try:
        from tensorflowonspark import TFManager

        return TFManager.start(b"key", ["input"]), "TensorFlowOnSpark's own TFManager"
    except ImportError as error:
        _queues["input"] = multiprocessing.JoinableQueue()
        OwnManager.register("get_queue", callable=own_queue)
        manager = OwnManager(authkey=b"key")
        manager.start()
        return manager, f"a manager made after TensorFlowOnSpark's ({error})"


def manager_queue(rows: int) -> float:
    """Rows per second through a manager's queue, an item each, stacked by the reader."""
    manager, _ = start_manager()
    context = multiprocessing.get_context("spawn")
    feeder = context.Process(target=put_rows_by_proxy, args=(manager.address, rows))
    queue = manager.get_queue("input")
    feeder.start()
    queue.get()
    queue.task_done()
    start, count = time.perf_counter(), 0
    while count < rows:
        batch = []
        while len(batch) < min(BATCH, rows - count):
            batch.append(queue.get(block=True))
            queue.task_done()
        count += len(np.array(batch, np.float32))
    seconds = time.perf_counter() - start
    feeder.join()
    manager.shutdown()
    return rows / seconds


def put_rows_by_proxy(address: Any, rows: int) -> None:
    """The other end: what a task of Spark does there with the rows of its partition."""
    multiprocessing.current_process().authkey = b"key"
    OwnManager.register("get_queue")
    manager = OwnManager(address=address, authkey=b"key")
    manager.connect()
    queue: Any = manager.get_queue("input")
    values = np.random.default_rng(0).random((100, 784), np.float32).tolist()
    queue.put("begin", block=True)
    for i in range(rows):
        queue.put(values[i % 100], block=True)
    queue.join()


def put_rows(queue: Any, rows: int) -> None:
    """The other end."""
    values = np.random.default_rng(0).random((100, 784), np.float32).tolist()
    queue.put("begin")
    for i in range(rows):
        queue.put(values[i % 100])


def feed(rows: int, budget_bytes: int) -> float:
    """Rows per second: kept as they come, then taken in batches."""
    source = batches(rows)
    start = time.perf_counter()
    spool = RowSpool(budget_bytes)
    for batch in source:
        spool.add(batch)
    count = sum(len(batch["x"]) for batch in Feed(spool.finish()).batches(BATCH))
    assert count == rows
    return rows / (time.perf_counter() - start)


def arrow_file(rows: int, folder: str) -> float:
    """Rows per second of the same rows from a mapped Arrow file, in arrays of a batch."""
    path = str(Path(folder, "rows.arrow"))
    source = batches(rows)
    with pa.ipc.new_file(path, source[0].schema) as writer:
        for batch in source:
            writer.write_batch(batch)
    start = time.perf_counter()
    count = 0
    with pa.memory_map(path) as mapped:
        reader = pa.ipc.open_file(mapped)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            for at in range(0, batch.num_rows, BATCH):
                count += len(np.array(to_numpy(batch.column(0).slice(at, BATCH))))
    assert count == rows
    return rows / (time.perf_counter() - start)


def limits(rows: int, folder: str) -> dict[str, float]:
    """Rows per second of two bare processes that read the same files, half of the rows each."""
    context = multiprocessing.get_context("spawn")
    rates = {}
    for kind in ("parquet", "arrow"):
        begin = context.Barrier(3)
        readers = [
            context.Process(target=read_half, args=(f"{folder}/rows.{kind}", rows, half, begin))
            for half in range(2)
        ]
        for reader in readers:
            reader.start()
        begin.wait()
        start = time.perf_counter()
        for reader in readers:
            reader.join()
        rates[kind] = rows / (time.perf_counter() - start)
    return rates


def read_half(path: str, rows: int, half: int, begin: Any) -> None:
    """One of them; it copies each batch, as the fed function does."""
    import pyarrow.parquet as pq

    begin.wait()
    count = 0
    with pa.memory_map(path) as mapped:
        if path.endswith("arrow"):
            file = pa.ipc.open_file(mapped)
            chunks: Any = map(file.get_batch, halves(file.num_record_batches, half))
        else:
            parquet = pq.ParquetFile(mapped, pre_buffer=False)
            groups = halves(parquet.num_row_groups, half)
            chunks = parquet.iter_batches(2560, row_groups=groups, use_threads=False)
        for chunk in chunks:
            values = to_numpy(chunk.column(0))
            for at in range(0, len(values), BATCH):
                count += len(np.array(values[at : at + BATCH]))
    assert 2 * count == rows


def halves(count: int, half: int) -> list[int]:
    """The first or the last half of the numbers below ``count``, which is even."""
    return list(range(count * half // 2, count * (half + 1) // 2))


def to_a_rank(rows: int) -> dict[str, float]:
    """Rows per second from this process to another one, until they are kept there."""
    source = batches(rows)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    rank = context.Process(target=be_a_rank, args=(theirs,))
    rank.start()
    address = mine.recv()
    rates = {}
    send_rows(source[:1], address, "token", "", number=0, attempt=0)
    start = time.perf_counter()
    assert send_rows(source, address, "token", "", number=1, attempt=0) == rows
    rates["socket"] = rows / (time.perf_counter() - start)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        start = time.perf_counter()
        for at in range(0, len(source), 1):
            path = f"{folder}/{at}.arrow"
            with pa.OSFile(path, "w") as file, pa.ipc.new_stream(file, source[at].schema) as to:
                to.write_batch(source[at])
            mine.send(path)
            mine.recv()
        rates["shared memory"] = rows / (time.perf_counter() - start)
    packed = bytearray(source[0].nbytes)
    values = np.frombuffer(source[0].column(0).values.buffers()[1], np.uint8)
    start = time.perf_counter()
    for _ in source:
        np.copyto(np.frombuffer(packed, np.uint8)[: values.size], values)
    rates["a copy in memory"] = rows / (time.perf_counter() - start)
    mine.send("")
    rank.join()
    return rates


def be_a_rank(pipe: Any) -> None:
    """The other end."""
    listeners = Listeners.bind(ListenOptions("socket", web=False), None)
    kept = RowSpool(1 << 40)
    with Server(StreamIntake(1 << 40), "token", listeners, 1).start() as server:
        pipe.send((server.address.host, server.address.port))
        while path := pipe.recv():
            with pa.memory_map(path) as mapped:
                for batch in pa.ipc.open_stream(mapped):
                    kept.add(batch)
            pipe.send(kept.num_rows)


def through_spark(
    rows: int, turns: int, frame: bool, manager: float, queue: float, arrow: float
) -> None:
    """Prints the rates of whole jobs."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    from pyspark.sql import SparkSession

    import sparkdl

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as folder:
        import pyarrow.parquet as pq

        source = batches(rows)
        path = f"{folder}/rows.parquet"
        with pq.ParquetWriter(path, source[0].schema, use_dictionary=False) as writer:
            for batch in source:
                writer.write_batch(batch)
        mapped = f"{folder}/rows.arrow"
        with pa.ipc.new_file(mapped, source[0].schema) as writer:
            for batch in source:
                writer.write_batch(batch)

        def take(given: Any) -> int:
            return sum(len(np.array(batch["x"])) for batch in given.batches(BATCH))

        given = {"a Parquet file": path, "an Arrow file": mapped}
        if frame:
            given["a DataFrame"] = spark.read.parquet(path)
        for _ in range(turns):
            for kind, rate in limits(rows, folder).items():
                print(f"two bare processes, {kind}: {rate:,.0f} rows/s", flush=True)
            for name, data in given.items():
                start = time.perf_counter()
                shares = sparkdl.run(
                    take, num_workers=2, data=data, communicator="builtin",
                    feeding=Feeding(uneven="keep"), limits=Limits(memory_budget_mb=4096),
                )  # fmt: skip
                taken = sum(shares)
                seconds = time.perf_counter() - start
                assert taken == rows
                start = time.perf_counter()
                sparkdl.run(int, num_workers=2, communicator="builtin")
                empty = time.perf_counter() - start
                whole, rate = taken / seconds, taken / max(1e-9, seconds - empty)
                print(
                    f"run(fn, data={name}), 2 ranks: {whole:,.0f} rows/s, {whole / manager:.1f} x "
                    f"TensorFlowOnSpark's queue, {whole / queue:.1f} x the bare queue; without the "
                    f"{empty:.1f} s of an empty job {rate:,.0f}, {rate / manager:.1f} x and "
                    f"{rate / queue:.1f} x, {rate / arrow:.2f} x the Arrow file",
                    flush=True,
                )
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--frame", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    rows = arguments.rows // 10_000 * 10_000
    for _ in range(arguments.turns if arguments.stream else 0):
        rates = to_a_rank(rows)
        print(", ".join(f"{name} {rate:,.0f} rows/s" for name, rate in rates.items()), flush=True)
    manager, whose = start_manager()
    manager.shutdown()
    print(f"TensorFlowOnSpark's queue is {whose}", flush=True)
    managers, queues, arrows = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.turns):
            managers.append(manager_queue(min(rows, 5_000)))
            queues.append(queue_per_row(min(rows, 5_000)))
            arrows.append(arrow_file(rows, folder))
            print(
                f"TensorFlowOnSpark's queue {managers[-1]:,.0f} rows/s, "
                f"bare queue {queues[-1]:,.0f}, "
                f"feed {feed(rows, 1 << 40):,.0f}, feed from disk {feed(rows, 1):,.0f}, "
                f"Arrow file {arrows[-1]:,.0f}",
                flush=True,
            )
    if arguments.spark:
        middle = arguments.turns // 2
        found = [sorted(rates)[middle] for rates in (managers, queues, arrows)]
        through_spark(rows, arguments.turns, arguments.frame, *found)


if __name__ == "__main__":
    main()
