"""A rank in a process of its own: started, talked to, and ended with its parent.

Parent and child talk over a socket pair in frames of a length and a pickle; both are the same
user's processes on one machine. The child's standard output and error are its own, so a crash
can still be read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from sparkdl.errors import TransportError

_LENGTH = struct.Struct("<Q")


class ChildProcess:
    """The parent's end of one child, which runs ``main`` of a module.

    Args:
        module: Its name; its ``main`` begins with :class:`ParentLine`.
        rank: Its rank.
        setup: The first message.
        output: Where its standard output and error go; as for ``subprocess.Popen``.
        pass_fds: Descriptors that it shall have too, under the same numbers.
    """

    def __init__(
        self,
        module: str,
        rank: int,
        setup: Any,
        *,
        output: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=[theirs.fileno(), *pass_fds],
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            _send(self.socket, (os.getpid(), setup))
        except OSError:  # it died at once: receive() finds no message, and status tells why
            return
        except BaseException:
            self.close()
            raise

    def receive(self) -> tuple[str, Any] | None:
        """The next message, or None if the child has ended."""
        message: tuple[str, Any] | None = _receive(self.socket)
        return message

    def answer(self, texts: list[str]) -> None:
        """Ends the child's ``all_gather``."""
        _send(self.socket, texts)

    def status(self) -> str:
        """How it ended, in words."""
        code = self.process.wait(10.0)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def close(self, grace_s: float = 0.0) -> None:
        """Ends the child, by force if it does not end by itself in time."""
        self.socket.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class ParentLine:
    """The child's end; from now on the child dies with its parent.

    Thread-safe for :meth:`tell`.
    """

    def __init__(self) -> None:
        self._connection = socket.socket(fileno=int(sys.argv[1]))
        self._connection.set_inheritable(False)
        self._lock = threading.Lock()
        parent, self.setup = _receive(self._connection)
        _die_with(parent)

    def tell(self, kind: str, content: Any) -> None:
        """Sends a message to the parent."""
        with self._lock:
            _send(self._connection, (kind, content))

    def gathering(self, rank: int) -> ParentGathering:
        """The parent's gathering, from here."""
        return ParentGathering(self, rank)

    def answer(self) -> Any:
        """What the parent answers; None if it has ended."""
        return _receive(self._connection)

    def close(self) -> None:
        """Closes the line."""
        self._connection.close()


class ParentGathering:
    """The parent exchanges the texts; see :class:`sparkdl.launch.gathering.Gathering`."""

    def __init__(self, line: ParentLine, rank: int) -> None:
        self._line, self.rank = line, rank

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text, by way of the parent, which keeps the time."""
        self._line.tell("gather", (text, timeout_s))
        texts = self._line.answer()
        if texts is None:
            raise TransportError(
                f"rank {self.rank} lost its parent process",
                expected="the parent's answer",
                received="the end of the line",
            )
        return list(texts)


def _die_with(parent: int) -> None:
    """Ends this process when the parent does, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _send(connection: socket.socket, message: Any) -> None:
    import cloudpickle

    data = cloudpickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    import cloudpickle

    header = _read(connection, _LENGTH.size)
    if header is None:
        return None
    data = _read(connection, _LENGTH.unpack(header)[0])
    return None if data is None else cloudpickle.loads(data)


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(min(size - len(data), 1 << 20))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
