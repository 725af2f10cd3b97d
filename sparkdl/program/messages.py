"""Messages between nodes: pickled objects on a connection whose ends have shown a token.

::

    uint64 call | uint8 kind | uint32 pieces | uint64 size of each piece | pieces

The first piece is the pickle, the others are the memory of large arrays in it, which are sent from
and received into their own memory without a copy. Before the first message each end proves that it
knows the run's token (:mod:`sparkdl.wire.proving`); until then nothing is unpickled. Between hosts
of an encrypted run TLS begins after this proof.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import cloudpickle

from sparkdl.errors import AuthenticationError, ProtocolError
from sparkdl.wire.listening import receive_exactly, tune
from sparkdl.wire.proving import prove
from sparkdl.wire.tls import Certificate, require_name

_CHUNK_BYTES = 1 << 18


class EncryptedStream:
    """A TLS connection; any thread may send, one receives.

    Both ends show the run's certificate, and name the address that is called. The state of OpenSSL
    is behind a lock, because a Python socket's is not.

    Raises:
        AuthenticationError: The other end has another certificate, or was called by another name.
        EOFError, OSError: The connection broke.
    """

    def __init__(
        self, connection: socket.socket, certificate: Certificate, name: str, *, is_server: bool
    ) -> None:
        context = certificate.peer_context(name, listens=is_server)
        self._socket, self._state, self._sending = connection, threading.Lock(), threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        try:
            self._shake_hands()
        except ssl.SSLError as error:
            raise AuthenticationError(
                "the other end of an encrypted call could not prove itself",
                expected="the certificate of this run", received=str(error),
                hint="something between the two hosts answers in its place",
            ) from error  # fmt: skip
        require_name(self._tls, name, "the other end of an encrypted call")

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._take()
            else:
                self._socket.sendall(self._outgoing.read())
                return

    def _take(self) -> None:
        received = self._socket.recv(_CHUNK_BYTES)
        if not received:
            raise EOFError("the connection ended")
        with self._state:
            self._incoming.write(received)

    def sendall(self, data: bytes | memoryview, /) -> None:
        left = memoryview(data)
        with self._sending:
            while left:
                with self._state:
                    left = left[self._tls.write(left[:_CHUNK_BYTES]) :]
                    sealed = self._outgoing.read()
                self._socket.sendall(sealed)

    def recv_into(self, memory: memoryview, /) -> int:
        while True:
            try:
                with self._state:
                    return int(self._tls.read(len(memory), memory))
            except ssl.SSLWantReadError:
                self._take()

    def settimeout(self, timeout_s: float | None, /) -> None:
        self._socket.settimeout(timeout_s)

    def shutdown(self, how: int, /) -> None:
        """Ends both directions; a thread that receives gets an error."""
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


_HEAD = struct.Struct("<QBI")
HANDSHAKE_S = 5.0
"""Longest wait in each step of the handshakes."""
_MAX_PIECES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 36


class MessageKind(IntEnum):
    """The kinds of messages."""

    CALL = 1
    CANCEL = 2
    RESULT = 3
    ERROR = 4


@dataclass(frozen=True)
class CallMessage:
    """A message as it came; the object in it is unpickled only when it is asked for."""

    call: int
    kind: MessageKind
    pieces: list[memoryview]

    def load(self) -> Any:
        return pickle.loads(self.pieces[0], buffers=self.pieces[1:])


class MessageConnection:
    """One end of a connection; any thread may send, one receives.

    Raises:
        AuthenticationError: The other end has another certificate.
        OSError: The connection broke.
    """

    def __init__(
        self,
        connection: socket.socket,
        certificate: Certificate | None = None,
        name: str = "",
        *,
        is_server: bool,
    ) -> None:
        self._sending = threading.Lock()
        self._socket: socket.socket | EncryptedStream = connection
        try:
            tune(connection)
            connection.settimeout(HANDSHAKE_S)
            if certificate is not None:
                self._socket = EncryptedStream(connection, certificate, name, is_server=is_server)
            self._socket.settimeout(None)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def proven(
        cls, connection: socket.socket, token: bytes, certificate: Certificate | None, name: str
    ) -> Self:
        """The client's end, after both ends have shown that they know the token.

        Raises:
            AuthenticationError: The server does not know the token, or has another certificate.
            OSError, EOFError: The connection broke, or the server has refused this end.
        """
        try:
            connection.settimeout(HANDSHAKE_S)
            prove(connection, token, name=f"node {name}")
        except BaseException:
            connection.close()
            raise
        return cls(connection, certificate, name, is_server=False)

    def send(self, call: int, kind: MessageKind, thing: object) -> None:
        """Sends an object.

        Raises:
            OSError: The connection broke.
            Exception: The object cannot be pickled; nothing was sent.
        """
        self.send_pieces(call, kind, pieces_of(thing))

    def send_pieces(self, call: int, kind: MessageKind, pieces: Sequence[memoryview]) -> None:
        """Sends what :func:`pieces_of` made of an object."""
        sizes = struct.pack(f"<{len(pieces)}Q", *(piece.nbytes for piece in pieces))
        head = _HEAD.pack(call, kind, len(pieces)) + sizes
        with self._sending:
            if len(pieces) == 1 and pieces[0].nbytes < 1 << 16:
                self._socket.sendall(head + pieces[0])
                return
            self._socket.sendall(head)
            for piece in pieces:
                self._socket.sendall(piece)

    def receive(self) -> CallMessage:
        """The next message.

        Raises:
            EOFError, OSError: The connection ended.
            ProtocolError: What came is no message.
        """
        call, kind, count = _HEAD.unpack(receive_exactly(self._socket, _HEAD.size))
        if not 1 <= count <= _MAX_PIECES or kind not in list(MessageKind):
            raise ProtocolError(
                "a message between nodes is malformed",
                expected=f"a known kind and 1 to {_MAX_PIECES} pieces",
                received=f"kind {kind}, {count} pieces",
            )
        sizes = struct.unpack(f"<{count}Q", receive_exactly(self._socket, 8 * count))
        if sum(sizes) > _MAX_MESSAGE_BYTES:
            raise ProtocolError(
                "a message between nodes is too long",
                expected=f"at most {_MAX_MESSAGE_BYTES} bytes", received=f"{sum(sizes)} bytes",
            )  # fmt: skip
        pieces = [receive_exactly(self._socket, size) for size in sizes]
        return CallMessage(call, MessageKind(kind), pieces)

    def close(self) -> None:
        """Ends the connection; a thread that receives gets EOFError or OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def pieces_of(thing: object) -> list[memoryview]:
    """An object as a message carries it: its pickle, and the memory of the arrays in it.

    Raises:
        Exception: The object cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        text = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    except Exception:  # what has no name to be found by: lambdas, classes of the main script
        buffers.clear()
        text = cloudpickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return [memoryview(text), *(buffer.raw() for buffer in buffers)]
