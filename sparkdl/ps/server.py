"""The parameter server as a thing that runs: in this process, or in one of its own.

``ServerProcess`` is what the driver holds. It starts ``python -m sparkdl.ps.server`` in its own
session (Ctrl-C in a notebook does not reach it), hands over configuration and secret through a
private pipe and the initial center through anonymous shared memory, and reads the address from
its output. The server ends when the driver's pipe closes or its parent changes, so that none is
ever orphaned. (``PR_SET_PDEATHSIG`` would not do: it fires when the *thread* that started the
server ends.)
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pickle
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TextIO, get_args

import numpy as np

from sparkdl.errors import (
    ConfigError,
    ResourceError,
    SparkDLError,
    TransportError,
    UnknownNameError,
)
from sparkdl.ps.messages import Limits
from sparkdl.ps.rules.base import Rule
from sparkdl.ps.state import ServerState, Settings
from sparkdl.ps.transports.address import Address, Mode, boot_id
from sparkdl.ps.transports.base import Dispatcher, PortSpec, listen, ports_of
from sparkdl.ps.transports.inproc import InprocChannel
from sparkdl.ps.transports.shm import ShmServer, anonymous_file
from sparkdl.ps.transports.socket import SocketServer
from sparkdl.weights import FloatArray, Layout

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class ServerConfig:
    """All that a server needs, except the center.

    Args:
        layout: Of the flat buffer.
        rule: How commits change the center; may be an instance of a user's class.
        num_workers: Workers of the run.
        mode: ``'http'``, ``'socket'``, ``'shm'``, or ``'auto'`` for all three.
        port: 0 for any free one, a port, or a range (``'7000-7010'``). The framed socket takes it
            where the mode has one, else Flask; both stay inside a range.
        bind_address: Interface to listen on.
        advertised_address: What workers connect to; None for ``bind_address``.
        settings: Time limits; its ``num_workers`` is replaced by the one above. None for defaults.
        token: The run's secret; made up if empty.
    """

    layout: Layout
    rule: Rule
    num_workers: int
    mode: Mode = "auto"
    port: PortSpec = 0
    bind_address: str = "127.0.0.1"
    advertised_address: str | None = None
    settings: Settings | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UnknownNameError("parameter_server_mode", self.mode, get_args(Mode))
        ports_of(self.port)
        if not isinstance(self.rule, Rule):
            raise ConfigError(
                "the server needs a rule", expected="a Rule", received=type(self.rule).__name__
            )
        self.limits()

    def limits(self) -> Settings:
        """The settings, with this configuration's number of workers."""
        given = {} if self.settings is None else asdict(self.settings)
        return Settings(**{**given, "num_workers": self.num_workers})


class _Transport(Protocol):
    def close(self) -> None: ...


class Server:
    """A server in this process: state, dispatcher and the transports that the mode asks for.

    Args:
        config: See :class:`ServerConfig`.
        center: Initial weights; taken over, not copied.
        directory: Private directory for the Unix socket; None for no shm transport.
        inproc_only: No sockets at all; clients connect through :meth:`channel`.
    """

    def __init__(
        self,
        config: ServerConfig,
        center: FloatArray,
        directory: str | None = None,
        *,
        inproc_only: bool = False,
    ) -> None:
        self.config = config
        self.state = ServerState(config.layout, center, config.rule, config.limits())
        self._transports: list[_Transport] = []
        self._late: list[Callable[[], _Transport]] = []
        self.address = Address("")
        listeners: list[socket.socket] = []
        try:
            if not inproc_only:
                listeners, self.address = self._listen(directory)
            self.dispatcher = Dispatcher(self.state)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise

    def _listen(self, directory: str | None) -> tuple[list[socket.socket], Address]:
        """Binds everything first, so that what is advertised is held."""
        config, mode = self.config, self.config.mode
        framed = mode in ("auto", "socket")
        host = config.advertised_address or _reachable(config.bind_address)
        listeners: list[socket.socket] = []
        address: dict[str, Any] = {"boot_id": boot_id(), "mode": mode}
        max_connections = 8 * config.num_workers + 32
        try:
            if framed:
                tcp = listen(config.bind_address, config.port)
                listeners.append(tcp)
                address.update(host=host, port=tcp.getsockname()[1])
                self._late.append(
                    lambda: SocketServer(tcp, self.dispatcher, config.token, max_connections)
                )
            if mode in ("auto", "shm") and directory and hasattr(socket, "AF_UNIX"):
                path = os.path.join(directory, "ps.sock")
                uds = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listeners.append(uds)
                uds.bind(path)
                uds.listen(1024)
                address.update(uds=path)
                self._late.append(
                    lambda: ShmServer(uds, self.dispatcher, config.token, max_connections)
                )
            fixed = framed and len(list(ports_of(config.port))) == 1
            web = listen(config.bind_address, 0 if fixed else config.port)
            listeners.append(web)
            literal = f"[{host}]" if ":" in host.strip("[]") else host
            address.update(
                http=f"http://{literal.replace('[[', '[').replace(']]', ']')}"
                f":{web.getsockname()[1]}"
            )
            self._late.append(lambda: self._serve_http(web))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return listeners, Address(**address)

    def _serve_http(self, listener: socket.socket) -> _Transport:
        from sparkdl.ps.transports.http import HttpServer  # Flask's import takes a while

        # one thread per worker's deferred request, plus heartbeats, driver and people
        return HttpServer(
            listener, self.dispatcher, self.config.token, 2 * self.config.num_workers + 8
        )

    def start(self) -> Self:
        """Starts to answer on all listening sockets."""
        for make in self._late:
            self._transports.append(make())
        self._late.clear()
        return self

    def channel(self, token: str, *, buffer: bool = True) -> InprocChannel:
        """An in-process connection."""
        limits = Limits.of(self.config.layout)
        raw = limits.allocate() if buffer else None
        return InprocChannel(self.dispatcher, token, self.config.token, limits, raw)

    def close(self) -> None:
        """Ends all waits, connections and threads."""
        self.dispatcher.shutdown()
        for transport in reversed(self._transports):
            transport.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _reachable(bind_address: str) -> str:
    """An address of this host for others, if ``bind_address`` is a wildcard."""
    if bind_address.strip("[]") not in ("", "0.0.0.0", "::"):
        return bind_address.strip("[]")
    family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
    probe = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.connect((probe, 9))  # sends nothing; asks the kernel for the route
            return str(udp.getsockname()[0])
    except OSError:
        return socket.gethostname()


# -------------------------------------------------------------------- own process


class ServerProcess:
    """Driver-side handle of a server in a process of its own; a context manager.

    Args:
        config: See :class:`ServerConfig`.
        center: Initial weights; copied once, into memory shared with the server.
        start_timeout_s: For the process to come up.

    Raises:
        ResourceError: No free port, or the process did not start; with its error output.
    """

    def __init__(
        self, config: ServerConfig, center: FloatArray, *, start_timeout_s: float = 60.0
    ) -> None:
        config.layout.check(center)
        self.config = config
        self._directory: str | None = None
        self._tail: collections.deque[bytes] = collections.deque(maxlen=200)
        if config.mode in ("auto", "shm"):
            # the driver owns the directory, so that it goes even if the server is killed
            self._directory = tempfile.mkdtemp(prefix="sparkdl-")
            if len(self._directory) > 90:  # a Unix socket's path has room for about 100 bytes
                os.rmdir(self._directory)
                self._directory = tempfile.mkdtemp(prefix="sparkdl-", dir="/tmp")
        try:
            self._process = self._spawn(center)
            self._reader = threading.Thread(
                target=self._read_errors, name="sparkdl-ps-stderr", daemon=True
            )
            self._reader.start()
            self.address = self._read_address(start_timeout_s)
        except BaseException:
            self.stop(timeout_s=1.0)
            raise

    @property
    def token(self) -> str:
        return self.config.token

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def errors(self) -> str:
        """The last lines of its error output."""
        return b"".join(self._tail).decode(errors="replace")

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the server, waiting at most ``timeout_s`` for a clean end. May be called twice."""
        process: subprocess.Popen[bytes] | None = getattr(self, "_process", None)
        if process is not None:
            for end in (_close_input, subprocess.Popen.terminate, subprocess.Popen.kill):
                end(process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
                    break
            reader: threading.Thread | None = getattr(self, "_reader", None)
            if reader is not None:
                reader.join(5)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self, center: FloatArray) -> subprocess.Popen[bytes]:
        import cloudpickle

        recipe = cloudpickle.dumps(self.config)
        size = max(center.nbytes, 1)
        descriptor = anonymous_file(size, "sparkdl-center")
        try:
            _write_all(descriptor, center)
            setup = {"descriptor": descriptor, "size": center.size, "directory": self._directory}
            path = [p or os.getcwd() for p in sys.path]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sparkdl.ps.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(descriptor,),
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path),
                    "OPENBLAS_NUM_THREADS": "1",  # adds and copies need none, start-up is faster
                    "OMP_NUM_THREADS": "1",
                },
            )
        finally:
            os.close(descriptor)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its error output says why
            for part in (json.dumps(setup).encode(), recipe):
                process.stdin.write(_LENGTH.pack(len(part)) + part)
            process.stdin.flush()
        return process

    def _read_address(self, timeout_s: float) -> Address:
        lines: list[bytes] = []
        stdout = self._process.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(timeout_s)
        if lines and lines[0]:
            answer = json.loads(lines[0])
            if "address" in answer:
                return Address(**answer["address"])
            raise ResourceError(
                answer["what"],
                expected=answer["expected"],
                received=answer["received"],
                hint=answer["hint"],
            )
        self._process.kill()
        self._process.wait()
        self._reader.join(5)
        raise ResourceError(
            "the parameter server did not start",
            expected=f"its address within {timeout_s:g} s",
            received=self.errors.strip() or "no output",
        )

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._tail.append(line)

    def check(self) -> None:
        """Raises TransportError, with the error output, if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise TransportError(
                "the parameter server's process ended",
                received=f"exit status {code}\n{self.errors.strip()}",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _write_all(descriptor: int, center: FloatArray) -> None:
    view = np.ascontiguousarray(center).view(np.uint8).data
    position = 0
    while position < len(view):
        position += os.pwrite(descriptor, view[position : position + (1 << 30)], position)


def _read_part() -> bytes:
    stream = sys.stdin.buffer
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise SystemExit(0)  # the driver went away
    return stream.read(_LENGTH.unpack(head)[0])


def main() -> None:
    """The server's process: setup from stdin, address to stdout, until stdin closes."""
    parent = os.getppid()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a user's module prints when imported must not look like an address
    setup = json.loads(_read_part())
    try:
        config: ServerConfig = pickle.loads(_read_part())  # from the driver's private pipe
        center = _map_center(setup["descriptor"], setup["size"])
        server = Server(config, center, setup["directory"])
    except SparkDLError as error:
        _say(
            output,
            {
                "what": error.what,
                "expected": error.expected,
                "received": error.received,
                "hint": error.hint,
            },
        )
        return
    _say(output, {"address": asdict(server.address)})
    server.start()
    threading.Thread(target=_watch_input, args=(ended,), daemon=True).start()
    while not ended.wait(0.5):
        if os.getppid() != parent:
            break
    server.dispatcher.shutdown()  # whoever waits for a reply is told by a closed connection
    if setup["directory"]:  # the driver removes it too, but it may be gone
        shutil.rmtree(setup["directory"], ignore_errors=True)
    os._exit(0)  # the kernel closes the rest at once; there is nothing to save


def _say(output: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=output, flush=True)


def _map_center(descriptor: int, size: int) -> FloatArray:
    from sparkdl.ps.transports.shm import map_file

    if size == 0:
        return np.empty(0, np.float32)
    center = map_file(descriptor, 4 * size).view(np.float32)
    os.close(descriptor)
    return center


def _watch_input(ended: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    ended.set()


if __name__ == "__main__":
    # as a module of its proper name, so that the classes unpickled are the ones defined here
    from sparkdl.ps.server import main as _main

    _main()
