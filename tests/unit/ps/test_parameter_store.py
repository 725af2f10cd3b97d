"""The server without waiting: exactly-once, attempts, leases, telemetry, control, failure."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_world import Bounded, Flag, Kind, Plain, World, code
from sparkdl.ps.state import Settings

from sparkdl.errors import ConfigError
from sparkdl.ps.rules.rule import Rule


def test_commits_add_up_and_replies_hold_the_center() -> None:
    world = World(Plain())
    world.join(0, 1)
    world.commit(0, 1.0, 1)
    reply = world.commit(1, 2.0, 1)
    assert reply is not None
    assert reply.clock == 2
    np.testing.assert_array_equal(world.bodies[1], np.full(4, 3.0))
    push = world.send(0, Kind.PUSH, 1.0, sequence=2)
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
    assert world.state.clock == applied


def test_a_reply_keeps_the_center_of_its_moment_while_it_is_read() -> None:
    world = World(Plain(), workers=2)
    world.join(0, 1)
    world.commit(0, 1.0, 1)
    from sparkdl.transport.frames import Message

    [(_, reply)] = world.state.receive(0, Message(Kind.PULL, rank=0), 0.0)
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
    world.send(0, Kind.PULL)
    world.send(1, Kind.PULL)
    world.commit(0, 0.0, 1)
    world.commit(0, 0.0, 2)
    world.commit(1, 0.0, 1)
    assert seen == [(0, 0), (0, 0), (1, 2)]
    assert world.status()["workers"]["1"]["staleness_max"] == 2


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


def test_a_speculative_twin_waits_until_the_first_finishes() -> None:
    world = World(Plain())
    world.join(0)
    assert world.hello(100, attempt=1) is None
    world.commit(0, 1.0, 1)
    world.send(0, Kind.FINISH)
    assert world.last(100).flags & Flag.DONE
    world.drop(0)
    assert world.status()["workers"]["0"]["finished"]


def test_a_speculative_twin_takes_over_when_the_first_dies() -> None:
    world = World(Plain())
    world.join(0)
    assert world.hello(100, attempt=1) is None
    world.commit(0, 1.0, 1, batch=9)
    world.drop(0)
    assert world.last(100).batch == 9
    assert not world.last(100).flags & Flag.DONE


def test_a_silent_worker_loses_its_lease_to_a_retry() -> None:
    world = World(Plain(), lease_s=10)
    world.join(0)
    assert world.hello(100, attempt=1) is None
    world.wait(6)
    world.send(0, Kind.HEARTBEAT)
    world.wait(6)
    assert world.answers(100) == 0
    world.wait(11)
    assert world.last(100).kind is Kind.OK


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


def test_a_twin_of_a_finished_rank_is_done_at_once() -> None:
    world = World(Plain())
    world.join(0)
    world.send(0, Kind.FINISH)
    reply = world.hello(100, attempt=3)
    assert reply is not None
    assert reply.flags & Flag.DONE


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
        world.send(1, Kind.FINISH)
    assert world.last(0).kind is Kind.WEIGHTS


def test_the_gate_has_a_limit_and_names_the_slowest() -> None:
    world = World(Bounded(0), round_timeout_s=5)
    world.hello(0)
    world.hello(1)
    world.commit(0, 1.0, 1)
    world.wait(6)
    assert code(world.last(0)) == "timeout"
    assert "missing: 1" in world.last(0).meta["what"]


# ------------------------------------------------------------------ telemetry and control


def test_epochs_sum_over_ranks_and_dead_attempts() -> None:
    world = World(Plain())
    world.join(0, 1)
    world.commit(0, 0, 1, meta={"epoch": 0, "metrics": [1, 2], "rows": 5})
    world.commit(0, 0, 2, meta={"epoch": 0, "metrics": [3, 4], "rows": 10})  # replaces
    world.drop(0)
    world.join(100, attempt=1)
    world.send(100, Kind.REPORT, attempt=1, meta={"epoch": 0, "metrics": [10, 10], "rows": 7})
    world.send(1, Kind.REPORT, meta={"epoch": 0, "metrics": [100, 0], "rows": 1, "ended": True,
                                     "val_metrics": [0.5]})  # fmt: skip
    epoch = world.status()["epochs"]["0"]
    assert epoch == {
        "rows": 18, "val_rows": 0, "metrics": [113, 14], "val_metrics": [0.5], "ended": [1]
    }  # fmt: skip
    late = world.send(999, Kind.STATUS, rank=-1, meta={"since_epoch": 1})
    assert late is not None
    assert late.meta["epochs"] == {}


def test_malformed_telemetry_is_refused_and_not_applied() -> None:
    world = World(Plain())
    world.join(0)
    assert code(world.commit(0, 1.0, 1, meta={"epoch": 0, "metrics": "no"})) == "protocol"
    np.testing.assert_array_equal(world.center, np.zeros(4))


def test_an_epoch_ends_when_the_driver_releases_it() -> None:
    world = World(Plain())
    world.join(0, 1)
    meta = {"epoch": 0, "ended": True}
    assert world.send(0, Kind.REPORT, flags=Flag.WAIT, meta=meta) is None
    assert world.send(1, Kind.REPORT, flags=Flag.WAIT, meta=meta) is None
    assert world.status()["epochs"]["0"]["ended"] == [0, 1]
    world.send(999, Kind.CONTROL, rank=-1, meta={"release": 0, "learning_rate": 0.5, "stop": True})
    for rank in (0, 1):
        assert world.last(rank).flags & Flag.STOP
        assert world.last(rank).learning_rate == 0.5
    assert world.send(0, Kind.REPORT, flags=Flag.WAIT, meta=meta) is not None  # already released


def test_a_silent_driver_ends_the_wait_at_an_epochs_end() -> None:
    world = World(Plain(), release_timeout_s=10)
    world.join(0)
    world.send(0, Kind.REPORT, flags=Flag.WAIT, meta={"epoch": 0, "ended": True})
    world.wait(8)
    world.status()
    world.send(0, Kind.HEARTBEAT)
    world.wait(8)
    assert world.answers(0) == 2  # hello and the heartbeat
    world.wait(4)
    assert code(world.last(0)) == "timeout"
    assert "driver" in world.last(0).meta["what"]


def test_workers_may_not_control() -> None:
    world = World(Plain())
    world.join(0)
    assert code(world.send(0, Kind.CONTROL, meta={"stop": True})) == "protocol"
    assert code(world.send(999, Kind.CONTROL, rank=-1, meta={"learning_rate": "x"})) == "protocol"


def test_one_failure_ends_all_waits() -> None:
    world = World(Plain(), workers=3)
    world.join(0, 1, 2)
    world.send(0, Kind.REPORT, flags=Flag.WAIT, meta={"epoch": 0})
    world.send(2, Kind.FAIL, meta={"error": "ValueError: bad", "traceback": "tb"})
    assert code(world.last(0)) == "aborted"
    assert world.last(0).flags & Flag.ABORT
    assert code(world.commit(1, 1.0, 1)) == "aborted"
    assert world.last(1).meta["rank"] == 2
    assert world.status()["failure"] == {
        "rank": 2, "error": "ValueError: bad", "traceback": "tb"
    }  # fmt: skip
    assert world.send(999, Kind.PULL, rank=-1).kind is Kind.WEIGHTS  # type: ignore[union-attr]


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
    assert world.send(999, Kind.PULL, rank=-1) is not None
    world.drop(999)
    assert world.state.metrics()["workers_alive"] == 0


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
    assert world.last(0).kind is Kind.WEIGHTS
    assert world.last(1).kind is Kind.WEIGHTS


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        Settings(0)
    with pytest.raises(ConfigError, match="lease_s"):
        Settings(1, lease_s=0)


def test_workers_that_do_not_wait_begin_together_but_not_for_ever() -> None:
    """A worker that came late would train its rows alone at the end."""
    from sparkdl.ps.state import ServerState, Settings

    from sparkdl.ps.rules.rule import Rule
    from sparkdl.transport.frames import Kind, Message
    from sparkdl.weights import Layout

    layout = Layout.of([("w", (3,), "float32")])

    def world() -> ServerState:
        settings = Settings(3, gather=2, gather_s=5.0)
        return ServerState(layout, np.zeros(3, np.float32), Rule(), settings)

    def hello(rank: int) -> Message:
        return Message(Kind.HELLO, rank=rank, attempt=rank, meta={"batches_per_epoch": 4})

    state = world()
    assert state.receive(1, hello(0), now=0.0) == []
    assert sorted(c for c, _ in state.receive(2, hello(1), now=1.0)) == [1, 2]
    assert [c for c, _ in state.receive(3, hello(2), now=9.0)] == [3]  # a latecomer at once

    alone = world()
    assert alone.receive(1, hello(0), now=0.0) == []
    assert alone.tick(now=4.9) == []
    assert [c for c, _ in alone.tick(now=5.1)] == [1]
