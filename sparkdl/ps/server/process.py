"""A server in a process of its own, and the driver's handle of it.

``ServerProcess`` is what the driver holds. It starts ``python -m sparkdl.ps.server`` in its own
session (Ctrl-C in a notebook does not reach it), hands over configuration and secret through a
private pipe and the initial center through anonymous shared memory. The driver binds the sockets
and passes them on, so the address is known, and may be sent to workers, before the server is up:
who connects early waits in the kernel's queue. The server ends when the driver's pipe closes or
its parent changes, so that none is ever orphaned. (``PR_SET_PDEATHSIG`` would not do: it fires
when the *thread* that started the server ends.)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from dataclasses import asdict

import numpy as np

from sparkdl.errors import ResourceError, TransportError
from sparkdl.process.closing import Closing
from sparkdl.process.log_lines import ChildOutput, start_module
from sparkdl.ps.server.config import ServerConfig
from sparkdl.transport.address import Endpoint, Listeners
from sparkdl.weights import FloatArray
from sparkdl.wire.anonymous import anonymous_file

LENGTH = struct.Struct("<Q")
_START_S = 60.0


class ServerProcess(Closing):
    """Driver-side handle of a server in a process of its own; a context manager.

    Args:
        config: See :class:`ServerConfig`.
        center: Initial weights; copied once, into memory shared with the server.
        wait: Return when the server answers; False leaves that to :meth:`wait_ready`.

    Raises:
        ResourceError: No free port, or the process did not start; with its error output.
    """

    def __init__(self, config: ServerConfig, center: FloatArray, *, wait: bool = True) -> None:
        if not config.sharded:
            config.layout.check(center)
        self.config = config
        self._directory: str | None = None
        if config.mode in ("auto", "shm"):
            # the driver owns the directory, so that it goes even if the server is killed
            parent = tempfile.gettempdir()
            if len(parent) > 70:  # a Unix socket's path has room for about 100 bytes
                parent = next((p for p in ("/tmp", "/dev/shm") if os.access(p, os.W_OK)), parent)
            self._directory = tempfile.mkdtemp(prefix="sparkdl-", dir=parent)
        self._answer = b""
        self._answered = threading.Event()
        try:
            listeners = Listeners.bind(config.listen, self._directory)
            try:
                self.address = listeners.address
                self._process = self._spawn(center, listeners)
            finally:
                listeners.close()  # the server holds them now, and nobody else may
        except BaseException:
            self._remove_directory()
            raise
        assert self._process.stderr is not None
        self._output = ChildOutput(self._process, self._process.stderr, lambda line: None, kept=200)
        try:
            threading.Thread(
                target=self._read_answer, name="sparkdl-ps-stdout", daemon=True
            ).start()
            if wait:
                self.wait_ready()
        except BaseException:
            self.stop(timeout_s=1.0)
            raise

    @property
    def endpoint(self) -> Endpoint:
        """The address for workers, and the run's secret."""
        certificate = self.config.certificate
        fingerprint = "" if certificate is None else certificate.fingerprint
        return Endpoint(self.address, self.config.token, fingerprint)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def errors(self) -> str:
        """The last lines of its error output."""
        return self._output.tail

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the server, waiting at most ``timeout_s`` for a clean end. May be called twice."""
        process = self._process
        for end in (_close_input, subprocess.Popen.terminate, subprocess.Popen.kill):
            end(process)
            # the output ends with the process, while Popen.wait looks now and then
            ended = self._output.finish(timeout_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s if ended else 0.5)
                break
        if process.stdout is not None:
            process.stdout.close()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self, center: FloatArray, listeners: Listeners) -> subprocess.Popen[bytes]:
        import cloudpickle

        recipe = cloudpickle.dumps(self.config)
        descriptor = anonymous_file(max(center.nbytes, 1), "sparkdl-center")
        try:
            _write_all(descriptor, center)
            setup = {
                "center": descriptor,
                "size": center.size,
                "directory": self._directory,
                "descriptors": listeners.descriptors,
                "address": asdict(listeners.address),
            }
            process = start_module(
                "sparkdl.ps.server",
                options=["-P"],
                # adds and copies need no threads, and start-up is faster
                environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                pass_fds=(descriptor, *listeners.descriptors.values()),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its error output says why
            for part in (json.dumps(setup).encode(), recipe):
                process.stdin.write(LENGTH.pack(len(part)) + part)
            process.stdin.flush()
        return process

    def wait_ready(self) -> None:
        """Returns when the server answers; at once if it did before.

        Raises:
            ResourceError: The process did not start; with its error output.
        """
        self._answered.wait(_START_S)
        if self._answer:
            answer = json.loads(self._answer)
            if "ready" in answer:
                return
            raise ResourceError(**answer["refused"])
        self._process.kill()
        self._process.wait()
        self._output.finish(5)
        raise ResourceError(
            f"{self.config.title} did not start", expected=f"an answer within {_START_S:g} s",
            received=self.errors.strip() or "no output",
        )  # fmt: skip

    def _read_answer(self) -> None:
        """Reads the one line that the server prints, whoever waits for it and however often."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed by stop() before it began
            self._answer = self._process.stdout.readline()
        self._answered.set()

    def check(self) -> None:
        """Raises TransportError, with the error output, if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise TransportError(
                f"{self.config.title}'s process ended",
                expected="a server that runs until the fit has ended",
                received=f"exit status {code}\n{self.errors.strip()}",
            )

    def close(self) -> None:
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
