"""What a store is: state that the ranks of a run share, which plugs into a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sparkdl.coordinator.group import Group
from sparkdl.coordinator.worker import Worker
from sparkdl.transport.frames import Kind, Limits, Message
from sparkdl.transport.service import Metric


@dataclass(frozen=True)
class Entry:
    """Where a worker that joins takes its state from.

    Args:
        source: ``'center'`` (pull), ``'state'`` (a member's weights and optimizer state),
            ``'snapshot'`` (pull: the last snapshot), or ``''`` where the store has none.
    """

    source: str = ""


@dataclass(frozen=True)
class Work:
    """What is left of a request after the lock is given back.

    Args:
        run: Does it, and returns the reply.
        worker: Whose request it is.
    """

    run: Callable[[], Message]
    worker: Worker


class Store(Protocol):
    """Plugs into a :class:`~sparkdl.coordinator.machine.Coordinator`.

    All methods but :meth:`decoded` and :meth:`metrics` are called under the group's lock.
    """

    @property
    def limits(self) -> Limits:
        """The bodies that it takes."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """The requests that it answers."""

    @property
    def together(self) -> bool:
        """Whether all ranks begin at the same moment."""

    @property
    def in_step(self) -> bool:
        """Whether the ranks train in step to the end, so that one that is done ends all."""

    @property
    def name(self) -> str:
        """For messages."""

    def attach(self, group: Group) -> None:
        """Called once, before anything else, with the run's group."""

    def check(self, message: Message) -> None:
        """Refuses a HELLO whose sender does not fit the store."""

    def decoded(self, connection: int, message: Message) -> Message:
        """The request as :meth:`receive` takes it; called without the lock."""

    def receive(self, connection: int, message: Message) -> Work | None:
        """Answers or defers a request of ``kinds``; returns what is left without the lock."""

    def enter(self, worker: Worker, *, late: bool) -> Entry | None:
        """Lets a worker in; None: not yet. ``late``: the others have begun before."""

    def welcome(self) -> Mapping[str, bool | str]:
        """More that a worker is told when it joins."""

    def leave(self, worker: Worker) -> None:
        """The worker is dead or done."""

    def disconnect(self, connection: int) -> None:
        """The connection is gone."""

    def settle(self) -> None:
        """Answers the deferred requests that can be answered now."""

    def expire(self) -> None:
        """Ends the deferred requests that waited too long."""

    def missing(self) -> list[int]:
        """Ranks that a joiner waits for."""

    @property
    def rounds(self) -> int:
        """Rounds that were completed."""

    def metrics(self) -> list[Metric]:
        """Numbers for ``/metrics``."""


class NoStore:
    """The store of a run whose ranks exchange everything among themselves: there is none."""

    limits = Limits()
    kinds: frozenset[Kind] = frozenset()
    together = in_step = True
    name = "none"
    rounds = 0

    def attach(self, group: Group) -> None:
        """Needs nothing of the group."""

    def check(self, message: Message) -> None:
        """Takes every rank."""

    def decoded(self, connection: int, message: Message) -> Message:
        """Nothing comes encoded."""
        return message

    def receive(self, connection: int, message: Message) -> Work | None:
        """Never called: there are no kinds."""
        raise NotImplementedError(message.kind.name)

    def enter(self, worker: Worker, *, late: bool) -> Entry | None:
        """At once."""
        return Entry()

    def welcome(self) -> Mapping[str, bool | str]:
        """Nothing more."""
        return {}

    def leave(self, worker: Worker) -> None:
        """Nothing is kept of a worker."""

    def disconnect(self, connection: int) -> None:
        """Nothing is kept of a connection."""

    def settle(self) -> None:
        """Nothing waits here."""

    def expire(self) -> None:
        """Nothing waits here."""

    def missing(self) -> list[int]:
        """No one waits for anyone."""
        return []

    def metrics(self) -> list[Metric]:
        """None."""
        return []
