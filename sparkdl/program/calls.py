"""Calls of other nodes: where they serve, and the client that calls them."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparkdl.errors import AuthenticationError, ProtocolError, TransportError, WaitTimeoutError
from sparkdl.program.messages import CallMessage, MessageConnection, MessageKind, pieces_of
from sparkdl.wire.hosts import host_id
from sparkdl.wire.tls import Certificate


class Deadlines:
    """Tells of each call that has not been taken out within its limit; all have the same one.

    So the call that came first is the first to pass it. The thread runs while there are calls, and
    for at most one limit longer.
    """

    def __init__(self, limit_s: float, passed: Callable[[int], None]) -> None:
        self._limit_s, self._passed = limit_s, passed
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._ended: threading.Event | None = None

    def add(self, number: int) -> None:
        with self._lock:
            self._until[number] = time.monotonic() + self._limit_s
            if self._ended is None:
                self._ended = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._ended,), name="sparkdl-deadlines", daemon=True
                ).start()

    def take_out(self, number: int) -> None:
        """The call has ended."""
        with self._lock:
            self._until.pop(number, None)

    def _watch(self, ended: threading.Event) -> None:
        wait_s = self._limit_s  # a call that comes meanwhile has at least as long
        while not ended.wait(wait_s):
            now, passed = time.monotonic(), list[int]()
            with self._lock:
                for number, until in self._until.items():
                    if until > now:
                        break
                    passed.append(number)
                for number in passed:
                    del self._until[number]
                if not self._until and self._ended is ended:
                    self._ended = None
                    ended.set()
                else:
                    wait_s = max(0.001, next(iter(self._until.values()), 0.0) - now)
            for number in passed:
                self._passed(number)

    def close(self) -> None:
        """Ends the thread; a later call begins another one."""
        with self._lock:
            ended, self._ended = self._ended, None
            self._until.clear()
        if ended is not None:
            ended.set()


LOOPBACK = "127.0.0.1"
LIST_METHODS = "__methods__"
"""Called like a method, it gives the names of all methods."""
_RETRY_S = 0.05
_CONNECT_S = 60.0
_ATTEMPT_S, _LEAST_ATTEMPT_S = 5.0, 1.0


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in another node: its traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


@dataclass(frozen=True)
class CallAddress:
    """The address at which a node serves calls.

    Args:
        host_id: Equal to the caller's if both are on one host.
        local_port: In an encrypted run: the port on 127.0.0.1 for callers of the same host, who
            need no encryption; 0 if there is none.
    """

    host: str
    port: int
    label: str = ""
    host_id: str = ""
    local_port: int = 0

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    def is_near(self) -> bool:
        """Whether a caller here uses :attr:`local_port`."""
        return self.local_port != 0 and self.host_id == host_id()


@dataclass(eq=False)
class _Call:
    """A call that has no result yet."""

    number: int
    name: str
    future: Future[Any]
    pieces: list[memoryview]
    reach_until: float
    connection: MessageConnection | None = None


class CallClient:
    """Calls a node: ``client.method(...)`` waits, ``client.futures.method(...)`` does not.

    It connects when it is first used, waits until the node serves, and may be used by any thread.

    Args:
        timeout_s: How long a call may take, the time for connecting included; None for ever. It
            holds for futures as well, which end with WaitTimeoutError then.
        connect_s: How long the node may take to come up.
        wait_for_ready: Whether a call waits for a node that cannot be reached yet; else it fails.
    """

    def __init__(
        self,
        address: CallAddress,
        token: bytes,
        *,
        timeout_s: float | None = None,
        connect_s: float = _CONNECT_S,
        certificate: Certificate | None = None,
        wait_for_ready: bool = True,
    ) -> None:
        self._address, self._token, self._certificate = address, token, certificate
        self._timeout_s, self._connect_s = timeout_s, connect_s
        self._wait_for_ready = wait_for_ready
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Call] = {}
        self._queued: list[_Call] = []  # for a connection that is being made
        self._connecting = False
        self._unreached: BaseException | None = None  # why the last attempt to connect failed
        self._connection: MessageConnection | None = None
        self._deadlines = None if timeout_s is None else Deadlines(timeout_s, self._pass_deadline)
        self.futures = _Futures(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._wait_for(name, args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the object itself."""
        return self._wait_for("__call__", args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(
            CallClient, timeout_s=self._timeout_s, connect_s=self._connect_s,
            certificate=self._certificate, wait_for_ready=self._wait_for_ready,
        )  # fmt: skip
        return make, (self._address, self._token)

    def _wait_for(self, name: str, args: object, kwargs: object) -> Any:
        begun = time.monotonic()
        call = self._start(name, args, kwargs)
        if self._timeout_s is None:
            return call.future.result()
        try:
            return call.future.result(max(0.0, self._timeout_s - (time.monotonic() - begun)))
        except TimeoutError:
            if call.future.cancel():
                raise self._overtime(call) from self._unreached
            return call.future.result()  # it ended just now, or raised a TimeoutError of its own

    def _start_later(self, name: str, args: object, kwargs: object) -> Future[Any]:
        """Begins a call without waiting for anything, not even for the connection."""
        call = self._start(name, args, kwargs)
        if self._deadlines is not None and not call.future.done():
            self._deadlines.add(call.number)
            if call.future.done():
                self._deadlines.take_out(call.number)
        return call.future

    def _start(self, name: str, args: object, kwargs: object) -> _Call:
        pieces = pieces_of((name, args, kwargs))
        reach_s = self._connect_s if self._wait_for_ready else 0.0
        call = _Call(next(self._numbers), name, Future(), pieces, time.monotonic() + reach_s)
        with self._lock:
            call.connection = connection = self._connection
            if connection is None:
                if not self._connecting:  # first: where no thread can be started nothing is queued
                    threading.Thread(
                        target=self._connect, name="sparkdl-connecting", daemon=True
                    ).start()
                    self._connecting = True
                # what the caller does with its arrays until there is a connection does not matter
                call.pieces = [memoryview(bytes(piece)) for piece in pieces]
                self._queued.append(call)
            self._waiting[call.number] = call
        call.future.add_done_callback(lambda _: self._forget(call))
        if connection is not None:
            self._send(call, connection)
        return call

    def _send(self, call: _Call, connection: MessageConnection) -> None:
        pieces, call.pieces = call.pieces, []
        try:
            connection.send_pieces(call.number, MessageKind.CALL, pieces)
        except OSError as error:
            with self._lock:
                if self._connection is connection:
                    self._connection = None
            connection.close()  # so its receiving thread ends the other calls on it
            self._fail(call, self._lost(error))

    def _fail(self, call: _Call, error: BaseException) -> bool:
        """Ends a call with an error, unless it has ended; whether it had not."""
        # who takes a call out of those that wait ends it, so that no two do
        waits = self._waiting.pop(call.number, None) is not None
        if waits and call.future.set_running_or_notify_cancel():
            call.future.set_exception(error)
            return True
        return False

    def _forget(self, call: _Call) -> None:
        """After the end of a call; one that still waits here was cancelled."""
        if self._deadlines is not None:
            self._deadlines.take_out(call.number)
        if self._waiting.pop(call.number, None) is not None:
            _take_back(call)

    def _pass_deadline(self, number: int) -> None:
        call = self._waiting.get(number)
        if call is not None and self._fail(call, self._overtime(call)):
            _take_back(call)

    def _connect(self) -> None:
        while True:
            with self._lock:
                self._queued = [call for call in self._queued if not call.future.done()]
                if not self._queued:
                    self._connecting = False
                    return
                first = min(call.reach_until for call in self._queued)
            left_s = min(_ATTEMPT_S, max(_LEAST_ATTEMPT_S, first - time.monotonic()))
            try:
                self._begin(self._attempt(left_s))
                return
            except AuthenticationError as error:  # an OSError, too
                self._unreached = error
                self._fail_queued(error)
            except (OSError, EOFError, RuntimeError) as error:  # RuntimeError: no thread to be had
                self._unreached = error
                self._fail_queued(self._lost(error), time.monotonic())
                time.sleep(_RETRY_S)

    def _attempt(self, timeout_s: float) -> MessageConnection:
        address = self._address
        near = address.is_near()
        at = (LOOPBACK, address.local_port) if near else (address.host, address.port)
        return MessageConnection.proven(
            socket.create_connection(at, timeout_s), self._token,
            None if near else self._certificate, address.name,
        )  # fmt: skip

    def _begin(self, connection: MessageConnection) -> None:
        """Sends the queued calls on a new connection, and receives their results."""
        with self._lock:
            queued = [call for call in self._queued if not call.future.done()]
            if queued:
                receiving = threading.Thread(
                    target=self._receive, args=(connection,), name="sparkdl-replies", daemon=True
                )
                try:
                    receiving.start()
                except RuntimeError:  # the calls stay queued for another try
                    connection.close()
                    raise
            self._connecting, self._unreached, self._queued = False, None, []
            if not queued:
                connection.close()
                return
            self._connection = connection
            for call in queued:
                call.connection = connection
            try:
                for call in queued:  # before others, so that calls keep their order
                    pieces, call.pieces = call.pieces, []
                    connection.send_pieces(call.number, MessageKind.CALL, pieces)
            except OSError:  # the receiving thread ends these calls
                self._connection = None
                connection.close()

    def _fail_queued(self, error: BaseException, when: float = math.inf) -> None:
        with self._lock:
            failed = [call for call in self._queued if call.reach_until <= when]
            self._queued = [call for call in self._queued if call.reach_until > when]
        for call in failed:
            self._fail(call, error)

    def _receive(self, connection: MessageConnection) -> None:
        try:
            while True:
                message = connection.receive()
                call = self._waiting.pop(message.call, None)
                if call is not None and call.future.set_running_or_notify_cancel():
                    _settle(call.future, message)
        except (OSError, EOFError, ProtocolError) as error:
            connection.close()
            with self._lock:
                if self._connection is connection:
                    self._connection = None
                waiting = [c for c in self._waiting.values() if c.connection is connection]
            for call in waiting:
                self._fail(call, self._lost(error))

    def _lost(self, error: BaseException) -> TransportError:
        return TransportError(
            f"node {self._address.label!r} cannot be called",
            expected=f"a connection to {self._address.name}",
            received=f"{type(error).__name__}: {error}",
            hint="has the node ended? If its group has restarts, the next call finds it again",
        )

    def _overtime(self, call: _Call) -> WaitTimeoutError:
        reached = call.connection is not None
        cause = "" if self._unreached is None else f" ({self._unreached})"
        return WaitTimeoutError(
            f"{call.name} of node {self._address.label!r} takes too long",
            expected=f"a result within {self._timeout_s:g} s",
            received="none" if reached else f"no connection to {self._address.name} yet{cause}",
        )

    def close(self) -> None:
        """Ends the connection and the calls on it; a later call makes another one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._fail_queued(self._lost(ConnectionAbortedError("this client was closed")))
        if self._deadlines is not None:
            self._deadlines.close()


def list_methods(client: CallClient) -> list[str]:
    """The names of the methods that a node serves now, in alphabetical order.

    Raises:
        TransportError: The node cannot be reached.
    """
    found: list[str] = client._wait_for(LIST_METHODS, (), {})
    return found


class _Futures:
    """The methods of a node as functions that return a future at once."""

    def __init__(self, client: CallClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._client._start_later(name, args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Future[Any]:
        """Calls the object itself."""
        return self._client._start_later("__call__", args, kwargs)


def _take_back(call: _Call) -> None:
    if call.connection is not None:
        with suppress(OSError):
            call.connection.send(call.number, MessageKind.CANCEL, None)


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
