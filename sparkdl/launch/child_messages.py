"""What a child process and its parent tell each other, pickled, over a socket pair."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from sparkdl.failures import Failure
from sparkdl.launch.task import RankContext

_LENGTH = struct.Struct("<Q")

# -- from the parent -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ChildSetup:
    """The first message.

    Args:
        parent: The parent's process id.
        task: The pickled task (:func:`sparkdl.payload.dump`).
        rank: Its rank, without gathering and log, which stay with the parent.
        gathers: Whether the parent has a gathering for it.
        logs: Whether the parent has a log for it.
    """

    parent: int
    task: bytes | bytearray
    rank: RankContext
    gathers: bool
    logs: bool


@dataclass(frozen=True)
class InputBatch:
    """The answer to :class:`NextInput`: an Arrow stream of one batch; None after the last."""

    content: bytes | None


@dataclass(frozen=True)
class GatheredTexts:
    """The answer to :class:`GatherTexts`: every rank's text in rank order."""

    texts: list[str]


FromParent = ChildSetup | InputBatch | GatheredTexts

# -- from the child ------------------------------------------------------------------------------


@dataclass(frozen=True)
class NextInput:
    """Asks for the next batch of the input."""


@dataclass(frozen=True)
class GatherTexts:
    """Asks for every rank's text, and gives this rank's."""

    text: str
    timeout_s: float


@dataclass(frozen=True)
class LogLine:
    """A line for the driver's log."""

    text: str


@dataclass(frozen=True)
class OutputBatch:
    """What the task yielded: an Arrow stream of one batch."""

    content: bytes


@dataclass(frozen=True)
class TaskRaised:
    """The last message: the task raised."""

    error: BaseException
    failure: Failure


@dataclass(frozen=True)
class TaskDone:
    """The last message: the task has ended."""


FromChild = NextInput | GatherTexts | LogLine | OutputBatch | TaskRaised | TaskDone

# -- the connection ------------------------------------------------------------------------------

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class MessageSocket(Generic[Sent, Received]):
    """One end of the socket pair.

    Args:
        connection: The socket; closed with this object.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Sent) -> None:
        """Sends a message; one thread at a time.

        Raises:
            OSError: The other side has ended.
        """
        data = pickle.dumps(message)
        self._connection.sendall(_LENGTH.pack(len(data)))
        self._connection.sendall(data)

    def receive(self) -> Received | None:
        """The next message; None if the other side has ended."""
        header = self._read(_LENGTH.size)
        data = None if header is None else self._read(_LENGTH.unpack(header)[0])
        if data is None:
            return None
        message: Received = pickle.loads(data)
        return message

    def close(self) -> None:
        """Closes the socket."""
        self._connection.close()

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._connection.recv(min(size - len(data), 1 << 20))
            except OSError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)


def to_bytes(batch: pa.RecordBatch) -> bytes:
    """An Arrow stream of one batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_bytes(content: bytes) -> pa.RecordBatch:
    """The batch of :func:`to_bytes`."""
    return pa.ipc.open_stream(content).read_next_batch()
