"""How ranks join a run, are retried, replaced or given up, and how they leave it."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_world import Apart, CoordinatorWorld, code

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError
from sparkdl.ps.kinds import StoreKind
from sparkdl.training.reports import EpochReport
from sparkdl.transport.frames import Flag, Kind


def apart(workers: int = 2, **limits: Any) -> CoordinatorWorld:
    """Ranks that neither begin together nor train in step."""
    return CoordinatorWorld(workers, Apart(), **limits)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        Settings(0)
    with pytest.raises(ConfigError, match="lease_s"):
        Settings(1, lease_s=0)


def test_hello_comes_first() -> None:
    world = apart()
    assert code(world.report(0, EpochReport(0, 1))) == "protocol"
    assert code(world.hello(7)) == "protocol"  # of 2 workers
    assert code(world.hello(0, rank=-1)) == "protocol"


@pytest.mark.parametrize(
    "meta",
    [
        {"batches_per_epoch": "many"},
        {"rows": -1},
        {"pid": True},
        {"host": 3},
        {"text": ["a"]},
    ],
)
def test_a_malformed_hello_is_refused_and_joins_nobody(meta: dict[str, Any]) -> None:
    world = apart()
    assert code(world.hello(0, meta=meta)) == "protocol"
    assert world.status().workers == {}


def test_frames_of_another_kind_are_refused() -> None:
    world = apart()
    world.join(0)
    for kind in (StoreKind.PULL, StoreKind.PUSH, StoreKind.STATE_GET, Kind.OK, Kind.OPEN):
        assert code(world.send(0, kind)) == "protocol"


# ------------------------------------------------------------------ ranks that begin together


def test_ranks_meet_and_are_told_what_all_said() -> None:
    world = CoordinatorWorld(3)
    assert world.hello(0, meta={"text": "I am 0", "batches_per_epoch": 3}) is None
    assert world.hello(2, meta={"text": "I am 2", "batches_per_epoch": 7}) is None
    assert not world.status().started
    assert world.status().waiting == {0: "start", 2: "start"}
    world.hello(1, meta={"text": "I am 1"})
    for rank in range(3):
        reply = world.last(rank)
        assert reply.meta["texts"] == {str(r): f"I am {r}" for r in range(3)}
        assert reply.meta["steps_per_epoch"] == 7
        assert reply.meta["num_workers"] == 3
        assert reply.rank == rank
    assert world.status().started
    assert world.status().waiting == {}


def test_a_start_that_never_completes_names_the_missing_ranks() -> None:
    world = CoordinatorWorld(4, start_timeout_s=30)
    world.hello(1)
    world.wait(29)
    world.hello(3)
    world.wait(2)
    for rank in (1, 3):
        assert code(world.last(rank)) == "timeout"
        assert "missing: 0, 2" in world.last(rank).meta["what"]


def test_a_member_that_says_more_of_itself_waits_for_nobody() -> None:
    world = CoordinatorWorld(2)
    world.join(0, 1)
    again = world.hello(0, meta={"rows": 50, "batches_per_epoch": 4})
    assert again is not None
    assert again.kind is Kind.OK
    assert again.meta["steps_per_epoch"] == 4
    assert world.status().workers[0].batches_per_epoch == 4


def test_a_late_attempt_joins_at_once_and_resumes_where_the_former_was() -> None:
    world = CoordinatorWorld(2)
    world.join(0, 1, meta={"text": "hello"})
    world.report(0, EpochReport(2, 30, batches_done=5, rows_done=640))
    world.drop(0)
    late = world.hello(100, attempt=1, meta={"text": "back"})
    assert late is not None
    assert (late.epoch, late.batch, late.rows, late.sequence) == (2, 5, 640, 0)
    assert late.meta["texts"] == {"0": "back", "1": "hello"}
    assert not late.flags & Flag.DONE
    assert world.status().workers[0].attempt == 1


def test_nobody_joins_ranks_in_step_that_are_through() -> None:
    world = CoordinatorWorld(2)
    world.join(0, 1)
    finished = world.send(0, CoordinatorKind.FINISH)
    assert finished is not None
    assert finished.kind is Kind.OK
    world.drop(1)
    late = world.hello(101, attempt=1)
    assert late is not None
    assert late.flags & Flag.DONE
    status = world.status()
    assert status.workers[0].finished
    assert not status.workers[1].finished


def test_the_lowest_live_rank_leads() -> None:
    world = CoordinatorWorld(2)
    world.join(0, 1)
    assert world.last(0).flags & Flag.LEAD
    assert not world.last(1).flags & Flag.LEAD
    world.drop(0)
    world.wait(3)  # the grace
    world.report(1, EpochReport(0, 1))
    assert world.last(1).flags & Flag.LEAD


# ------------------------------------------------------------------ attempts


def test_a_retry_resumes_where_the_former_attempt_was() -> None:
    world = apart()
    world.join(0)
    world.report(0, EpochReport(2, 30, batches_done=30, rows_done=64))
    world.drop(0)
    welcome = world.hello(100, attempt=5)
    assert welcome is not None
    assert (welcome.epoch, welcome.batch, welcome.rows, welcome.sequence) == (2, 30, 64, 0)


def test_a_superseded_attempt_says_nothing_more() -> None:
    world = apart()
    world.join(0)
    world.drop(0)
    world.join(100, attempt=1)
    late = world.report(0, EpochReport(0, 1), attempt=0)
    assert code(late) == "transport"
    assert late is not None
    assert "superseded" in late.meta["what"]
    assert code(world.hello(0, attempt=0)) == "transport"
    world.send(0, CoordinatorKind.FAIL, attempt=0, meta={"error": "of no interest"})
    status = world.status()
    assert status.epochs == {}
    assert status.failure is None
    assert status.workers[0].alive


def test_a_duplicate_attempt_waits_until_the_first_finishes() -> None:
    world = apart()
    world.join(0)
    assert world.hello(100, attempt=1) is None
    assert world.status().waiting == {0: "duplicate"}
    world.report(0, EpochReport(0, 1))
    assert world.answers(100) == 0
    world.send(0, CoordinatorKind.FINISH)
    assert world.last(100).flags & Flag.DONE
    world.drop(0)
    assert world.status().workers[0].finished


def test_a_duplicate_attempt_takes_over_when_the_first_dies() -> None:
    world = apart()
    world.join(0)
    assert world.hello(100, attempt=1) is None
    world.report(0, EpochReport(0, 9, batches_done=9, rows_done=9))
    world.drop(0)
    assert world.last(100).batch == 9
    assert not world.last(100).flags & Flag.DONE
    assert world.status().workers[0].attempt == 1


def test_a_duplicate_of_a_finished_rank_is_done_at_once() -> None:
    world = apart()
    world.join(0)
    world.send(0, CoordinatorKind.FINISH)
    reply = world.hello(100, attempt=3)
    assert reply is not None
    assert reply.flags & Flag.DONE


def test_finish_may_be_said_again() -> None:
    world = apart()
    world.join(0)
    for _ in range(2):  # the first reply may be lost
        reply = world.send(0, CoordinatorKind.FINISH)
        assert reply is not None
        assert reply.kind is Kind.OK


def test_a_silent_worker_loses_its_lease_to_a_retry() -> None:
    world = apart(lease_s=10)
    world.join(0)
    assert world.hello(100, attempt=1) is None
    world.wait(6)
    world.send(0, CoordinatorKind.HEARTBEAT)
    world.wait(6)
    assert world.answers(100) == 0
    world.wait(11)
    assert world.last(100).kind is Kind.OK


def test_a_broken_connection_has_a_grace() -> None:
    world = apart(grace_s=2.0)
    world.join(0)
    world.drop(0)
    world.wait(1.9)
    assert world.status().workers[0].alive
    world.wait(0.2)
    assert not world.status().workers[0].alive


def test_the_same_attempt_goes_on_over_a_new_connection() -> None:
    world = apart(lease_s=100)
    world.join(0)
    world.drop(0)
    world.wait(1)
    reply = world.report(100, EpochReport(0, 7), attempt=0)
    assert reply is not None
    assert reply.kind is Kind.OK
    world.wait(10)  # far beyond the grace
    status = world.status()
    assert status.workers[0].alive
    assert status.epochs[0].rows == 7


def test_a_request_over_a_newer_connection_ends_the_older_ones_wait() -> None:
    world = apart()
    world.join(0)
    assert world.report(0, EpochReport(0, 1, ended=True), wait=True) is None
    assert world.report(100, EpochReport(0, 1, ended=True), wait=True, attempt=0) is None
    assert code(world.last(0)) == "transport"
    world.control(release=0)
    assert world.last(100).kind is Kind.OK


def test_bye_of_a_worker_that_has_not_finished_marks_it_dead() -> None:
    world = apart()
    world.join(0, 1)
    world.send(1, CoordinatorKind.FINISH)
    for rank in (0, 1):
        world.send(rank, CoordinatorKind.BYE)
    status = world.status()
    assert not status.workers[0].alive
    assert not status.workers[0].finished
    assert status.workers[1].finished


# ------------------------------------------------------------------ ranks that do not wait


def test_workers_that_do_not_wait_begin_together_but_not_for_ever() -> None:
    """A worker that came late would train its rows alone at the end."""
    world = apart(3, gather=2, gather_s=5.0)
    assert world.hello(0, meta={"batches_per_epoch": 4}) is None
    world.wait(1)
    assert world.answers(0) == 0
    world.hello(1, meta={"batches_per_epoch": 4})
    assert world.answers(0) == world.answers(1) == 1
    world.wait(8)
    assert world.hello(2, meta={"batches_per_epoch": 4}) is not None  # a latecomer at once

    alone = apart(3, gather=2, gather_s=5.0)
    assert alone.hello(0) is None
    alone.wait(4.9)
    assert alone.answers(0) == 0
    alone.wait(0.2)
    assert alone.answers(0) == 1


def test_a_driver_that_only_looks_is_no_worker() -> None:
    world = apart()
    world.status()
    world.drop(999)
    metrics = {metric.name: metric.value for metric in world.coordinator.metrics()}
    assert metrics["workers_alive"] == 0
