"""Blocking rules: rounds, ranks that die in them, joiners, timeouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ps_world import Flag, Kind, Rounds, World, code

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.store.rounds import BLOCK, Payload, Round
from sparkdl.rules.bsp import BSP
from sparkdl.training.reports import EpochReport
from sparkdl.transport.frames import Message

GRADIENT = "gradient"


def started(workers: int = 2, payload: str = "delta", **limits: float) -> World:
    world = World(Rounds(payload), workers=workers, **limits)
    world.join(*range(workers), meta={"batches_per_epoch": 3})
    return world


def test_hello_waits_for_all_and_agrees_on_the_steps() -> None:
    world = World(Rounds())
    assert world.hello(0, meta={"batches_per_epoch": 3}) is None
    world.hello(1, meta={"batches_per_epoch": 7})
    assert world.last(0).meta["steps_per_epoch"] == world.last(1).meta["steps_per_epoch"] == 7


def test_a_start_that_never_completes_names_the_missing_ranks() -> None:
    world = World(Rounds(), workers=4, start_timeout_s=30)
    world.hello(1)
    world.wait(29)
    world.hello(3)
    world.wait(2)
    for rank in (1, 3):
        assert code(world.last(rank)) == "timeout"
        assert "missing: 0, 2" in world.last(rank).meta["what"]


def test_a_round_is_the_row_weighted_mean() -> None:
    world = started()
    assert world.commit(0, 1.0, 1, rows=3) is None
    world.commit(1, 5.0, 1, rows=1)
    for rank in (0, 1):
        np.testing.assert_array_equal(world.bodies[rank], np.full(4, 2.0))
        assert world.last(rank).rows == 4
        assert world.last(rank).clock == 1


def test_gradients_leave_the_snapshot_alone() -> None:
    world = started(payload=GRADIENT)
    world.commit(0, 1.0, 1)
    world.commit(1, 3.0, 1)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 2.0))
    np.testing.assert_array_equal(world.center, np.zeros(4))
    world.send(0, StoreKind.SNAPSHOT, 9.0, epoch=1)
    np.testing.assert_array_equal(world.center, np.full(4, 9.0))


def test_a_rank_without_rows_contributes_nothing() -> None:
    world = started()
    world.commit(0, np.nan, 1, rows=0)
    world.commit(1, 5.0, 1, rows=2)
    np.testing.assert_array_equal(world.center, np.full(4, 5.0))
    world.commit(0, np.nan, 2, rows=0)
    world.commit(1, np.nan, 2, rows=0)
    np.testing.assert_array_equal(world.center, np.full(4, 5.0))
    assert world.last(0).rows == 0


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(
            hnp.arrays(np.float32, (n, 11), elements=st.floats(-100, 100, width=32)),
            st.lists(st.integers(0, 9), min_size=n, max_size=n).filter(any),
        )
    )
)
def test_the_mean_equals_numpy(case: tuple[np.ndarray, list[int]]) -> None:
    values, rows = case
    round_ = Round()
    for rank, (row, weight) in enumerate(zip(values, rows, strict=True)):
        round_.payloads[rank] = Payload(rank, row.copy(), Message(StoreKind.PUSH, rows=weight))
    expected = np.average(values.astype(np.float64), axis=0, weights=rows)
    out = round_.payloads[0].values
    round_.mean(out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


def test_the_mean_goes_block_by_block() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(2, 2 * BLOCK + 7)).astype(np.float32)
    round_ = Round()
    for rank in (0, 1):
        round_.payloads[rank] = Payload(rank, values[rank].copy(), Message(StoreKind.PUSH, rows=1))
    out = np.empty(values.shape[1], np.float32)
    round_.mean(out)
    np.testing.assert_allclose(out, values.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_the_round_waits_for_the_next_attempt_of_a_lost_rank() -> None:
    world = started(workers=3)
    world.commit(0, 1.0, 1)
    world.commit(1, 3.0, 1)
    world.drop(2)
    world.wait(30)  # far beyond the grace
    assert world.answers(0) == 1
    welcome = world.hello(102, attempt=1, rank=2)
    assert welcome is not None
    assert (welcome.epoch, welcome.batch) == (0, 0)
    world.commit(102, 5.0, 1, attempt=1, rank=2)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 3.0))


def test_what_a_rank_sent_before_it_was_lost_counts_once() -> None:
    """The round completes with it, and the next attempt goes on behind it."""
    world = started()
    world.commit(1, 3.0, 1)
    world.drop(1)
    world.wait(30)
    world.commit(0, 1.0, 1)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 2.0))
    welcome = world.hello(101, attempt=1, rank=1)
    assert welcome is not None
    assert welcome.batch == 1


def test_what_a_rank_sent_is_trained_again_if_its_next_attempt_comes_before_the_round() -> None:
    world = started()
    world.commit(1, 3.0, 1)
    world.drop(1)
    welcome = world.hello(101, attempt=1, rank=1)
    assert welcome is not None
    assert welcome.batch == 0
    assert world.commit(0, 1.0, 1) is None
    world.commit(101, 3.0, 1, attempt=1, rank=1)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 2.0))
    assert world.clock == 1


def test_a_silent_rank_is_waited_for_and_goes_on_where_it_was() -> None:
    world = started(lease_s=10)
    world.commit(0, 1.0, 1)
    for _ in range(5):
        world.wait(4)
        world.send(0, CoordinatorKind.HEARTBEAT, rank=0)
    assert not world.status().workers[1].alive
    assert world.answers(0) == 6  # of the HELLO and the heartbeats
    world.commit(1, 3.0, 1)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 2.0))
    assert world.status().workers[1].member


def test_a_silent_rank_that_has_sent_its_part_stops_nobody() -> None:
    world = started(lease_s=10)
    world.commit(1, 3.0, 1)
    for _ in range(5):
        world.wait(4)
        world.send(0, CoordinatorKind.HEARTBEAT, rank=0)
    world.commit(0, 1.0, 1)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 2.0))
    assert world.clock == 1
    assert world.commit(0, 1.0, 2) is None


def test_a_lost_rank_that_never_comes_back_is_named_in_one_error() -> None:
    world = started(workers=3, start_timeout_s=50, round_timeout_s=1000, lease_s=1000)
    world.commit(0, 1.0, 1)
    world.commit(1, 1.0, 1)
    world.wait(40)
    world.send(2, CoordinatorKind.HEARTBEAT)
    world.drop(2)
    world.wait(49)
    assert world.answers(0) == 1
    world.wait(2)
    for rank in (0, 1):
        assert code(world.last(rank)) == "timeout"
        assert "missing: 2" in world.last(rank).meta["what"]
        assert "rank 2 was lost" in world.last(rank).meta["hint"]


def test_a_broken_connection_may_come_back_within_the_grace() -> None:
    world = started()
    world.commit(0, 2.0, 1)
    world.drop(0)  # its payload is here; its reply is lost
    world.wait(1)
    assert world.commit(100, 2.0, 1, attempt=0) is None  # resent
    world.commit(1, 4.0, 1)
    np.testing.assert_array_equal(world.bodies[100], np.full(4, 3.0))
    assert world.clock == 1


def test_a_lost_reply_is_sent_again() -> None:
    world = started(payload=GRADIENT)
    world.commit(0, 2.0, 1)
    world.drop(0)
    world.commit(1, 4.0, 1)  # the round counts the payload of the broken connection
    reply = world.commit(100, 2.0, 1, attempt=0)
    assert reply is not None
    assert reply.flags & Flag.DUPLICATE
    np.testing.assert_array_equal(world.bodies[100], np.full(4, 3.0))


def test_a_lost_reply_still_tells_the_rows_of_its_round() -> None:
    world = started(payload=GRADIENT)
    world.commit(0, 2.0, 1, rows=3)
    world.drop(0)
    world.commit(1, 4.0, 1, rows=2)
    reply = world.commit(100, 2.0, 1, attempt=0, rows=3)
    assert reply is not None
    assert reply.rows == 5


def test_a_silent_rank_that_the_others_have_gone_back_without_is_told() -> None:
    world = started(payload=GRADIENT, lease_s=10)
    assert world.commit(1, 1.0, 1) is None
    world.drop(0)
    world.wait(11)
    welcome = world.hello(100, attempt=1, rank=0)
    assert welcome is not None
    assert welcome.meta["source"] == "snapshot"
    for reply in (world.last(1), world.commit(1, 1.0, 1)):
        assert code(reply) == "transport"
        assert reply is not None
        assert "dropped" in reply.meta["what"]


def test_finished_ranks_leave_the_rounds() -> None:
    world = started(workers=3)
    world.commit(0, 1.0, 1)
    world.commit(1, 1.0, 1)
    world.send(2, CoordinatorKind.FINISH)
    assert world.last(0).kind is StoreKind.WEIGHTS
    reply = world.hello(102, attempt=1, rank=2)
    assert reply is not None
    assert reply.flags & Flag.DONE


def test_a_round_that_never_completes_names_the_missing_ranks() -> None:
    world = started(workers=3, round_timeout_s=20, lease_s=1000)
    world.commit(1, 1.0, 1)
    world.wait(21)
    assert code(world.last(1)) == "timeout"
    assert "missing: 0, 2" in world.last(1).meta["what"]


def test_stop_and_learning_rate_arrive_at_one_step_for_all() -> None:
    world = started()
    world.commit(0, 1.0, 1)
    world.control(stop=True, learning_rate=0.1)
    beat = world.send(1, CoordinatorKind.HEARTBEAT)
    assert beat is not None
    assert not beat.flags & Flag.STOP
    world.commit(1, 1.0, 1)
    assert world.last(0).flags & world.last(1).flags & Flag.STOP
    assert world.last(0).learning_rate == world.last(1).learning_rate == 0.1


def test_a_failure_answers_those_who_wait_in_a_round() -> None:
    world = started(workers=3)
    world.commit(0, 1.0, 1)
    world.send(1, CoordinatorKind.FAIL, meta={"error": "E", "traceback": "T"})
    assert code(world.last(0)) == "aborted"


# ------------------------------------------------------------------ joiners


def test_a_joiner_of_delta_rounds_starts_from_the_center() -> None:
    world = started()
    world.commit(0, 1.0, 1, epoch=1, batch=5)
    world.commit(1, 1.0, 1, epoch=1, batch=5)
    world.drop(1)
    world.wait(3)
    world.commit(0, 1.0, 2, epoch=2, batch=1)
    welcome = world.hello(101, attempt=1, rank=1)
    assert welcome is not None
    assert (welcome.epoch, welcome.batch, welcome.meta["source"]) == (2, 0, "center")
    world.commit(101, 1.0, 1, attempt=1, rank=1, epoch=2, batch=1)
    assert world.last(0).clock == 2


def test_a_joiner_of_gradient_rounds_gets_a_live_ranks_state() -> None:
    world = started(workers=3, payload=GRADIENT)
    for rank in range(3):
        world.commit(rank, 1.0, 1, epoch=0, batch=1)
    world.drop(2)
    assert world.hello(102, attempt=1, rank=2) is None  # takes over; waits for a state
    world.commit(0, 1.0, 2, epoch=0, batch=2)
    asked = world.last(0)
    assert (asked.kind, asked.flags & Flag.UPLOAD) == (Kind.OK, Flag.UPLOAD)
    assert world.commit(1, 1.0, 2, epoch=0, batch=2) is None
    blob = np.arange(100, dtype=np.uint8)
    for part in (slice(0, 60), slice(60, 100)):
        world.blob(
            0, StoreKind.STATE_PUT, blob[part], epoch=0, batch=1, offset=part.start, total=100
        )
    welcome = world.last(102)
    assert (welcome.epoch, welcome.batch, welcome.meta["source"]) == (0, 1, "state")
    state = world.send(102, StoreKind.STATE_GET, attempt=1, rank=2, offset=0)
    assert state is not None
    assert state.body is not None
    np.testing.assert_array_equal(state.body, blob)
    assert world.commit(0, 4.0, 2, batch=2) is None  # the same commit; the round waits for all
    world.commit(102, 1.0, 1, attempt=1, rank=2, batch=2)
    np.testing.assert_array_equal(world.bodies[1], np.full(4, 2.0))
    assert not world.last(0).flags & Flag.UPLOAD


def test_a_rank_that_lost_the_question_for_its_state_is_asked_again() -> None:
    world = started(payload=GRADIENT)
    world.drop(1)
    assert world.hello(101, attempt=1, rank=1) is None
    world.commit(0, 1.0, 1)
    world.drop(0)
    world.commit(100, 1.0, 1, attempt=0)
    assert world.last(100).flags & Flag.UPLOAD


def test_another_rank_uploads_if_the_first_dies() -> None:
    world = started(workers=3, payload=GRADIENT)
    world.drop(2)
    world.hello(102, attempt=1, rank=2)
    world.commit(0, 1.0, 1)
    assert world.last(0).flags & Flag.UPLOAD
    assert world.commit(1, 1.0, 1) is None
    world.drop(0)
    world.wait(3)
    assert world.last(1).flags & Flag.UPLOAD


def test_the_copy_of_a_live_rank_goes_on_in_its_place_where_a_rank_is_lost() -> None:
    """Spark's only free slot runs rank 0 again, which lives; the lost rank 1 needs a slot."""
    world = started(payload=GRADIENT)
    for rank in (0, 1):
        world.commit(rank, 1.0, 1, epoch=0, batch=1)
    world.drop(1)
    world.wait(3)
    assert world.commit(0, 5.0, 2, epoch=0, batch=2) is None
    assert world.hello(100, attempt=1, rank=0) is None
    world.wait(4)
    assert not world.last(0).flags & Flag.UPLOAD  # rank 1 itself may still come
    world.wait(2)
    assert world.last(0).flags & Flag.UPLOAD
    world.blob(0, StoreKind.STATE_PUT, np.arange(9, dtype=np.uint8), epoch=0, batch=1, total=9)
    welcome = world.last(100)
    assert (welcome.epoch, welcome.batch, welcome.meta["source"]) == (0, 1, "state")
    world.commit(0, 5.0, 2, epoch=0, batch=2)  # the former attempt ends with an error
    assert "superseded" in world.last(0).meta["what"]
    state = world.send(100, StoreKind.STATE_GET, attempt=1, rank=0, offset=0)
    assert state is not None
    np.testing.assert_array_equal(state.body, np.arange(9))
    assert world.commit(100, 5.0, 1, attempt=1, epoch=0, batch=2) is None
    assert world.hello(101, attempt=1, rank=1) is None  # in the slot that became free
    assert world.last(100).flags & Flag.UPLOAD
    world.blob(
        100, StoreKind.STATE_PUT, np.arange(9, dtype=np.uint8), attempt=1, epoch=0, batch=1, total=9
    )
    assert world.last(101).batch == 1
    world.commit(100, 5.0, 1, attempt=1, epoch=0, batch=2)
    world.commit(101, 1.0, 1, attempt=1, epoch=0, batch=2)
    np.testing.assert_array_equal(world.bodies[100], np.full(4, 3.0))


def test_the_copy_of_a_live_rank_waits_where_no_rank_is_lost() -> None:
    world = started(payload=GRADIENT)
    assert world.commit(0, 5.0, 1, epoch=0, batch=1) is None
    assert world.hello(100, attempt=1, rank=0) is None
    world.wait(30)
    world.commit(1, 1.0, 1, epoch=0, batch=1)
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 3.0))
    assert not world.last(0).flags & Flag.UPLOAD


def test_rounds_of_changes_need_no_state_for_a_copy() -> None:
    world = started()
    world.drop(1)
    world.wait(3)
    assert world.commit(0, 5.0, 1, epoch=0, batch=1) is None
    assert world.hello(100, attempt=1, rank=0) is None
    world.wait(6)
    assert world.last(100).meta["source"] == "center"
    assert code(world.last(0)) == "transport"


def test_when_all_have_died_the_first_back_starts_from_the_snapshot() -> None:
    world = started(payload=GRADIENT)
    world.commit(0, 1.0, 1, epoch=0, batch=1)
    world.commit(1, 1.0, 1, epoch=0, batch=1)
    world.send(0, StoreKind.SNAPSHOT, 7.0, epoch=1)
    world.drop(0)
    world.drop(1)
    world.wait(3)
    welcome = world.hello(100, attempt=1, rank=0)
    assert welcome is not None
    assert (welcome.epoch, welcome.batch, welcome.meta["source"]) == (1, 0, "snapshot")
    world.send(100, StoreKind.PULL, attempt=1, rank=0)
    np.testing.assert_array_equal(world.bodies[100], np.full(4, 7.0))
    assert world.hello(101, attempt=1, rank=1) is None  # gets the state of the first
    world.commit(100, 1.0, 1, attempt=1, rank=0)
    assert world.last(100).flags & Flag.UPLOAD


def test_what_is_trained_again_from_the_snapshot_counts_once() -> None:
    """Eight rows an epoch: the second one is lost half way with all of its workers."""
    world = started(payload=GRADIENT)

    def report(
        connection: int, epoch: int, rows: int, attempt: int = 0, ended: bool = False
    ) -> None:
        metrics = np.array([100.0 * rows if not attempt else rows, rows])
        said = EpochReport(epoch, rows, metrics, ended=ended)
        world.report(connection, said, attempt=attempt)

    for rank in (0, 1):
        report(rank, 0, 4, ended=True)
    world.send(0, StoreKind.SNAPSHOT, 7.0, epoch=1)
    for rank in (0, 1):
        world.commit(rank, 1.0, 1, epoch=1, batch=2, rows=2)
        report(rank, 1, 2)
    for rank in (0, 1):
        world.drop(rank)
    world.wait(3)
    world.hello(100, attempt=1, rank=0)
    status = world.status()
    assert set(status.epochs) == {0}
    assert status.epochs[0].rows == 8
    assert [(w.epoch, w.batch) for w in status.workers.values()] == [(1, 0), (1, 0)]
    report(100, 1, 8, attempt=1, ended=True)
    totals = world.status().epochs[1]
    assert (totals.rows, totals.ended) == (8, (0,))
    np.testing.assert_array_equal(totals.metrics, [8.0, 8.0])


def test_joiners_whose_only_source_died_start_from_the_snapshot() -> None:
    world = started(payload=GRADIENT)
    world.drop(1)
    assert world.hello(101, attempt=1, rank=1) is None
    world.drop(0)
    world.wait(3)
    assert world.last(101).meta["source"] == "snapshot"


def test_ranks_hear_which_variables_have_no_gradient_on_any_rank_with_rows() -> None:
    world = started(payload=GRADIENT)
    world.commit(0, 1.0, 1, rows=0)
    world.commit(1, 1.0, 1, rows=2, meta={"without_gradient": [0]})
    assert world.last(0).meta["without_gradient"] == [0]
    world.commit(0, 1.0, 2, rows=1, meta={"without_gradient": []})
    world.commit(1, 1.0, 2, rows=2, meta={"without_gradient": [0]})
    assert "without_gradient" not in world.last(0).meta


@pytest.mark.parametrize("told", [[-1], [99], ["0"], [True], "0", {}])
def test_variables_without_gradient_that_are_none_are_refused(told: Any) -> None:
    world = started(payload=GRADIENT)
    world.commit(0, 1.0, 1, meta={"without_gradient": told})
    assert code(world.last(0)) == "protocol"


@pytest.mark.parametrize(
    "fields",
    [
        {"total": 0},
        {"offset": 0, "total": 10**12},
        {"offset": 5, "total": 50},
    ],
)
def test_a_state_out_of_bounds_is_refused(fields: dict[str, int]) -> None:
    world = started(payload=GRADIENT)
    world.drop(1)
    world.hello(101, attempt=1, rank=1)
    world.commit(0, 1.0, 1)
    assert world.last(0).flags & Flag.UPLOAD
    chunk = {"body": world.coordinator.buffer(0)[:16], **fields}
    assert code(world.send(0, StoreKind.STATE_PUT, **chunk)) == "protocol"
    assert world.answers(101) == 0


# ------------------------------------------------------------------ snapshots


def asks(world: World, connection: int, **fields: Any) -> Message | None:
    """A worker that had every step asks whether to send its weights of the first epoch's end."""
    told = {"epoch": 1, "batches": 1, **fields}
    return world.send(connection, StoreKind.SNAPSHOT, flags=Flag.WAIT, **told)


def test_a_worker_that_had_fewer_batches_sends_only_if_no_other_can() -> None:
    """Its seeds and counters are of fewer steps."""
    world = started(workers=3, payload=GRADIENT)
    assert asks(world, 0, batches=0) is None
    complete = asks(world, 1)
    assert complete is not None
    assert complete.flags & Flag.UPLOAD
    world.send(1, StoreKind.SNAPSHOT, 9.0, epoch=1)
    assert not world.last(0).flags & Flag.UPLOAD
    for connection in (0, 2):
        assert asks(world, connection, epoch=2, batches=0) is None
    world.drop(1)
    world.wait(3)  # the grace
    assert [bool(world.last(c).flags & Flag.UPLOAD) for c in (0, 2)].count(True) == 1


def test_a_wait_for_a_worker_with_every_step_has_a_limit() -> None:
    world = started(payload=GRADIENT, round_timeout_s=20, lease_s=1000)
    assert asks(world, 0, batches=0) is None
    world.wait(21)
    assert code(world.last(0)) == "timeout"
    assert "missing: 1" in world.last(0).meta["what"]


def test_the_first_worker_that_asks_sends_the_weights_and_the_others_wait_for_them() -> None:
    world = started(workers=3, payload=GRADIENT)
    first = asks(world, 1)
    assert first is not None
    assert first.flags & Flag.UPLOAD
    assert asks(world, 0) is None
    world.send(1, StoreKind.SNAPSHOT, 9.0, epoch=1)
    late = asks(world, 2)
    assert late is not None
    assert not (world.last(0).flags | late.flags) & Flag.UPLOAD
    np.testing.assert_array_equal(world.center, np.full(4, 9.0))


@pytest.mark.parametrize("ended", ["killed", "retried"])
def test_another_worker_sends_the_weights_if_the_first_dies(ended: str) -> None:
    world = started(workers=3, payload=GRADIENT)
    asks(world, 0)
    assert asks(world, 1) is None
    assert asks(world, 2) is None
    world.drop(0)
    if ended == "killed":
        world.wait(3)  # the grace
    else:
        world.hello(100, attempt=1, rank=0)
    assert world.last(1).flags & Flag.UPLOAD
    world.send(1, StoreKind.SNAPSHOT, 7.0, epoch=1)
    assert world.last(2).kind is Kind.OK
    assert not world.last(2).flags & Flag.UPLOAD
    np.testing.assert_array_equal(world.center, np.full(4, 7.0))


def test_a_lost_answer_on_who_sends_the_weights_is_given_again() -> None:
    world = started(payload=GRADIENT)
    asks(world, 0)
    world.drop(0)
    again = asks(world, 100, attempt=0)
    assert again is not None
    assert again.flags & Flag.UPLOAD


def test_weights_of_the_past_change_nothing() -> None:
    world = started(payload=GRADIENT)
    world.send(1, StoreKind.SNAPSHOT, 9.0, epoch=2)
    for epoch in (1, 2):  # of a worker that was silent meanwhile, and sent again
        reply = world.send(0, StoreKind.SNAPSHOT, 5.0, epoch=epoch)
        assert reply is not None
        assert reply.kind is Kind.OK
        answer = asks(world, 0, epoch=epoch)
        assert answer is not None
        assert not answer.flags & Flag.UPLOAD
    np.testing.assert_array_equal(world.center, np.full(4, 9.0))


def test_a_wait_for_weights_that_never_come_has_a_limit_and_names_the_rank() -> None:
    world = started(payload=GRADIENT, round_timeout_s=20, lease_s=1000)
    asks(world, 1)
    asks(world, 0)
    world.wait(21)
    assert code(world.last(0)) == "timeout"
    assert "missing: 1" in world.last(0).meta["what"]


def test_the_lowest_live_rank_leads() -> None:
    world = started(payload=GRADIENT)
    assert world.last(0).flags & Flag.LEAD
    world.drop(0)
    world.wait(3)
    world.send(1, CoordinatorKind.HEARTBEAT)
    assert world.last(1).flags & Flag.LEAD


def test_a_rank_with_more_batches_leads() -> None:
    """Its seeds and counters are those of all steps."""
    world = World(Rounds(GRADIENT))
    world.hello(0, meta={"batches_per_epoch": 0})
    world.hello(1, meta={"batches_per_epoch": 3})
    for rank in (0, 1):
        world.send(rank, CoordinatorKind.HEARTBEAT)
        assert bool(world.last(rank).flags & Flag.LEAD) == (rank == 1)
    world.send(1, CoordinatorKind.FINISH)
    world.send(0, CoordinatorKind.HEARTBEAT)
    assert not world.last(0).flags & Flag.LEAD  # the state of rank 1 is there, and stays


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_the_mean_may_be_written_over_any_payload(place: int | None) -> None:
    """The same bits as apart, also where the payload is another view of the same memory."""
    random = np.random.default_rng(0)
    size = 2 * BLOCK + 5
    sent = [random.standard_normal(size).astype(np.float32) for _ in range(3)]

    def mean(values: list[Any], out: Any) -> Any:
        round_ = Round()
        for rank, (array, rows) in enumerate(zip(values, (3, 4, 5), strict=True)):
            round_.payloads[rank] = Payload(rank, array, Message(StoreKind.PUSH_PULL, rows=rows))
        round_.mean(out)
        return out.copy()

    wanted = mean(sent, np.empty(size, np.float32))
    np.testing.assert_allclose(wanted, np.average(sent, 0, [3, 4, 5]), atol=1e-6)
    copies = [array.copy() for array in sent]
    out = np.empty(size, np.float32) if place is None else copies[place][:]
    np.testing.assert_array_equal(mean(copies, out), wanted)


def test_a_subclass_with_an_update_of_its_own_is_asked() -> None:
    class Doubled(BSP):
        def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
            np.multiply(delta, 2, out=out)

    assert BSP().replies_mean
    assert not BSP(payload="delta").replies_mean
    assert not Doubled().replies_mean


def counted(world: World, connection: int, batches: int, batch: int = 3) -> Message | None:
    """A worker at an epoch's end asks who sends the counters."""
    fields = {"epoch": 0, "batch": batch, "batches": batches}
    return world.send(connection, StoreKind.CARRIED, **fields)


def uneven_world(**limits: float) -> World:
    world = World(Rounds(GRADIENT), **limits)
    world.hello(0, meta={"batches_per_epoch": 1})
    world.hello(1, meta={"batches_per_epoch": 3})
    return world


def sends_counters(world: World, connection: int, content: bytes, batch: int = 3) -> None:
    body = np.frombuffer(content, np.uint8)
    fields = {"epoch": 0, "batch": batch, "total": body.size, "body": body}
    world.send(connection, StoreKind.CARRIED_PUT, **fields)


def test_counters_of_a_worker_with_every_batch_are_there_for_one_with_fewer() -> None:
    world = uneven_world()
    for batch, content in [(3, b"three"), (4, b"four")]:
        assert counted(world, 0, 0, batch) is None
        asked = counted(world, 1, 1, batch)
        assert asked is not None
        assert asked.flags & Flag.UPLOAD
        sends_counters(world, 1, content, batch)
        assert world.last(0).total == len(content)
        reply = world.send(0, StoreKind.CARRIED_GET, offset=0)
        assert reply is not None
        assert reply.body is not None
        assert reply.body.tobytes() == content


def test_counters_wait_until_all_have_those_of_before() -> None:
    """Else a slow worker would read the first half of one and the second half of the other."""
    world = uneven_world()
    assert counted(world, 1, 1) is None
    asked = counted(world, 0, 0)
    assert asked is None
    assert world.last(1).flags & Flag.UPLOAD
    sends_counters(world, 1, b"three")
    assert counted(world, 1, 1, batch=4) is None
    assert not world.last(0).flags & Flag.UPLOAD


def test_counters_that_nobody_has_sent_cannot_be_read() -> None:
    reply = uneven_world().send(0, StoreKind.CARRIED_GET, offset=0)
    assert reply is not None
    assert reply.kind is Kind.ERROR


def test_counters_of_a_worker_that_the_others_have_gone_back_without_are_refused() -> None:
    world = uneven_world()
    world.drop(0)
    world.drop(1)
    world.wait(3)  # the grace
    world.hello(100, attempt=1, rank=0, meta={"batches_per_epoch": 1})
    world.hello(101, attempt=1, rank=1, meta={"batches_per_epoch": 3})
    late = world.send(1, StoreKind.CARRIED, epoch=0, batch=3, batches=1)
    assert late is not None
    assert late.kind is Kind.ERROR


def test_counters_that_are_equal_on_all_do_not_travel() -> None:
    world = started(payload=GRADIENT)
    for rank in (0, 1):
        reply = counted(world, rank, 1)
        assert reply is not None
        assert not reply.flags & Flag.UPLOAD
        assert reply.total == 0


def test_a_worker_with_fewer_batches_sends_counters_if_the_other_is_lost() -> None:
    world = uneven_world()
    assert counted(world, 0, 0) is None
    world.drop(1)
    world.wait(3)  # the grace
    assert world.last(0).flags & Flag.UPLOAD
