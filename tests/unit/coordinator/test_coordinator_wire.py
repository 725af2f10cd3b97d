"""What coordinator, ranks and driver tell each other: status, reports, blobs, orders, lines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparkdl.coordinator.blobs import Assembly, KeptBlobs, chunk_reply
from sparkdl.coordinator.group import RunOrders
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import introduction_of
from sparkdl.coordinator.telemetry import (
    EpochTotals,
    LogLines,
    Status,
    Telemetry,
    WorkerStatus,
    pack_lines,
    report_message,
    report_of,
    sum_states,
    unpack_lines,
)
from sparkdl.errors import ProtocolError
from sparkdl.failures import Failure
from sparkdl.training.reports import EpochReport
from sparkdl.transport.frames import (
    BLOB_BYTES,
    Flag,
    Kind,
    Message,
    decode_meta,
    encode,
)

states = hnp.arrays(np.float64, st.integers(0, 5), elements=st.floats(-1e300, 1e300))
counts = st.integers(0, 2**53)


def through_json(meta: dict[str, Any]) -> dict[str, Any]:
    """``meta`` as a receiver gets it."""
    frame = encode(Message(Kind.OK, meta=meta))
    return decode_meta(Kind.OK, frame[len(encode(Message(Kind.OK))) :])


# ------------------------------------------------------------------ status

WORKER = WorkerStatus(
    alive=True, attempt=3, epoch=2, batch=7, batches=9, rows=64, finished=False, clock=4,
    commits=5, batches_per_epoch=10, host="executor", pid=17, staleness_mean=0.5, staleness_max=2,
)  # fmt: skip


def equal(one: EpochTotals, other: EpochTotals) -> bool:
    return (
        (one.rows, one.val_rows, one.ended, one.seconds)
        == (other.rows, other.val_rows, other.ended, other.seconds)
        and np.array_equal(one.metrics, other.metrics)
        and np.array_equal(one.val_metrics, other.val_metrics)
    )


@given(st.dictionaries(st.integers(0, 2**31), st.tuples(counts, counts, states, states)))
def test_a_status_comes_back_as_it_was(epochs: dict[int, Any]) -> None:
    status = Status(
        workers={0: WORKER, 11: WORKER},
        epochs={
            number: EpochTotals(rows, val_rows, metrics, val_metrics, (0, 11), 1.5)
            for number, (rows, val_rows, metrics, val_metrics) in epochs.items()
        },
        failure=Failure(3, "ValueError: x", "trace"),
        clock=8, rounds=2, released_epoch=1, started=True, waiting={11: "epoch"},
        bytes_in=123, bytes_out=456,
    )  # fmt: skip
    meta, body = status.to_wire()
    back = Status.from_wire(through_json(meta), body)
    assert back.workers == status.workers
    assert back.failure == status.failure
    assert back.waiting == status.waiting
    assert list(back.epochs) == list(status.epochs)
    assert all(equal(back.epochs[n], status.epochs[n]) for n in status.epochs)
    for name in ("clock", "rounds", "released_epoch", "started", "bytes_in", "bytes_out"):
        assert getattr(back, name) == getattr(status, name)
    assert back.commits == 10


def test_an_empty_status_comes_back() -> None:
    meta, body = Status().to_wire()
    assert body.size == 0
    assert Status.from_wire(through_json(meta), body) == Status()


def test_numbers_of_a_status_travel_in_the_body_not_in_the_meta() -> None:
    def size(values: int) -> int:
        totals = EpochTotals(1, 0, np.full(values, 1 / 3), np.empty(0), ())
        meta, body = Status(epochs={0: totals}).to_wire()
        assert body.nbytes == 8 * values
        return len(str(meta))

    assert size(100_000) - size(1) < 20


@pytest.mark.parametrize(
    ("change", "body_bytes"),
    [
        ({"epochs": [[0, 1, 0]]}, 0),
        ({"epochs": 3}, 0),
        ({"workers": {"0": {"alive": True}}}, 0),
        ({"workers": {"zero": {}}}, 0),
        ({"failure": {"rank": 1}}, 0),
        ({"waiting": []}, 0),
        ({"epochs": [[0, 1, 0, 2, 0, []]]}, 8),  # says more numbers than there are
        ({}, 8),  # says fewer
        ({}, 5),  # half a number
        ({"epochs": [[0, 1, 0, -1, 2, []]]}, 8),
    ],
)
def test_a_malformed_status_is_refused(change: dict[str, Any], body_bytes: int) -> None:
    meta, _ = Status().to_wire()
    with pytest.raises(ProtocolError, match="cannot read the status"):
        Status.from_wire({**meta, **change}, np.zeros(body_bytes, np.uint8))


def test_a_status_without_a_counter_is_refused() -> None:
    meta, body = Status().to_wire()
    del meta["rounds"]
    with pytest.raises(ProtocolError, match="rounds"):
        Status.from_wire(meta, body)


# ------------------------------------------------------------------ reports


@given(st.integers(0, 2**31), counts, states, st.booleans(), counts, states, st.booleans())
def test_a_report_comes_back_as_it_was(
    epoch: int,
    rows: int,
    metrics: np.ndarray,
    ended: bool,
    val_rows: int,
    val_metrics: np.ndarray,
    wait: bool,
) -> None:
    report = EpochReport(epoch, rows, metrics, ended, val_rows, val_metrics, 12, 345)
    message = report_message(report, wait=wait)
    assert bool(message.flags & Flag.WAIT) == wait
    message.meta = through_json(message.meta)
    back = report_of(message)
    np.testing.assert_array_equal(back.metrics, metrics)
    np.testing.assert_array_equal(back.val_metrics, val_metrics)
    for name in ("epoch", "rows", "ended", "val_rows", "batches_done", "rows_done"):
        assert getattr(back, name) == getattr(report, name)


@pytest.mark.parametrize("name", ["rows", "val_rows", "split"])
@pytest.mark.parametrize(
    "number",
    [pytest.param(10**400, id="10**400"), 2**63, -1, True, 1.0, "1"],
)
def test_a_count_that_no_rank_can_have_is_refused(name: str, number: object) -> None:
    """The driver divides by and adds these: one that is no float would end the run for all."""
    message = report_message(EpochReport(0, 1, np.ones(2)), wait=False)
    message.meta[name] = number
    with pytest.raises(ProtocolError, match="telemetry of rank"):
        report_of(message)
    with pytest.raises(ProtocolError, match="malformed HELLO"):
        introduction_of(Message(CoordinatorKind.HELLO, meta={"rows": number}))


def test_a_report_is_as_large_as_a_frame_can_be_or_an_error_that_says_so() -> None:
    most = BLOB_BYTES // 8
    message = report_message(
        EpochReport(0, 1, np.zeros(most - 1), val_metrics=np.zeros(1)), wait=False
    )
    assert message.body_bytes == BLOB_BYTES
    with pytest.raises(ProtocolError, match=r"metrics of epoch 7 cannot be sent") as caught:
        report_message(EpochReport(7, 1, np.zeros(most), val_metrics=np.zeros(1)), wait=False)
    assert f"{BLOB_BYTES + 8} bytes" in caught.value.received
    assert "thresholds" in caught.value.hint


def test_states_of_ranks_without_rows_add_nothing() -> None:
    np.testing.assert_array_equal(
        sum_states([np.empty(0), np.array([1.0, 2.0]), np.array([0.5, 0.5])]), [1.5, 2.5]
    )
    assert sum_states([]).size == 0


def test_telemetry_forgets_what_the_driver_is_through_with() -> None:
    telemetry = Telemetry()
    for epoch in range(100):
        telemetry.record(0, 0, EpochReport(epoch, 1, np.ones(3), ended=True), 2.0 * epoch)
        assert list(telemetry.totals(epoch)) == [epoch]
    assert len(telemetry._reports) == len(telemetry._ended) == 1
    assert len(telemetry._ended_at) == 2


def test_each_epoch_has_a_duration_of_its_own_also_where_the_driver_looks_rarely() -> None:
    """Two ranks: an epoch lasts from the end of the one before, on the slower rank, to its own."""
    telemetry = Telemetry()
    for epoch, ends in enumerate([(9.0, 10.0), (12.5, 11.0), (20.0, 19.0)]):
        for rank, now in sorted(enumerate(ends), key=lambda end: end[1]):
            telemetry.record(rank, 0, EpochReport(epoch, 1, np.ones(3), ended=True), now)
    assert [totals.seconds for totals in telemetry.totals().values()] == [None, 2.5, 7.5]
    assert [totals.seconds for totals in telemetry.totals(2).values()] == [7.5]
    telemetry.record(0, 0, EpochReport(3, 1, np.ones(3), ended=False), 21.0)
    assert telemetry.totals(3)[3].seconds is None


# ------------------------------------------------------------------ blobs


def chunk(content: bytes, offset: int, total: int, rank: int = 0, attempt: int = 0) -> Message:
    return Message(
        CoordinatorKind.KEEP, rank=rank, attempt=attempt, offset=offset, total=total,
        body=np.frombuffer(content, np.uint8),
    )  # fmt: skip


@given(st.binary(min_size=1, max_size=50), st.integers(1, 20), st.data())
def test_chunks_make_the_blob_even_if_each_comes_twice(
    blob: bytes, size: int, data: st.DataObject
) -> None:
    assembly = Assembly("it", 50)
    whole = None
    for offset in range(0, len(blob), size):
        for _ in range(data.draw(st.integers(1, 2))):
            part = assembly.put(chunk(blob[offset : offset + size], offset, len(blob)))
            whole = part if part is not None else whole
    assert whole is not None
    assert whole.tobytes() == blob


def test_a_new_first_chunk_begins_a_new_blob() -> None:
    assembly = Assembly("it", 50)
    assert assembly.put(chunk(b"abc", 0, 6, rank=0)) is None
    assert assembly.put(chunk(b"xyz", 0, 5, rank=1)) is None
    with pytest.raises(ProtocolError, match="out of order"):
        assembly.put(chunk(b"def", 3, 6, rank=0))
    whole = assembly.put(chunk(b"uv", 3, 5, rank=1))
    assert whole is not None
    assert whole.tobytes() == b"xyzuv"


def test_blobs_of_one_size_follow_each_other() -> None:
    """As the states of one model at the end of each epoch do."""
    assembly = Assembly("it", 50)
    for blob in (b"first", b"other", b"third"):
        assert assembly.put(chunk(blob[:3], 0, 5)) is None
        whole = assembly.put(chunk(blob[3:], 3, 5))
        assert whole is not None
        assert whole.tobytes() == blob
        assert assembly.put(chunk(blob[3:], 3, 5)) is None  # its answer was lost


def test_a_blob_given_out_is_not_written_to_again() -> None:
    assembly = Assembly("it", 50)
    first = assembly.put(chunk(b"abc", 0, 3))
    assert assembly.put(chunk(b"x", 0, 3)) is None
    assert first is not None
    assert first.tobytes() == b"abc"


@pytest.mark.parametrize(
    "message",
    [
        chunk(b"", 0, 0),
        chunk(b"abc", 0, 51),
        chunk(b"abc", 5, 10),  # a gap
        chunk(b"abcd", 0, 3),  # more than the total
        chunk(b"bc", 1, 9),  # another total
        chunk(b"bc", 1, 10, attempt=1),  # another sender
    ],
)
def test_chunks_out_of_bounds_or_order_are_refused(message: Message) -> None:
    assembly = Assembly("the state", 50)
    assembly.put(chunk(b"a", 0, 10))
    with pytest.raises(ProtocolError, match="the state"):
        assembly.put(message)


def test_a_kept_blob_stays_until_the_next_is_whole() -> None:
    blobs = KeptBlobs(50)
    assert (blobs.of().content.size, blobs.of().epoch) == (0, -1)
    for message, epoch in ((chunk(b"old", 0, 3), 1), (chunk(b"ne", 0, 3), 2)):
        message.epoch = epoch
        blobs.put(message)
        assert (blobs.of().content.tobytes(), blobs.of().epoch) == (b"old", 1)
    last = chunk(b"w", 2, 3)
    last.epoch = 2
    blobs.put(last)
    assert (blobs.of().content.tobytes(), blobs.of().epoch) == (b"new", 2)


def test_ranks_keep_blobs_at_the_same_time_and_of_their_own() -> None:
    blobs = KeptBlobs(50)
    for offset, parts in ((0, (b"ol", b"ne")), (2, (b"d", b"w"))):
        for rank, part in enumerate(parts):
            blobs.put(chunk(part, offset, 3, rank=rank))
    assert blobs.of().content.tobytes() == b"new"
    for rank, part in enumerate((b"a", b"bc")):
        message = chunk(part, 0, len(part), rank=rank)
        message.meta["own"] = True
        blobs.put(message)
    assert [blobs.of(rank).content.tobytes() for rank in range(3)] == [b"a", b"bc", b""]
    assert blobs.of().content.tobytes() == b"new"


def test_a_blob_is_read_in_chunks() -> None:
    blob = np.arange(10, dtype=np.uint8)
    replies = [chunk_reply(blob, offset, 4, epoch=3) for offset in (0, 4, 8, 10)]
    assert [reply.body_bytes for reply in replies] == [4, 4, 2, 0]
    assert {(r.kind, r.total, r.epoch) for r in replies} == {(Kind.CHUNK, 10, 3)}
    with pytest.raises(ProtocolError, match="outside"):
        chunk_reply(blob, 11, 4)


# ------------------------------------------------------------------ orders


def told(orders: RunOrders) -> tuple[bool, float]:
    reply = Message(Kind.OK)
    orders.stamp(reply)
    return bool(reply.flags & Flag.STOP), reply.learning_rate


def test_orders_are_told_at_once_where_ranks_do_not_train_in_step() -> None:
    orders = RunOrders(latched=False)
    assert not told(orders)[0]
    assert math.isnan(told(orders)[1])
    orders.take({"learning_rate": 0.5}, started=True)
    assert told(orders) == (False, 0.5)
    orders.take({"stop": True}, started=True)
    assert told(orders) == (True, 0.5)
    orders.take({"stop": False}, started=True)  # a stop is not taken back
    assert told(orders)[0]


def test_orders_are_told_from_the_next_latch_on_where_ranks_train_in_step() -> None:
    orders = RunOrders(latched=True)
    orders.take({"learning_rate": 0.5}, started=False)  # nobody trains yet
    assert told(orders) == (False, 0.5)
    orders.take({"stop": True, "learning_rate": 0.25}, started=True)
    assert told(orders) == (False, 0.5)
    orders.latch()
    assert told(orders) == (True, 0.25)


def test_a_release_comes_with_its_orders_as_all_ranks_wait_then() -> None:
    orders = RunOrders(latched=True)
    orders.take({"release": 3, "learning_rate": 0.1}, started=True)
    assert told(orders) == (False, 0.1)
    assert orders.released_epoch == 3
    orders.take({"release": 2}, started=True)
    assert orders.released_epoch == 3


@pytest.mark.parametrize(
    "meta", [{"learning_rate": "x"}, {"release": "soon"}, {"release": None}, {"learning_rate": []}]
)
def test_malformed_orders_change_nothing(meta: dict[str, Any]) -> None:
    orders = RunOrders(latched=False)
    with pytest.raises(ProtocolError, match="malformed CONTROL"):
        orders.take({"stop": True, **meta}, started=True)
    assert not told(orders)[0]
    assert orders.released_epoch == -1


# ------------------------------------------------------------------ lines


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))))
def test_lines_come_back_as_they_were(lines: list[str]) -> None:
    assert unpack_lines(pack_lines(lines)) == lines


def test_a_line_that_is_no_unicode_costs_only_itself() -> None:
    assert unpack_lines(pack_lines(["\ud800", "next"])) == ["?", "next"]


def test_lines_are_taken_in_the_order_of_arrival_and_in_bounded_parts() -> None:
    lines = LogLines()
    for rank in (1, 0):
        lines.put(Message(CoordinatorKind.LOG, rank=rank, body=pack_lines(["a", "bc"])))
    assert lines.take(4) == ([1, 1], ["a", "bc"])
    assert lines.take(100) == ([0, 0], ["a", "bc"])
    assert lines.take(100) == ([], [])
