"""The driver's view of a run: workers, metrics, failure, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sparkdl.errors import ProtocolError
from sparkdl.failures import Failure
from sparkdl.process.host_load import HostLoad
from sparkdl.training.phases import Usage
from sparkdl.training.reports import MetricState
from sparkdl.transport.frames import ByteArray


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

    @classmethod
    def of(cls, fields: dict[str, Any]) -> WorkerStatus:
        """The counterpart of ``asdict``, with the load as its numbers."""
        usage = fields["usage"]
        load = fields["load"]
        return cls(
            **{
                **fields,
                "usage": None if usage is None else Usage(**usage),
                "load": None if load is None else HostLoad.of_numbers(load),
            }
        )


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
        bytes_in, bytes_out: Of all frames.
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
        meta = {
            "workers": {str(rank): _to_wire(worker) for rank, worker in self.workers.items()},
            "epochs": [
                [
                    n,
                    e.rows,
                    e.val_rows,
                    e.metrics.size,
                    e.val_metrics.size,
                    list(e.ended),
                    e.seconds,
                ]
                for n, e in self.epochs.items()
            ],
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


def _to_wire(worker: WorkerStatus) -> dict[str, Any]:
    return {**asdict(worker), "load": None if worker.load is None else worker.load.numbers()}


_COUNTERS = ("clock", "rounds", "released_epoch", "started", "bytes_in", "bytes_out")
