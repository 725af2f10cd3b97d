"""Commits whose gradients are slices in part: what is joined, and what a hostile rank can do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coordinator_world import CoordinatorWorld, code
from hypothesis import given
from hypothesis import strategies as st
from ps_world import Plain

from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.store import make_store
from sparkdl.ps.store.rounds import MAX_BYTES
from sparkdl.rules import BSP
from sparkdl.rules.rule import Rule
from sparkdl.training.slices import Slices, pack, unpack
from sparkdl.transport.frames import ByteArray, Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of(
    [("table", (6, 2), "float32"), ("bias", (3,), "float32"), ("other", (4, 1), "float32")],
    [("mean", (1,), "float32")],
)
DENSE = np.array([1, 2, 3, 7], np.float32)  # of bias and mean


class SlicedWorld(CoordinatorWorld):
    """Two tables whose gradients are slices, and two dense variables."""

    def __init__(self, rule: Rule | None = None, workers: int = 2) -> None:
        center = np.zeros(LAYOUT.size, np.float32)
        super().__init__(workers, make_store(LAYOUT, center, rule or BSP()))
        self.join(*range(workers))

    def commit(
        self, rank: int, body: ByteArray, sequence: int = 1, **fields: Any
    ) -> Message | None:
        fields = {"rows": 1, "batches": 1, "batch": sequence, "flags": Flag.SLICED, **fields}
        return self.send(rank, StoreKind.PUSH_PULL, body=body.copy(), sequence=sequence, **fields)


def table(ids: list[int], value: float, place: int = 0, width: int = 2) -> Slices:
    rows = np.full((len(ids), width), value, np.float32)
    return Slices(place, np.array(ids, np.int32), rows)


def frame(*slices: Slices, dense: FloatArray = DENSE) -> ByteArray:
    return pack(dense.view(np.uint8), slices)


def good(value: float = 1.0) -> ByteArray:
    return frame(table([1, 1], value), table([3], value, 2, 1))


def test_the_rows_of_all_ranks_follow_each_other_scaled() -> None:
    world = SlicedWorld()
    assert world.commit(1, good(8.0), rows=1) is None
    reply = world.commit(0, good(4.0), rows=3)
    for answer in (reply, world.last(1)):
        assert answer is not None
        assert answer.flags & Flag.SLICED
        assert answer.body is not None
        dense, (first, second) = unpack(answer.body)
        np.testing.assert_array_equal(dense.view(np.float32), DENSE)
        assert first.indices.tolist() == [1, 1, 1, 1]
        assert first.rows[:, 0].tolist() == [3.0, 3.0, 2.0, 2.0]
        assert second.indices.tolist() == [3, 3]
        assert second.rows.tolist() == [[3.0], [2.0]]


def test_a_rank_without_rows_sends_all_dense_and_is_told_the_slices() -> None:
    world = SlicedWorld()
    whole = np.full(LAYOUT.size, np.nan, np.float32).view(np.uint8)
    world.commit(1, whole, rows=0, batches=0, flags=Flag.NONE)
    reply = world.commit(0, good())
    assert reply is not None
    assert world.last(1).flags & Flag.SLICED
    np.testing.assert_array_equal(world.last(1).body, reply.body)


def chunks(world: SlicedWorld, rank: int, body: ByteArray, size: int) -> list[Message | None]:
    return [
        world.blob(rank, StoreKind.SLICES_PUT, body[at : at + size], offset=at, total=body.size)
        for at in range(0, body.size, size)
    ]


def test_a_commit_in_chunks_is_that_in_one_frame_in_each_round() -> None:
    world = SlicedWorld()
    nothing = np.empty(0, np.uint8)
    for sequence in (1, 2, 3):  # of equal size, so that a chunk may be taken for the last round's
        body = good(float(sequence))
        replies = chunks(world, 0, body, 40)
        assert all(reply is not None and reply.kind is Kind.OK for reply in replies)
        world.commit(0, nothing, sequence, total=body.size)
        reply = world.commit(1, body, sequence)
        assert reply is not None
        assert reply.body is not None
        _, (first, _) = unpack(reply.body)
        assert first.rows.tolist() == [[sequence / 2] * 2] * 4


@pytest.mark.parametrize(
    "body",
    [
        frame(table([1], 1.0, place=1)),  # no such width
        frame(table([1], 1.0, width=3)),
        frame(table([1], 1.0, place=9)),
        frame(table([1], 1.0, place=3, width=1)),  # a statistic
        frame(table([1], 1.0), table([2], 1.0)),  # one variable twice
        frame(table([1], 1.0), dense=DENSE),  # the dense part of other slices
        frame(dense=np.zeros(LAYOUT.size, np.float32)),  # no slices at all
        frame(table([1], 1.0), table([3], 1.0, 2, 1), dense=np.zeros(3, np.float32)),
        np.zeros(3, np.uint8),
        np.full(64, 255, np.uint8),
        good()[:-4],
        np.concatenate([good(), np.zeros(4, np.uint8)]),
    ],
)
def test_what_does_not_fit_the_model_is_refused(body: ByteArray) -> None:
    world = SlicedWorld()
    assert code(world.commit(1, body)) == "protocol"
    world.commit(1, good())
    assert world.commit(0, good()) is not None  # the round goes on


@given(st.binary(max_size=120), st.integers(0, 119), st.integers(0, 255))
def test_any_bytes_are_taken_or_refused(garbage: bytes, at: int, value: int) -> None:
    changed = good()
    changed[at % changed.size] = value
    world = SlicedWorld()
    for body in (np.frombuffer(garbage, np.uint8), changed):
        reply = world.commit(1, body)
        if reply is None:
            return  # a value or an index is another: it waits in the round
        assert code(reply) == "protocol"


def test_slices_where_others_are_dense_and_the_reverse_are_refused() -> None:
    world = SlicedWorld()
    whole = np.zeros(LAYOUT.size, np.float32).view(np.uint8)
    world.commit(0, good())
    assert code(world.commit(1, whole, flags=Flag.NONE)) == "protocol"
    assert (
        code(world.commit(1, frame(table([1], 1.0), dense=np.zeros(8, np.float32)))) == "protocol"
    )
    world = SlicedWorld()
    world.commit(0, whole, flags=Flag.NONE)
    assert code(world.commit(1, good())) == "protocol"


def test_a_size_that_is_claimed_allocates_nothing_beyond_the_bound() -> None:
    world = SlicedWorld()
    piece = np.zeros(8, np.uint8)
    assert code(world.blob(1, StoreKind.SLICES_PUT, piece, total=MAX_BYTES + 1)) == "protocol"
    assert code(world.blob(1, StoreKind.SLICES_PUT, piece, offset=8, total=16)) == "protocol"
    # a commit whose chunks have not come, or are of another size
    nothing = np.empty(0, np.uint8)
    assert code(world.commit(1, nothing, total=99)) == "protocol"
    chunks(world, 1, good(), 1000)
    assert code(world.commit(1, nothing, total=99)) == "protocol"
    assert code(world.send(1, StoreKind.SLICES_GET, offset=1 << 40)) == "protocol"


def test_an_encoded_commit_in_a_run_without_a_codec_is_refused() -> None:
    world = SlicedWorld()
    assert code(world.commit(1, good(), flags=Flag.ENCODED)) == "protocol"


@pytest.mark.parametrize("rule", [Plain(), BSP("delta")], ids=["plain", "windows"])
def test_a_rule_that_takes_no_slices_refuses_them(rule: Rule) -> None:
    world = SlicedWorld(rule)
    assert code(world.commit(1, good())) == "protocol"
    assert code(world.blob(1, StoreKind.SLICES_PUT, np.zeros(8, np.uint8))) == "protocol"


def test_who_has_not_said_hello_puts_nothing() -> None:
    world = SlicedWorld()
    piece = np.zeros(8, np.uint8)
    assert code(world.blob(1, StoreKind.SLICES_PUT, piece, rank=5)) == "protocol"
    assert code(world.send(1, StoreKind.SLICES_GET, rank=5)) == "protocol"
