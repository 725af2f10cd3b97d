"""Binary frames between workers, driver and parameter server. No pickle, ever.

A frame is a fixed header, UTF-8 JSON meta and a raw body, all little-endian::

    | header 76 B | meta (JSON object, bounded) | body (float32 buffer of the layout, or bytes) |

The header's sizes are checked against the layout *before* anything is allocated or read, so a
hostile or broken peer costs at most a few kilobytes. Encoding and decoding are pure functions;
the transports decide where the bytes come from. The body never passes through here: transports
receive it straight into a connection's buffer and send it straight from one.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    SparkDLError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.weights import FloatArray, Layout

ByteArray = npt.NDArray[np.uint8]

MAGIC = b"SPDL"
VERSION = 1
HEADER = struct.Struct("<4sBBHiqQQQIIIdIQ")
HEADER_BYTES = HEADER.size
MAX_META_BYTES = 4 << 20
MAX_FIRST_META_BYTES = 4 << 10
MIN_BUFFER_BYTES = 64 << 10


class Kind(enum.IntEnum):
    """What a frame asks for, or (from 64 on) what it answers."""

    OPEN = 1  # first frame on a framed connection: the token
    HELLO = 2  # a worker joins
    PULL = 3
    PUSH = 4
    PUSH_PULL = 5
    REPORT = 6  # telemetry only
    SNAPSHOT = 7  # weights become the center (gradient rules)
    STATE_PUT = 8  # one chunk of weights + optimizer state for a joiner
    STATE_GET = 9
    HEARTBEAT = 10
    FAIL = 11
    FINISH = 12
    BYE = 13
    STATUS = 14  # driver
    CONTROL = 15  # driver: stop, learning_rate, release
    OK = 64
    WEIGHTS = 65
    STATE = 66
    ERROR = 67


class Flag(enum.IntFlag):
    """Bits that travel in every header."""

    NONE = 0
    STOP = 1  # reply: the driver asks workers to end
    ABORT = 2  # reply: another rank failed
    WAIT = 4  # REPORT: answer only when the driver releases the epoch
    UPLOAD = 8  # round reply: send STATE_PUT, a joiner waits for it
    DONE = 16  # HELLO reply: this rank's work is already done
    LEAD = 32  # reply: this rank is the lowest live one (it snapshots)
    DUPLICATE = 64  # commit reply: this sequence had been applied before
    ENCODED = 128  # the body is a codec's payload; on a request: and the reply's may be
    CHANGE = 256  # WEIGHTS, encoded: a change of what the worker holds, not the values themselves


WEIGHT_REQUESTS = frozenset({Kind.PUSH, Kind.PUSH_PULL, Kind.SNAPSHOT})
COMMITS = frozenset({Kind.PUSH, Kind.PUSH_PULL})


class PiecewiseBody(Protocol):
    """A body that is read piece by piece while its source may change."""

    nbytes: int

    def read(self, consume: Callable[[memoryview], int]) -> bool: ...

    def copy_into(self, target: ByteArray) -> None: ...


@dataclass(slots=True)
class Message:
    """One frame, decoded; also the one shape of requests and replies.

    Attributes:
        kind: What is asked or answered.
        flags: See :class:`Flag`.
        rank: The worker's rank; -1 for the driver.
        attempt: The task attempt, so that a retried task is told apart.
        sequence: Number of this commit within ``(rank, attempt)``, from 1; makes it exactly-once.
        clock: Commits (or rounds) that the server had applied.
        rows: Rows of this commit; in a round's reply those of all ranks.
        batches: Batches of this commit.
        epoch: Epoch the sender is in.
        batch: Batches of that epoch done when this frame was sent.
        learning_rate: The worker's now; in replies the driver's wish; NaN for none.
        meta: Small JSON object.
        body: Bytes that follow, as a view of some buffer; None for none.
        reading: Stands for ``body`` in replies with the center.
    """

    kind: Kind
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
    meta: dict[str, Any] = field(default_factory=dict)
    body: ByteArray | None = None
    reading: PiecewiseBody | None = None

    @property
    def body_bytes(self) -> int:
        """Size of the body, whichever form it has."""
        body = self.body if self.reading is None else self.reading
        return 0 if body is None else body.nbytes


@dataclass(frozen=True)
class Limits:
    """What a peer may send, from the layout. Checked before any allocation.

    Args:
        weights_bytes: Bytes of one flat buffer.
        max_meta_bytes: Bound of a frame's meta.
        encoded_bytes: Bound of an encoded body; 0 without compression.
    """

    weights_bytes: int
    max_meta_bytes: int = MAX_META_BYTES
    encoded_bytes: int = 0

    @classmethod
    def of(
        cls, layout: Layout, max_meta_bytes: int = MAX_META_BYTES, *, encoded_bytes: int = 0
    ) -> Limits:
        return cls(layout.size_bytes, max_meta_bytes, encoded_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a connection's buffer: the weights, or a state chunk where that is larger."""
        return max(self.weights_bytes, MIN_BUFFER_BYTES)

    @property
    def max_frame_bytes(self) -> int:
        return HEADER_BYTES + self.max_meta_bytes + self.buffer_bytes

    def allocate(self) -> ByteArray:
        """A new buffer for one connection (pages are touched only when used)."""
        return np.empty(self.buffer_bytes, np.uint8)

    def weights(self, raw: ByteArray) -> FloatArray:
        """The float32 view of a connection's buffer."""
        return raw[: self.weights_bytes].view(np.float32)


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
                f"the meta of a {message.kind.name} frame cannot be sent",
                expected="a JSON object",
                received=str(error),
            ) from error
    if len(meta) > max_meta_bytes:
        raise ProtocolError(
            f"the meta of a {message.kind.name} frame is too large",
            expected=f"at most {max_meta_bytes} bytes",
            received=f"{len(meta)} bytes",
        )
    try:
        head = HEADER.pack(
            MAGIC,
            VERSION,
            message.kind,
            message.flags,
            message.rank,
            message.attempt,
            message.sequence,
            message.clock,
            message.rows,
            message.batches,
            message.epoch,
            message.batch,
            message.learning_rate,
            len(meta),
            message.body_bytes,
        )
    except struct.error as error:
        raise ProtocolError(
            f"a number in a {message.kind.name} frame does not fit its header field",
            received=str(error),
        ) from error
    return head + meta


def decode_header(head: bytes | bytearray | memoryview) -> tuple[Message, int, int]:
    """Returns the message without meta and body, the meta's size and the body's size.

    Raises:
        ProtocolError: These bytes are no header of this protocol and version.
    """
    if len(head) != HEADER_BYTES:
        raise ProtocolError(
            "a frame is shorter than its header",
            expected=f"{HEADER_BYTES} bytes",
            received=f"{len(head)} bytes",
        )
    magic, version, kind, flags, *numbers, meta_len, body_len = HEADER.unpack(head)
    if magic != MAGIC:
        raise ProtocolError(
            "these bytes are no sparkdl frame",
            expected=f"they start with {MAGIC!r}",
            received=repr(magic),
            hint="does another service use this port?",
        )
    if version != VERSION:
        raise ProtocolError(
            "the peer speaks another version of the protocol",
            expected=f"version {VERSION}",
            received=f"version {version}",
            hint="install the same sparkdl on the driver and on all executors",
        )
    try:
        return Message(Kind(kind), Flag(flags), *numbers), meta_len, body_len
    except ValueError as error:
        raise ProtocolError("a frame of an unknown kind", received=str(error)) from error


def decode_meta(kind: Kind, raw: bytes | bytearray | memoryview) -> dict[str, Any]:
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
            f"the meta of a {kind.name} frame is not JSON", received=str(error)
        ) from error
    if not isinstance(meta, dict):
        raise ProtocolError(
            f"the meta of a {kind.name} frame is not an object", received=type(meta).__name__
        )
    return meta


def check_sizes(
    kind: Kind, meta_len: int, body_len: int, limits: Limits, flags: Flag = Flag.NONE
) -> None:
    """Refuses a frame whose declared sizes do not fit the layout, or the run's compression.

    Raises:
        ProtocolError: A size is out of bounds.
    """
    if meta_len > limits.max_meta_bytes:
        raise ProtocolError(
            f"the meta of a {kind.name} frame is too large",
            expected=f"at most {limits.max_meta_bytes} bytes",
            received=f"{meta_len} bytes",
        )
    if flags & Flag.ENCODED and (kind in COMMITS or kind is Kind.WEIGHTS):
        fits = limits.encoded_bytes > 0 and body_len <= limits.encoded_bytes
        expected = f"at most {limits.encoded_bytes} bytes, encoded"
    elif kind in WEIGHT_REQUESTS or kind is Kind.WEIGHTS:
        fits, expected = body_len == limits.weights_bytes, f"{limits.weights_bytes} bytes"
    elif kind in (Kind.STATE_PUT, Kind.STATE):
        fits, expected = body_len <= limits.buffer_bytes, f"at most {limits.buffer_bytes} bytes"
    else:
        fits, expected = body_len == 0, "no body"
    if not fits:
        raise ProtocolError(
            f"the body of a {kind.name} frame does not fit the layout",
            expected=expected,
            received=f"{body_len} bytes",
            hint="the worker's model and the server's differ",
        )


def _codes() -> dict[str, type[SparkDLError]]:
    return {
        "aborted": WorkerError,
        "timeout": WaitTimeoutError,
        "authentication": AuthenticationError,
        "protocol": ProtocolError,
        "transport": TransportError,
        "config": ConfigError,
        "error": SparkDLError,
    }


def error_to_meta(error: SparkDLError) -> dict[str, Any]:
    """An error as the meta of an ERROR frame."""
    code = next(code for code, cls in _codes().items() if isinstance(error, cls))
    meta: dict[str, Any] = {
        "code": code,
        "what": error.what,
        "expected": error.expected,
        "received": error.received,
        "hint": error.hint,
    }
    if isinstance(error, WorkerError):
        meta.update(rank=error.rank, error=error.error, traceback=error.traceback)
    return meta


def error_from_meta(meta: dict[str, Any]) -> SparkDLError:
    """The error that an ERROR frame carries; unknown codes become a plain SparkDLError."""

    def text(key: str) -> str:
        return str(meta.get(key, ""))

    if meta.get("code") == "aborted":
        rank = meta.get("rank", -1)
        return WorkerError(
            rank if isinstance(rank, int) else -1, text("error"), text("traceback"), text("hint")
        )
    cls = _codes().get(text("code"), SparkDLError)
    return cls(
        text("what") or "the server refused a frame",
        expected=text("expected"),
        received=text("received"),
        hint=text("hint"),
    )
