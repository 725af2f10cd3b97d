"""The service of a node: the public methods of an object, called by other nodes."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from sparkdl.errors import AuthenticationError, ProtocolError, UnknownNameError
from sparkdl.process.closing import Closing
from sparkdl.program.calls import LIST_METHODS, LOOPBACK, CallAddress
from sparkdl.program.messages import HANDSHAKE_S, CallMessage, MessageConnection, MessageKind
from sparkdl.settings.network import PortSpec
from sparkdl.wire.greeting import Greeter
from sparkdl.wire.hosts import host_id, rank_addresses
from sparkdl.wire.listening import listen
from sparkdl.wire.proving import IncomingProof
from sparkdl.wire.tls import Certificate

CALL_THREADS = 16
_Running = dict[tuple[int, bool], Future[Any]]
"""The calls of a connection that run: in the pool (False), or a future that a method returned."""


class CallServer(Closing):
    """Serves the public methods of an object until closed.

    Calls run in a pool of threads, several at a time, so the methods must be thread-safe. A method
    that returns a ``concurrent.futures.Future`` is answered when that is done; it holds no thread.

    Args:
        target: The object; ``__call__`` is served too, other names that begin with ``_`` are not.
        bind: Address (or network, ``'10.0.0.0/8'``) to listen on.
        certificate: For TLS with clients of other hosts; those of this host connect to 127.0.0.1.
            None for no encryption.

    Raises:
        ResourceError: No port is free, or the address is not this host's.
    """

    def __init__(
        self,
        target: object,
        token: bytes,
        *,
        bind: str = LOOPBACK,
        advertised: str | None = None,
        ports: PortSpec = 0,
        label: str = "",
        threads: int = CALL_THREADS,
        certificate: Certificate | None = None,
    ) -> None:
        self._target, self._label = target, label
        bind, host = rank_addresses(bind, advertised)
        listeners = [listen(bind, ports)]
        port, local_port = int(listeners[0].getsockname()[1]), 0
        certificates: list[Certificate | None] = [None]
        if certificate is not None:
            if bind != LOOPBACK:
                certificates = [certificate, None]
                listeners.append(listen(LOOPBACK, ports))
            local_port = int(listeners[-1].getsockname()[1])
        self.address = CallAddress(host, port, label, host_id(), local_port)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sparkdl-calls")
        self._lock = threading.Lock()
        self._connections: set[MessageConnection] = set()
        self._closed = False
        self._greeters = [
            Greeter(
                listener, lambda c: IncomingProof(c, token), partial(self._welcome, with_tls),
                name="sparkdl-greeter",
            )
            for listener, with_tls in zip(listeners, certificates, strict=True)
        ]  # fmt: skip

    def _welcome(self, certificate: Certificate | None, caller: IncomingProof) -> None:
        threading.Thread(
            target=self._serve, args=(caller, certificate), name="sparkdl-caller", daemon=True
        ).start()

    def _serve(self, caller: IncomingProof, certificate: Certificate | None) -> None:
        try:
            caller.connection.settimeout(HANDSHAKE_S)
            caller.welcome()
            name = self.address.name
            connection = MessageConnection(caller.connection, certificate, name, is_server=True)
        except (OSError, EOFError, AuthenticationError):
            return
        with self._lock:
            self._connections.add(connection)
            closed = self._closed
        running: _Running = {}
        try:
            while not closed:
                message = connection.receive()
                if message.kind == MessageKind.CALL:
                    job = self._pool.submit(self._answer, connection, message, running)
                    running[message.call, False] = job
                    job.add_done_callback(partial(_forget, running, message.call, False))
                elif message.kind == MessageKind.CANCEL:
                    for later in (False, True):
                        found = running.get((message.call, later))
                        if found is not None:
                            found.cancel()
        except (OSError, EOFError, ProtocolError, RuntimeError):  # RuntimeError: the pool is closed
            pass
        finally:
            for job in list(running.values()):
                job.cancel()
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(
        self, connection: MessageConnection, message: CallMessage, running: _Running
    ) -> None:
        try:
            name, args, kwargs = message.load()
            result = self._method(name)(*args, **kwargs)
            if not isinstance(result, Future):
                connection.send(message.call, MessageKind.RESULT, result)
                return
        except BaseException as error:
            self._send_error(connection, message, error)
            return
        running[message.call, True] = result
        result.add_done_callback(partial(self._answer_later, connection, message, running))

    def _answer_later(
        self,
        connection: MessageConnection,
        message: CallMessage,
        running: _Running,
        done: Future[Any],
    ) -> None:
        try:
            connection.send(message.call, MessageKind.RESULT, done.result())
        except CancelledError:  # the caller has taken it back, or has ended
            pass
        except BaseException as error:
            self._send_error(connection, message, error)
        finally:
            _forget(running, message.call, True, done)

    def _send_error(
        self, connection: MessageConnection, message: CallMessage, error: BaseException
    ) -> None:
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):
            try:
                pickle.loads(pickle.dumps(error))
                connection.send(message.call, MessageKind.ERROR, (error, text))
            except Exception:  # an exception that does not survive pickling
                line = f"{type(error).__name__}: {error}"
                connection.send(message.call, MessageKind.ERROR, (RuntimeError(line), text))

    def _method(self, name: str) -> Callable[..., Any]:
        if name == LIST_METHODS:
            return self._methods
        hidden = name.startswith("_") and name != "__call__"
        method: Callable[..., Any] | None = None if hidden else getattr(self._target, name, None)
        if method is None or not callable(method):
            raise UnknownNameError(f"method of node {self._label!r}", name, self._methods())
        return method

    def _methods(self) -> list[str]:
        names = [name for name in dir(self._target) if not name.startswith("_")]
        methods = [name for name in names if callable(getattr(self._target, name, None))]
        return [*methods, "__call__"] if callable(self._target) else methods

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for greeter in self._greeters:
            greeter.close()
        for connection in connections:
            connection.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _forget(running: _Running, call: int, later: bool, _: Future[Any]) -> None:
    running.pop((call, later), None)
