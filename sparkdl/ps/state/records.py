"""What the server remembers of each worker, and the limits it holds them to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.errors import ConfigError
from sparkdl.transport.frames import Message
from sparkdl.weights import FloatArray

WaitReason = Literal["start", "gather", "twin", "join", "round", "gate", "epoch"]


@dataclass(frozen=True)
class Settings:
    """Limits of one run. All times in seconds.

    Args:
        num_workers: Ranks ``0 .. num_workers - 1`` take part.
        lease_s: A worker that was silent for longer is dead.
        grace_s: A worker whose connection broke may come back for this long.
        start_timeout_s: Blocking rules: wait for all workers' HELLO, from the first one on.
        round_timeout_s: Blocking rules: wait of a commit for the other ranks.
        release_timeout_s: Wait at an epoch's end for a driver that says nothing at all.
        gather: Rules that do not wait: workers that begin together, so that none trains its rows
            alone at the end because it came late; 0 for none.
        gather_s: Longest wait for them; then those that are there begin.
        max_state_bytes: Bound of the state that a joiner gets; None for 8 buffers + 64 MiB.
    """

    num_workers: int
    lease_s: float = 60.0
    grace_s: float = 2.0
    start_timeout_s: float = 600.0
    round_timeout_s: float = 600.0
    release_timeout_s: float = 600.0
    gather: int = 0
    gather_s: float = 10.0
    max_state_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(
                "a server needs workers",
                expected="num_workers >= 1",
                received=f"num_workers={self.num_workers}",
            )
        for name in ("lease_s", "start_timeout_s", "round_timeout_s", "release_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name} is no time limit",
                    expected="a positive number of seconds",
                    received=repr(getattr(self, name)),
                )


@dataclass
class Worker:
    """One rank over all its attempts.

    ``epoch``, ``batch``, ``rows`` and ``clock`` are *committed* progress, so a retried task
    resumes there. ``member`` says whether rounds of a blocking rule count on this rank.
    """

    rank: int
    attempt: int | None = None
    connection: int | None = None
    superseded: set[int] = field(default_factory=set)
    joined: bool = False
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
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Said HELLO, is neither dead nor finished; a broken connection in grace counts."""
        return self.attempt is not None and not self.dead and not self.finished

    @property
    def reachable(self) -> bool:
        """Alive with an unbroken connection: only such an attempt makes a twin wait."""
        return self.alive and self.lost_at is None

    @property
    def batches_per_epoch(self) -> int:
        return int(self.info.get("batches_per_epoch", 0))

    def bind(self, connection: int, message: Message, now: float) -> None:
        """Takes ``connection`` as this rank's, and its attempt as the current one."""
        if self.attempt != message.attempt:
            if self.attempt is not None:
                self.superseded.add(self.attempt)
            self.attempt, self.applied, self.member = message.attempt, 0, False
        self.connection, self.lost_at, self.dead = connection, None, False
        self.last_seen = now

    def advance(self, message: Message) -> None:
        """Takes note of a commit that is applied."""
        self.applied = message.sequence
        self.commits += 1
        self.clock += 1
        self.epoch, self.batch = message.epoch, message.batch
        self.rows += message.rows
        self.batches += message.batches

    def status(self) -> dict[str, Any]:
        """What the driver sees of this rank."""
        return {
            "alive": self.alive,
            "attempt": self.attempt,
            "epoch": self.epoch,
            "batch": self.batch,
            "batches": self.batches,
            "rows": self.rows,
            "finished": self.finished,
            "clock": self.clock,
            "commits": self.commits,
            "batches_per_epoch": self.batches_per_epoch,
            "host": self.info.get("host"),
            "pid": self.info.get("pid"),
            "staleness_mean": self.staleness_sum / max(self.commits, 1),
            "staleness_max": self.staleness_max,
        }


@dataclass
class Wait:
    """A request whose reply is deferred."""

    reason: WaitReason
    message: Message
    since: float


@dataclass
class Payload:
    """One rank's part in a round; ``values`` is the buffer it arrived in."""

    connection: int
    values: FloatArray
    message: Message
