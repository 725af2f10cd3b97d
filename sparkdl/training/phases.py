"""The parts of a rank's time: a clock that is in exactly one phase at every moment.

The task of a rank makes a :class:`PhaseClock` current for its thread; parts that it makes in that
thread (session, synchronizers, loop) take it with :func:`current_clock` and say when a phase
begins. So seconds add up to the time that the task took, and nothing is measured twice. Other
threads do not count: what runs beside the training takes none of its time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Phase = Literal["start", "read", "compute", "evaluate", "exchange", "wait"]
PHASES: tuple[Phase, ...] = ("start", "read", "compute", "evaluate", "exchange", "wait")
"""``start``: framework, model, connection, first compiled call. ``read``: the next batches.
``compute``: the model, on training rows. ``evaluate``: on validation rows. ``exchange``: with the
server or the other ranks, the wait for them included. ``wait``: for ranks to join, or for the
driver at an epoch's end."""
MOST_SPANS = 50_000
MOST_OUTRUN = 0.9
"""Above this multiple of the speed of one process, seconds do not show who is faster."""
_FIRST_BUCKET_S = 1e-3


@dataclass(frozen=True)
class Usage:
    """The time and memory of a rank since its task began; counters, so that two can be subtracted.

    Args:
        seconds: Phase -> seconds in it.
        cpu_s: Processor seconds of the process, all threads.
        memory_bytes: Resident memory now.
        bytes_sent, bytes_received: Of frames to and from the server (in shared memory without
            their bodies); 0 without a server.
    """

    seconds: dict[Phase, float]
    cpu_s: float = 0.0
    memory_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def beside_one_process(usage: Mapping[int, Usage]) -> float:
    """The speed of all ranks together, as a multiple of one process' that does all of their work.

    One process exchanges nothing; to compute, to evaluate and to read it takes as long as all ranks
    took together. A multiple below 1 says that it would be faster. The start and the waits for the
    driver are left out: one process would have them, too.

    Args:
        usage: Rank -> what its time went into, in one stage.

    >>> rank = Usage({"start": 9.0, "read": 0.1, "compute": 0.8, "evaluate": 0.1, "exchange": 3.0})
    >>> round(beside_one_process({0: rank, 1: rank}), 2)
    0.5
    """
    work = [_seconds(u, "read", "compute", "evaluate") for u in usage.values()]
    longest = max((_busy_s(u) for u in usage.values()), default=0.0)
    return sum(work) / longest if longest else float(len(usage))


def _seconds(usage: Usage, *phases: Phase) -> float:
    return sum(usage.seconds.get(phase, 0.0) for phase in phases)


def _busy_s(usage: Usage) -> float:
    return _seconds(usage, "read", "compute", "evaluate", "exchange")


def too_many_workers(usage: Mapping[int, Usage], least_s: float = 1.0) -> str | None:
    """A sentence on ranks that one process would outrun; None if it would not, or nobody knows.

    Args:
        usage: See :func:`beside_one_process`; of ranks that have trained rows.
        least_s: Least seconds of a rank; of a shorter training nothing is said.
    """
    multiple = beside_one_process(usage)
    if len(usage) < 2 or multiple > MOST_OUTRUN or max(map(_busy_s, usage.values())) < least_s:
        return None
    return (
        f"{len(usage)} workers are at {multiple:.2g} of one process here: exchanges take longer "
        "than what the workers save; num_workers=1, a larger batch_size or, in modes with a "
        "server, a larger frequency is faster"
    )


@dataclass(frozen=True)
class ServerUsage:
    """The work of one of several parameter servers in a run.

    Args:
        host: At which the workers reach it.
        memory_bytes: Resident memory at the end.
        bytes_received, bytes_sent: Of frames, those in shared memory with their bodies.
        staleness: Steps of other workers between a pull of rows and their push, a mean.
        busy: Requests that it works on at this moment.
    """

    host: str
    memory_bytes: int
    bytes_received: int
    bytes_sent: int
    table_rows: int = 0
    staleness: float = 0.0
    busy: int = 0


@dataclass(frozen=True, eq=False)
class Spans:
    """The phases of a rank one after another, without a gap.

    Args:
        began_at: When the first begins, in seconds since 1970 by the clock of the rank's host.
        starts: When each begins, in seconds since ``began_at``; float64.
        phases: Index of each in :data:`PHASES`; float64.
        end_s: When the last ends.
    """

    began_at: float
    starts: npt.NDArray[np.float64]
    phases: npt.NDArray[np.float64]
    end_s: float

    def __repr__(self) -> str:
        return f"Spans({len(self.starts)} phases, {self.end_s:.3g} s)"

    def __iter__(self) -> Iterator[tuple[Phase, float, float]]:
        """``(phase, start, seconds)`` of each."""
        ends = np.append(self.starts[1:], self.end_s)
        for index, start, end in zip(self.phases, self.starts, ends, strict=True):
            yield PHASES[int(index)], float(start), float(end - start)

    def to_bytes(self) -> bytes:
        edges = [self.began_at, self.end_s]
        return np.concatenate([edges, self.starts, self.phases]).astype("<f8").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Spans:
        """The counterpart of :meth:`to_bytes`."""
        numbers = np.frombuffer(content, "<f8")
        starts, phases = np.split(numbers[2:], 2)
        return cls(float(numbers[0]), starts, phases, float(numbers[1]))


class PhaseClock:
    """Measures the phases of the thread that makes it.

    Args:
        keeps_spans: Keep every phase with its times, not the sums alone. Of more than
            :data:`MOST_SPANS`, short ones are joined: within a bucket of time each phase then
            stands once, as long as its parts were together.
    """

    def __init__(
        self, *, keeps_spans: bool = False, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._owner = threading.get_ident()
        self._began_at, self._began = time.time(), now()
        self._phase, self._since = 0, self._began
        self._seconds = [0.0] * len(PHASES)
        self._keeps_spans = keeps_spans
        self._starts: list[float] = [0.0]
        self._phases: list[int] = [0]
        self._bucket_s = _FIRST_BUCKET_S / 2

    def enter(self, phase: Phase) -> None:
        self._switch(PHASES.index(phase))

    def within(
        self, phase: Phase, *, any_thread: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """A block that is spent in ``phase``; the phase before goes on after it.

        Args:
            any_thread: Count also in another thread than the clock's: in one that the training
                waits for (a framework calls back in threads of its own).
        """
        if any_thread or threading.get_ident() == self._owner:
            return _Block(self, PHASES.index(phase))
        return contextlib.nullcontext()

    def each(self, items: Generator[T]) -> Generator[T]:
        """The items of a generator; making them is ``read``. Closes it."""
        with contextlib.closing(items):
            while True:
                with self.within("read"):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item

    def usage(self, bytes_sent: int = 0, bytes_received: int = 0) -> Usage:
        """The usage until now; from any thread."""
        seconds = list(self._seconds)
        seconds[self._phase] += self._now() - self._since
        times = os.times()
        return Usage(
            dict(zip(PHASES, seconds, strict=True)), round(times.user + times.system, 3),
            memory_bytes(),
            bytes_sent, bytes_received,
        )  # fmt: skip

    def spans(self) -> Spans | None:
        """All phases until now; None if they are not kept."""
        if not self._keeps_spans:
            return None
        return Spans(
            self._began_at, np.array(self._starts), np.array(self._phases, np.float64),
            self._now() - self._began,
        )  # fmt: skip

    def _switch(self, phase: int) -> int:
        now = self._now()
        before = self._phase
        self._seconds[before] += now - self._since
        if self._keeps_spans and phase != before:
            self._starts.append(now - self._began)
            self._phases.append(phase)
            if len(self._starts) > MOST_SPANS:
                self._join(now - self._began)
        self._phase, self._since = phase, now
        return before

    def _join(self, end_s: float) -> None:
        """Joins spans until half of the room is free."""
        starts, phases = np.array(self._starts[:-1]), np.array(self._phases[:-1])
        last = self._phases[-1]
        while len(starts) > MOST_SPANS // 2:
            self._bucket_s *= 2
            starts, phases = joined(starts, phases, end_s, self._bucket_s)
        self._starts, self._phases = [*starts.tolist(), end_s], [*phases.tolist(), last]


class _Block:
    """A block in a phase; cheaper than a generator's context manager."""

    __slots__ = ("_before", "_clock", "_phase")

    def __init__(self, clock: PhaseClock, phase: int) -> None:
        self._clock, self._phase = clock, phase

    def __enter__(self) -> None:
        self._before = self._clock._switch(self._phase)

    def __exit__(self, *_: object) -> None:
        self._clock._switch(self._before)


def joined(
    starts: npt.NDArray[np.float64], phases: npt.NDArray[Any], end_s: float, bucket_s: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Spans that begin in one bucket of time, with each phase once; the sums stay.

    >>> joined(np.array([0.0, 1, 2, 3, 10]), np.array([2, 4, 2, 4, 2]), 12.0, 5.0)
    (array([ 0.,  2., 10.]), array([2, 4, 2]))
    """
    bucket = (starts // bucket_s).astype(np.int64)
    _, first, group = np.unique(bucket, return_index=True, return_inverse=True)
    seconds = np.zeros((len(first), len(PHASES)))
    np.add.at(seconds, (group, phases.astype(np.int64)), np.diff(np.append(starts, end_s)))
    ends = starts[first][:, None] + np.cumsum(seconds, axis=1)
    kept = seconds > 0
    return (ends - seconds)[kept], np.nonzero(kept)[1]


class _Current(threading.local):
    clock: PhaseClock | None = None


_current = _Current()


def current_clock() -> PhaseClock:
    """The clock of the task that runs in this thread; one that nobody reads where there is none."""
    return PhaseClock() if _current.clock is None else _current.clock


@contextlib.contextmanager
def recording(clock: PhaseClock) -> Iterator[PhaseClock]:
    """Makes ``clock`` current in this thread."""
    before, _current.clock = _current.clock, clock
    try:
        yield clock
    finally:
        _current.clock = before


def memory_bytes() -> int:
    """Resident memory of this process: now on Linux, the most so far elsewhere."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
