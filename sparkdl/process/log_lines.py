"""Lines of text on their way from a rank to the driver, and from a child process to its parent.

On a rank a *sink* takes lines. Whoever runs the rank installs one for the time that the user's
code runs; without a sink a line is printed. While a fit runs, messages and logged warnings wait
in a :class:`LineBox` for the rank's next heartbeat, which takes them to the driver.

:func:`start_module` starts a child process, of this interpreter.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO

MESSAGE_CHARS = 4000
"""Characters after which messages and lines are cut."""
MOST_BOXED = 100
"""Lines that wait for a heartbeat, at most: the latest are kept."""
BOXED_CHARS = 500
"""Characters after which lines that wait for a heartbeat are cut."""

Sink = Callable[[str], None]
_sink: Sink | None = None


def log_to_driver(message: object) -> None:
    """Shows a message on the driver, with the rank in front; outside of a run it is printed here.

    Args:
        message: Any object; its text is cut after 4,000 characters.
    """
    text = shorten(str(message))
    if _sink is None:
        print(text, flush=True)
    else:
        _sink(text)


def shorten(text: str) -> str:
    """At most :data:`MESSAGE_CHARS` characters; the cut is marked.

    >>> len(shorten('x' * 5000)), shorten('x' * 5000)[-3:]
    (4000, '...')
    """
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 3] + "..."


@contextlib.contextmanager
def log_through(sink: Sink) -> Iterator[None]:
    """:func:`log_to_driver` passes its messages to ``sink`` inside the block."""
    global _sink
    before, _sink = _sink, sink
    try:
        yield
    finally:
        _sink = before


def show(rank: int, text: str) -> None:
    """Prints a rank's line on the driver."""
    print(f"[rank {rank}] {text}", flush=True)


class LineBox:
    """Lines that wait for a heartbeat; thread-safe, bounded, and never waits for anybody."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: collections.deque[str] = collections.deque()
        self._dropped = 0

    def put(self, text: str) -> None:
        """Takes a message, which may have several lines."""
        with self._lock:
            for line in text.splitlines():
                self._lines.append(line if len(line) <= BOXED_CHARS else line[:BOXED_CHARS] + "...")
            while len(self._lines) > MOST_BOXED:
                self._lines.popleft()
                self._dropped += 1

    def take(self) -> list[str]:
        """The lines since the last call; the first says how many were dropped."""
        with self._lock:
            lines = list(self._lines)
            if self._dropped:
                lines.insert(0, f"[{self._dropped} lines dropped: too many at once]")
            self._lines.clear()
            self._dropped = 0
            return lines

    def __len__(self) -> int:
        return len(self._lines)


class _Handler(logging.Handler):
    """Warnings and errors of Python's logging, into a box."""

    def __init__(self, box: LineBox) -> None:
        super().__init__(logging.WARNING)
        self._box = box

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a record that cannot be formatted ends no fit
            self._box.put(f"{record.levelname} {record.name}: {record.getMessage()}")
        if logging.lastResort is not None and logging.root.handlers == [self]:
            logging.lastResort.handle(record)  # printed as without this handler


_current = threading.local()


def current_box() -> LineBox:
    """The box of the fit that this thread trains; one that nobody else fills outside of a fit."""
    box: LineBox | None = getattr(_current, "box", None)
    return LineBox() if box is None else box


@contextlib.contextmanager
def boxed_lines() -> Iterator[LineBox]:
    """Inside, messages of :func:`log_to_driver` and logged warnings go into this thread's box.

    They go where they went before as well: a message is printed, a warning handled.
    """
    box = LineBox()

    def put(text: str) -> None:
        print(text, flush=True)
        box.put(text)

    handler = _Handler(box)
    _current.box = box
    logging.root.addHandler(handler)
    try:
        with log_through(put):
            yield box
    finally:
        logging.root.removeHandler(handler)
        _current.box = None


class LineSplitter:
    """Passes whole lines of text, of bounded length, to a sink as pieces of bytes come in.

    Of a line that a progress bar wrote over itself (with carriage returns) only the last state
    is passed on.
    """

    def __init__(self, on_line: Sink) -> None:
        self._on_line, self._rest = on_line, b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._rest) > 4 * MESSAGE_CHARS:
            self.end()

    def end(self) -> None:
        """Passes on what is left as a last line."""
        rest, self._rest = self._rest, b""
        if rest:
            self._emit(rest)

    def _emit(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace").replace("\b", "")
        self._on_line(shorten(text))


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
