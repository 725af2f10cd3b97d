"""The driver's connection to the coordinator of a run."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparkdl.coordinator.blobs import chunked, read_kept
from sparkdl.coordinator.group import Store
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import Status, unpack_lines
from sparkdl.process.closing import Closing
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.address import Endpoint, Listeners, ListenOptions
from sparkdl.transport.connection import Connection, Opener, Timeouts
from sparkdl.transport.frames import ByteArray, FrameLimits, Message
from sparkdl.transport.openers import explained, openers_of
from sparkdl.transport.server import Server
from sparkdl.wire.hosts import loopback_of
from sparkdl.wire.tls import Certificate


class DriverClient(Closing):
    """Status in, orders out. Thread-safe, one request at a time."""

    def __init__(
        self,
        opener: Opener,
        limits: FrameLimits | None = None,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.limits = FrameLimits() if limits is None else limits
        timeouts = Timeouts()
        self._connection = Connection(
            opener, self.limits, timeouts, buffered=True, name="the driver", check=check
        )
        self._changes_sent = 0
        with explained(opener, timeouts):
            self._connection.open()

    def status(self, since_epoch: int = 0) -> Status:
        """Workers, counters, failure, and the metrics of the epochs from ``since_epoch`` on.

        Epochs before ``since_epoch`` are forgotten at the coordinator.
        """
        reply = self.request(Message(CoordinatorKind.STATUS, epoch=since_epoch))
        return Status.from_wire(reply.meta, reply.content)

    def control(
        self,
        *,
        stop: bool = False,
        learning_rate: float | None = None,
        release: int | None = None,
        changes: VariableChanges | None = None,
    ) -> None:
        """Asks all workers to stop, sets their learning rate, lets them pass an epoch's end, or
        gives variables of their models other values.

        All of it takes effect together: where ranks train in step, at one step for all ranks.
        """
        orders: dict[str, Any] = {}
        if changes:
            message = Message(CoordinatorKind.CHANGES)
            for frame, chunk in chunked(message, [changes.to_bytes()], self.limits.chunk_bytes):
                self._connection.request(frame, chunk)
            self._changes_sent += 1
            orders["changes"] = self._changes_sent
        if stop:
            orders["stop"] = True
        if learning_rate is not None:
            orders["learning_rate"] = float(learning_rate)
        if release is not None:
            orders["release"] = int(release)
        self.request(Message(CoordinatorKind.CONTROL, meta=orders))

    def kept(self, rank: int | None = None) -> bytearray:
        """The state that a worker kept last; empty if none has.

        Raises:
            ProtocolError: A newer state replaces it each time before it is read.
        """
        return read_kept(self.request, rank)

    def take_lines(self) -> list[tuple[int, str]]:
        taken: list[tuple[int, str]] = []
        while True:
            reply = self.request(Message(CoordinatorKind.TAKE_LINES))
            lines = unpack_lines(reply.content)
            if not lines:
                return taken
            taken += [(int(r), line) for r, line in zip(reply.meta["ranks"], lines, strict=True)]

    def request(self, message: Message) -> Message:
        return self._connection.request(message)

    @property
    def raw(self) -> ByteArray:
        """The buffer that the body of the last reply lies in."""
        return self._connection.raw

    def close(self) -> None:
        self._connection.close()


def open_driver(
    endpoint: Endpoint,
    limits: FrameLimits | None = None,
    *,
    mode: str = "auto",
    check: Callable[[], None] | None = None,
) -> DriverClient:
    """Connects the driver; arguments as in :class:`DriverClient` and ``open_session``.

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """
    openers = openers_of(endpoint, mode, FrameLimits() if limits is None else limits, Timeouts())
    return DriverClient(openers, limits, check=check)


class CoordinatorHost(Closing):
    """Serves a coordinator over framed TCP, until closed.

    What goes through it is small (metrics, orders, log lines) or rare (a state per epoch), so it
    needs no process of its own.

    Raises:
        ResourceError: No port is free, or the address is not this host's.
    """

    def __init__(
        self,
        settings: Settings,
        listen: ListenOptions,
        certificate: Certificate | None = None,
        store: Store | None = None,
    ) -> None:
        token = secrets.token_urlsafe(32)
        listeners = Listeners.bind(listen, None)
        coordinator = Coordinator(settings, store)
        self._server = Server(coordinator, token, listeners, settings.num_workers, certificate)
        fingerprint = "" if certificate is None else certificate.fingerprint
        self.endpoint = Endpoint(self._server.address, token, fingerprint)
        with contextlib.ExitStack() as failed:
            failed.callback(self._server.close)
            self._server.start()
            # by the address that is bound: the advertised one may not be reachable from here
            address = replace(self.endpoint.address, host=loopback_of(listen.bind_address))
            self.driver = open_driver(replace(self.endpoint, address=address))
            failed.pop_all()

    def close(self) -> None:
        self.driver.close()
        self._server.close()
