"""The protocols of a launcher and of the tasks that it starts, and what ranks return.

A *task* is made on the driver and pickled. A *launcher* starts it once per *rank*: as threads
(:mod:`sparkdl.launch.threads`), as processes of this machine (:mod:`sparkdl.launch.child`), or
as tasks of a Spark stage (:mod:`sparkdl.spark.runs.launcher`). Results come to the driver in rows
of bounded size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa

from sparkdl.errors import ConfigError, SparkDLError, TransportError, WaitTimeoutError
from sparkdl.failures import Failure, RankFailure
from sparkdl.launch.devices import DeviceRequest, Resources
from sparkdl.process.log_lines import LineSplitter, Sink

RESULT_SCHEMA = "rank long, kind string, text string, content binary"
"""The columns of a row, as Spark writes them."""
_RESULT_ROW = pa.schema([
    ("rank", pa.int64()), ("kind", pa.string()), ("text", pa.string()), ("content", pa.binary())
])  # fmt: skip
CHUNK_BYTES = 2 << 20
"""Most bytes of a row's content (Spark Connect bounds an Arrow batch at 4 MiB)."""


def batch_to_bytes(batch: pa.RecordBatch) -> bytes:
    """An Arrow stream of one batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


class Row(Protocol):
    """One row of :data:`RESULT_SCHEMA`, as Spark or Arrow gives it."""

    @property
    def rank(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def content(self) -> bytes: ...


@dataclass(frozen=True)
class Result:
    """One thing that a rank returns.

    Args:
        kind: What it is: a rank returns one result of a kind.
        text: JSON or plain text, small.
        content: Bytes of any size.
    """

    rank: int
    kind: str
    text: str = ""
    content: bytes = b""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The result as Arrow batches of one row each; only the first has the text."""
        for start in range(0, max(1, len(self.content)), CHUNK_BYTES):
            part = self.content[start : start + CHUNK_BYTES]
            row = replace(self, text="" if start else self.text, content=part)
            yield pa.RecordBatch.from_pylist([vars(row)], _RESULT_ROW)


def join(rows: Iterable[Row]) -> list[Result]:
    """The results that the rows are chunks of; rows of one result come in order.

    >>> join([Result(0, 'state', 'a', b'one '), Result(0, 'state', '', b'two')])
    [Result(rank=0, kind='state', text='a', content=b'one two')]
    """
    parts: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.rank, row.kind), []).append(row)
    return [
        Result(rank, kind, chunks[0].text, b"".join(bytes(c.content) for c in chunks))
        for (rank, kind), chunks in parts.items()
    ]


def join_batches(batches: Iterable[pa.RecordBatch]) -> list[Result]:
    return join(Result(**row) for batch in batches for row in batch.to_pylist())


def of_kind(results: Iterable[Result], kind: str) -> dict[int, Result]:
    """Rank -> its result of one kind, in rank order."""
    return {r.rank: r for r in sorted(results, key=lambda r: r.rank) if r.kind == kind}


def failed(rank: int, failure: Failure) -> Result:
    """A failure as what ``rank`` returns."""
    return Result(rank, "failed", failure.to_json())


def failures_of(results: Iterable[Result]) -> list[Failure]:
    """The failures that ranks returned, in rank order."""
    return [Failure.from_json(r.text) for r in of_kind(results, "failed").values()]


class Capture:
    """Passes every line that this process writes to a sink, and on to where it went before.

    It works on the file descriptors 1 and 2, so that lines of C code and of child processes are
    captured too. After the block the descriptors are as they were before.

    Args:
        on_line: The sink; called in a thread of the capture, once per line.
    """

    def __init__(self, on_line: Sink) -> None:
        self._on_line = on_line

    def __enter__(self) -> Capture:
        _flush()
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        for fd, saved in self._saved.items():
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.dup2(writer, fd)
            os.close(writer)
            splitter = LineSplitter(self._on_line)
            self._selector.register(reader, selectors.EVENT_READ, (splitter, saved))
        streams: list[Any] = [s for s in (sys.stdout, sys.stderr) if _is_text(s)]
        self._streams = [(stream, stream.line_buffering) for stream in streams]
        for stream, _ in self._streams:
            stream.reconfigure(line_buffering=True)
        self._thread = threading.Thread(target=self._read, name="sparkdl-capture", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        _flush()
        for stream, line_buffering in self._streams:
            stream.reconfigure(line_buffering=line_buffering)
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        os.write(self._wake_write, b"\0")  # child processes may hold the pipes: no end would come
        self._thread.join(5.0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_write)
        for saved in self._saved.values():
            os.close(saved)

    def _read(self) -> None:
        ending = False
        while not ending:
            ready = [key for key, _ in self._selector.select()]
            ending = any(key.data is None for key in ready)
            for key in list(self._selector.get_map().values()) if ending else ready:
                if key.data is not None:
                    self._pump(key.fd, *key.data, to_the_end=ending)

    def _pump(self, fd: int, splitter: LineSplitter, saved: int, *, to_the_end: bool) -> None:
        for _ in range(64 if to_the_end else 1):  # a child that goes on writing ends nothing
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            with contextlib.suppress(OSError):
                os.write(saved, data)
            splitter.feed(data)
        if to_the_end:
            splitter.end()


def _is_text(stream: object) -> bool:
    return hasattr(stream, "reconfigure") and hasattr(stream, "line_buffering")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


class Gathering(Protocol):
    """A rank's part in the one exchange that the launcher provides."""

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order.

        Raises:
            WaitTimeoutError: Some rank did not come in time.
        """

    def settle(self) -> None:
        """Returns when this rank may fail: at once where a failure ends every wait in the exchange
        by itself, else when no rank is inside it any more."""
        return


class AloneGathering(Gathering):
    """The gathering of a world of one."""

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        return [text]


class Meeting:
    """The meeting where ranks in threads or children of one process exchange texts."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._condition = threading.Condition()
        self._texts: dict[int, str] = {}
        self._told: list[str] = []
        self._round = 0
        self._ended = False
        self.timeout: WaitTimeoutError | None = None
        """The error of the first rank that waited too long."""

    def gathering(self, rank: int) -> Gathering:
        """A rank's part in it."""
        return _MeetingRank(self, rank)

    def end(self) -> None:
        """Ends every wait: a rank has failed."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def all_gather(self, rank: int, text: str, timeout_s: float) -> list[str]:
        with self._condition:
            number = self._round
            self._texts[rank] = text
            if len(self._texts) == self._num_ranks:
                self._told = [self._texts[r] for r in range(self._num_ranks)]
                self._texts = {}
                self._round += 1
                self._condition.notify_all()
                return self._told
            self._condition.wait_for(lambda: self._round > number or self._ended, timeout_s)
            if self._round > number:
                return self._told
            if self._ended:
                raise TransportError(
                    f"another rank has failed; rank {rank} cannot go on",
                    expected="all ranks to take part to the end",
                    received="a launch that has ended",
                )
            missing = [r for r in range(self._num_ranks) if r not in self._texts]
            error = WaitTimeoutError(
                f"{len(missing)} of {self._num_ranks} ranks did not come",
                expected=f"all ranks within {timeout_s:g} s",
                received=f"nothing from ranks {', '.join(map(str, missing))}",
                hint="do they hang while they import a framework or unpickle the function?",
            )
            self.timeout = self.timeout or error
            raise error


class _MeetingRank(Gathering):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        return self._meeting.all_gather(self._rank, text, timeout_s)


GATHER_TIMEOUT_S = 300.0
"""Seconds that a rank waits for the others to come up."""


@dataclass(frozen=True)
class RankContext:
    """Which of the ranks this is, and what its launcher provides.

    Args:
        attempt: A number that no other attempt at the work of this rank has.
        num_ranks: Ranks in all; 0 where only Spark knows (a rank for each partition of a frame).
        gathering: The ranks' exchange of texts; None where they do not run at the same time.
        log: Takes lines for the driver; None where the launcher has no way for them.
    """

    rank: int
    attempt: int = 0
    num_ranks: int = 1
    resources: Resources = field(default_factory=Resources)
    gathering: Gathering | None = None
    log: Sink | None = None

    def all_gather(self, text: str, timeout_s: float = GATHER_TIMEOUT_S) -> list[str]:
        if self.gathering is None:
            raise ConfigError(
                f"rank {self.rank} cannot exchange texts with the others",
                expected="ranks that run at the same time",
                received="a launch whose ranks run as there is room for them",
            )
        return self.gathering.all_gather(text, timeout_s)

    def settle(self) -> None:
        if self.gathering is not None:
            self.gathering.settle()


class Task(Protocol):
    """Picklable work for every rank; made on the driver."""

    @property
    def devices(self) -> DeviceRequest:
        """The devices that it must run on; where this process has others a child is started."""

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The work: the rank's Arrow batches in, Arrow batches out.

        What comes out are :class:`~sparkdl.launch.task.Result` batches, except from a task
        that transforms rows (predict).
        """

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Turns an exception that ended :meth:`run` into batches for the driver, or raises it.

        A raised exception ends the other ranks (of a barrier stage), or makes Spark try again.
        Runs in the process that the launcher started, never in a child.
        """


class RaisingTask:
    """The base of tasks whose exceptions end the whole launch."""

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it: the launcher ends the other ranks, whatever they do, or Spark tries again."""
        raise RankFailure(Failure.of(rank.rank, error)) from error


class ReturningTask:
    """The base of tasks whose exceptions are results: another attempt would find the same."""

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Returns it."""
        yield from failed(rank.rank, Failure.of(rank.rank, error)).batches()


class QueryTask:
    """The base of tasks in a user's query, where Spark shows the text of an exception."""

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it: Spark tries again, and at last shows it to whoever asks for the rows."""
        if isinstance(error, SparkDLError):
            raise error
        raise Failure.of(rank.rank, error).worker_error() from None


class Ranks(Protocol):
    """Ranks that run."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until all have ended; False if some still run."""

    def results(self) -> list[Result]:
        """Their results, after all have ended.

        Raises:
            RankFailure: A rank raised; if several did, the first cause.
            RanksLost: Ranks ended without a description of why.
            ResourceError: They could not start at the same time.
            WaitTimeoutError: Some did not come in time; they are named.
        """

    def results_so_far(self) -> list[Result]:
        """The results of the ranks that have ended; none where the launcher has them at the end."""


class Launcher(Protocol):
    """A way to start ranks."""

    def launch(self, task: Task) -> AbstractContextManager[Ranks]:
        """Starts the task on every rank; leaving the context ends those that still run."""
