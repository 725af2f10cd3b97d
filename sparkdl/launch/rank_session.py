"""A rank's session with the coordinator of a run that trains nothing: for meeting, for lines."""

from __future__ import annotations

import collections
import socket
import threading

from sparkdl.coordinator.session import Session, open_session
from sparkdl.errors import Cause, ResourceError, TransportError
from sparkdl.launch.task import RankContext
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts

KEPT_BYTES = 1 << 20
"""The most lines that a rank keeps to be sent: the latest."""


class LineSender:
    """Sends lines through the rank's session, in a thread: a slow driver never stops the rank.

    Args:
        session: The rank's; None where the driver cannot be reached, and the lines are kept.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._lines: collections.deque[str] = collections.deque()
        self._bytes = self._dropped = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if session is not None:
            self._thread = threading.Thread(target=self._send, name="sparkdl-lines", daemon=True)
            self._thread.start()

    def send(self, text: str) -> None:
        """Sends or keeps a message, which may have several lines; never waits."""
        with self._changed:
            for line in text.split("\n"):
                self._lines.append(line)
                self._bytes += len(line) + 1
            while self._bytes > KEPT_BYTES:
                self._bytes -= len(self._lines.popleft()) + 1
                self._dropped += 1
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Sends what is left; returns the lines that could not be sent."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            return self._take()

    def _take(self) -> list[str]:
        lines = list(self._lines)
        if self._dropped:
            lines.insert(0, f"[{self._dropped} lines dropped: the driver was too slow]")
        self._lines.clear()
        self._bytes = self._dropped = 0
        return lines

    def _send(self) -> None:
        assert self._session is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._ended)
                lines = self._take()
            if not lines:
                return
            try:
                self._session.log([line or " " for line in lines])
            except Exception:  # the driver is gone: they may still come with the result
                with self._changed:
                    self._lines.extendleft(reversed(lines))
                return


CONNECT_TIMEOUT_S = 5.0
"""Seconds for which a rank tries to reach the coordinator."""


class DriverUnreachableError(ResourceError):
    """A rank cannot reach the coordinator. The others may: all must meet in another way."""

    cause = Cause.UNREACHED


def open_rank_session(endpoint: Endpoint, rank: RankContext) -> Session:
    """A session with the coordinator.

    Raises:
        DriverUnreachableError: It cannot be reached from here.
    """
    timeouts = Timeouts(connect_s=CONNECT_TIMEOUT_S, reconnect_s=CONNECT_TIMEOUT_S)
    try:
        return open_session(endpoint, rank=rank.rank, attempt=rank.attempt, timeouts=timeouts)
    except TransportError as error:
        problem = error.received
    # outside of the except: the failure is this rank's own, not a consequence of another's
    address = f"{endpoint.address.host}:{endpoint.address.port}"
    raise DriverUnreachableError(
        f"rank {rank.rank} on {socket.gethostname()} cannot reach the driver",
        expected=f"a connection to {address} within {CONNECT_TIMEOUT_S:g} s",
        received=problem,
        hint="network=Network(server_bind=..., server_address=..., port=...) says where it listens",
    )
