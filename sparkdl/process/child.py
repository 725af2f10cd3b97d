"""A child process of this interpreter: how it is started, and the lines that it writes."""

from __future__ import annotations

import collections
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO

from sparkdl.process.log_lines import LineSplitter, Sink


def start_module(
    module: str,
    *arguments: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a module of this interpreter, which finds the modules that this process finds."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return subprocess.Popen(
        [sys.executable, *options, "-m", module, *arguments], stdin=stdin, stdout=subprocess.PIPE,
        stderr=stderr, pass_fds=tuple(pass_fds), start_new_session=start_new_session,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )  # fmt: skip


class ChildOutput:
    """Reads what a child writes, in a thread, to the end of the child."""

    def __init__(
        self, process: subprocess.Popen[bytes], stream: IO[bytes], on_line: Sink, kept: int = 40
    ) -> None:
        self._process, self._stream, self._on_line = process, stream, on_line
        self._lines: collections.deque[str] = collections.deque(maxlen=kept)
        self._thread = threading.Thread(target=self._read, name="sparkdl-output", daemon=True)
        self._thread.start()

    @property
    def tail(self) -> str:
        return "\n".join(self._lines)

    def finish(self, timeout_s: float = 10.0) -> bool:
        """Waits for the last lines of a child that ends; False if it goes on."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _read(self) -> None:
        splitter = LineSplitter(self._take)
        with self._stream, selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            while True:
                ended = self._process.poll() is not None
                if not selector.select(0.0 if ended else 0.5):
                    if ended:  # its own children may hold the pipe open
                        break
                    continue
                data = os.read(self._stream.fileno(), 1 << 16)
                if not data:
                    break
                splitter.feed(data)
        splitter.end()

    def _take(self, line: str) -> None:
        self._lines.append(line)
        self._on_line(line)
