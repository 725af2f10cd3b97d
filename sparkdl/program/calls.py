"""Calls of other nodes: where they serve, and the client that calls them."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sparkdl.collective.builtin.sockets import own_host_id
from sparkdl.errors import (
    AuthenticationError,
    ProtocolError,
    TransportError,
    WaitTimeoutError,
)
from sparkdl.program.messages import CallMessage, MessageConnection, MessageKind
from sparkdl.transport.encryption import Certificate

LOOPBACK = "127.0.0.1"
_RETRY_S = 0.05
_CONNECT_S = 60.0


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in another node: its traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


@dataclass(frozen=True)
class CallAddress:
    """Where a node serves calls.

    Args:
        host: Its host.
        port: The port.
        label: The node's name, for messages.
        host_id: Equal to the caller's if both are on one host.
        local_port: Of an encrypted run: the port on 127.0.0.1 for callers of the same host, who
            need no encryption; 0 if there is none.
    """

    host: str
    port: int
    label: str = ""
    host_id: str = ""
    local_port: int = 0

    @property
    def name(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def is_near(self) -> bool:
        """Whether a caller here uses :attr:`local_port`."""
        return self.local_port != 0 and self.host_id == own_host_id()


class CallClient:
    """Calls a node: ``client.method(...)`` waits, ``client.futures.method(...)`` does not.

    It connects when it is first used, waits until the node serves, and may be used by any thread.

    Args:
        address: Where the node serves.
        token: The run's secret.
        timeout_s: How long a call may take; None for ever.
        connect_s: How long the node may take to come up.
        certificate: Of an encrypted run; None for no encryption.
    """

    def __init__(
        self,
        address: CallAddress,
        token: bytes,
        *,
        timeout_s: float | None = None,
        connect_s: float = _CONNECT_S,
        certificate: Certificate | None = None,
    ) -> None:
        self._address, self._token, self._certificate = address, token, certificate
        self._timeout_s, self._connect_s = timeout_s, connect_s
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._connection: MessageConnection | None = None
        self.futures = _Futures(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wait_for(name, args, kwargs)

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the object itself."""
        return self._wait_for("__call__", args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        limits = self._timeout_s, self._connect_s
        return _client, (self._address, self._token, *limits, self._certificate)

    def _wait_for(self, name: str, args: Any, kwargs: Any) -> Any:
        future = self._start(name, args, kwargs)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if future.done():  # the method itself raised a TimeoutError
                raise
            future.cancel()
            raise WaitTimeoutError(
                f"{name} of node {self._address.label!r} takes too long",
                expected=f"a result within {self._timeout_s:g} s",
                received="none",
            ) from error

    def _start(self, name: str, args: Any, kwargs: Any) -> Future[Any]:
        connection = self._connected()
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._waiting[number] = future
        try:
            connection.send(number, MessageKind.CALL, (name, args, kwargs))
        except OSError as error:
            self._waiting.pop(number, None)
            raise self._lost(error) from error
        except BaseException:
            self._waiting.pop(number, None)
            raise
        future.add_done_callback(lambda done: self._cancel(connection, number, done))
        return future

    def _cancel(self, connection: MessageConnection, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            self._waiting.pop(number, None)
            with suppress(OSError):
                connection.send(number, MessageKind.CANCEL, None)

    def _connected(self) -> MessageConnection:
        with self._lock:
            if self._connection is None:
                self._connection = connection = self._connect()
                threading.Thread(
                    target=self._receive, args=(connection,), name="sparkdl-replies", daemon=True
                ).start()
            return self._connection

    def _connect(self) -> MessageConnection:
        address, deadline = self._address, time.monotonic() + self._connect_s
        while True:
            try:
                near = address.is_near()
                at = (LOOPBACK, address.local_port) if near else (address.host, address.port)
                return MessageConnection(
                    socket.create_connection(at, 5.0), self._token,
                    certificate=None if near else self._certificate, name=address.name,
                )  # fmt: skip
            except AuthenticationError:  # an OSError, too
                raise
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise self._lost(error) from error
                time.sleep(_RETRY_S)

    def _receive(self, connection: MessageConnection) -> None:
        try:
            while True:
                message = connection.receive()
                future = self._waiting.pop(message.call, None)
                if future is not None and future.set_running_or_notify_cancel():
                    _settle(future, message)
        except (OSError, EOFError, ProtocolError) as error:
            connection.close()
            with self._lock:
                if self._connection is connection:
                    self._connection = None
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._lost(error))

    def _lost(self, error: BaseException) -> TransportError:
        return TransportError(
            f"node {self._address.label!r} cannot be called",
            expected=f"a connection to {self._address.name}",
            received=f"{type(error).__name__}: {error}",
            hint="has the node ended? If its group has restarts, the next call finds it again",
        )

    def close(self) -> None:
        """Ends the connection; a later call makes another one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Futures:
    """The methods of a node as functions that return a future at once."""

    def __init__(self, client: CallClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._client._start(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls the object itself."""
        return self._client._start("__call__", args, kwargs)


def _client(
    address: CallAddress,
    token: bytes,
    timeout_s: float | None,
    connect_s: float,
    certificate: Certificate | None,
) -> CallClient:
    return CallClient(
        address, token, timeout_s=timeout_s, connect_s=connect_s, certificate=certificate
    )


def _settle(future: Future[Any], message: CallMessage) -> None:
    try:
        thing = message.load()
    except BaseException as error:
        future.set_exception(error)
        return
    if message.kind == MessageKind.RESULT:
        future.set_result(thing)
        return
    raised, text = thing
    raised.__cause__ = RemoteTraceback(text)
    future.set_exception(raised)
