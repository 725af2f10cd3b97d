"""The messages of driver and ranks while a stream feeds the ranks: no rows, only where."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkdl.coordinator.group import Group, Store, Work, Worker
from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import Body, FrameKind, FrameLimits, Kind, Message, kinds_of

LONGEST_WAIT_S = 5.0
"""Seconds after which a rank that waits for rows is answered; it asks again, and knows us alive."""
Told = dict[str, int | bool]


@dataclass(frozen=True)
class Offer:
    """A micro-batch that the ranks have received.

    Args:
        number: Number of the offer, from 0 in each run.
        batch_id: Spark's number of the micro-batch.
        rows: Rank -> rows that it gives to its function.
        attempts: Rank -> the attempt of the task that sent them.
    """

    number: int
    batch_id: int
    rows: Mapping[int, int]
    attempts: Mapping[int, int]


class StreamKind(FrameKind):
    """The frames that feed ranks from a stream."""

    NEXT_ROWS = 48  # a rank says where it listens, asks for rows, or takes none any more
    OFFER = 49  # driver: the ranks have the rows of a micro-batch; or there are no more
    ROWS = 50, Body.CHUNK  # rows on their way to a rank


class StreamStore(Store):
    """The ranks' addresses, the rows that they are offered, and those that they have taken.

    Ranks ask over connections of their own beside their session, which carries their lines.
    """

    limits = FrameLimits(kinds=kinds_of(StreamKind))
    kinds = frozenset({StreamKind.NEXT_ROWS, StreamKind.OFFER})

    def __init__(self) -> None:
        self.addresses: dict[int, tuple[str, int]] = {}
        """Rank -> where it listens for rows."""
        self.taken: dict[int, int] = {}
        """Rank -> number of the last offer whose rows its function has taken, all of them."""
        self.left: set[int] = set()
        """Ranks whose function takes no more rows."""
        self.began_again: set[int] = set()
        """Ranks that listen for the second time: what they had been sent is gone."""
        self._offer: Offer | None = None
        self._ended = False
        self._asking: dict[int, tuple[Worker, float]] = {}

    def attach(self, group: Group) -> None:
        super().attach(group)
        self._changed = threading.Condition(group.lock)

    def offer(self, offer: Offer | None) -> Message:
        """Makes an offer, or ends all (None); the frame that the driver sends to tell the ranks."""
        with self._group.lock:
            if offer is None:
                self._ended = True
            else:
                self._offer = offer
        return Message(StreamKind.OFFER)

    def wait_for(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something is so; False if it is not within the time."""
        with self._changed:
            return self._changed.wait_for(happened, timeout_s)

    def receive(self, connection: int, message: Message) -> Work | None:
        group = self._group
        if message.kind is StreamKind.OFFER:
            if message.rank != -1:
                raise ProtocolError(
                    "only the driver offers rows", expected="rank -1",
                    received=f"rank {message.rank}",
                )  # fmt: skip
            group.answer(connection, Message(Kind.OK))
            self._answer_all()
            return None
        worker = group.workers.get(message.rank)
        if worker is None or worker.attempt != message.attempt:
            raise ProtocolError(
                f"rank {message.rank} asks for rows and has not met the others",
                expected="HELLO of the same attempt first",
                received=f"a request of attempt {message.attempt}",
            )
        self._listen(message)
        if "taken" in message.meta:
            self._asking[connection] = worker, group.now
            self._answer(connection)
        else:
            group.answer_beside(connection, Message(Kind.OK), worker)
        self._changed.notify_all()
        return None

    def _listen(self, message: Message) -> None:
        rank, meta = message.rank, message.meta
        try:
            if "port" in meta:
                address = str(meta["host"]), int(meta["port"])
                if self.addresses.setdefault(rank, address) != address:
                    self.began_again.add(rank)
            for name in {"taken", "done"} & set(meta):
                self.taken[rank] = int(meta[name])
            if meta.get("left"):
                self.left.add(rank)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                "a malformed request for rows", expected="numbers", received=str(error)
            ) from error

    def disconnect(self, connection: int) -> None:
        self._asking.pop(connection, None)

    def expire(self) -> None:
        now = self._group.now
        for connection, (_, since) in list(self._asking.items()):
            if now - since > LONGEST_WAIT_S:
                self._tell(connection, {})

    def _answer_all(self) -> None:
        for connection in list(self._asking):
            self._answer(connection)

    def _answer(self, connection: int) -> None:
        rank = self._asking[connection][0].rank
        offer = self._offer
        if offer is not None and offer.number > self.taken[rank]:
            told: Told = {"number": offer.number, "batch_id": offer.batch_id}
            told["rows"] = offer.rows.get(rank, 0)
            told["attempt"] = offer.attempts.get(rank, 0)
            self._tell(connection, told)
        elif self._ended:
            self._tell(connection, {"end": True})

    def _tell(self, connection: int, told: Told) -> None:
        worker, _ = self._asking.pop(connection)
        self._group.answer_beside(connection, Message(Kind.OK, meta=dict(told)), worker)
