"""The frames of a parameter store; the range of each of several servers, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.errors import ProtocolError
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.frames import Body, FrameKind, FrameLimits, kinds_of
from sparkdl.weights import FloatArray, Layout

WITHOUT_GRADIENT = "without_gradient"
"""Key in the meta of a commit to a round and of its reply: variables without a gradient."""


class StoreKind(FrameKind):
    """The requests that a store answers, and its own reply."""

    PULL = 32
    PUSH = 33, Body.DENSE
    PUSH_PULL = 34, Body.DENSE
    SNAPSHOT = 35, Body.DENSE  # weights become the center (gradient rules)
    STATE_PUT = 36, Body.CHUNK  # one chunk of weights + optimizer state for a joiner
    STATE_GET = 37
    ADD_UP = 38  # a few numbers, in the meta; answered with their sums over the ranks of the round
    SLICES_PUT = 39, Body.CHUNK  # one chunk of a commit with slices too large for one frame
    SLICES_GET = 40  # one chunk of such a round's result
    CARRIED = 41  # who sends counters and seeds after an epoch, and are they here
    CARRIED_PUT = 42, Body.CHUNK  # one chunk of them
    CARRIED_GET = 43
    STAGE = 44, Body.DENSE  # to a shard: a part of a commit, which counts when a round names it
    RESULT = 45  # to a shard: apply the round that the meta names, and answer with its result
    WRITE = 46, Body.CHUNK  # to a shard: values that the driver's callbacks wrote
    ROWS_PULL = 47, Body.CHUNK  # to a shard: ids; answered with the rows of a table
    ROWS_PUSH = 51, Body.CHUNK  # to a shard: a step of rows, by their gradients
    ROWS_CLOCKS = 52  # to a shard: the steps that its tables have had
    ROWS_SAVE = 53  # to a shard: write the rows to files
    ROWS_STAGE = 55, Body.CHUNK  # to a shard: a part of a round's step of rows, put aside
    TELL = 54  # to a shard: its numbers, as /metrics has them, and its memory
    WEIGHTS = 65, Body.DENSE  # a reply


COMMITS = frozenset({StoreKind.PUSH, StoreKind.PUSH_PULL})
ROWS = frozenset(kind for kind in StoreKind if kind.name.startswith("ROWS_"))
"""The requests about rows of tables."""
ENCODABLE = COMMITS | {StoreKind.STAGE}
DECISION = "decision"
"""Key in the meta of a coordinator's replies, and of requests to shards: see :class:`Decision`."""


def limits_of(layout: Layout, compression: Compression | None = None) -> FrameLimits:
    """The bodies that travel between a worker and a store of this layout."""
    encoded = 0 if compression is None else compression.max_bytes
    return FrameLimits(layout.size_bytes, encoded, kinds=kinds_of(StoreKind))


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
                expected=f"round {applied} or {applied + 1}", received=f"round {self.round}",
                hint="a worker that was silent while the others went on; its task is retried",
            )  # fmt: skip
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
                expected="a round, a position and the members' commits", received=repr(value)[:200],
            ) from error  # fmt: skip

    @classmethod
    def in_meta(cls, meta: Mapping[str, Any]) -> Decision:
        """The one in a frame's meta; that of the beginning where there is none."""
        return cls.from_wire(meta[DECISION]) if DECISION in meta else cls()


@dataclass(frozen=True)
class Range:
    """The range of one shard.

    Args:
        place: In the flat buffer of the model.
        layout: Layout of the values in it: one trained vector, and one of averaged statistics.
    """

    place: slice
    layout: Layout

    def written(self, changes: VariableChanges, values: FloatArray) -> FloatArray:
        """``values`` of the range with what callbacks wrote to the model's weights; a copy."""
        start, stop = self.place.start, self.place.stop
        found = values.copy()
        for offset, new in changes.weights.items():
            first, last = max(offset, start), min(offset + new.size, stop)
            if first < last:
                found[first - start : last - start] = new[first - offset : last - offset]
        return found


def ranges_of(layout: Layout, count: int) -> tuple[Range, ...]:
    """``count`` nearly equal ranges that cover the buffer; some are empty if it has fewer values.

    >>> layout = Layout.of([('w', (6,), 'float32')], [('mean', (3,), 'float32')])
    >>> [(r.place.start, r.place.stop, r.layout.trained_size) for r in ranges_of(layout, 2)]
    [(0, 4, 4), (4, 9, 2)]
    """
    return tuple(_range(layout, place) for place in layout.shards(count))


def _range(layout: Layout, place: slice) -> Range:
    edge = int(np.clip(layout.trained_size, place.start, place.stop))
    trained = [("trained", (edge - place.start,), "float32")]
    averaged = [("averaged", (place.stop - edge,), "float32")]
    return Range(place, Layout.of(trained, averaged))


def compression_of(whole: Compression | None, range_: Range) -> Compression | None:
    """The compression of a run's commits to one shard."""
    return None if whole is None else replace(whole, layout=range_.layout)
