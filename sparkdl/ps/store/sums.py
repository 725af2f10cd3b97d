"""Sums of a few numbers over the ranks of a round, which they need before they commit."""

from __future__ import annotations

from collections.abc import Collection

from sparkdl.coordinator.group import Group
from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import Kind, Message

MOST_NUMBERS = 1 << 16


class Sums:
    """Answers each rank when all have told their numbers.

    A rank without rows tells none: its commit, which waits for the round, stands for them. What a
    round has added up is kept until the next one, for a rank whose reply was lost and for the next
    attempt at a rank's work.

    Args:
        group: The run's.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._clock = -1
        self._known: dict[int, list[float]] = {}

    def take(self, connection: int, message: Message) -> None:
        """Answers or defers a rank's numbers; ``message.offset`` says which sums they are for."""
        numbers = message.meta.get("numbers")
        if (
            not isinstance(numbers, list)
            or len(numbers) > MOST_NUMBERS
            or any(not isinstance(n, (int, float)) for n in numbers)
        ):
            raise ProtocolError(
                f"an {message.kind.name} frame without numbers",
                expected=f"a list of at most {MOST_NUMBERS} numbers",
                received=type(numbers).__name__,
            )
        if self._clock != self._group.clock:
            self._clock = self._group.clock
            self._known.clear()
        if message.offset in self._known:
            self._answer(connection, message)
        else:
            self._group.defer(connection, "sums", message)

    def settle(self, ranks: Collection[int], committed: Collection[int]) -> None:
        """Answers those who wait, if nobody is missing.

        Args:
            ranks: That take part in the round.
            committed: Those of them whose commit waits for it.
        """
        waits = self._group.waiting("sums")
        if not waits or set(ranks) - {w.message.rank for _, w in waits} - set(committed):
            return
        number = min(w.message.offset for _, w in waits)
        here = [(c, w.message) for c, w in waits if w.message.offset == number]
        columns = zip(*(message.meta["numbers"] for _, message in here), strict=True)
        self._known[number] = [float(sum(column)) for column in columns]
        for connection, message in here:
            self._answer(connection, message)

    def _answer(self, connection: int, message: Message) -> None:
        reply = Message(Kind.OK, meta={"sums": self._known[message.offset]})
        self._group.answer(connection, reply, self._group.workers[message.rank])
