"""What workers tell about themselves, and what the driver asks and orders."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import ProtocolError, WorkerError
from sparkdl.ps.state.joining import Joining
from sparkdl.ps.state.records import Wait
from sparkdl.ps.state.telemetry import parse_telemetry
from sparkdl.transport.frames import Flag, Kind, Message


class Reporting(Joining):
    """Telemetry, ends, failures, STATUS and CONTROL."""

    def metrics(self) -> dict[str, float]:
        """Numbers for /metrics."""
        with self.lock:
            workers = self._workers.values()
            commits = sum(w.commits for w in workers)
            return {
                "commits": commits,
                "rounds": self.rounds,
                "clock": self.clock,
                "workers_alive": sum(w.alive for w in workers),
                "workers_finished": sum(w.finished for w in workers),
                "waiting": len(self._waits),
                "rows": sum(w.rows for w in workers),
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
                "staleness_mean": sum(w.staleness_sum for w in workers) / max(commits, 1),
                "staleness_max": max((w.staleness_max for w in workers), default=0),
                "failed": float(self._failure is not None),
            }

    def _report(self, connection: int, message: Message) -> None:
        worker = self._identify(connection, message)
        self._telemetry.record(worker.rank, message.attempt, parse_telemetry(message))
        if not worker.commits and message.rows:
            worker.epoch, worker.batch, worker.rows = message.epoch, message.batch, message.rows
        if message.flags & Flag.WAIT:
            self._waits[connection] = Wait("epoch", message, self._now)
        else:
            self._answer(connection, Message(Kind.OK), worker)

    def _heartbeat(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        if worker is not None and worker.attempt == message.attempt:
            worker.last_seen = self._now
        reply = Message(Kind.OK)
        self._stamp(reply, worker)
        self._outbox.append((connection, reply))  # over http the connection may wait meanwhile

    def _take_failure(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        stale = worker is not None and message.attempt in worker.superseded
        if self._failure is None and not stale:
            self._failure = WorkerError(
                message.rank,
                str(message.meta.get("error", "unknown error")),
                str(message.meta.get("traceback", "")),
            )
        if worker is not None and worker.attempt == message.attempt:
            self._bury(worker)
        self._answer(connection, Message(Kind.OK))

    def _finish(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        if worker is None or not (worker.finished and worker.attempt == message.attempt):
            worker = self._identify(connection, message)
        worker.finished, worker.member = True, False
        self._forget_held(worker)
        self._cohort_done = self._rule.blocking
        self._transfer.forget(worker.rank)
        if self._transfer.uploader == worker.rank:
            self._transfer.uploader = None
        self._answer(connection, Message(Kind.OK), worker)

    def _bye(self, connection: int, message: Message) -> None:
        worker = self._workers.get(message.rank)
        if worker is not None and worker.connection == connection and worker.alive:
            self._bury(worker)
        self._answer(connection, Message(Kind.OK))

    def _status(self, connection: int, message: Message) -> None:
        self._driver_seen = self._now
        since = message.meta.get("since_epoch", 0)
        failure = self._failure
        meta: dict[str, Any] = {
            "workers": {str(r): w.status() for r, w in sorted(self._workers.items())},
            "epochs": self._telemetry.summary(since if isinstance(since, int) else 0),
            "failure": None
            if failure is None
            else {"rank": failure.rank, "error": failure.error, "traceback": failure.traceback},
            "clock": self.clock,
            "commits": sum(w.commits for w in self._workers.values()),
            "rounds": self.rounds,
            "released_epoch": self._released_epoch,
            "started": self._started,
            "waiting": {str(w.message.rank): w.reason for w in self._waits.values()},
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }
        self._answer(connection, Message(Kind.OK, meta=meta))

    def _control(self, connection: int, message: Message) -> None:
        if message.rank >= 0:
            raise ProtocolError("only the driver may send CONTROL", received=f"{message.rank}")
        self._driver_seen = self._now
        meta = message.meta
        stop, learning_rate = self._wish
        try:
            stop = stop or bool(meta.get("stop", False))
            learning_rate = float(meta.get("learning_rate", learning_rate))
            released = int(meta.get("release", self._released_epoch))
        except (TypeError, ValueError) as error:
            raise ProtocolError("a malformed CONTROL", received=str(error)) from error
        self._wish = (stop, learning_rate)
        # In a blocking run every rank must learn of it at the same step: with a round or an epoch.
        if not self._rule.blocking or "release" in meta or not self._started:
            self._shown = self._wish
        self._released_epoch = max(self._released_epoch, released)
        self._answer(connection, Message(Kind.OK))
