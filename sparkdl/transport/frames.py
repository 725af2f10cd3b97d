"""Binary frames between ranks, driver and servers. No pickle, ever.

A frame is a fixed header, UTF-8 JSON meta and a raw body, all little-endian::

    | header 96 B | meta (JSON object, bounded) | body (of the kind: :class:`Body`) |

The kind says what the body is, and the receiver checks its size against its own limit for that
*before* anything is allocated or read, so a hostile or broken peer costs at most a few kilobytes.
Encoding and decoding are pure functions; the transports decide where the bytes come from. The body
never passes through here: transports receive it straight into a connection's buffer and send it
straight from one.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from sparkdl.errors import (
    BEATS,
    MAX_BEAT_CHARS,
    AuthenticationError,
    ConfigError,
    ProtocolError,
    RowsAheadError,
    SparkDLError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.failures import Failure
from sparkdl.weights import FloatArray
from sparkdl.wire.greeting import BusyError

ByteArray = npt.NDArray[np.uint8]

MAGIC = b"SPDL"
VERSION = 4
HEADER = struct.Struct("<4sBBHiqQQQIIIdQQ4xIQ")
HEADER_BYTES = HEADER.size
MAX_META_BYTES = 4 << 20
MAX_FIRST_META_BYTES = (4 << 10) - HEADER_BYTES
BLOB_BYTES = 16 << 20
"""Bytes of a blob that travel in one frame (where weights are larger: as many as they have)."""


class Body(enum.Enum):
    """The body of a kind of frame; the receiver's limit for it follows from that."""

    NONE = 0
    DENSE = 1  # the whole flat buffer; a payload of it (Flag.ENCODED); with Flag.SLICED see there
    CHUNK = 2  # a chunk of bytes: from Message.offset on, of Message.total


class FrameKind(enum.IntEnum):
    """Base of the enums of kinds: a number, which no other service has, and the body."""

    body: Body

    def __new__(cls, number: int, body: Body = Body.NONE) -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.body = number, body
        return kind


class Kind(FrameKind):
    """The kinds of frames that all services share; each service has an enum of its own beside it.

    Requests have numbers below 64: 2 to 31 are a coordinator's, those from 32 on its services'.
    """

    OPEN = 1  # first frame on a framed connection: the token
    OK = 64, Body.CHUNK
    CHUNK = 66, Body.CHUNK
    ERROR = 67


Kinds = Mapping[int, FrameKind]
"""Number of a kind -> the kind, of all frames that may travel over a connection."""


def kinds_of(*services: type[FrameKind]) -> Kinds:
    """The kinds that all services share, and those of ``services``."""
    return {int(kind): kind for kind in itertools.chain(Kind, *services)}


SHARED_KINDS = kinds_of()


class Flag(enum.IntFlag):
    """Bits that travel in every header."""

    NONE = 0
    STOP = 1  # reply: the driver asks workers to end
    ABORT = 2  # reply: another rank failed
    WAIT = 4  # REPORT: answer when the driver releases the epoch; PULL: after the last commits;
    # SNAPSHOT, without weights: when they are there, or this rank is to send them
    UPLOAD = 8  # reply to a round: send STATE_PUT, a joiner waits; to SNAPSHOT: send the weights
    DONE = 16  # HELLO reply: this rank's work is already done
    LEAD = 32  # reply: this rank is the lowest live one (it keeps the optimizer state in step)
    DUPLICATE = 64  # commit reply: this sequence had been applied before
    ENCODED = 128  # the body is a codec's payload; on a request: and the reply's may be
    CHANGE = 256  # WEIGHTS, encoded: a change of what the worker holds, not the values themselves
    SLICED = 512  # a part of the flat buffer (or a payload of it), and slices of gradients; without
    # a body: these have come in chunks before, or are read so


class PiecewiseBody(Protocol):
    """A body that is read piece by piece while its source may change."""

    nbytes: int

    def read(self, consume: Callable[[memoryview], int]) -> bool: ...

    def copy_into(self, target: ByteArray) -> None: ...


@dataclass(slots=True)
class Message:
    """One frame, decoded; also the one shape of requests and replies.

    Attributes:
        flags: See :class:`Flag`.
        rank: The worker's rank; -1 for the driver.
        attempt: The task attempt, so that a retried task is told apart.
        sequence: Number of this commit within ``(rank, attempt)``, from 1; makes it exactly-once.
        clock: Commits (or rounds) that the server had applied.
        rows: Rows of this commit; in a round's reply those of all ranks.
        batch: Batches of that epoch done when this frame was sent.
        learning_rate: The worker's now; in replies the driver's wish; NaN for none.
        offset: The byte of a blob at which the body begins.
        total: Bytes of the whole blob that the body is a chunk of.
        meta: Small JSON object.
        body: Bytes that follow, as a view of some buffer; None for none.
        reading: Stands for ``body`` in replies with the center.
    """

    kind: FrameKind
    flags: Flag = Flag.NONE
    rank: int = -1
    attempt: int = 0
    sequence: int = 0
    clock: int = 0
    rows: int = 0
    batches: int = 0
    epoch: int = 0
    batch: int = 0
    learning_rate: float = math.nan
    offset: int = 0
    total: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    body: ByteArray | None = None
    reading: PiecewiseBody | None = None

    @property
    def content(self) -> ByteArray:
        """The body; empty where there is none."""
        return np.empty(0, np.uint8) if self.body is None else self.body

    @property
    def body_bytes(self) -> int:
        """Size of the body, whichever form it has."""
        body = self.body if self.reading is None else self.reading
        return 0 if body is None else body.nbytes


@dataclass(frozen=True)
class FrameLimits:
    """The most bytes of each kind of body that a peer may send. Checked before any allocation.

    Args:
        dense_bytes: Bytes of the whole flat buffer, and of a dense body.
        encoded_bytes: Bound of an encoded dense body; 0 without compression.
        blob_bytes: Bound of one chunk of a blob.
        max_meta_bytes: Bound of a frame's meta.
        kinds: The frames that may travel; a service names its own.
    """

    dense_bytes: int = 0
    encoded_bytes: int = 0
    blob_bytes: int = BLOB_BYTES
    max_meta_bytes: int = MAX_META_BYTES
    kinds: Kinds = field(default_factory=lambda: SHARED_KINDS, repr=False)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a connection's buffer: room for the largest body."""
        return max(self.dense_bytes, self.encoded_bytes, self.blob_bytes)

    @property
    def chunk_bytes(self) -> int:
        return max(self.blob_bytes, self.dense_bytes)

    @property
    def max_frame_bytes(self) -> int:
        return HEADER_BYTES + self.max_meta_bytes + self.buffer_bytes

    def allocate(self) -> ByteArray:
        """A new buffer for one connection (pages are touched only when used)."""
        return np.empty(self.buffer_bytes, np.uint8)

    def dense(self, raw: ByteArray) -> FloatArray:
        """The flat float32 buffer at the start of a connection's buffer."""
        return raw[: self.dense_bytes].view(np.float32)

    def check(self, message: Message, meta_size: int, body_size: int) -> None:
        """Refuses a frame whose declared sizes do not fit.

        Raises:
            ProtocolError: A size is out of bounds.
        """
        name = message.kind.name
        if meta_size > self.max_meta_bytes:
            raise ProtocolError(
                f"the meta of a {name} frame is too large",
                expected=f"at most {self.max_meta_bytes} bytes", received=f"{meta_size} bytes",
            )  # fmt: skip
        fits, expected = self._fits(message, body_size)
        if not fits:
            raise ProtocolError(
                f"the body of a {name} frame does not fit the receiver's limits", expected=expected,
                received=f"{body_size} bytes", hint="the worker's model and the server's differ",
            )  # fmt: skip

    def _fits(self, message: Message, size: int) -> tuple[bool, str]:
        if size == 0 or message.kind.body is Body.NONE:
            return size == 0, "no body"
        if message.kind.body is Body.CHUNK:
            return size <= self.chunk_bytes, f"at most {self.chunk_bytes} bytes in a chunk"
        if message.flags & Flag.SLICED:
            return size <= self.buffer_bytes, f"at most {self.buffer_bytes} bytes of slices"
        if message.flags & Flag.ENCODED:
            return size <= self.encoded_bytes, f"at most {self.encoded_bytes} bytes, encoded"
        return size == self.dense_bytes, f"{self.dense_bytes} bytes"


def encode(message: Message, *, max_meta_bytes: int = MAX_META_BYTES) -> bytes:
    """Header and meta of ``message`` as bytes; the body follows on the wire, from its buffer.

    Raises:
        ProtocolError: The meta is larger than ``max_meta_bytes`` or not JSON.
    """
    meta = b""
    if message.meta:
        try:
            meta = json.dumps(message.meta, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                f"the meta of a {message.kind.name} frame cannot be sent", expected="a JSON object",
                received=str(error),
            ) from error  # fmt: skip
    if len(meta) > max_meta_bytes:
        raise ProtocolError(
            f"the meta of a {message.kind.name} frame is too large",
            expected=f"at most {max_meta_bytes} bytes", received=f"{len(meta)} bytes",
        )  # fmt: skip
    try:
        head = HEADER.pack(
            MAGIC, VERSION, message.kind, message.flags, message.rank, message.attempt,
            message.sequence, message.clock, message.rows, message.batches, message.epoch,
            message.batch, message.learning_rate, message.offset, message.total, len(meta),
            message.body_bytes,
        )  # fmt: skip
    except struct.error as error:
        raise ProtocolError(
            f"a number in a {message.kind.name} frame does not fit its header field",
            expected="numbers in the ranges of the fields", received=str(error),
        ) from error  # fmt: skip
    return head + meta


def decode_header(head: bytes | bytearray | memoryview, kinds: Kinds) -> tuple[Message, int, int]:
    """Returns the message without meta and body, the meta's size and the body's size.

    Raises:
        ProtocolError: These bytes are no header of this protocol and version.
    """
    if len(head) != HEADER_BYTES:
        raise ProtocolError(
            "a frame is shorter than its header", expected=f"{HEADER_BYTES} bytes",
            received=f"{len(head)} bytes",
        )  # fmt: skip
    magic, version, kind, flags, *numbers, meta_len, body_len = HEADER.unpack(head)
    if magic != MAGIC:
        raise ProtocolError(
            "these bytes are no sparkdl frame", expected=f"they start with {MAGIC!r}",
            received=repr(magic), hint="does another service use this port?",
        )  # fmt: skip
    if version != VERSION:
        raise ProtocolError(
            "the peer speaks another version of the protocol", expected=f"version {VERSION}",
            received=f"version {version}",
            hint="install the same sparkdl on the driver and on all executors",
        )  # fmt: skip
    try:
        message = Message(kinds[kind], Flag(flags), *numbers)
    except (KeyError, ValueError) as error:
        raise ProtocolError(
            "a frame of an unknown kind", expected="a kind that this end takes",
            received=f"kind {kind}, flags {flags}",
            hint="install the same sparkdl on the driver and on all executors",
        ) from error  # fmt: skip
    return message, meta_len, body_len


def decode_meta(kind: FrameKind, raw: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in ``raw``; an empty one for no bytes.

    Raises:
        ProtocolError: Not UTF-8, not JSON, or not an object.
    """
    if not raw:
        return {}
    try:
        meta = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"the meta of a {kind.name} frame is not JSON", expected="a JSON object in UTF-8",
            received=str(error),
        ) from error  # fmt: skip
    if not isinstance(meta, dict):
        raise ProtocolError(
            f"the meta of a {kind.name} frame is not an object", expected="a JSON object",
            received=type(meta).__name__,
        )  # fmt: skip
    return meta


_CODES: dict[str, type[SparkDLError]] = {
    "aborted": WorkerError,
    "timeout": WaitTimeoutError,
    "busy": BusyError,
    "authentication": AuthenticationError,
    "ahead": RowsAheadError,
    "protocol": ProtocolError,
    "transport": TransportError,
    "config": ConfigError,
    "error": SparkDLError,
}


def error_to_meta(error: SparkDLError) -> dict[str, Any]:
    """An error as the meta of an ERROR frame; long texts are cut, so that it can be sent."""
    code = next(code for code, cls in _CODES.items() if isinstance(error, cls))
    texts = {name: str(getattr(error, name))[:MAX_BEAT_CHARS] for name in BEATS}
    failure = Failure.heard(error).to_wire() if isinstance(error, WorkerError) else {}
    return {"code": code, **texts, **failure}


def error_from_meta(meta: dict[str, Any]) -> SparkDLError:
    """The error that an ERROR frame carries; unknown codes become a plain SparkDLError."""

    def text(key: str) -> str:
        return str(meta.get(key, ""))

    if meta.get("code") == "aborted":
        return Failure.from_wire(meta).worker_error()
    return _CODES.get(text("code"), SparkDLError)(
        text("what") or "the server refused a frame", expected=text("expected"),
        received=text("received"), hint=text("hint"),
    )  # fmt: skip
