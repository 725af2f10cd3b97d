"""One round of a rule that waits for all: its payloads and their mean; sums of a few numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sparkdl.coordinator.group import Group
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import WITHOUT_GRADIENT
from sparkdl.training.slices import Slices
from sparkdl.transport.frames import Kind, Message
from sparkdl.weights import FloatArray

BLOCK = 1 << 16
"""Elements reduced at a time: two blocks fit the second-level cache."""
MOST_NUMBERS = 1 << 16


@dataclass
class Payload:
    """One rank's part in a round; ``values`` is the buffer it arrived in.

    Where gradients of some variables are ``slices``, ``values`` are those of the others. The loss
    may not depend on some variables: these are ``without_gradient``, and no optimizer moves them.
    """

    connection: int
    values: FloatArray
    message: Message
    slices: Sequence[Slices] = ()
    without_gradient: Sequence[int] = ()


def numbers_without_gradient(message: Message, num_trained: int) -> list[int]:
    """The variables of which the sender of a commit has no gradient.

    Raises:
        ProtocolError: These are no numbers of trained variables.
    """
    numbers = message.meta.get(WITHOUT_GRADIENT, [])
    if not isinstance(numbers, list) or any(
        type(n) is not int or not 0 <= n < num_trained for n in numbers
    ):
        raise ProtocolError(
            f"rank {message.rank} names variables without gradient that are none",
            expected=f"a list of whole numbers from 0 to {num_trained - 1}",
            received=repr(numbers)[:100],
        )
    return numbers


class Round:
    """The payloads of one round, left in the buffers they arrived in."""

    def __init__(self) -> None:
        self.payloads: dict[int, Payload] = {}

    @property
    def rows(self) -> int:
        return sum(p.message.rows for p in self.payloads.values())

    @property
    def reply_meta(self) -> dict[str, list[int]]:
        """Tells of which variables no rank with rows has a gradient, where there are any."""
        told = [set(p.without_gradient) for p in self.contributions]
        without = sorted(set.intersection(*told)) if told else []
        return {WITHOUT_GRADIENT: without} if without else {}

    @property
    def contributions(self) -> list[Payload]:
        """Those of ranks with rows, in the order of the ranks."""
        return [p for _, p in sorted(self.payloads.items()) if p.message.rows]

    def mean(self, out: FloatArray) -> None:
        """Writes the row-weighted mean into ``out``: ranks in order, so bit for bit repeatable.

        Ranks with 0 rows contribute nothing. ``out`` may be one of the payloads: a block is
        written only after it was read from all. Only two blocks are allocated.
        """
        parts = [(p.values, p.message.rows) for p in self.contributions]
        total = float(sum(rows for _, rows in parts))
        if len(parts) == 1:
            if parts[0][0] is not out:
                np.copyto(out, parts[0][0])
            return
        weights = [np.float32(rows / total) for _, rows in parts]
        scratch = np.empty((2, min(BLOCK, out.size)), np.float32)
        apart = not any(np.may_share_memory(values, out) for values, _ in parts[1:])
        for start in range(0, out.size, BLOCK):
            block = slice(start, min(start + BLOCK, out.size))
            total_block, part = scratch[:, : block.stop - block.start]
            if apart:
                total_block = out[block]
            np.multiply(parts[0][0][block], weights[0], out=total_block)
            for (values, _), weight in zip(parts[1:], weights[1:], strict=True):
                np.multiply(values[block], weight, out=part)
                total_block += part
            if not apart:
                out[block] = total_block


class Sums:
    """Answers each rank when all have told their numbers.

    A rank without rows tells none: its commit, which waits for the round, stands for them. What a
    round has added up is kept until the next one, for a rank whose reply was lost and for the next
    attempt at a rank's work.
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
            ranks: The ranks that take part in the round.
            committed: The ranks among them whose commit waits for it.
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
