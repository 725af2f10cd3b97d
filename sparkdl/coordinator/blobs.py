"""Bytes that travel in chunks, and the blobs that ranks keep with the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.errors import ProtocolError
from sparkdl.files.run_state import Blob, StoredBytes
from sparkdl.transport.frames import ByteArray, Kind, Message

_READS = 5


class Assembly:
    """Puts the chunks of one blob together. Frames carry ``offset`` and ``total`` in the header."""

    def __init__(self, what: str, max_bytes: int) -> None:
        self._what, self._max_bytes = what, max_bytes
        self._sender = (-1, -1)
        self._blob: ByteArray = np.empty(0, np.uint8)
        self._filled = 0
        self._last: tuple[tuple[int, int], int, int] | None = None

    def put(self, message: Message) -> ByteArray | None:
        """Takes one chunk; returns the blob once it is whole.

        A chunk may come twice, as its sender repeats a request whose reply was lost.

        Raises:
            ProtocolError: The blob is too large, or a chunk is out of order.
        """
        offset, total = message.offset, message.total
        chunk = message.content
        if not 0 < total <= self._max_bytes:
            raise ProtocolError(
                f"{self._what} is empty or too large", expected=f"1 .. {self._max_bytes} bytes",
                received=f"{total} bytes", hint="raise max_state_bytes",
            )  # fmt: skip
        sender = (message.rank, message.attempt)
        if offset and (sender, offset, total) == self._last:
            return None  # it made the former blob whole
        if offset == 0:
            self._sender, self._blob, self._filled = sender, np.empty(total, np.uint8), 0
            self._last = None  # a new blob, which may be as large as the former
        fits = sender == self._sender and total == self._blob.size
        if not fits or offset > self._filled or offset + chunk.size > total:
            raise ProtocolError(
                f"a chunk of {self._what} came out of order", expected=f"offset {self._filled}",
                received=f"offset {offset}, {chunk.size} bytes, total {total}",
            )  # fmt: skip
        self._blob[offset : offset + chunk.size] = chunk
        self._filled = max(self._filled, offset + chunk.size)
        if self._filled < total:
            return None
        whole, self._blob, self._filled = self._blob, np.empty(0, np.uint8), 0
        self._last = (sender, offset, total)
        return whole


def chunk_reply(blob: ByteArray, offset: int, limit: int, epoch: int = 0) -> Message:
    """One chunk of ``blob`` from ``offset`` on, as the reply to a reader."""
    if not 0 <= offset <= blob.size:
        raise ProtocolError(
            "a read outside a blob", expected=f"0 .. {blob.size}", received=f"offset {offset}"
        )
    return Message(
        Kind.CHUNK, epoch=epoch, offset=offset, total=blob.size, body=blob[offset : offset + limit]
    )


def chunked(message: Message, blob: Blob, limit: int) -> Iterator[tuple[Message, ByteArray]]:
    """The frames of a blob: copies of ``message``, each with its chunk; none if it is empty."""
    total = sum(_size(part) for part in blob)
    for offset in range(0, total, limit):
        frame = replace(message, offset=offset, total=total, meta=dict(message.meta))
        yield frame, _cut(blob, offset, min(offset + limit, total))


def _size(part: bytes | memoryview | ByteArray | StoredBytes) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def _cut(blob: Blob, first: int, stop: int) -> ByteArray:
    found: list[ByteArray] = []
    begins = 0
    for part in blob:
        place = slice(max(first - begins, 0), min(stop - begins, _size(part)))
        if place.start < place.stop:
            if isinstance(part, StoredBytes):
                found.append(part.read(place))
            else:
                found.append(np.frombuffer(part, np.uint8)[place])
        begins += _size(part)
    return found[0] if len(found) == 1 else np.concatenate(found)


class BlobReplacedError(ProtocolError):
    """Another blob took the place of the one that is read."""


def read_blob(request: Callable[[int], Message]) -> bytearray:
    """A blob that the other side cuts by :func:`chunk_reply`, in as many requests as it takes.

    Args:
        request: Asks for the chunk at an offset, and returns the reply.

    Raises:
        BlobReplacedError: The blob is another one now.
        ProtocolError: A chunk is empty, or beyond the end.
    """
    reply = request(0)
    epoch, found, filled = reply.epoch, bytearray(reply.total), 0
    while True:
        if (reply.epoch, reply.total) != (epoch, len(found)):
            raise BlobReplacedError(
                "a blob was replaced while it was read",
                expected=f"{len(found)} bytes of epoch {epoch}",
                received=f"{reply.total} bytes of epoch {reply.epoch}",
            )
        size = reply.content.size
        if filled + size > len(found) or (found and not size):
            raise ProtocolError(
                "a chunk of a blob has a wrong size",
                expected=f"1 .. {len(found) - filled} bytes at offset {filled}",
                received=f"{size} bytes",
            )
        found[filled : filled + size] = reply.content.data
        filled += size
        if filled == len(found):
            return found
        reply = request(filled)


@dataclass(frozen=True)
class KeptBlob:
    """A whole blob that a rank kept, and the epochs that were done; as it stands there is none."""

    content: ByteArray = field(default_factory=lambda: np.empty(0, np.uint8), repr=False)
    epoch: int = -1


class KeptBlobs:
    """The run's last whole blob, and each rank's of its own: bytes that the coordinator only keeps.

    A new one replaces the last only once all of its chunks have come, so that a rank that dies in
    the middle leaves the former. Several ranks may send theirs at the same time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._assemblies: dict[int, Assembly] = {}
        self._kept: dict[int | None, KeptBlob] = {}  # by rank; None: the run's last

    def put(self, message: Message) -> None:
        """Takes one chunk, see :meth:`Assembly.put`; ``own`` in its meta: it is the rank's."""
        new = Assembly("the state to keep", self._max_bytes)
        whole = self._assemblies.setdefault(message.rank, new).put(message)
        if whole is not None:
            owner = message.rank if message.meta.get("own") else None
            self._kept[owner] = KeptBlob(whole, message.epoch)

    def of(self, rank: int | None = None) -> KeptBlob:
        """The run's last blob, or the one of a rank."""
        return self._kept.get(rank, KeptBlob())


def read_kept(request: Callable[[Message], Message], rank: int | None = None) -> bytearray:
    """The run's last blob, or the one of a rank, read in chunks; empty if there is none.

    Raises:
        ProtocolError: A newer one replaces it each time before it is read.
    """
    wanted = {} if rank is None else {"of": rank}
    for _ in range(_READS):
        with contextlib.suppress(BlobReplacedError):
            return read_blob(
                lambda offset: request(
                    Message(CoordinatorKind.KEPT, offset=offset, meta=dict(wanted))
                )
            )
    raise ProtocolError(
        "the state that the workers keep changes faster than it can be read",
        expected="one state to stay until it is read", received=f"{_READS} newer ones in a row",
    )  # fmt: skip
