"""How workers join: at the start, as a retry, as a twin, or into running rounds."""

from __future__ import annotations

from sparkdl.errors import ProtocolError, TransportError
from sparkdl.ps.state.records import Wait, Worker
from sparkdl.ps.state.roster import Roster
from sparkdl.ps.state.rounds import integer_of
from sparkdl.transport.frames import Flag, Kind, Message


class Joining(Roster):
    """HELLO and all that may follow from it."""

    def _hello(self, connection: int, message: Message) -> None:
        if not 0 <= message.rank < self.settings.num_workers:
            raise ProtocolError(
                "a worker with an impossible rank said HELLO",
                expected=f"0 .. {self.settings.num_workers - 1}",
                received=str(message.rank),
            )
        size = message.meta.get("weights_bytes", self.limits.weights_bytes)
        if size != self.limits.weights_bytes:
            raise ProtocolError(
                f"rank {message.rank}'s model does not fit the server's layout",
                expected=f"{self.limits.weights_bytes} bytes of weights",
                received=f"{size} bytes",
                hint="does the model build other layers on the executors?",
            )
        batches = message.meta.get("batches_per_epoch", 0)
        if not isinstance(batches, int) or batches < 0:
            raise ProtocolError("a malformed HELLO", received=f"batches_per_epoch={batches!r}")
        if self._failure is not None:
            raise self._failure
        worker = self._workers.setdefault(message.rank, Worker(message.rank))
        if message.attempt in worker.superseded:
            raise TransportError(
                f"attempt {message.attempt} of rank {message.rank} is superseded",
                received="HELLO",
                hint="the task was retried elsewhere; this one can end",
            )
        self._waits[connection] = Wait("twin", message, self._now)
        if worker.finished or worker.attempt in (None, message.attempt):
            self._enter(connection, message, worker)

    def _enter(self, connection: int, message: Message, worker: Worker) -> None:
        """Admits a HELLO whose rank no other live attempt holds."""
        if worker.finished or (self._cohort_done and not worker.member):
            self._welcome(connection, worker, Flag.DONE)
            return
        if worker.attempt not in (None, message.attempt):
            self._bury(worker)
        self._bind(connection, message, worker)
        worker.info = dict(message.meta)
        if worker.member or not (self._rule.blocking or self._gated):
            if self._gathered:
                self._join(connection, worker)
            else:
                self._waits[connection] = Wait("gather", message, self._now)
        elif not self._started:
            self._waits[connection] = Wait("start", message, self._now)
        elif self._gated and not self._rule.blocking:
            self._join(connection, worker)
        else:
            self._waits[connection] = Wait("join", message, self._now)

    def _join(self, connection: int, worker: Worker, source: str = "center") -> None:
        if self._gated:  # a latecomer must not hold back those who are ahead
            others = [w.clock for w in self._live() if w is not worker]
            worker.clock = max(worker.clock, min(others, default=0))
        worker.joined = True
        worker.member = self._rule.blocking
        self._welcome(connection, worker, Flag.NONE, source)

    def _welcome(self, connection: int, worker: Worker, flag: Flag, source: str = "center") -> None:
        reply = Message(
            Kind.OK,
            flags=flag,
            sequence=worker.applied,
            rows=worker.rows,
            batches=worker.batches,
            epoch=worker.epoch,
            batch=worker.batch,
            meta={
                "num_workers": self.settings.num_workers,
                "source": source,
                "worker_clock": worker.clock,
                "lease_s": self.settings.lease_s,
                "steps_per_epoch": max(
                    (w.batches_per_epoch for w in self._workers.values()), default=0
                ),
                "texts": {
                    str(rank): w.info["text"]
                    for rank, w in self._workers.items()
                    if isinstance(w.info.get("text"), str)
                },
                "released_epoch": self._released_epoch,
                "rule": self._rule.name,
                "payload": self._rule.payload,
                "blocking": self._rule.blocking,
            },
        )
        self._answer(connection, reply, worker)

    def _admit(self) -> None:
        """Answers the HELLOs that can be answered now."""
        for connection, wait in self._waiting("twin"):
            worker = self._workers[wait.message.rank]
            if worker.finished or not worker.reachable:
                self._enter(connection, wait.message, worker)
        starters = self._waiting("start")
        if starters and len(starters) == self.settings.num_workers:
            self._started = True
            self._shown = self._wish
            for connection, wait in starters:
                self._join(connection, self._workers[wait.message.rank])
        early = self._waiting("gather")
        if early:
            waited = self._now - min(wait.since for _, wait in early)
            if len(early) >= self.settings.gather or waited >= self.settings.gather_s:
                self._gathered = True
                for connection, wait in early:
                    self._join(connection, self._workers[wait.message.rank])
        for connection, wait in self._waiting("join"):
            worker = self._workers[wait.message.rank]
            if self._cohort_done:
                self._welcome(connection, worker, Flag.DONE)
                continue
            if self._center.on_workers and self._members():
                continue  # the next round's reply asks a live rank to upload its state
            if self._center.on_workers:
                self._position = self._snapshot_position
            worker.epoch, worker.batch = self._position
            self._join(connection, worker, "snapshot" if self._center.on_workers else "center")

    def _choose_uploader(self, members: list[Worker]) -> int | None:
        """Lowest live rank, if a joiner waits for the state and nobody sends it yet."""
        if not (self._center.on_workers and self._waiting("join")):
            return None
        if self._transfer.uploader is None:
            present = [w.rank for w in members if w.reachable]
            self._transfer.uploader = present[0] if present else None
            return self._transfer.uploader
        return None

    def _state_put(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message)
        if message.meta.get("keep"):
            self._kept.put(message)
            self._answer(connection, Message(Kind.OK), worker)
            return
        if not (worker.member and self._transfer.uploader == worker.rank):
            self._answer(connection, Message(Kind.OK), worker)  # nobody waits for it any more
            return
        if self._transfer.put(message):
            for joiner, wait in self._waiting("join"):
                fresh = self._workers[wait.message.rank]
                fresh.epoch, fresh.batch = self._transfer.position
                self._transfer.readers.add(fresh.rank)
                self._join(joiner, fresh, "state")
        self._answer(connection, Message(Kind.OK), worker)

    def _state_get(self, connection: int, message: Message) -> None:
        offset = integer_of(message, "offset")
        if message.rank < 0:  # the driver
            chunk, total = self._kept.get(offset, self.limits.buffer_bytes)
            meta = {"total": total, "epoch": self._kept.epoch}
            self._answer(connection, Message(Kind.STATE, meta=meta, body=chunk))
            return
        worker = self._identify(connection, message)
        chunk, total = self._transfer.get(offset, self.limits.buffer_bytes)
        if offset + chunk.size == total:
            self._transfer.forget(worker.rank)
        self._answer(connection, Message(Kind.STATE, meta={"total": total}, body=chunk), worker)
