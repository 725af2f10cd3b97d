"""Base of both stores of a parameter server: the center and its pulls."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from sparkdl.codecs import Compression
from sparkdl.coordinator.group import Group, Store, Work, Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import COMMITS, StoreKind, limits_of
from sparkdl.ps.store.center import Center, CenterReplies
from sparkdl.rules.rule import Rule
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.frames import Message
from sparkdl.weights import FloatArray, Layout


class ParameterStore(Store, abc.ABC):
    """Weights that all workers share, changed by a rule; a store of a coordinator.

    How commits are read and pulls are answered without copies: :class:`CenterReplies`.

    Args:
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        compression: What workers may send encoded; None refuses encoded commits.
    """

    kinds = frozenset({StoreKind.PULL, StoreKind.PUSH, StoreKind.PUSH_PULL, StoreKind.SNAPSHOT})

    def __init__(
        self, layout: Layout, center: FloatArray, rule: Rule, compression: Compression | None = None
    ) -> None:
        self.limits = limits_of(layout, compression)
        self._rule = rule
        self._compression = compression
        self._center = Center(layout, center, rule, compression)

    def attach(self, group: Group) -> None:
        super().attach(group)
        self._replies = CenterReplies(self._center, self.limits, self._compression, group.buffer)

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
                expected=f"{self.limits.dense_bytes} bytes of weights", received=f"{size} bytes",
                hint="does the model build other layers on the executors?",
            )  # fmt: skip

    def welcome(self) -> Mapping[str, Any]:
        """The rule's name and what it takes."""
        return {"rule": self._rule.name, "payload": self._rule.payload}

    def leave(self, worker: Worker) -> None:
        self._replies.forget(worker.rank)

    def disconnect(self, connection: int) -> None:
        self._replies.disconnect(connection)

    def decoded(self, connection: int, message: Message) -> Message:
        """A commit with its values instead of their payload; needs no lock."""
        return self._replies.decoded(connection, message)

    def receive(self, connection: int, message: Message) -> Work | None:
        if message.kind in COMMITS:
            return self._commit(connection, message, self._group.identify(connection, message))
        if message.kind is StoreKind.SNAPSHOT:
            self._take_snapshot(connection, message, self._group.identify(connection, message))
            return None
        worker = self._group.identify(connection, message) if message.rank >= 0 else None
        self._pull(connection, message, worker)
        return None

    def write(self, changes: VariableChanges) -> None:
        if changes.offsets and self.limits.dense_bytes:
            self._replies.preserve()
            changes.write_into(self._center.weights)

    @abc.abstractmethod
    def _commit(self, connection: int, message: Message, worker: Worker) -> Work | None:
        """Takes a commit."""

    def _take_snapshot(self, connection: int, message: Message, worker: Worker) -> None:
        self._center.require_on_workers()

    def _pull(self, connection: int, message: Message, worker: Worker | None) -> None:
        """Answers a pull, of the driver where ``worker`` is None."""
        group = self._group
        if worker is not None:
            worker.pulled_clock = group.clock
            self._center.pulled(worker.rank)
        group.answer(connection, self._replies.weights(connection, message), worker)
