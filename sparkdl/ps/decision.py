"""``Decision``: what the coordinator of a run has decided, which its shards follow.

A round is a *commit in two steps*. Each member sends its values to all shards, which put them
aside, and then says so to the coordinator. The coordinator closes the round when all members have,
and names them in its replies. Whoever asks a shard for the result brings that decision along, and
the first to do so makes the shard apply it. So a shard needs no members, no leases and no clock of
its own, and no death between two messages makes the shards differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ProtocolError

Member = tuple[int, int, int]
"""The rank, the attempt and the sequence number of a commit."""


@dataclass(frozen=True)
class Decision:
    """The last round and the last snapshot of a run.

    Args:
        round: Rounds that are decided.
        members: The commits of the last of them, by rank.
        position: Epoch and batch of the last snapshot.
    """

    round: int = 0
    members: Sequence[Member] = ()
    position: tuple[int, int] = (0, 0)

    def follows(self, applied: int) -> bool:
        """Whether the round is to be applied after ``applied`` rounds; False if it was the last.

        Raises:
            ProtocolError: It is neither that one nor the next.
        """
        if self.round not in (applied, applied + 1):
            raise ProtocolError(
                "a shard is asked for a round that is not the next one",
                expected=f"round {applied} or {applied + 1}",
                received=f"round {self.round}",
                hint="a worker that was silent while the others went on; its task is retried",
            )
        return self.round > applied

    def to_wire(self) -> list[Any]:
        """As a list that JSON can hold."""
        return [self.round, list(self.position), [list(member) for member in self.members]]

    @classmethod
    def from_wire(cls, value: Any) -> Decision:
        """The counterpart of :meth:`to_wire`.

        Raises:
            ProtocolError: It is something else.
        """
        try:
            number, position, members = value
            found = [tuple(int(part) for part in member) for member in members]
            epoch, batch = (int(part) for part in position)
            if any(len(member) != 3 for member in found):
                raise ValueError("a member is a rank, an attempt and a sequence number")
            return cls(int(number), [(r, a, s) for r, a, s in found], (epoch, batch))
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                "a decision of the coordinator is malformed",
                expected="a round, a position and the members' commits",
                received=repr(value)[:200],
            ) from error

    @classmethod
    def in_meta(cls, meta: Mapping[str, Any], key: str) -> Decision:
        """The one in a frame's meta; that of the beginning where there is none."""
        return cls.from_wire(meta[key]) if key in meta else cls()
