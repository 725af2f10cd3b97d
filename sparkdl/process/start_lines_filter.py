"""Passes on what a process writes while its framework starts, without lines that say nothing.

Runs as a program of its own (:mod:`sparkdl.process.start_lines` starts it), so that the last words
of a process that crashes meanwhile are passed on too. Needs the standard library only::

    python -I -S -c SOURCE FD [no-gpu] < pipe

It writes to the descriptor ``FD``. Known lines are held: they are dropped at the mark ``DROP`` and
written at the mark ``SHOW`` or at the end of the input. After a mark everything is passed on as it
comes, for children of the process that inherited the pipe.
"""

from __future__ import annotations

import os
import re
import select
import sys

DROP, SHOW = b"\0sparkdl: started\0", b"\0sparkdl: failed\0"
_UNFINISHED_S = 0.2
"""Seconds after which a line without an end is passed on as it is: a progress bar, a question."""

_KNOWN = (
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called",
    rb"I\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+:\d+\] ",  # level INFO, in both forms of TensorFlow
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I \S+:\d+\] ",
    rb"To enable the following instructions: .*rebuild TensorFlow",
    rb".*\] Unable to register cu(DNN|FFT|BLAS)\w* factory: ",
    rb".*\] computation placer already registered",
    rb".*\] TF-TRT Warning: Could not find TensorRT",
)
_WITHOUT_GPU = (rb".*\] failed call to cuInit: ",)
"""Lines about a machine without a GPU, or about a process that is to see none."""


def known(no_gpu: bool) -> re.Pattern[bytes]:
    """The pattern at the start of a line that says nothing to a user."""
    return re.compile(b"|".join(_KNOWN + (_WITHOUT_GPU if no_gpu else ())))


class Filter:
    """Takes pieces of the input and returns what is to be written now."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern, self._held, self._rest = pattern, b"", b""
        self._within, self.marked = False, False

    def feed(self, data: bytes) -> bytes:
        if self.marked:
            return data
        data = self._rest + data
        for mark in (DROP, SHOW):
            before, found, after = data.partition(mark)
            if found:
                self._rest = before
                shown = self._lines() + self.unfinished()
                shown += self._held if mark is SHOW else b""
                self._held, self.marked = b"", True
                return shown + after
        self._rest = data
        return self._lines()

    def unfinished(self) -> bytes:
        """Passes on the start of a line whose end has not come (a mark's start is kept)."""
        if b"\0" in self._rest:
            return b""
        rest, self._rest = self._rest, b""
        self._within = self._within or bool(rest)
        return rest

    def end(self) -> bytes:
        """The input has ended: all that was held."""
        return self._rest + self._held

    def _lines(self) -> bytes:
        *lines, self._rest = self._rest.split(b"\n")
        shown = []
        for line in lines:
            if not self._within and self._pattern.match(line):
                self._held += line + b"\n"
            else:
                shown.append(line + b"\n")
            self._within = False
        return b"".join(shown)


def main() -> None:
    out = int(sys.argv[1])
    lines = Filter(known("no-gpu" in sys.argv[2:]))
    os.write(1, b"r")  # ready
    while True:
        if lines.marked or select.select([0], [], [], _UNFINISHED_S)[0]:
            data = os.read(0, 1 << 16)
            told = lines.marked
            _write(out, lines.feed(data) if data else lines.end())
            if lines.marked and not told:
                os.write(1, b"d")  # done
            if not data:
                return
        else:
            _write(out, lines.unfinished())


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
