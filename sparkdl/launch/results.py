"""The results of ranks, in rows of bounded size for the driver, and the lines that they print."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from sparkdl.failures import Failure
from sparkdl.process.log_lines import LineSplitter, Sink

RESULT_SCHEMA = "rank long, kind string, text string, content binary"
"""The columns of a row, as Spark writes them."""
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
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([self.rank], pa.int64()),
                    pa.array([self.kind], pa.string()),
                    pa.array(["" if start else self.text], pa.string()),
                    pa.array([self.content[start : start + CHUNK_BYTES]], pa.binary()),
                ],
                names=["rank", "kind", "text", "content"],
            )


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
