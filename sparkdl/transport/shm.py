"""Shared memory, for workers on the server's host.

Control frames go over a Unix domain socket; the body lies in a mailbox that both processes map.
The server makes the mailbox (a memfd where there is one) and passes its descriptor, so it has no
name, and nothing is left behind whoever is killed. The client's buffer *is* the mailbox: a push
copies nothing, a pull is one copy by the server.
"""

from __future__ import annotations

import os
import socket

import numpy as np

from sparkdl.errors import ProtocolError
from sparkdl.transport.connection import deliver_body
from sparkdl.transport.frames import Body, FrameLimits, Kind, Message
from sparkdl.transport.socket import StreamChannel, StreamServer, open_stream, send_frame
from sparkdl.wire.anonymous import anonymous_file, map_file, map_received

SENT_BY_ANY_BYTES = 4 << 20
"""Weights up to which the thread that completes a round copies the result for all workers, one
after the other: to wake up their threads would take longer. Larger ones are copied by each
connection's own thread, at the same time."""


class ShmServer(StreamServer):
    """Serves a Unix domain socket; one mailbox per connection that asks for one."""

    name = "shm"
    inline_body = False

    def _answer_open(self, connection: socket.socket, opening: Message, number: int) -> None:
        limits = self._dispatcher.limits
        if not opening.meta.get("mailbox"):
            send_frame(connection, Message(Kind.OK), limits)
            return
        descriptor = anonymous_file(limits.buffer_bytes, "sparkdl-mailbox")
        try:
            self._dispatcher.service.attach(number, map_file(descriptor, limits.buffer_bytes))
            send_frame(connection, Message(Kind.OK), limits)
            socket.send_fds(connection, [b"m"], [descriptor])
        finally:
            os.close(descriptor)

    def _open(self, connection: socket.socket) -> int:
        if not self._any_thread_sends:
            return super()._open(connection)
        number: int = self._dispatcher.open(lambda reply: self._answer(connection, number, reply))
        return number

    def _exchange(self, connection: socket.socket, number: int) -> None:
        if not self._any_thread_sends:
            super()._exchange(connection, number)
            return
        try:
            while True:
                self._dispatcher.post(number, self._receive(connection, number))
        except ProtocolError as error:  # the stream is out of step: say so and close
            self._refuse(connection, error)

    @property
    def _any_thread_sends(self) -> bool:
        return self._dispatcher.limits.dense_bytes <= SENT_BY_ANY_BYTES

    def _send(self, connection: socket.socket, number: int, reply: Message) -> None:
        if reply.body_bytes and reply.kind.body is not Body.CHUNK:
            deliver_body(reply, self._dispatcher.service.buffer(number))
        super()._send(connection, number, reply)


class ShmChannel(StreamChannel):
    """A client's end: control over the Unix socket ``path``, bodies in the mailbox."""

    name = "shm"
    inline_body = False

    def __init__(
        self, path: str, token: str, limits: FrameLimits, mailbox: bool, timeout_s: float
    ) -> None:
        super().__init__(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), limits, None)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            open_stream(self._socket, token, limits, mailbox=mailbox)
            if mailbox:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
                size, hint = limits.buffer_bytes, "its model has another layout than the worker's"
                mapped = map_received(data, descriptors, size, "the parameter server", hint)
                self.raw = np.frombuffer(mapped, np.uint8)
        except BaseException:
            self._socket.close()
            raise
