"""Base of both stores of a parameter server: center, pulls, replies that read the center."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sparkdl.changes import VariableChanges
from sparkdl.codecs import Compression
from sparkdl.coordinator.store import Store, Work
from sparkdl.coordinator.worker import Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import COMMITS, StoreKind, limits_of
from sparkdl.ps.store.center import Center
from sparkdl.ps.store.holdings import Holdings
from sparkdl.ps.store.reading import Reading
from sparkdl.rules.rule import Rule
from sparkdl.transport.frames import Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout


class ParameterStore(Store, abc.ABC):
    """Weights that all workers share, changed by a rule; a store of a coordinator.

    A commit is applied from its connection's buffer. A reply reads the center itself; only if a
    commit changes the center meanwhile is the unread rest copied, into that same buffer. So replies
    are consistent, and memory stays at center + rule state + one buffer each.

    Args:
        layout: Of the flat buffer.
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        compression: What workers may send encoded; None refuses encoded commits.
    """

    kinds = frozenset({StoreKind.PULL, StoreKind.PUSH, StoreKind.PUSH_PULL, StoreKind.SNAPSHOT})

    def __init__(
        self,
        layout: Layout,
        center: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
    ) -> None:
        self.limits = limits_of(layout, compression)
        self._rule = rule
        self._compression = compression
        self._center = Center(layout, center, rule, compression)
        self._holdings = None if compression is None else Holdings(compression)
        self._readings: dict[int, Reading] = {}

    @property
    def name(self) -> str:
        """The rule's name."""
        return repr(self._rule.name)

    def check(self, message: Message) -> None:
        """Refuses a worker whose model has another size."""
        size = message.meta.get("weights_bytes", self.limits.dense_bytes)
        if size != self.limits.dense_bytes:
            raise ProtocolError(
                f"rank {message.rank}'s model does not fit the server's layout",
                expected=f"{self.limits.dense_bytes} bytes of weights",
                received=f"{size} bytes",
                hint="does the model build other layers on the executors?",
            )

    def welcome(self) -> Mapping[str, bool | str]:
        """The rule's name and what it takes."""
        return {"rule": self._rule.name, "payload": self._rule.payload}

    def leave(self, worker: Worker) -> None:
        """Forgets what is kept for a worker that is dead or done."""
        if self._holdings is not None:
            self._holdings.forget(worker.rank)

    def disconnect(self, connection: int) -> None:
        """Nobody reads this connection's reply any more."""
        self._readings.pop(connection, None)

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; needs no lock.

        The values take the payload's place in the connection's buffer, so that a commit costs a
        copy of its few bytes, and no second buffer.
        """
        if not (message.flags & Flag.ENCODED and message.kind in COMMITS):
            return message
        if self._compression is None:
            raise ProtocolError(
                "an encoded commit in a run without compression",
                expected="float32 values",
                received="a codec's payload",
            )
        body = np.empty(0, np.uint8) if message.body is None else message.body.copy()
        raw = self._group.buffer(connection)[: self.limits.dense_bytes]
        self._compression.commits.decode(body, self.limits.dense(raw))
        return replace(message, body=raw)

    def receive(self, connection: int, message: Message) -> Work | None:
        """Answers or defers a request."""
        if message.kind in COMMITS:
            return self._commit(connection, message, self._group.identify(connection, message))
        if message.kind is StoreKind.SNAPSHOT:
            self._take_snapshot(connection, message, self._group.identify(connection, message))
            return None
        worker = self._group.identify(connection, message) if message.rank >= 0 else None
        self._pull(connection, message, worker)
        return None

    def write(self, changes: VariableChanges) -> None:
        """Sets what the driver's callbacks wrote to the weights."""
        if changes.offsets:
            self._preserve()
            changes.write_into(self._center.weights)

    @abc.abstractmethod
    def _commit(self, connection: int, message: Message, worker: Worker) -> Work | None:
        """Takes a commit."""

    def _take_snapshot(self, connection: int, message: Message, worker: Worker) -> None:
        raise ProtocolError(
            "SNAPSHOT is for rules that wait and take gradients",
            expected="a rule whose workers hold the weights",
            received=f"rule {self._rule.name!r}",
            hint="with other rules the server itself holds the weights",
        )

    def _pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        """Answers a pull, of the driver where ``worker`` is None."""
        group = self._group
        if worker is not None:
            worker.pulled_clock = group.clock
            self._center.pulled(worker.rank)
        group.answer(connection, self._weights(connection, message), worker)

    def _values(self, message: Message) -> FloatArray:
        """The values of a commit, in the buffer that they arrived in."""
        body = message.body
        whole = body is not None and body.nbytes == self.limits.dense_bytes
        if body is None or not whole or message.flags & Flag.SLICED:
            raise ProtocolError(
                f"a {message.kind.name} frame without the whole flat buffer",
                expected=f"{self.limits.dense_bytes} bytes of weights",
                received=f"{message.body_bytes} bytes, {message.flags!r}",
            )
        return self.limits.dense(body)

    def _weights(self, connection: int, request: Message) -> Message:
        """OK for a push; the center as it is now, or its encoded change, for a pull."""
        if request.kind is StoreKind.PUSH:
            return Message(Kind.OK, sequence=request.sequence)
        encoded = request.flags & Flag.ENCODED and request.rank >= 0
        if self._holdings is not None and encoded and not self._center.on_workers:
            return self._holdings.answer(request, self._center.weights)
        group = self._group
        reading = Reading(self._center.weights.view(np.uint8), lambda: group.buffer(connection))
        if not self._rule.lock_free:  # Hogwild! readers take what they find
            self._readings[connection] = reading
        return Message(StoreKind.WEIGHTS, sequence=request.sequence, reading=reading)

    def _preserve(self) -> None:
        """Before the center changes: whoever still reads it keeps what it was."""
        for reading in self._readings.values():
            reading.preserve()
        self._readings.clear()
