"""``SparkModel`` without a JVM: Spark's part is played by two Python processes and an Arrow table.

Everything else is the library's own: the checks, the plan, the archive of the model, the task and
its pickle, the server or the coordinator with their sockets, the monitor with its callbacks, what
the ranks return and what happens to it in the driver's model. The server runs in this process,
since a process of its own takes longer to start than such a fit to train.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from sparkdl import SparkModel
from sparkdl.failures import RankFailure
from sparkdl.launch.task import Result, Task, join
from sparkdl.learner.signature import model_signature
from sparkdl.process import payload
from sparkdl.process.closing import Closing
from sparkdl.ps.server.config import ServerConfig
from sparkdl.spark.forms import arrays, opening
from sparkdl.spark.forms.arrays import by_name
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.sources import ROLE, Form, Source
from sparkdl.spark.forms.wire import GROUP, wire_names
from sparkdl.spark.session.versions import spark_schema_of
from sparkdl.transport.address import Endpoint, Listeners
from sparkdl.transport.server import Server

HERE = Path(__file__).parent
WORKERS = 2
TASK_S = 240.0
"""Seconds after which a rank without an answer hangs."""


# -- the workers -----------------------------------------------------------------------------------


class Workers(Closing):
    """Python processes that run ranks, as Spark's Python workers do; they live for many fits."""

    def __init__(self, count: int = WORKERS) -> None:
        key = secrets.token_bytes(16)
        folder = tempfile.mkdtemp(prefix="parity-")
        self._listener = Listener(f"{folder}/workers", authkey=key)
        path = os.pathsep.join([str(HERE), str(HERE.parent.parent), *filter(None, sys.path)])
        self._environment = {**os.environ, "PARITY_KEY": key.hex(), "PYTHONPATH": path}
        self._processes = [self._start() for _ in range(count)]
        self._connections = [self._listener.accept() for _ in range(count)]
        self.jobs = 0

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "rank_process.py"), str(self._listener.address)]
        return subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL)

    def replace(self, number: int) -> None:
        """Kills a process, as Spark does at times, and starts another one in its place."""
        old = self._processes[number % len(self._processes)]
        old.kill()
        old.wait()
        self._processes[number % len(self._processes)] = self._start()
        place = next(i for i, connection in enumerate(self._connections) if connection.poll())
        self._connections[place].close()
        self._connections[place] = self._listener.accept()

    def run(self, content: bytes, frames: Sequence[bytes], barrier: bool) -> list[Future[Any]]:
        """Starts a task on a rank for each frame; each future has what a rank returned."""
        pool = ThreadPoolExecutor(len(frames), thread_name_prefix="parity-rank")
        self.jobs += 1
        futures = [
            pool.submit(_ask, connection, (content, rank, self.jobs, len(frames), barrier, frame))
            for rank, (connection, frame) in enumerate(zip(self._connections, frames, strict=False))
        ]
        pool.shutdown(wait=False)
        return futures

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._listener.close()


def _ask(connection: Connection, request: tuple[Any, ...]) -> Any:
    connection.send(request)
    if not connection.poll(TASK_S):
        raise TimeoutError(f"rank {request[1]} did not end within {TASK_S:g} s")
    kind, value = connection.recv()
    if kind == "raised":
        raise value
    return value


# -- what stands for Spark -------------------------------------------------------------------------


class LocalContext:
    """What the driver asks of a SparkContext of ``local[2]``."""

    master = f"local[{WORKERS}]"
    defaultParallelism = WORKERS
    applicationId = "parity"
    pythonExec = sys.executable

    def getConf(self) -> LocalConf:
        return LocalConf()


class LocalConf:
    """The settings of a session to which nobody gave any."""

    def get(self, name: str, default: str | None = None) -> str | None:
        return {"spark.master": LocalContext.master}.get(name, default)


class LocalSession:
    """What the driver asks of a session.

    Args:
        workers: The processes that are its executors' Python workers.
        sizes: Rows to train on of each partition, in order.
        held_out: Rows to validate on of each partition.
    """

    conf = LocalConf()
    sparkContext = LocalContext()

    def __init__(
        self, workers: Workers | None, sizes: Sequence[int], held_out: Sequence[int]
    ) -> None:
        self.workers, self.sizes, self.held_out = workers, sizes, held_out

    def createDataFrame(self, table: pa.Table) -> LocalFrame:
        return LocalFrame(self, table)


@dataclass(frozen=True)
class LocalFrame:
    """An Arrow table as a DataFrame: as much of one as ``fit`` and ``evaluate`` use."""

    sparkSession: LocalSession
    table: pa.Table

    @property
    def schema(self) -> Any:
        return spark_schema_of(self.table.schema)

    def select(self, *columns: str | tuple[str, str]) -> LocalFrame:
        """Columns: names, and pairs of a name and the one that it gets."""
        pairs = [(c, c) if isinstance(c, str) else c for c in columns]
        names, aliases = zip(*pairs, strict=True)
        columns = [self.table[name.removeprefix(GROUP)] for name in names]
        return replace(self, table=pa.table(columns, names=list(aliases)))

    def toDF(self, *names: str) -> LocalFrame:
        return replace(self, table=self.table.rename_columns(list(names)))

    def partitions(self) -> list[bytes]:
        """The rows of each partition as an Arrow stream."""
        table, session = self.table, self.sparkSession
        if ROLE not in table.column_names:
            return [_stream(part) for part in _cut(table, session.sizes)]
        roles = np.asarray(table[ROLE])
        train = _cut(table.filter(pa.array(roles == 0)), session.sizes)
        held_out = _cut(table.filter(pa.array(roles == 1)), session.held_out)
        both = zip(train, held_out, strict=True)
        return [_stream(pa.concat_tables(parts)) for parts in both]


def _cut(table: pa.Table, sizes: Sequence[int]) -> list[pa.Table]:
    assert table.num_rows == sum(sizes), (table.num_rows, sizes)
    edges = np.cumsum([0, *sizes])
    return [table.slice(a, b - a) for a, b in itertools.pairwise(edges.tolist())]


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


class LocalLauncher:
    """In the place of :class:`sparkdl.spark.runs.launcher.SparkLauncher`."""

    def __init__(self, frame: LocalFrame, num_ranks: int, *, barrier: bool, **_: Any) -> None:
        self._frame, self._num_ranks, self._barrier = frame, num_ranks, barrier

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[LocalRanks]:
        frames = self._frame.partitions()
        assert self._num_ranks in (0, len(frames))
        workers = self._frame.sparkSession.workers
        assert workers is not None
        ranks = LocalRanks(workers.run(payload.dump(task), frames, self._barrier))
        try:
            yield ranks
        finally:
            ranks.wait(TASK_S)


class LocalRanks:
    """Ranks in the processes of :class:`Workers`."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self._futures = futures
        self._ended = threading.Event()
        self._left = len(futures)
        self._lock = threading.Lock()
        for future in futures:
            future.add_done_callback(self._one_ended)

    def _one_ended(self, _: Any) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._ended.set()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def results(self) -> list[Result]:
        errors = [e for e in (future.exception() for future in self._futures) if e is not None]
        failure = next((e for e in errors if isinstance(e, RankFailure)), None)
        if failure is not None or errors:
            raise failure or errors[0]
        rows = (row for future in self._futures for batch in future.result() for row in batch)
        return join(Result(**row) for row in rows)

    def results_so_far(self) -> list[Result]:
        return []


class ServerInThreads:
    """In the place of :class:`sparkdl.ps.server.ServerProcess`: the same, in this process."""

    def __init__(self, config: ServerConfig, center: Any, *, wait: bool = True) -> None:
        listeners = Listeners.bind(config.listen, None)
        self._server = Server(
            config.service(center), config.token, listeners, config.num_workers, None
        ).start()
        self.endpoint = Endpoint(self._server.address, config.token, "")

    def check(self) -> None: ...

    def wait_ready(self) -> None: ...

    def stop(self) -> None:
        self._server.close()


class LocalSparkModel(SparkModel):
    """A ``SparkModel`` whose session is a :class:`LocalSession`."""

    _session: LocalSession

    @classmethod
    def of(cls, session: LocalSession) -> type[LocalSparkModel]:
        """The class for one session."""
        return type("SessionSparkModel", (cls,), {"_session": session})

    def _open(self, form: Form, validation_data: Any, columns: Any, split: float) -> Source:
        """As the library's, but the rows of both roles are put together by Arrow, not by Spark."""
        signature = model_signature(self.model)
        if split:
            parts = arrays.split_arrays(by_name(form.data, signature), split)
            form, validation_data = form_of(parts[0]), parts[1]
        source = replace(form.open(signature, columns), origin=None)  # a frame made here
        if validation_data is None:
            return source
        held_out = form_of(validation_data).open(signature, columns)
        frames = [_weighted(source, held_out), _weighted(held_out, source)]
        opening._check_alike(*frames)
        tables = [
            f.frame.table.append_column(ROLE, pa.array([role] * f.frame.table.num_rows, pa.int8()))
            for role, f in enumerate(frames)
        ]
        frame = LocalFrame(self._session, pa.concat_tables(tables))
        return Source(frame, replace(frames[0].spec, role_column=ROLE), validates="must")

    def fit(self, *arguments: Any, **named: Any) -> Any:
        with without_spark(self._session):
            return super().fit(*arguments, **named)


def _weighted(source: Source, other: Source) -> Source:
    """The rows with weights of 1, where only the ``other`` rows have weights."""
    if source.spec.weights or not other.spec.weights:
        return source
    table = source.frame.table
    have, want = len(source.spec.columns), len(other.spec.columns)
    for name in wire_names(want)[have:]:
        kind = other.frame.table.schema.field(name).type
        if pa.types.is_binary(kind):
            (weight, *_) = other.spec.weights.values()
            one = np.ones([size or 1 for size in weight.shape], weight.dtype).tobytes()
            table = table.append_column(name, pa.array([one] * table.num_rows, kind))
        else:
            table = table.append_column(name, pa.array(np.ones(table.num_rows)).cast(kind))
    spec = replace(source.spec, sample_weight=other.spec.sample_weight)
    return replace(source, frame=LocalFrame(source.frame.sparkSession, table), spec=spec)


@contextlib.contextmanager
def without_spark(session: LocalSession) -> Iterator[None]:
    """Within, the driver finds this session, and starts ranks in its workers."""
    places = {
        "sparkdl.spark.forms.arrays.session_of": lambda *_: session,
        "sparkdl.spark.forms.frames.require_running": lambda *_: None,
        "sparkdl.spark.forms.frames.selection": lambda _, spec, names: zip(
            spec.columns, names, strict=True
        ),
        "sparkdl.spark.forms.shipped.frame_of_table": LocalFrame,
        "sparkdl.spark.forms.sources.dealt": lambda frame, *_, **__: frame,
        "sparkdl.spark.fit.training.SparkLauncher": LocalLauncher,
        "sparkdl.spark.runs.launcher.SparkLauncher": LocalLauncher,
        "sparkdl.spark.fit.training_run.ServerProcess": ServerInThreads,
        "sparkdl.spark.fit.shard_servers.ServerProcess": ServerInThreads,
        "sparkdl.spark.fit.training.POLL_S": 0.05,
    }
    with contextlib.ExitStack() as stack:
        for place, stand_in in places.items():
            stack.enter_context(mock.patch(place, stand_in))
        yield
