"""Lines that ranks print, on their way to the driver."""

from __future__ import annotations

from collections import deque

import numpy as np

from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import ByteArray, Message

MAX_LINES_BYTES = 1 << 20
"""Bytes of lines in one frame; a rank that has more sends several frames."""
MAX_LINE_CHARS = MAX_LINES_BYTES // 8
"""The rest of a longer line is not sent."""
KEPT_LINES = 20_000
KEPT_CHARS = 16 << 20
"""The oldest lines are dropped where the driver does not fetch them."""


def pack_lines(lines: list[str]) -> ByteArray:
    """Lines as UTF-8, each with a line end; a line end inside a line becomes a space."""
    text = "".join(line.replace("\n", " ") + "\n" for line in lines)
    return np.frombuffer(text.encode(errors="replace"), np.uint8)


def unpack_lines(body: ByteArray) -> list[str]:
    """The counterpart of :func:`pack_lines`."""
    text = body.tobytes().decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else []


class LogLines:
    """``(rank, line)`` in the order of arrival, until the driver takes them."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque()
        self._chars = 0

    def put(self, message: Message) -> None:
        """Takes the lines of a LOG frame."""
        body = np.empty(0, np.uint8) if message.body is None else message.body
        if body.size > MAX_LINES_BYTES:
            raise ProtocolError(
                "a LOG frame is too large",
                expected=f"at most {MAX_LINES_BYTES} bytes of text",
                received=f"{body.size} bytes",
            )
        self.add(message.rank, unpack_lines(body))

    def add(self, rank: int, lines: list[str]) -> None:
        """Takes lines of a rank."""
        for line in lines:
            self._lines.append((rank, line))
            self._chars += len(line)
        while len(self._lines) > KEPT_LINES or self._chars > KEPT_CHARS:
            self._pop()

    def take(self, limit_bytes: int) -> tuple[list[int], list[str]]:
        """Ranks and lines that are forgotten from now on; about ``limit_bytes`` at most."""
        ranks: list[int] = []
        lines: list[str] = []
        size = 0
        while self._lines and size < limit_bytes:
            rank, line = self._pop()
            ranks.append(rank)
            lines.append(line)
            size += len(line) + 1
        return ranks, lines

    def _pop(self) -> tuple[int, str]:
        """Forgets the oldest line."""
        rank, line = self._lines.popleft()
        self._chars -= len(line)
        return rank, line
