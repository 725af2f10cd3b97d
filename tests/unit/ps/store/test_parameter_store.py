"""The store without rounds: exactly-once, attempts, staleness, gates, failure."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_world import Bounded, Flag, Kind, Plain, Rounds, World, code

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.failures import Failure
from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.store import make_store
from sparkdl.rules.rule import Rule
from sparkdl.training.reports import EpochReport
from sparkdl.transport.frames import Message
from sparkdl.weights import Layout


def test_commits_add_up_and_replies_hold_the_center() -> None:
    world = World(Plain())
    world.join(0, 1)
    world.commit(0, 1.0, 1)
    reply = world.commit(1, 2.0, 1)
    assert reply is not None
    assert reply.clock == 2
    np.testing.assert_array_equal(world.bodies[1], np.full(4, 3.0))
    push = world.send(0, StoreKind.PUSH, 1.0, sequence=2)
    assert push is not None
    assert push.kind is Kind.OK
    np.testing.assert_array_equal(world.center, np.full(4, 4.0))


def test_the_averaged_segment_is_averaged() -> None:
    world = World(Plain(), workers=2, trained=2, averaged=2)
    world.join(0, 1)
    world.commit(0, 1.0, 1)
    world.commit(1, 1.0, 1)
    np.testing.assert_array_equal(world.center, [2, 2, 1, 1])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=40))
def test_each_sequence_counts_once_in_any_order_of_resends(sends: list[tuple[int, int]]) -> None:
    world = World(Plain(), workers=3)
    world.join(0, 1, 2)
    highest = [0, 0, 0]
    applied = 0
    for rank, sequence in sends:
        reply = world.commit(rank, 1.0, sequence)
        assert reply is not None
        fresh = sequence > highest[rank]
        applied += fresh
        highest[rank] = max(highest[rank], sequence)
        assert bool(reply.flags & Flag.DUPLICATE) != fresh
        np.testing.assert_array_equal(world.bodies[rank], np.full(4, float(applied)))
    assert world.clock == applied


def test_a_reply_keeps_the_center_of_its_moment_while_it_is_read() -> None:
    world = World(Plain(), workers=2)
    world.join(0, 1)
    world.commit(0, 1.0, 1)
    [(_, reply)] = world.coordinator.receive(0, Message(StoreKind.PULL, rank=0), 0.0)
    reading = reply.reading
    assert reading is not None
    seen = bytearray()

    def some(piece: memoryview) -> int:
        seen.extend(piece[:4])
        return min(4, len(piece))

    assert not reading.read(some)
    world.commit(1, 5.0, 1)  # changes the center in the middle
    while not reading.read(some):
        pass
    np.testing.assert_array_equal(np.frombuffer(seen, np.float32), np.full(4, 1.0))
    np.testing.assert_array_equal(world.center, np.full(4, 6.0))


def test_staleness_is_what_others_committed_since_the_pull() -> None:
    seen: list[tuple[int, int]] = []

    class Watching(Rule):
        def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
            seen.append((commit.worker, commit.staleness))

    world = World(Watching())
    world.join(0, 1)
    world.send(0, StoreKind.PULL)
    world.send(1, StoreKind.PULL)
    world.commit(0, 0.0, 1)
    world.commit(0, 0.0, 2)
    world.commit(1, 0.0, 1)
    assert seen == [(0, 0), (0, 0), (1, 2)]
    assert world.status().workers[1].staleness_max == 2


# ------------------------------------------------------------------ attempts


def test_hello_comes_first() -> None:
    world = World(Plain())
    assert code(world.commit(0, 1.0, 1)) == "protocol"
    assert code(world.hello(7)) == "protocol"  # of 2 workers
    assert code(world.hello(0, meta={"batches_per_epoch": "many"})) == "protocol"


def test_a_retry_resumes_where_committed_work_ended() -> None:
    world = World(Plain())
    world.join(0)
    world.commit(0, 1.0, 1, epoch=2, batch=30, rows=64)
    world.drop(0)
    welcome = world.hello(100, attempt=5)
    assert welcome is not None
    assert (welcome.epoch, welcome.batch, welcome.rows, welcome.sequence) == (2, 30, 64, 0)
    world.commit(100, 1.0, 1, attempt=5)  # its sequences start anew
    np.testing.assert_array_equal(world.center, np.full(4, 2.0))


def test_a_superseded_attempt_changes_nothing() -> None:
    world = World(Plain())
    world.join(0)
    world.drop(0)
    world.join(100, attempt=1)
    late = world.commit(0, 1.0, 1, attempt=0)
    assert code(late) == "transport"
    assert late is not None
    assert "superseded" in late.meta["what"]
    assert code(world.hello(0, attempt=0)) == "transport"
    np.testing.assert_array_equal(world.center, np.zeros(4))


def test_a_duplicate_attempt_takes_over_when_the_first_dies() -> None:
    world = World(Plain())
    world.join(0)
    assert world.hello(100, attempt=1) is None
    world.commit(0, 1.0, 1, batch=9)
    world.drop(0)
    assert world.last(100).batch == 9
    assert not world.last(100).flags & Flag.DONE


def test_the_same_attempt_resumes_on_a_new_connection() -> None:
    world = World(Plain())
    world.join(0)
    world.commit(0, 1.0, 1)
    world.drop(0)
    duplicate = world.commit(100, 1.0, 1, attempt=0)
    assert duplicate is not None
    assert duplicate.flags & Flag.DUPLICATE
    world.commit(100, 1.0, 2, attempt=0)
    np.testing.assert_array_equal(world.center, np.full(4, 2.0))


# ------------------------------------------------------------------ bounded staleness


def test_a_fast_worker_waits_for_the_slowest() -> None:
    world = World(Bounded(1))
    assert world.hello(0) is None  # all start together
    world.hello(1)
    assert world.commit(0, 1.0, 1) is not None
    assert world.commit(0, 1.0, 2) is None
    assert world.commit(1, 1.0, 1) is not None
    assert world.answers(0) == 3  # hello, first, second
    np.testing.assert_array_equal(world.bodies[0], np.full(4, 3.0))  # sees the slow one's commit


@pytest.mark.parametrize("end", ["death", "finish"])
def test_the_gate_opens_when_the_slowest_ends(end: str) -> None:
    world = World(Bounded(0))
    world.hello(0)
    world.hello(1)
    assert world.commit(0, 1.0, 1) is None
    if end == "death":
        world.drop(1)
        assert world.answers(0) == 1
        world.wait(3)  # the grace
    else:
        world.send(1, CoordinatorKind.FINISH)
    assert world.last(0).kind is StoreKind.WEIGHTS


def test_the_gate_has_a_limit_and_names_the_slowest() -> None:
    world = World(Bounded(0), round_timeout_s=5)
    world.hello(0)
    world.hello(1)
    world.commit(0, 1.0, 1)
    world.wait(6)
    assert code(world.last(0)) == "timeout"
    assert "missing: 1" in world.last(0).meta["what"]


# ------------------------------------------------------------------ telemetry and failure


def test_orders_are_told_at_once_where_nobody_waits() -> None:
    world = World(Plain())
    world.join(0, 1)
    world.control(stop=True, learning_rate=0.5)
    for rank in (0, 1):
        reply = world.commit(rank, 1.0, 1)
        assert reply is not None
        assert reply.flags & Flag.STOP
        assert reply.learning_rate == 0.5


def test_reports_change_neither_the_center_nor_committed_progress() -> None:
    world = World(Plain())
    world.join(0)
    world.commit(0, 1.0, 1, epoch=1, batch=5, rows=64)
    report = EpochReport(3, 9, np.ones(2), batches_done=8, rows_done=1000)
    assert world.report(0, report) is not None
    worker = world.status().workers[0]
    assert (worker.epoch, worker.batch, worker.rows, worker.batches) == (1, 5, 64, 1)
    np.testing.assert_array_equal(world.status(since_epoch=3).epochs[3].metrics, [1, 1])
    np.testing.assert_array_equal(world.center, np.full(4, 1.0))


def test_malformed_telemetry_is_refused_and_not_applied() -> None:
    world = World(Plain())
    world.join(0)
    reply = world.blob(0, CoordinatorKind.REPORT, np.zeros(8, np.uint8), meta={"rows": "no"})
    assert code(reply) == "protocol"
    np.testing.assert_array_equal(world.center, np.zeros(4))


def test_a_malformed_commit_is_refused_and_not_applied() -> None:
    world = World(Plain())
    world.join(0)
    assert code(world.send(0, StoreKind.PUSH, sequence=1, rows=1)) == "protocol"  # without a body
    raw = world.coordinator.buffer(0)
    part = {"flags": Flag.SLICED, "body": raw[:8]}
    assert code(world.send(0, StoreKind.PUSH, sequence=1, rows=1, **part)) == "protocol"
    encoded = {"flags": Flag.ENCODED, "body": raw[:8]}
    reply = world.send(0, StoreKind.PUSH, sequence=1, rows=1, **encoded)
    assert code(reply) == "protocol"
    assert reply is not None
    assert "without compression" in reply.meta["what"]
    np.testing.assert_array_equal(world.center, np.zeros(4))
    assert world.clock == 0


def test_a_snapshot_that_comes_encoded_is_refused_and_ends_nobody() -> None:
    world = World(Rounds("gradient"), workers=1)
    world.join(0)
    part = world.coordinator.buffer(0)[:8]
    reply = world.send(0, StoreKind.SNAPSHOT, flags=Flag.ENCODED, body=part, epoch=1)
    assert code(reply) == "protocol"
    assert world.status().failure is None
    np.testing.assert_array_equal(world.center, np.zeros(4))


def test_a_model_of_another_size_is_refused_before_it_joins() -> None:
    world = World(Plain())
    reply = world.hello(0, meta={"weights_bytes": 20})
    assert code(reply) == "protocol"
    assert reply is not None
    assert "does not fit" in reply.meta["what"]
    assert world.status().workers == {}
    assert world.hello(0, meta={"weights_bytes": 16}) is not None


def test_one_failure_ends_all_waits() -> None:
    world = World(Plain(), workers=3)
    world.join(0, 1, 2)
    world.report(0, EpochReport(0, 1, ended=True), wait=True)
    world.send(2, CoordinatorKind.FAIL, meta={"error": "ValueError: bad", "traceback": "tb"})
    assert code(world.last(0)) == "aborted"
    assert world.last(0).flags & Flag.ABORT
    assert code(world.commit(1, 1.0, 1)) == "aborted"
    assert world.last(1).meta["rank"] == 2
    assert world.status().failure == Failure(2, "ValueError: bad", "tb")
    np.testing.assert_array_equal(world.center, np.zeros(4))
    assert world.send(999, StoreKind.PULL, rank=-1).kind is StoreKind.WEIGHTS  # type: ignore[union-attr]


def test_a_rule_that_raises_ends_the_run_with_its_traceback() -> None:
    class Broken(Rule):
        name = "broken"

        def update(self, *_: Any) -> None:
            raise ZeroDivisionError("in the rule")

    world = World(Broken())
    world.join(0)
    reply = world.commit(0, 1.0, 1)
    assert code(reply) == "aborted"
    assert reply is not None
    assert "ZeroDivisionError: in the rule" in reply.meta["traceback"]


def test_a_driver_that_only_looks_is_no_worker() -> None:
    world = World(Plain())
    assert world.send(999, StoreKind.PULL, rank=-1) is not None
    world.drop(999)
    metrics = {metric.name: metric.value for metric in world.coordinator.metrics()}
    assert metrics["workers_alive"] == 0


# ------------------------------------------------------------------ lock-free


def test_lock_free_rules_run_at_the_same_time() -> None:
    barrier = threading.Barrier(2)

    class Meeting(Rule):
        lock_free = True

        def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
            barrier.wait(5)  # breaks unless both are inside

    world = World(Meeting())
    world.join(0, 1)
    threads = [threading.Thread(target=world.commit, args=(rank, 1.0, 1)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert world.last(0).kind is StoreKind.WEIGHTS
    assert world.last(1).kind is StoreKind.WEIGHTS


def test_workers_that_do_not_wait_begin_together_but_not_for_ever() -> None:
    """A worker that came late would train its rows alone at the end."""
    layout = Layout.of([("w", (3,), "float32")])

    def world() -> Coordinator:
        settings = Settings(3, gather=2, gather_s=5.0)
        return Coordinator(settings, make_store(layout, np.zeros(3, np.float32), Rule()))

    def hello(rank: int) -> Message:
        return Message(
            CoordinatorKind.HELLO, rank=rank, attempt=rank, meta={"batches_per_epoch": 4}
        )

    state = world()
    assert state.receive(1, hello(0), now=0.0) == []
    assert sorted(c for c, _ in state.receive(2, hello(1), now=1.0)) == [1, 2]
    assert [c for c, _ in state.receive(3, hello(2), now=9.0)] == [3]  # a latecomer at once

    alone = world()
    assert alone.receive(1, hello(0), now=0.0) == []
    assert alone.tick(now=4.9) == []
    assert [c for c, _ in alone.tick(now=5.1)] == [1]


def begun_together() -> tuple[Coordinator, Message]:
    """Two of three workers that were let in, and what the first of them pushes."""
    layout = Layout.of([("w", (3,), "float32")])
    settings = Settings(3, gather=2, gather_s=5.0, grace_s=1.0)
    state = Coordinator(settings, make_store(layout, np.zeros(3, np.float32), Rule()))
    for rank in (0, 1):
        hello = Message(CoordinatorKind.HELLO, rank=rank, attempt=0, meta={"batches_per_epoch": 4})
        state.receive(rank, hello, now=0.0)
    push = Message(
        StoreKind.PUSH_PULL, rank=0, sequence=1, batches=1, rows=1,
        body=np.ones(3, np.float32).view(np.uint8),
    )  # fmt: skip
    return state, push


def test_workers_that_begin_together_get_the_same_center() -> None:
    """Else a slow one begins with what a fast one has trained of its whole, short epoch."""
    state, push = begun_together()
    assert state.receive(0, Message(StoreKind.PULL, rank=0), now=1.0) == []
    both = state.receive(1, Message(StoreKind.PULL, rank=1), now=2.0)
    assert sorted(connection for connection, _ in both) == [0, 1]
    state.receive(0, push, now=3.0)
    target = np.empty(3, np.float32)
    for connection, reply in both:
        assert reply.reading is not None
        reply.reading.copy_into(target.view(np.uint8))
        assert target.tolist() == [0, 0, 0], connection
    [(_, later)] = state.receive(
        1, Message(StoreKind.PULL, rank=1), now=4.0
    )  # no first pull any more
    assert later.reading is not None
    later.reading.copy_into(target.view(np.uint8))
    assert target.tolist() == [1, 1, 1]


@pytest.mark.parametrize("end", ["dies", "is silent", "commits", "comes late"])
def test_a_first_pull_does_not_wait_for_ever(end: str) -> None:
    state, push = begun_together()
    if end == "comes late":
        state.receive(0, Message(StoreKind.PULL, rank=0), now=1.0)
        state.receive(1, Message(StoreKind.PULL, rank=1), now=1.0)
        hello = Message(CoordinatorKind.HELLO, rank=2, attempt=0, meta={"batches_per_epoch": 4})
        state.receive(2, hello, now=2.0)
        assert [c for c, _ in state.receive(2, Message(StoreKind.PULL, rank=2), now=2.0)] == [2]
        return
    assert state.receive(1, Message(StoreKind.PULL, rank=1), now=1.0) == []
    if end == "commits":
        assert {c for c, _ in state.receive(0, push, now=2.0)} == {0, 1}
    elif end == "dies":
        assert state.disconnect(0, now=2.0) == []
        assert [c for c, _ in state.tick(now=3.5)] == [1]
    else:
        assert state.tick(now=5.9) == []
        assert [c for c, _ in state.tick(now=6.1)] == [1]


# -- pulls after the last commits ----------------------------------------------------------------


def pull_last(world: World, connection: int) -> Any:
    return world.send(connection, StoreKind.PULL, flags=Flag.WAIT)


def test_a_last_pull_waits_for_the_last_commits_of_all_members() -> None:
    world = World(Plain(), workers=3)
    world.join(0, 1, 2)
    world.commit(0, 1.0, 1)
    assert pull_last(world, 0) is None
    world.commit(1, 10.0, 1)
    assert pull_last(world, 1) is None
    world.commit(2, 100.0, 1)
    assert pull_last(world, 2) is not None
    for connection in (0, 1, 2):
        assert world.bodies[connection].tolist() == [111.0] * 4


@pytest.mark.parametrize("end", ["finishes", "dies", "never comes"])
def test_a_last_pull_does_not_wait_for_those_who_are_gone(end: str) -> None:
    world = World(Plain(), workers=2, grace_s=2)
    world.join(0)
    if end == "never comes":
        assert pull_last(world, 0) is not None  # it may wait for the slot of the first
        return
    world.join(1)
    assert pull_last(world, 0) is None
    if end == "finishes":
        world.send(1, CoordinatorKind.FINISH)
    else:
        world.drop(1)
        assert world.answers(0) == 1
        world.wait(3)
    assert world.last(0).kind is StoreKind.WEIGHTS


def test_a_gate_does_not_wait_for_a_worker_that_is_through() -> None:
    world = World(Bounded(1), workers=2)
    world.join(0, 1)
    world.commit(0, 1.0, 1)
    assert world.commit(0, 1.0, 2) is None  # two ahead of the other
    assert pull_last(world, 1) is None
    assert world.last(0).kind is StoreKind.WEIGHTS  # which makes no commits any more
    world.commit(0, 1.0, 3)
    assert pull_last(world, 0) is not None
    assert world.bodies[1].tolist() == [3.0] * 4
