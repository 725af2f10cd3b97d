"""Metrics of all ranks, of which no attempt counts twice and none is lost; the lines they print;
the driver's view of a run: workers, metrics, failure, counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.errors import ProtocolError
from sparkdl.failures import Failure
from sparkdl.process.host_load import HostLoad
from sparkdl.settings.values import is_number
from sparkdl.training.phases import PHASES, Usage
from sparkdl.training.reports import EpochReport, MetricState
from sparkdl.transport.frames import BLOB_BYTES, ByteArray, Flag, Message


@dataclass(frozen=True)
class WorkerStatus:
    """One rank, as the coordinator knows it.

    Args:
        alive: Takes part, or may come back within the grace time.
        attempt: The present try at this rank; None before the first.
        epoch, batch: How far it has committed.
        batches, rows, commits, clock: Counted over all its attempts.
        staleness_mean, staleness_max: Commits of others between its pulls and its commits.
        member: Was let in and takes part; a worker that waits to join is alive, but no member.
        usage: What the present attempt had used at its last report; None before one.
        load: Load of its host, at the last heartbeat that told it; None before one.
    """

    alive: bool
    attempt: int | None
    epoch: int
    batch: int
    batches: int
    rows: int
    finished: bool
    clock: int
    commits: int
    batches_per_epoch: int
    host: str
    pid: int
    staleness_mean: float
    staleness_max: int
    member: bool = False
    retries: int = 0
    usage: Usage | None = None
    load: HostLoad | None = None

    def to_wire(self) -> dict[str, Any]:
        """``asdict``, with the load as its numbers."""
        return {**asdict(self), "load": None if self.load is None else self.load.numbers()}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> WorkerStatus:
        """The counterpart of :meth:`to_wire`."""
        usage = None if fields["usage"] is None else Usage(**fields["usage"])
        load = None if fields["load"] is None else HostLoad.of_numbers(fields["load"])
        return cls(**{**fields, "usage": usage, "load": load})


@dataclass(frozen=True)
class EpochTotals:
    """One epoch over all ranks.

    Args:
        metrics, val_metrics: Sums of the ranks' metric states, float64; empty for none.
        seconds: From the end of the epoch before to its own, as far as it has ended; None for the
            first epoch, before which ranks start and compile.
    """

    rows: int
    val_rows: int
    metrics: MetricState
    val_metrics: MetricState
    ended: tuple[int, ...]
    seconds: float | None = None


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Args:
        epochs: By number, from the epoch on that was asked for.
        clock, rounds: Commits or rounds that the store has applied.
        released_epoch: Last epoch whose end the driver has released; -1 for none.
        started: Whether the ranks that begin together have begun.
        waiting: Rank -> what its deferred request waits for.
    """

    workers: dict[int, WorkerStatus] = field(default_factory=dict)
    epochs: dict[int, EpochTotals] = field(default_factory=dict)
    failure: Failure | None = None
    clock: int = 0
    rounds: int = 0
    released_epoch: int = -1
    started: bool = False
    waiting: dict[int, str] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def commits(self) -> int:
        return sum(worker.commits for worker in self.workers.values())

    def to_wire(self) -> tuple[dict[str, Any], ByteArray]:
        """A JSON object, and the metric states as float64 one after the other."""
        parts = [part for e in self.epochs.values() for part in (e.metrics, e.val_metrics)]
        epochs = [
            [n, e.rows, e.val_rows, e.metrics.size, e.val_metrics.size, list(e.ended), e.seconds]
            for n, e in self.epochs.items()
        ]
        meta = {
            "workers": {str(rank): worker.to_wire() for rank, worker in self.workers.items()},
            "epochs": epochs,
            "failure": None if self.failure is None else self.failure.to_wire(),
            "waiting": {str(rank): reason for rank, reason in self.waiting.items()},
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        numbers = np.concatenate(parts) if parts else np.empty(0)
        return meta, numbers.astype("<f8").view(np.uint8)

    @classmethod
    def from_wire(cls, meta: Mapping[str, Any], body: ByteArray) -> Status:
        """The counterpart of :meth:`to_wire`.

        Raises:
            ProtocolError: The meta does not describe the body.
        """
        epochs: dict[int, EpochTotals] = {}
        start = 0
        try:
            numbers = np.frombuffer(body.tobytes(), "<f8")
            for number, rows, val_rows, size, val_size, ended, seconds in meta["epochs"]:
                middle, stop = start + size, start + size + val_size
                if not start <= middle <= stop <= numbers.size:
                    raise ValueError(f"numbers {start} to {stop} of {numbers.size}")
                epochs[number] = EpochTotals(
                    rows, val_rows, numbers[start:middle], numbers[middle:stop], tuple(ended),
                    None if seconds is None else float(seconds),
                )  # fmt: skip
                start = stop
            if start != numbers.size:
                raise ValueError(f"{start} numbers of {numbers.size}")
            failure = meta["failure"]
            return cls(
                workers={int(r): WorkerStatus.of(w) for r, w in meta["workers"].items()},
                epochs=epochs, failure=None if failure is None else _failure(failure),
                waiting={int(r): str(reason) for r, reason in meta["waiting"].items()},
                **{name: meta[name] for name in _COUNTERS},
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                "cannot read the status of the run", expected="what Status.to_wire wrote",
                received=f"{type(error).__name__}: {error}",
                hint="install the same sparkdl on the driver and on all executors",
            ) from error  # fmt: skip


def _failure(fields: Mapping[str, object]) -> Failure:
    missing = {"rank", "error", "traceback"} - fields.keys()
    if missing:
        raise ValueError(f"a failure without {sorted(missing)}")
    return Failure.from_wire(fields)


_COUNTERS = ("clock", "rounds", "released_epoch", "started", "bytes_in", "bytes_out")
MAX_EPOCH = 1 << 31


def require_sendable(epoch: int, size_bytes: int) -> None:
    """Raises ProtocolError if the metric states of an epoch are larger than a frame can be."""
    if size_bytes > BLOB_BYTES:
        raise ProtocolError(
            f"the metrics of epoch {epoch} cannot be sent to the driver",
            expected=f"metric states of at most {BLOB_BYTES} bytes in all",
            received=f"{size_bytes} bytes",
            hint="metrics with fewer thresholds or classes, e.g. AUC(num_thresholds=200)",
        )


def report_message(report: EpochReport, *, wait: bool, usage: Usage | None = None) -> Message:
    """The REPORT frame; its numbers travel as they are, in the body.

    Raises:
        ProtocolError: The metric states are larger than a frame can be.
    """
    body = np.concatenate([report.metrics, report.val_metrics]).astype("<f8").view(np.uint8)
    require_sendable(report.epoch, body.nbytes)
    split = int(report.metrics.size)
    meta: dict[str, Any] = {"rows": report.rows, "val_rows": report.val_rows, "split": split}
    if report.ended:
        meta["ended"] = True
    if usage is not None:
        meta["usage"] = [
            *(round(usage.seconds.get(phase, 0.0), 6) for phase in PHASES), usage.cpu_s,
            usage.memory_bytes, usage.bytes_sent, usage.bytes_received,
        ]  # fmt: skip
    return Message(
        CoordinatorKind.REPORT, flags=Flag.WAIT if wait else Flag.NONE, epoch=report.epoch,
        batch=report.batches_done, rows=report.rows_done, total=body.nbytes, meta=meta,
        body=body if body.size else None,
    )  # fmt: skip


def report_of(message: Message) -> EpochReport:
    """The counterpart of :func:`report_message`."""
    meta = message.meta
    body = message.content
    counts = [meta.get(name, 0) for name in ("rows", "val_rows", "split")]
    whole = all(map(is_count, counts))
    if not whole or body.nbytes % 8 or 8 * counts[2] > body.nbytes or message.epoch > MAX_EPOCH:
        raise ProtocolError(
            f"the telemetry of rank {message.rank} is malformed",
            expected="whole numbers of rows, below 2**63, and float64 numbers as body",
            received=f"epoch {message.epoch}, {str(counts)[:200]}, {body.nbytes} bytes",
        )
    numbers = np.frombuffer(body.tobytes(), "<f8")
    return EpochReport(
        epoch=message.epoch, rows=counts[0], metrics=numbers[: counts[2]],
        ended=bool(meta.get("ended")), val_rows=counts[1], val_metrics=numbers[counts[2] :],
        batches_done=message.batch, rows_done=message.rows,
    )  # fmt: skip


def usage_of(message: Message) -> Usage | None:
    """The time and memory that the sender of a REPORT has used so far; None if it does not say."""
    numbers = message.meta.get("usage")
    if numbers is None:
        return None
    whole = isinstance(numbers, list) and len(numbers) == len(PHASES) + 4
    if not whole or not all(_is_amount(number) for number in numbers):
        raise ProtocolError(
            f"what rank {message.rank} says that it has used is malformed",
            expected=f"{len(PHASES) + 4} numbers of at least 0", received=str(numbers)[:200],
        )  # fmt: skip
    *seconds, cpu_s, memory_bytes, sent, received = numbers
    return Usage(
        dict(zip(PHASES, map(float, seconds), strict=True)), float(cpu_s),
        int(memory_bytes), int(sent), int(received),
    )  # fmt: skip


def load_of(message: Message) -> HostLoad | None:
    """The load of the sender's host; None if a HEARTBEAT does not say it."""
    numbers = message.meta.get("load")
    if numbers is None:
        return None
    try:
        return HostLoad.of_numbers(numbers)
    except ValueError as error:
        raise ProtocolError(
            f"what rank {message.rank} says of its host's load is malformed",
            expected="percentages: processors, memory, then the GPUs' use and memory",
            received=str(numbers)[:200],
        ) from error


def lines_of(message: Message) -> list[str]:
    """The lines that a HEARTBEAT brings."""
    lines = message.meta.get("lines", [])
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ProtocolError(
            f"the lines of rank {message.rank} are malformed", expected="a list of texts",
            received=str(lines)[:200],
        )  # fmt: skip
    return [line.replace("\n", " ") for line in lines]


def is_count(value: object) -> bool:
    """Whether this is a whole number that can count something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_amount(value: object) -> bool:
    return is_number(value) and 0 <= value < 2**63  # type: ignore[operator]


class Telemetry:
    """The latest report per epoch, rank and attempt, summed when the driver asks.

    A metric state is a vector of sums and counts, so the sum over ranks is that of the whole epoch.
    """

    def __init__(self) -> None:
        self._reports: dict[int, dict[tuple[int, int], EpochReport]] = {}
        self._ended: dict[int, dict[int, int]] = {}  # epoch -> rank -> the attempt that ended it
        self._ended_at: dict[int, float] = {}  # epoch -> when the last rank had ended it
        self._since = 0

    def record(self, rank: int, attempt: int, report: EpochReport, now: float) -> None:
        """Replaces what this attempt said of that epoch at ``now``, in seconds."""
        if report.epoch < self._since:
            return  # the driver is through with that epoch
        ended = self._ended.setdefault(report.epoch, {})
        if ended.get(rank, attempt) != attempt:
            return  # an earlier attempt has told all of it, and died before it told the store
        self._reports.setdefault(report.epoch, {})[rank, attempt] = report
        if report.ended:
            ended[rank] = attempt
            self._ended_at[report.epoch] = now

    def forget(self, first: int) -> None:
        """Drops what was said of the epochs from ``first`` on: they are trained again."""
        for epoch in [e for e in self._reports if e >= first]:
            del self._reports[epoch]
            self._ended.pop(epoch, None)
            self._ended_at.pop(epoch, None)

    def totals(self, since: int = 0) -> dict[int, EpochTotals]:
        """The epochs from ``since`` on; those before are forgotten, so memory stays bounded."""
        self._since = max(self._since, since)
        for epoch in [e for e in self._reports if e < self._since]:
            del self._reports[epoch]
            self._ended.pop(epoch, None)
        for epoch in [e for e in self._ended_at if e < self._since - 1]:
            del self._ended_at[epoch]
        result: dict[int, EpochTotals] = {}
        for epoch in sorted(e for e in self._reports if e >= since):
            reports = list(self._reports[epoch].values())
            result[epoch] = EpochTotals(
                rows=sum(r.rows for r in reports),
                val_rows=sum(r.val_rows for r in reports),
                metrics=sum_states([r.metrics for r in reports]),
                val_metrics=sum_states([r.val_metrics for r in reports]),
                ended=tuple(sorted(self._ended.get(epoch, ()))),
                seconds=self._seconds(epoch),
            )
        return result

    def _seconds(self, epoch: int) -> float | None:
        began, ended = self._ended_at.get(epoch - 1), self._ended_at.get(epoch)
        return None if began is None or ended is None else max(0.0, ended - began)


def sum_states(states: list[MetricState]) -> MetricState:
    """The sum of metric states; a rank without rows has an empty one.

    >>> sum_states([np.array([1.0, 2.0]), np.empty(0), np.array([3.0, 4.0])])
    array([4., 6.])
    """
    total = np.zeros(max((state.size for state in states), default=0))
    for state in states:
        total[: state.size] += state
    return total


MAX_LINES_BYTES = 1 << 20
"""Bytes of lines in one frame; a rank that has more sends several frames."""
MAX_LINE_CHARS = MAX_LINES_BYTES // 8
"""Characters of a line that are sent; the rest of a longer one is not."""
KEPT_LINES = 20_000
KEPT_CHARS = 16 << 20
"""Characters of lines that are kept if the driver does not fetch them; the oldest are dropped."""


def pack_lines(lines: list[str]) -> ByteArray:
    """Lines as UTF-8, each with a line end; a line end inside a line becomes a space."""
    text = "".join(line.replace("\n", " ") + "\n" for line in lines)
    return np.frombuffer(text.encode(errors="replace"), np.uint8)


def bodies_of(lines: list[str]) -> Iterator[ByteArray]:
    """Lines as the bodies of LOG frames."""
    batch, size = list[str](), 0
    for line in (line[:MAX_LINE_CHARS] for line in lines):
        if batch and size + len(line) >= MAX_LINES_BYTES // 4:
            yield pack_lines(batch)
            batch, size = [], 0
        batch.append(line)
        size += len(line) + 1
    if batch:
        yield pack_lines(batch)


def unpack_lines(body: ByteArray) -> list[str]:
    text = body.tobytes().decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else []


class LogLines:
    """``(rank, line)`` in the order of arrival, until the driver takes them."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque()
        self._chars = 0

    def put(self, message: Message) -> None:
        body = message.content
        if body.size > MAX_LINES_BYTES:
            raise ProtocolError(
                "a LOG frame is too large", expected=f"at most {MAX_LINES_BYTES} bytes of text",
                received=f"{body.size} bytes",
            )  # fmt: skip
        self.add(message.rank, unpack_lines(body))

    def add(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._lines.append((rank, line))
            self._chars += len(line)
        while len(self._lines) > KEPT_LINES or self._chars > KEPT_CHARS:
            self._pop()

    def take(self, limit_bytes: int) -> tuple[list[int], list[str]]:
        """Ranks and lines that are forgotten from now on; about ``limit_bytes`` at most."""
        taken: list[tuple[int, str]] = []
        size = 0
        while self._lines and size < limit_bytes:
            taken.append(self._pop())
            size += len(taken[-1][1]) + 1
        return [rank for rank, _ in taken], [line for _, line in taken]

    def _pop(self) -> tuple[int, str]:
        rank, line = self._lines.popleft()
        self._chars -= len(line)
        return rank, line
