"""The protocol of a store: state that the ranks of a run share, which plugs into a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.coordinator.group import Group, Worker
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.frames import FrameKind, FrameLimits, Message


@dataclass(frozen=True)
class Entry:
    """The source of the state of a worker that joins.

    Args:
        source: ``'center'`` (pull), ``'state'`` (a member's weights and optimizer state),
            ``'snapshot'`` (pull: the last snapshot), or ``''`` where the store has none.
    """

    source: str = ""


@dataclass(frozen=True)
class Work:
    """The part of a request that is done after the lock is given back."""

    run: Callable[[], Message]
    worker: Worker


class Store:
    """State that the ranks share, beside a coordinator; as it stands there is none.

    A store of its own overrides what differs. All methods but :meth:`decoded` are called under the
    group's lock.
    """

    limits = FrameLimits()
    """The bodies that it takes."""
    kinds: frozenset[FrameKind] = frozenset()
    """The requests that it answers."""
    rounds = 0
    """Rounds that were completed."""
    together = True
    """Whether all ranks begin at the same moment."""
    in_step = True
    """Whether the ranks train in step to the end, so that one that is done ends all."""
    latched = False
    """Whether the driver's orders are told only between two rounds."""

    @property
    def name(self) -> str:
        return "none"

    def attach(self, group: Group) -> None:
        """Called once, before anything else, with the run's group."""
        self._group = group

    def check(self, message: Message) -> None:
        """Refuses a HELLO whose sender does not fit the store."""

    def decoded(self, connection: int, message: Message) -> Message:
        """The request as :meth:`receive` takes it; called without the lock."""
        return message

    def receive(self, connection: int, message: Message) -> Work | None:
        """Answers or defers a request of ``kinds``; returns what is left without the lock."""
        raise NotImplementedError(message.kind.name)

    def enter(self, worker: Worker, *, late: bool) -> Entry | None:
        """Lets a worker in; None: not yet. ``late``: the others have begun before."""
        return Entry()

    def gives_way(self, since: float) -> bool:
        """Whether a live attempt leaves its rank to the next one, which has waited ``since``."""
        return False

    def welcome(self) -> Mapping[str, Any]:
        """More that a worker is told when it joins."""
        return {}

    def leave(self, worker: Worker) -> None:
        """The worker is dead or done."""

    def disconnect(self, connection: int) -> None:
        """The connection is gone."""

    def write(self, changes: VariableChanges) -> None:
        """Takes what the driver's callbacks wrote, as far as the store has those variables."""

    def settle(self) -> None:
        """Answers the deferred requests that can be answered now."""

    def expire(self) -> None:
        """Ends the deferred requests that waited too long."""

    def missing(self) -> list[int]:
        """Ranks that a joiner waits for."""
        return []
