"""What ranks report and the driver orders: metrics, releases, failures, kept states, log lines."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from coordinator_world import DRIVER, Apart, CoordinatorWorld, code

from sparkdl.coordinator.group import Store
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.telemetry import (
    KEPT_CHARS,
    KEPT_LINES,
    MAX_LINES_BYTES,
    Status,
    pack_lines,
    report_message,
    unpack_lines,
)
from sparkdl.errors import DataError, SparkDLError, WorkerError, beats_of
from sparkdl.failures import Failure
from sparkdl.process.host_load import HostLoad
from sparkdl.ps.kinds import StoreKind
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import PHASES, Usage
from sparkdl.training.reports import EpochReport
from sparkdl.transport.frames import (
    BLOB_BYTES,
    MAX_META_BYTES,
    Flag,
    Kind,
    Message,
    encode,
    error_from_meta,
)


def joined(workers: int = 2, **limits: Any) -> CoordinatorWorld:
    world = CoordinatorWorld(workers, Apart(), **limits)
    world.join(*range(workers))
    return world


def numbers(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


# ------------------------------------------------------------------ metrics


def test_epochs_sum_over_ranks_and_dead_attempts() -> None:
    world = joined()
    world.report(0, EpochReport(0, 5, numbers(1, 2)))
    world.report(0, EpochReport(0, 10, numbers(3, 4)))  # replaces
    world.drop(0)
    world.join(100, attempt=1)
    world.report(100, EpochReport(0, 7, numbers(10, 10)), attempt=1)
    world.report(
        1, EpochReport(0, 1, numbers(100, 0), ended=True, val_rows=3, val_metrics=numbers(0.5))
    )
    epoch = world.status().epochs[0]
    assert (epoch.rows, epoch.val_rows, epoch.ended) == (18, 3, (1,))
    np.testing.assert_array_equal(epoch.metrics, [113, 14])
    np.testing.assert_array_equal(epoch.val_metrics, [0.5])
    assert world.status(since_epoch=1).epochs == {}
    assert world.status().epochs == {}  # the driver is through with that epoch


def test_reports_of_epochs_that_the_driver_is_through_with_are_dropped() -> None:
    world = joined()
    world.status(since_epoch=3)
    world.report(0, EpochReport(2, 5, numbers(1)))
    world.report(0, EpochReport(3, 6, numbers(1)))
    assert list(world.status(since_epoch=3).epochs) == [3]
    assert list(world.status().epochs) == [3]


def test_a_report_is_not_read_from_a_buffer_that_the_next_request_uses() -> None:
    world = joined()
    message = report_message(EpochReport(0, 5, numbers(1, 2)), wait=True)
    message.rank = 0
    assert message.body is not None
    raw = world.coordinator.buffer(0)
    raw[: message.body.size] = message.body
    message.body = raw[: message.body.size]
    assert world.deliver(0, message) is None
    raw[...] = 255
    np.testing.assert_array_equal(world.status().epochs[0].metrics, [1, 2])


@pytest.mark.parametrize(
    ("meta", "body_bytes"),
    [
        ({"rows": "no"}, 8),
        ({"rows": -1}, 8),
        ({"rows": True}, 8),
        ({"rows": 1, "split": 2}, 8),
        ({"rows": 1, "split": 0.5}, 8),
        ({"rows": 1}, 7),
    ],
)
def test_malformed_telemetry_is_refused_and_not_counted(
    meta: dict[str, Any], body_bytes: int
) -> None:
    world = joined()
    reply = world.blob(
        0, CoordinatorKind.REPORT, np.zeros(body_bytes, np.uint8), meta=meta, rows=9, batch=1
    )
    assert code(reply) == "protocol"
    assert world.status().epochs == {}
    assert world.status().workers[0].rows == 0


def test_no_epoch_number_ends_the_run_for_all() -> None:
    world = joined()
    assert code(world.report(0, EpochReport(2**32 - 1, 1))) == "protocol"
    world.report(1, EpochReport(0, 1))
    assert list(world.status().epochs) == [0]


def test_a_status_has_as_many_epochs_as_a_frame_has_room_for() -> None:
    world = joined()
    large = np.arange(BLOB_BYTES // 8 // 3, dtype=np.float64)
    for epoch in range(7):
        world.report(0, EpochReport(epoch, 1, large))
    seen: list[int] = []
    since = 0
    while epochs := world.status(since).epochs:
        seen += epochs
        since = max(epochs) + 1
        assert len(epochs) <= 3
        for totals in epochs.values():
            np.testing.assert_array_equal(totals.metrics, large)
    assert seen == list(range(7))


def test_metrics_that_no_frame_has_room_for_are_an_error_that_says_so() -> None:
    world = joined()
    half = np.ones(BLOB_BYTES // 8 // 2 + 1)
    world.report(0, EpochReport(0, 1, half))
    world.report(1, EpochReport(0, 1, val_metrics=half))  # two vectors of that size in all
    reply = world.send(DRIVER, CoordinatorKind.STATUS, rank=-1)
    assert code(reply) == "protocol"
    assert reply is not None
    assert "metrics of epoch 0 cannot be sent" in reply.meta["what"]


# ------------------------------------------------------------------ releases and orders


def test_an_epoch_ends_when_the_driver_releases_it() -> None:
    world = joined()
    end = EpochReport(0, 1, ended=True)
    assert world.report(0, end, wait=True) is None
    assert world.report(1, end, wait=True) is None
    assert world.status().epochs[0].ended == (0, 1)
    assert world.status().waiting == {0: "epoch", 1: "epoch"}
    world.control(release=0, learning_rate=0.5, stop=True)
    for rank in (0, 1):
        assert world.last(rank).flags & Flag.STOP
        assert world.last(rank).learning_rate == 0.5
    assert world.report(0, end, wait=True) is not None  # already released
    assert world.report(0, EpochReport(1, 1, ended=True), wait=True) is None
    assert world.status().released_epoch == 0


def test_a_silent_driver_ends_the_wait_at_an_epochs_end() -> None:
    world = CoordinatorWorld(2, Apart(), release_timeout_s=10)
    world.join(0)
    world.report(0, EpochReport(0, 1, ended=True), wait=True)
    world.wait(8)
    world.status()
    world.send(0, CoordinatorKind.HEARTBEAT)
    world.wait(8)
    assert world.answers(0) == 2  # hello and the heartbeat
    world.wait(4)
    assert code(world.last(0)) == "timeout"
    assert "driver" in world.last(0).meta["what"]


def test_workers_may_not_control() -> None:
    world = joined()
    assert code(world.send(0, CoordinatorKind.CONTROL, meta={"stop": True})) == "protocol"
    assert code(world.control(learning_rate="x")) == "protocol"
    world.report(0, EpochReport(0, 1))
    assert not world.last(0).flags & Flag.STOP


def test_ranks_that_exchange_among_themselves_hear_of_orders_at_once() -> None:
    """They agree on the step at which they follow an order by their own exchange."""
    world = CoordinatorWorld(2)
    world.join(0, 1)
    world.control(stop=True)
    beat = world.send(1, CoordinatorKind.HEARTBEAT)
    assert beat is not None
    assert beat.flags & Flag.STOP


def written(world: CoordinatorWorld, number: int, **values: float) -> None:
    changes = VariableChanges({int(name[1:]): np.array(v) for name, v in values.items()})
    blob = np.frombuffer(changes.to_bytes(), np.uint8)
    assert world.blob(DRIVER, CoordinatorKind.CHANGES, blob, rank=-1) is not None
    assert world.last(DRIVER).kind is Kind.OK
    world.control(changes=number)


def taken(world: CoordinatorWorld, rank: int, number: int) -> tuple[int, dict[int, float]]:
    """The number of the changes that a rank is given, and their values."""
    reply = world.send(rank, CoordinatorKind.TAKE_CHANGES, sequence=number)
    assert reply is not None
    assert reply.body is not None, reply
    changes = VariableChanges.from_bytes(reply.body.tobytes())
    return reply.sequence, {k: float(v) for k, v in changes.model.items()}


def test_every_rank_takes_what_callbacks_wrote_in_order_also_one_that_comes_late() -> None:
    world = CoordinatorWorld(3, Apart())
    world.join(0, 1)
    written(world, 1, v4=0.5)
    written(world, 2, v4=0.25, v7=3)
    for rank in (0, 1):
        assert world.report(rank, EpochReport(0, 1)).meta["changes"] == 2
        assert taken(world, rank, 1) == (1, {4: 0.5})
        assert taken(world, rank, 2) == (2, {4: 0.25, 7: 3})
        assert "changes" not in world.report(rank, EpochReport(0, 1)).meta
    assert taken(world, 1, 1) == (2, {4: 0.25, 7: 3})  # which sets all that the first one set
    world.join(2)
    assert world.last(2).meta["changes"] == 2
    assert taken(world, 2, 1) == (2, {4: 0.25, 7: 3})


def test_changes_come_from_the_driver_alone_and_are_read_before_they_are_told() -> None:
    world = joined()
    blob = np.frombuffer(VariableChanges({0: np.ones(2)}).to_bytes(), np.uint8)
    assert code(world.blob(0, CoordinatorKind.CHANGES, blob)) == "protocol"
    assert (
        code(world.blob(DRIVER, CoordinatorKind.CHANGES, blob[:-3].copy(), rank=-1)) == "protocol"
    )
    assert code(world.send(0, CoordinatorKind.TAKE_CHANGES, sequence=1)) == "protocol"
    assert "changes" not in world.report(0, EpochReport(0, 1)).meta


# ------------------------------------------------------------------ failure


def test_one_failure_ends_all_waits() -> None:
    world = joined(3)
    world.report(0, EpochReport(0, 1, ended=True), wait=True)
    world.send(2, CoordinatorKind.FAIL, meta={"error": "ValueError: bad", "traceback": "tb"})
    assert code(world.last(0)) == "aborted"
    assert world.last(0).flags & Flag.ABORT
    assert code(world.report(1, EpochReport(0, 1))) == "aborted"
    assert world.last(1).meta["rank"] == 2
    world.send(1, CoordinatorKind.FAIL, meta={"error": "OSError: later"})  # the first failure stays
    assert world.status().failure == Failure(2, "ValueError: bad", "tb")
    assert code(world.hello(102, attempt=1)) == "aborted"


def test_an_error_of_this_library_is_raised_as_itself_by_who_looks_at_the_run() -> None:
    """Also where the failed task itself is slow to end, as on a busy machine."""
    world = joined(2)
    error = DataError("column 'x'", expected="numbers", received="nan", hint="clean the column")
    beats = beats_of(error)
    world.send(
        1, CoordinatorKind.FAIL, meta={"error": "DataError: x", "traceback": "tb", "beats": beats}
    )
    failure = Status.from_wire(*world.status().to_wire()).failure
    assert failure is not None
    raised = failure.library_error()
    assert type(raised) is DataError
    assert str(raised) == str(error).replace("'x'", "'x' (worker 1)")


@pytest.mark.parametrize(
    "beats", [{"type": "WorkerError"}, {"type": "os"}, {"type": "Iterable"}, {}, ["what"], None]
)
def test_beats_of_no_error_are_left_out(beats: object) -> None:
    world = joined(1)
    world.send(0, CoordinatorKind.FAIL, meta={"error": "E: x", "traceback": "tb", "beats": beats})
    failure = world.status().failure
    assert failure is not None
    raised = failure.library_error()
    assert type(raised) is WorkerError
    assert "E: x" in str(raised)


def test_a_failure_ends_the_wait_of_ranks_that_begin_together() -> None:
    world = CoordinatorWorld(2)
    assert world.hello(0) is None
    world.send(1, CoordinatorKind.FAIL, meta={"error": "MemoryError", "traceback": ""})
    assert code(world.last(0)) == "aborted"
    assert world.last(0).meta["rank"] == 1


# ------------------------------------------------------------------ kept states


def keep(world: CoordinatorWorld, connection: int, state: bytes, epoch: int, size: int) -> None:
    source = np.frombuffer(state, np.uint8)
    for offset in range(0, source.size, size):
        chunk = source[offset : offset + size]
        reply = world.blob(
            connection, CoordinatorKind.KEEP, chunk, offset=offset, total=source.size, epoch=epoch
        )
        assert reply is not None
        assert reply.kind is Kind.OK, reply


def kept(world: CoordinatorWorld) -> tuple[int, bytes]:
    state, total = bytearray(), 1
    reply = None
    while len(state) < total:
        reply = world.send(DRIVER, CoordinatorKind.KEPT, rank=-1, offset=len(state))
        assert reply is not None
        assert reply.kind is Kind.CHUNK
        total = reply.total
        if reply.body is not None:
            state += reply.body.tobytes()
    assert reply is not None
    return reply.epoch, bytes(state)


def test_the_last_whole_state_is_kept() -> None:
    world = joined()
    assert kept(world) == (0, b"")
    keep(world, 0, b"the first", 1, 4)
    assert kept(world) == (1, b"the first")
    half = np.frombuffer(b"the sec", np.uint8)
    world.blob(1, CoordinatorKind.KEEP, half, offset=0, total=10, epoch=2)  # and dies in the middle
    assert kept(world) == (1, b"the first")
    keep(world, 0, b"another", 3, 100)
    assert kept(world) == (3, b"another")


def test_a_state_larger_than_allowed_is_refused() -> None:
    world = joined(max_state_bytes=100)
    reply = world.blob(0, CoordinatorKind.KEEP, np.zeros(10, np.uint8), total=101)
    assert code(reply) == "protocol"
    assert kept(world) == (0, b"")


def test_a_read_outside_the_kept_state_is_refused() -> None:
    world = joined()
    keep(world, 0, b"state", 1, 100)
    assert code(world.send(DRIVER, CoordinatorKind.KEPT, rank=-1, offset=6)) == "protocol"


# ------------------------------------------------------------------ log lines


def take_lines(world: CoordinatorWorld) -> list[tuple[int, str]]:
    reply = world.send(DRIVER, CoordinatorKind.TAKE_LINES, rank=-1)
    assert reply is not None
    lines = unpack_lines(np.empty(0, np.uint8) if reply.body is None else reply.body)
    return list(zip(reply.meta["ranks"], lines, strict=True))


def test_the_driver_takes_each_line_once_also_of_ranks_that_have_not_joined() -> None:
    world = CoordinatorWorld(2)
    world.blob(1, CoordinatorKind.LOG, pack_lines(["imported", "größer"]))
    world.blob(0, CoordinatorKind.LOG, pack_lines(["", "a\nb"]))
    assert take_lines(world) == [(1, "imported"), (1, "größer"), (0, ""), (0, "a b")]
    assert take_lines(world) == []
    assert world.status().workers == {}


def test_lines_of_no_rank_or_too_many_bytes_are_refused() -> None:
    world = joined()
    assert code(world.blob(7, CoordinatorKind.LOG, pack_lines(["x"]))) == "protocol"
    assert code(world.blob(0, CoordinatorKind.LOG, pack_lines(["x"]), rank=-1)) == "protocol"
    assert (
        code(world.blob(0, CoordinatorKind.LOG, np.ones(MAX_LINES_BYTES + 1, np.uint8)))
        == "protocol"
    )
    assert take_lines(world) == []


def test_a_driver_that_takes_no_lines_costs_a_bounded_memory() -> None:
    world = joined()
    some = [f"line {number}" for number in range(KEPT_LINES // 2)]
    for _ in range(5):
        world.blob(0, CoordinatorKind.LOG, pack_lines(some))
    taken: list[tuple[int, str]] = []
    while more := take_lines(world):
        taken += more
    assert len(taken) == KEPT_LINES
    assert taken[-1] == (0, some[-1])


def test_long_lines_cost_a_bounded_memory_too() -> None:
    world = joined()
    long = "x" * (MAX_LINES_BYTES - 1)
    for _ in range(2 * KEPT_CHARS // MAX_LINES_BYTES):
        world.blob(0, CoordinatorKind.LOG, pack_lines([long]))
    world.blob(1, CoordinatorKind.LOG, pack_lines(["the last"]))
    taken: list[tuple[int, str]] = []
    while more := take_lines(world):
        taken += more
    assert sum(len(line) for _, line in taken) <= KEPT_CHARS
    assert len(taken) >= KEPT_CHARS // MAX_LINES_BYTES
    assert taken[-1] == (1, "the last")


class _Undecodable(Store):
    """A store whose codec fails."""

    kinds = frozenset({StoreKind.PUSH})
    name = "'undecodable'"

    def decoded(self, connection: int, message: Message) -> Message:
        raise ZeroDivisionError("in the codec")


def test_a_store_that_cannot_decode_a_request_ends_the_run_with_its_traceback() -> None:
    world = CoordinatorWorld(2, _Undecodable())
    reply = world.send(0, StoreKind.PUSH)
    assert code(reply) == "aborted"
    assert reply is not None
    assert "ZeroDivisionError: in the codec" in reply.meta["error"]
    assert world.status().failure is not None


class _LongError(_Undecodable):
    """A store whose error says more than a frame holds."""

    def decoded(self, connection: int, message: Message) -> Message:
        raise ValueError("weights " + MAX_META_BYTES * "0")


class _LongRefusal(_Undecodable):
    """The same with an error of this library, which refuses one request."""

    def decoded(self, connection: int, message: Message) -> Message:
        raise DataError("weights", expected="numbers", received=MAX_META_BYTES * "0")


def test_a_long_error_of_the_server_is_heard_by_ranks_and_driver() -> None:
    world = CoordinatorWorld(2, _LongError())
    reply = world.send(0, StoreKind.PUSH)
    assert reply is not None
    encode(reply)
    heard = error_from_meta(reply.meta)
    assert isinstance(heard, WorkerError)
    assert heard.error.startswith("ValueError: weights 00")
    assert len(heard.error) == 10_000
    assert heard.traceback == 99_999 * "0" + "\n"
    meta, _ = world.status().to_wire()
    encode(Message(Kind.OK, meta=meta))


def test_a_long_error_of_a_rank_is_heard_by_the_others_and_the_driver() -> None:
    """Also where the rank's own session has not shortened it."""
    world = joined(2)
    long = 3_000_000 * "x"
    world.send(1, CoordinatorKind.FAIL, meta={"error": "E: " + long, "traceback": long + "the end"})
    failure = world.status().failure
    assert failure is not None
    assert (failure.error[:5], len(failure.error)) == ("E: xx", 10_000)
    assert (failure.traceback[-7:], len(failure.traceback)) == ("the end", 100_000)
    reply = world.report(0, EpochReport(0, 1))
    assert reply is not None
    encode(reply)
    meta, _ = world.status().to_wire()
    encode(Message(Kind.OK, meta=meta))


def test_a_long_refusal_is_heard() -> None:
    world = CoordinatorWorld(2, _LongRefusal())
    reply = world.send(0, StoreKind.PUSH)
    assert reply is not None
    encode(reply)
    assert type(error_from_meta(reply.meta)) is SparkDLError  # the nearest that a frame tells
    assert error_from_meta(reply.meta).received.startswith("000")


# ------------------------------------------------------------------ what a rank has used


def usage(compute: float) -> Usage:
    return Usage(dict.fromkeys(PHASES, compute), 1.5, 1 << 30, 10, 20)


def test_the_driver_sees_what_each_rank_has_used() -> None:
    world = joined()
    assert world.status().workers[0].usage is None
    for connection, compute in ((0, 1.0), (0, 2.0), (1, 3.0)):
        world.report(connection, EpochReport(0, 1), usage=usage(compute))
    found = world.status().workers
    assert (found[0].usage, found[1].usage) == (usage(2.0), usage(3.0))
    world.report(0, EpochReport(1, 1))  # a report that does not say it
    assert world.status().workers[0].usage == usage(2.0)


@pytest.mark.parametrize(
    "numbers", ["many", [1.0], [-1.0] * 10, [None] * 10, [True] * 10, [1e300] * 10]
)
def test_malformed_numbers_of_use_are_refused(numbers: Any) -> None:
    world = joined()
    meta = {**report_message(EpochReport(0, 1), wait=False).meta, "usage": numbers}
    assert code(world.report(0, EpochReport(0, 1), meta=meta)) == "protocol"
    assert world.status().workers[0].usage is None


# ------------------------------------------------------------------ what a heartbeat brings


def test_a_heartbeat_brings_the_hosts_load_and_lines() -> None:
    world = joined()
    assert world.status().workers[0].load is None
    world.send(
        0,
        CoordinatorKind.HEARTBEAT,
        meta={"load": [50.0, 25.0, 90.0, 10.0], "lines": ["a", "b\nc"]},
    )
    world.send(1, CoordinatorKind.HEARTBEAT, meta={"lines": ["d"]})
    world.send(0, CoordinatorKind.HEARTBEAT)  # one that says nothing changes nothing
    workers = world.status().workers
    assert workers[0].load == HostLoad(50.0, 25.0, (90.0,), (10.0,))
    assert workers[1].load is None
    meta, body = world.status().to_wire()
    assert Status.from_wire(json.loads(json.dumps(meta)), body).workers == workers
    reply = world.send(DRIVER, CoordinatorKind.TAKE_LINES, rank=-1)
    assert reply is not None
    assert reply.body is not None
    assert reply.meta["ranks"] == [0, 0, 1]
    assert unpack_lines(reply.body) == ["a", "b c", "d"]


@pytest.mark.parametrize(
    "meta", [{"load": [1.0]}, {"load": "high"}, {"lines": "a"}, {"lines": [1]}]
)
def test_a_malformed_heartbeat_is_refused(meta: Any) -> None:
    world = joined()
    assert code(world.send(0, CoordinatorKind.HEARTBEAT, meta=meta)) == "protocol"
    assert world.status().workers[0].load is None


def test_an_epoch_that_a_lost_attempt_has_told_whole_counts_once() -> None:
    """Its successor begins behind the epoch's last batch, and evaluates the same rows again."""
    world = CoordinatorWorld(2)
    world.join(0, 1)
    whole = EpochReport(0, 8, np.array([3.0, 8.0]), ended=True, val_metrics=np.array([1.0, 2.0]))
    world.report(1, whole)
    world.drop(1)
    world.hello(101, attempt=1, rank=1)
    again = EpochReport(0, 0, np.zeros(2), ended=True, val_metrics=np.array([1.0, 2.0]))
    world.report(101, again, attempt=1, rank=1)
    totals = world.status().epochs[0]
    assert (totals.rows, totals.ended) == (8, (1,))
    np.testing.assert_array_equal(totals.metrics, [3.0, 8.0])
    np.testing.assert_array_equal(totals.val_metrics, [1.0, 2.0])
