"""A rank in a process of its own: local ranks on the driver, and tasks that need other devices.

Parent and child talk over a socket pair in frames of a length and a pickle; both are the same
user's processes on one machine. The child's standard output and error are its own, so a crash
can still be read. It dies with its parent.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sparkdl.driver_log import LineSplitter, log_through, shorten
from sparkdl.errors import WaitTimeoutError, WorkerError
from sparkdl.spark.function_task import (
    TAKEN_ALONG_S,
    BarrierGathering,
    FunctionTask,
    Outcome,
    call,
    describe,
)
from sparkdl.spark.log_stream import show
from sparkdl.spark.resources import function_environment

_LENGTH = struct.Struct("<Q")
_TAIL_LINES = 40


class ChildFailure(Exception):
    """A rank's failure in the words of :func:`sparkdl.spark.function_task.describe`."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described.get("error", ""))
        self.described = described


class ChildProcess:
    """The parent's end of one child.

    Args:
        pickled: The :class:`FunctionTask`, pickled.
        rank: Its rank.
        gpus: What it may see; None: whatever this process sees.
        pipe_output: Whether the parent reads its output; else it goes where the parent's goes.
    """

    def __init__(
        self, pickled: bytes, rank: int, gpus: tuple[str, ...] | None, *, pipe_output: bool
    ) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        output = subprocess.PIPE if pipe_output else None
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "sparkdl.spark.function_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if pipe_output else None,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        _send(self.socket, (pickled, rank, gpus, os.getpid()))

    def receive(self) -> tuple[str, Any] | None:
        """The next message, or None if the child has ended."""
        message: tuple[str, Any] | None = _receive(self.socket)
        return message

    def answer(self, texts: list[str]) -> None:
        """Ends the child's ``all_gather``."""
        _send(self.socket, texts)

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


def call_in_child(
    pickled: bytes,
    gathering: BarrierGathering,
    gpus: tuple[str, ...] | None,
    on_line: Callable[[str], None],
) -> Outcome:
    """Runs a barrier task's function in a child with the right devices.

    Raises:
        ChildFailure: The function raised there.
        WorkerError: The child died without an answer.
    """
    child = ChildProcess(pickled, gathering.rank, gpus, pipe_output=False)
    try:
        while (message := child.receive()) is not None:
            kind, content = message
            if kind == "gather":
                child.answer(gathering.all_gather(*content))
            elif kind == "line":
                on_line(content)
            elif kind == "failed":
                raise ChildFailure(content)
            else:
                outcome: Outcome = content
                return outcome
        status = child.process.wait(10.0)
        raise WorkerError(gathering.rank, f"its child process ended with status {status}")
    finally:
        child.close(grace_s=5.0)


def run_local(pickled: bytes, num_workers: int, start_timeout_s: float) -> list[Outcome]:
    """Runs all ranks as children of this process and shows what they print.

    Raises:
        WorkerError: A rank raised or died; the others are ended.
        WaitTimeoutError: Some ranks did not come in time; they are named.
    """
    children: list[ChildProcess] = []
    try:
        for rank in range(num_workers):
            children.append(ChildProcess(pickled, rank, None, pipe_output=True))
        return _Family(children, start_timeout_s).follow()
    finally:
        for child in children:
            child.close()


class _Family:
    """Local ranks until all have ended; one thread, no waiting without a limit."""

    def __init__(self, children: list[ChildProcess], start_timeout_s: float) -> None:
        self._children = children
        self._deadline = time.monotonic() + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._gathered: dict[int, str] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._failures: list[dict[str, Any]] = []
        self._failed_at = 0.0
        self._rounds = 0
        self._tails: dict[int, list[str]] = {c.rank: [] for c in children}
        self._selector = selectors.DefaultSelector()
        for child in children:
            self._selector.register(child.socket, selectors.EVENT_READ, (child, None))
            assert child.process.stdout is not None
            os.set_blocking(child.process.stdout.fileno(), False)
            splitter = LineSplitter(lambda line, rank=child.rank: self._show(rank, line))  # type: ignore[misc]
            self._selector.register(child.process.stdout, selectors.EVENT_READ, (child, splitter))

    def follow(self) -> list[Outcome]:
        try:
            while len(self._outcomes) < len(self._children):
                self._step()
                if self._failures and self._over():
                    raise self._error()
            self._last_output()
            return [self._outcomes[c.rank] for c in self._children]
        finally:
            self._selector.close()

    def _over(self) -> bool:
        """Whether the cause is known, or no one else may tell it any more."""
        known = not self._failures[-1]["taken_along"]
        late = time.monotonic() - self._failed_at > TAKEN_ALONG_S
        return known or late

    def _step(self) -> None:
        for key, _ in self._selector.select(0.1):
            child, splitter = key.data
            if key.fd not in self._selector.get_map():
                continue  # ended while another one was served
            if splitter is None:
                self._message(child)
            else:
                self._output(child, splitter)
        if self._rounds == 0 and time.monotonic() > self._deadline and not self._failures:
            missing = [c.rank for c in self._children if c.rank not in self._gathered]
            raise WaitTimeoutError(
                f"{len(missing)} of {len(self._children)} local ranks did not come",
                expected=f"all ranks within {self._start_timeout_s:g} s",
                received=f"nothing from ranks {', '.join(map(str, missing))}",
                hint="do they hang while they import a framework or unpickle the function?",
            )

    def _message(self, child: ChildProcess) -> None:
        message = child.receive()
        if message is None:
            self._selector.unregister(child.socket)
            if child.rank not in self._outcomes:
                status = child.process.wait(10.0)
                told = {c["rank"] for c in self._failures}
                if child.rank not in told:
                    self._output_of(child)
                    tail = "\n".join(self._tails[child.rank])
                    self._fail(
                        {
                            "rank": child.rank,
                            "error": f"its process ended with status {status}",
                            "traceback": tail,
                            "taken_along": False,
                        }
                    )
            return
        kind, content = message
        if kind == "line":
            show(child.rank, content)
        elif kind == "failed":
            self._fail(content)
        elif kind == "gather":
            self._gathered[child.rank] = content[0]
            if len(self._gathered) == len(self._children):
                texts = [self._gathered[c.rank] for c in self._children]
                self._gathered.clear()
                self._rounds += 1
                for other in self._children:
                    other.answer(texts)
        else:
            self._outcomes[child.rank] = content

    def _fail(self, described: dict[str, Any]) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._failures.append(described)

    def _error(self) -> WorkerError:
        causes = [f for f in self._failures if not f["taken_along"]]
        return worker_error((causes or self._failures)[0])

    def _output_of(self, child: ChildProcess) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data[0] is child and key.data[1] is not None:
                self._output(child, key.data[1])

    def _last_output(self) -> None:
        for child in self._children:
            child.process.wait(10.0)
            self._output_of(child)

    def _output(self, child: ChildProcess, splitter: LineSplitter) -> None:
        stream = child.process.stdout
        assert stream is not None
        while True:
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                splitter.end()
                self._selector.unregister(stream)
                return
            splitter.feed(data)

    def _show(self, rank: int, line: str) -> None:
        tail = self._tails[rank]
        tail.append(line)
        del tail[:-_TAIL_LINES]
        show(rank, line)


def worker_error(described: dict[str, Any], hint: str = "") -> WorkerError:
    """What the driver raises for a rank's failure."""
    return WorkerError(
        int(described["rank"]), str(described["error"]), str(described["traceback"]), hint
    )


# -- the child's side ----------------------------------------------------------------------------


class _ParentGathering:
    """The parent exchanges the texts."""

    def __init__(self, connection: socket.socket, rank: int, lock: threading.Lock) -> None:
        self._connection, self.rank, self._lock = connection, rank, lock

    def all_gather(self, text: str, timeout_s: float | None) -> list[str]:
        with self._lock:
            _send(self._connection, ("gather", (text, timeout_s)))
        texts = _receive(self._connection)
        if texts is None:
            raise WorkerError(self.rank, "its parent process has ended")
        return list(texts)


def main() -> None:
    """One rank: everything from the socket, the outcome to the socket."""
    import cloudpickle

    from sparkdl.spark.child import _die_with

    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    lock = threading.Lock()

    def tell(kind: str, content: Any) -> None:
        with lock:
            _send(connection, (kind, content))

    pickled, rank, gpus, parent = _receive(connection)
    _die_with(parent)
    try:
        task: FunctionTask = cloudpickle.loads(pickled)
        with (
            log_through(lambda text: tell("line", shorten(text))),
            function_environment(gpus, task.backend),
        ):
            outcome = call(task, _ParentGathering(connection, rank, lock))
    except (Exception, SystemExit) as error:
        tell("failed", describe(rank, error))
    else:
        tell("done", outcome)
    connection.close()


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


if __name__ == "__main__":
    # as a module of its proper name, so that what is unpickled is what is defined here
    from sparkdl.spark.function_child import main as _main

    _main()
