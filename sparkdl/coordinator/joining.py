"""How workers join: at the start, as a retried task, as a duplicate attempt, or late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparkdl.coordinator.group import Group, Wait
from sparkdl.coordinator.store import Entry, Store
from sparkdl.coordinator.telemetry import is_count
from sparkdl.coordinator.worker import Introduction, Worker
from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import Flag, Kind, Message


class Joining:
    """HELLO and all that may follow from it.

    Args:
        group: The run's.
        store: Says whether ranks begin together, and where a joiner takes its state from.
    """

    def __init__(self, group: Group, store: Store) -> None:
        self._group, self._store = group, store
        self.started = not store.together
        self._gathered = group.settings.gather <= 1
        self.group_done = False
        """Whether the ranks that train in step are through: nobody joins any more."""

    def hello(self, connection: int, message: Message) -> None:
        """A worker joins, or tells more of itself.

        Raises:
            ProtocolError: It cannot be a worker of this run.
        """
        group = self._group
        count = group.settings.num_workers
        if not 0 <= message.rank < count:
            raise ProtocolError(
                "a worker with an impossible rank said HELLO",
                expected=f"0 .. {count - 1}",
                received=str(message.rank),
            )
        self._store.check(message)
        introduction_of(message)
        if group.failure is not None:
            raise group.failure.worker_error()
        worker = group.workers.setdefault(message.rank, Worker(message.rank))
        worker.refuse_superseded(message)
        group.defer(connection, "duplicate", message)
        if worker.finished or worker.attempt in (None, message.attempt):
            self._enter(connection, message, worker)

    def settle(self) -> None:
        """Answers the HELLOs that can be answered now."""
        group = self._group
        if not group.waiting("duplicate", "start", "gather", "join"):
            return
        for connection, wait in group.waiting("duplicate"):
            worker = group.workers[wait.message.rank]
            if worker.finished or not worker.reachable or self._store.gives_way(wait.since):
                self._enter(connection, wait.message, worker)
        starters = group.waiting("start")
        if starters and len(starters) == group.settings.num_workers:
            self.started = True
            group.orders.latch()
            self._let_in(starters)
        early = group.waiting("gather")
        if early:
            waited = group.now - min(wait.since for _, wait in early)
            if len(early) >= group.settings.gather or waited >= group.settings.gather_s:
                self._gathered = True
                self._let_in(early)
        self._let_in(group.waiting("join"), late=True)

    def expire(self) -> None:
        """Ends the HELLOs that waited too long for the others."""
        group, limits = self._group, self._group.settings
        starters = group.waiting("start")
        if starters and group.now - min(w.since for _, w in starters) > limits.start_timeout_s:
            present = {w.message.rank for _, w in starters}
            missing = [r for r in range(limits.num_workers) if r not in present]
            for connection, _ in starters:
                group.time_out(
                    connection, "the start of all workers", missing, limits.start_timeout_s,
                    "fewer free slots than workers?",
                )  # fmt: skip
        for connection, wait in group.waiting("join"):
            if group.now - wait.since > limits.round_timeout_s:
                group.time_out(
                    connection, f"rank {wait.message.rank}'s turn after its HELLO",
                    self._store.missing(), limits.round_timeout_s, "raise round_timeout_s?",
                )  # fmt: skip

    def finish(self, connection: int, message: Message) -> None:
        """A worker's work is done."""
        group = self._group
        worker = group.workers.get(message.rank)
        if worker is None or not (worker.finished and worker.attempt == message.attempt):
            worker = group.identify(connection, message)
        self.group_done = self._store.in_step
        group.mark_finished(worker)
        group.answer(connection, Message(Kind.OK), worker)

    def _enter(self, connection: int, message: Message, worker: Worker) -> None:
        """Admits a HELLO whose rank no other live attempt holds."""
        group = self._group
        if worker.finished or (self.group_done and not worker.member):
            self._welcome(connection, worker, Flag.DONE)
            return
        if worker.attempt not in (None, message.attempt):
            group.mark_dead(worker)
        group.bind(connection, message, worker)
        said = introduction_of(message)
        if worker.member and said.text is None:  # it tells more of itself
            said = replace(said, text=worker.said.text)
        worker.said = said
        if not self._store.together and not self._gathered:
            group.defer(connection, "gather", message)
        elif worker.member:
            self._welcome(connection, worker, Flag.NONE)
        else:
            group.defer(connection, "join" if self.started else "start", message)

    def _let_in(self, waits: list[tuple[int, Wait]], *, late: bool = False) -> None:
        for connection, wait in waits:
            worker = self._group.workers[wait.message.rank]
            if late and self.group_done:
                self._welcome(connection, worker, Flag.DONE)
                continue
            entry = self._store.enter(worker, late=late)
            if entry is not None:
                self.let_in(connection, worker, entry)

    def let_in(self, connection: int, worker: Worker, entry: Entry) -> None:
        """Makes a worker a member."""
        worker.member = True
        self._welcome(connection, worker, Flag.NONE, entry)

    def _welcome(
        self, connection: int, worker: Worker, flag: Flag, entry: Entry | None = None
    ) -> None:
        group = self._group
        known = group.workers.values()
        meta: dict[str, Any] = {
            "num_workers": group.settings.num_workers,
            "source": "center" if entry is None else entry.source,
            "worker_clock": worker.clock,
            "lease_s": group.settings.lease_s,
            "steps_per_epoch": max((w.said.batches_per_epoch for w in known), default=0),
            "texts": {str(w.rank): w.said.text for w in known if w.said.text is not None},
            "released_epoch": group.orders.released_epoch,
            "in_step": self._store.in_step,
            **self._store.welcome(),
        }
        reply = Message(
            Kind.OK,
            flags=flag,
            sequence=worker.applied,
            rows=worker.rows,
            batches=worker.batches,
            epoch=worker.epoch,
            batch=worker.batch,
            meta=meta,
        )
        group.answer(connection, reply, worker)


def introduction_of(message: Message) -> Introduction:
    """The sender of a HELLO, as it describes itself.

    Raises:
        ProtocolError: A field has another type.
    """
    meta = message.meta
    rows, batches, pid = (meta.get(key, 0) for key in ("rows", "batches_per_epoch", "pid"))
    host, text = meta.get("host", ""), meta.get("text")
    for name, value in (("rows", rows), ("batches_per_epoch", batches), ("pid", pid)):
        if not is_count(value):
            raise ProtocolError(
                "a malformed HELLO",
                expected="whole numbers from 0 on, below 2**63",
                received=f"{name}={value!r}"[:200],
            )
    if not isinstance(host, str) or not (text is None or isinstance(text, str)):
        raise ProtocolError(
            "a malformed HELLO", expected="texts", received=f"host={host!r}, text={text!r}"
        )
    return Introduction(rows, batches, host, pid, text)
