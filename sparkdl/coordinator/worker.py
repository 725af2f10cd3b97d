"""The coordinator's memory of each rank, over all its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdl.coordinator.status import WorkerStatus
from sparkdl.errors import TransportError
from sparkdl.process.host_load import HostLoad
from sparkdl.training.phases import Usage
from sparkdl.transport.frames import Message


@dataclass(frozen=True)
class Introduction:
    """A rank's description of itself when it joins.

    Args:
        text: For the other ranks (how they can connect to it).
    """

    rows: int = 0
    batches_per_epoch: int = 0
    host: str = ""
    pid: int = 0
    text: str | None = None


@dataclass
class Worker:
    """One rank over all its attempts.

    ``epoch``, ``batch``, ``rows`` and ``clock`` are *committed* progress, so a retried task
    resumes there. ``member`` says whether the present attempt was let in and takes part.
    """

    rank: int
    attempt: int | None = None
    connection: int | None = None
    superseded: set[int] = field(default_factory=set)
    member: bool = False
    finished: bool = False
    dead: bool = False
    lost_at: float | None = None
    last_seen: float = 0.0
    applied: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0
    batches: int = 0
    commits: int = 0
    clock: int = 0
    pulled_clock: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    said: Introduction = field(default_factory=Introduction)
    usage: Usage | None = None
    load: HostLoad | None = None
    changes_taken: int = 0

    @property
    def alive(self) -> bool:
        """Said HELLO, is neither dead nor finished; a broken connection in grace counts."""
        return self.attempt is not None and not self.dead and not self.finished

    @property
    def reachable(self) -> bool:
        """Alive with an unbroken connection: only such an attempt makes a duplicate wait."""
        return self.alive and self.lost_at is None

    def bind(self, connection: int, message: Message, now: float) -> None:
        """Takes ``connection`` as this rank's, and its attempt as the current one."""
        if self.attempt != message.attempt:
            if self.attempt is not None:
                self.superseded.add(self.attempt)
            self.attempt, self.applied, self.member = message.attempt, 0, False
            self.changes_taken = 0
        self.connection, self.lost_at, self.dead = connection, None, False
        self.last_seen = now

    def refuse_superseded(self, message: Message) -> None:
        """Raises TransportError if another attempt has taken the place of the sender."""
        if message.attempt in self.superseded:
            raise TransportError(
                f"attempt {message.attempt} of rank {message.rank} is superseded",
                expected=f"frames of attempt {self.attempt}",
                received=f"{message.kind.name} of attempt {message.attempt}",
                hint="the task was retried elsewhere; this one can end",
            )

    def advance(self, message: Message) -> None:
        """Takes note of a commit that is applied."""
        self.applied = message.sequence
        self.commits += 1
        self.clock += 1
        self.epoch, self.batch = message.epoch, message.batch
        self.rows += message.rows
        self.batches += message.batches

    def count_staleness(self, commits: int) -> None:
        """Takes note of how many commits others made since this rank's pull."""
        self.staleness_sum += commits
        self.staleness_max = max(self.staleness_max, commits)

    def status(self) -> WorkerStatus:
        """The driver's view of this rank."""
        return WorkerStatus(
            alive=self.alive,
            attempt=self.attempt,
            epoch=self.epoch,
            batch=self.batch,
            batches=self.batches,
            rows=self.rows,
            finished=self.finished,
            clock=self.clock,
            commits=self.commits,
            batches_per_epoch=self.said.batches_per_epoch,
            host=self.said.host,
            pid=self.said.pid,
            staleness_mean=self.staleness_sum / max(self.commits, 1),
            staleness_max=self.staleness_max,
            member=self.member,
            retries=len(self.superseded),
            usage=self.usage,
            load=self.load,
        )
