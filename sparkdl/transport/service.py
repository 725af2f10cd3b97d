"""The service behind transports: message in, replies out, no sockets and no clock of its own."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from sparkdl.transport.frames import ByteArray, FrameKind, FrameLimits, Message

Replies = list[tuple[int, Message]]
"""Connection and reply, for each reply that is due."""


class Metric(NamedTuple):
    """One number for ``/metrics``, in Prometheus' terms."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float


class Service(Protocol):
    """A state machine behind transports. A *connection* is an int that a transport chose.

    Each connection has one outstanding request at a time and one buffer. Every request gets
    exactly one reply, at once or deferred: ``receive``, ``disconnect`` and ``tick`` return the
    replies that became due. All methods are thread-safe.
    """

    beside: frozenset[FrameKind]
    """Requests that are never deferred, and may overtake one that waits."""
    parting: frozenset[FrameKind]
    """Requests after which a client that has no connection is forgotten."""
    bytes_in: int
    bytes_out: int

    @property
    def limits(self) -> FrameLimits:
        """The largest bodies that a peer may send."""

    @property
    def idle_s(self) -> float:
        """Seconds of silence after which a client without a connection is forgotten."""

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Takes one request."""

    def disconnect(self, connection: int, now: float) -> Replies:
        """The connection is gone."""

    def tick(self, now: float) -> Replies:
        """Ends the waits that ran out; to be called a few times per second."""

    def buffer(self, connection: int) -> ByteArray:
        """This connection's buffer, allocated at the first call."""

    def attach(self, connection: int, buffer: ByteArray) -> None:
        """Makes ``buffer`` (a shared-memory mailbox) this connection's."""

    def metrics(self) -> list[Metric]:
        """Numbers for ``/metrics``."""
