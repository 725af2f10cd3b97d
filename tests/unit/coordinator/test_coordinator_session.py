"""Sessions of ranks and the driver's client, over a coordinator without a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from coordinator_world import Apart

from sparkdl.coordinator.driver_client import CoordinatorHost, DriverClient
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.session import Session, open_session, report_failure
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import MAX_LINES_BYTES
from sparkdl.errors import ProtocolError, TransportError, WaitTimeoutError, WorkerError
from sparkdl.failures import Failure
from sparkdl.testing.inproc import InprocServer
from sparkdl.training.reports import EpochReport
from sparkdl.transport.address import ListenOptions
from sparkdl.transport.frames import BLOB_BYTES, HEADER_BYTES, Message


def in_threads(*actions: Any) -> list[Any]:
    """What each gives, or the exception that it raises."""
    results: list[Any] = [None] * len(actions)

    def work(i: int) -> None:
        try:
            results[i] = actions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return results


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[InprocServer]:
    """Of two ranks that exchange everything among themselves."""
    with InprocServer(Coordinator(Settings(2, grace_s=0.2))) as server:
        yield server


@pytest.fixture
def pair(server: InprocServer) -> Iterator[tuple[Session, Session]]:
    with server.session(0) as first, server.session(1) as second:
        yield first, second


@pytest.fixture
def driver(server: InprocServer) -> Iterator[DriverClient]:
    with server.driver() as driver:
        yield driver


def test_ranks_meet_and_may_join_again(pair: tuple[Session, Session]) -> None:
    met = in_threads(*(lambda s=s: s.meet(f"I am {s.rank}") for s in pair))
    assert met == [["I am 0", "I am 1"]] * 2
    for session in pair:  # a member that says more of itself waits for nobody
        welcome = session.join(rows=10, batches_per_epoch=5 + session.rank)
        assert welcome.num_workers == 2
        assert not welcome.done
    assert pair[1].welcome is not None
    assert pair[1].welcome.steps_per_epoch == 6
    assert pair[0].lead


def test_a_rank_that_meets_later_is_told_what_the_others_said(
    server: InprocServer, pair: tuple[Session, Session]
) -> None:
    in_threads(*(lambda s=s: s.meet(f"I am {s.rank}") for s in pair))
    for session in pair:
        session.join(rows=1, batches_per_epoch=1)
    pair[1].close()
    with server.session(1, attempt=1) as late:
        assert late.meet("I am back") == ["I am 0", "I am back"]


def test_a_meeting_names_who_is_missing() -> None:
    settings = Settings(3, start_timeout_s=0.3)
    with (
        InprocServer(Coordinator(settings)) as server,
        server.session(0) as a,
        server.session(2) as c,
    ):
        for error in in_threads(lambda: a.meet("a"), lambda: c.meet("c")):
            assert isinstance(error, WaitTimeoutError)
            assert "missing: 1" in str(error)


def test_finish_is_the_end_for_all_ranks_in_step(
    server: InprocServer, pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    for session in pair:
        session.finish()
        session.close()
    with server.session(0, attempt=1) as late:
        assert late.join().done
    assert [w.finished for w in driver.status().workers.values()] == [True, True]


def test_an_epochs_end_waits_for_the_driver(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    end = EpochReport(0, 4, np.array([1.0, 2.0]), ended=True, batches_done=1, rows_done=4)
    waiting = threading.Thread(target=pair[0].report, args=(end,), kwargs={"wait": True})
    waiting.start()
    until(lambda: driver.status().waiting == {0: "epoch"})
    status = driver.status()
    np.testing.assert_array_equal(status.epochs[0].metrics, [1, 2])
    assert status.epochs[0].ended == (0,)
    assert (status.workers[0].batch, status.workers[0].rows) == (1, 4)
    driver.control(release=0, learning_rate=0.25, stop=True)
    waiting.join(20)
    assert not waiting.is_alive()
    assert pair[0].stopped
    assert pair[0].learning_rate == 0.25


def test_a_state_is_kept_whole_whatever_its_size(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    assert driver.kept() == b""
    state = np.random.default_rng(0).bytes(2 * BLOB_BYTES + 17)
    pair[0].keep([state], 3)
    assert driver.kept() == state
    pair[1].keep([b"small"], 4)
    assert driver.kept() == b"small"


def test_a_chunk_whose_reply_is_lost_comes_twice_and_counts_once(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    state = np.random.default_rng(0).bytes(2 * BLOB_BYTES + 17)
    connection = pair[0]._connection
    broken: list[int] = []

    def break_replies() -> None:
        channel = connection.channel
        assert channel is not None
        request = channel.request

        def lossy(message: Message, timeout_s: float | None) -> Message:
            reply = request(message, timeout_s)
            if message.kind is CoordinatorKind.KEEP and message.offset not in broken:
                broken.append(message.offset)
                raise ConnectionResetError("the reply was lost")
            return reply

        channel.request = lossy  # type: ignore[method-assign]

    opener = connection._opener

    def opening(raw: Any) -> Any:
        made = opener(raw)
        connection.channel = made
        break_replies()
        return made

    connection._opener = opening
    break_replies()
    pair[0].keep([state], 3)
    assert broken == [0, BLOB_BYTES, 2 * BLOB_BYTES]
    assert driver.kept() == state


def test_lines_reach_the_driver_in_order_and_once(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    assert driver.take_lines() == []
    pair[1].log(["before it joined"])
    pair[0].log([])
    pair[0].log([""])
    pair[0].log(["", "größer", ""])
    assert driver.take_lines() == [
        (1, "before it joined"), (0, ""), (0, ""), (0, "größer"), (0, "")
    ]  # fmt: skip
    assert driver.take_lines() == []
    many = [f"line {number} " + "ü" * 200 for number in range(15_000)]  # several frames
    pair[0].log(many)
    assert driver.take_lines() == [(0, line) for line in many]


def test_a_line_without_an_end_is_shortened_not_refused(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    pair[0].log(["x" * (3 * MAX_LINES_BYTES), "next"])
    (_, first), (_, second) = driver.take_lines()
    assert set(first[:1000]) == {"x"}
    assert 10_000 < len(first) <= MAX_LINES_BYTES
    assert second == "next"


def test_a_failure_ends_the_others_next_request(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    pair[1].fail(Failure(1, "ValueError: bad row", "the traceback"))
    with pytest.raises(WorkerError, match="the traceback") as caught:
        pair[0].report(EpochReport(0, 1))
    assert caught.value.rank == 1
    failure = driver.status().failure
    assert failure is not None
    assert (failure.rank, failure.error) == (1, "ValueError: bad row")


def test_a_session_that_closes_before_it_has_finished_is_dead(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    pair[0].close()
    pair[0].close()
    assert not driver.status().workers[0].alive
    with pytest.raises(TransportError, match="closed"):
        pair[0].report(EpochReport(0, 1))


# ------------------------------------------------------------------ the size of a status


def test_a_status_costs_the_same_after_many_epochs_of_large_metrics() -> None:
    """A metric of 20,000 thresholds: 80,000 numbers an epoch, 640 kB."""
    state = np.arange(80_000, dtype=np.float64)
    with (
        InprocServer(Coordinator(Settings(1), Apart())) as server,
        server.session(0) as session,
        server.driver() as driver,
    ):
        session.join()
        sizes: list[int] = []
        for epoch in range(700):
            session.report(EpochReport(epoch, 10, state, ended=True))
            before = driver._connection.bytes_received
            status = driver.status(since_epoch=epoch)
            sizes.append(driver._connection.bytes_received - before)
            assert list(status.epochs) == [epoch]
            assert status.epochs[epoch].ended == (0,)
        np.testing.assert_array_equal(status.epochs[699].metrics, state)
    assert set(sizes) == {HEADER_BYTES + state.nbytes}
    assert len(server.dispatcher.service.group.telemetry._reports) == 1  # type: ignore[attr-defined]


def test_the_meta_of_a_status_does_not_grow_with_the_epochs_done() -> None:
    with (
        InprocServer(Coordinator(Settings(1), Apart())) as server,
        server.session(0) as session,
        server.driver() as driver,
    ):
        session.join()
        metas: list[int] = []
        request = driver.request

        def measured(message: Message) -> Message:
            reply = request(message)
            metas.append(len(str(reply.meta)))
            return reply

        driver.request = measured  # type: ignore[method-assign]
        for epoch in range(700):
            session.report(EpochReport(epoch, 10, ended=True))
            driver.status(since_epoch=epoch)
    assert max(metas) - min(metas) <= 60  # numbers have more digits


def test_a_driver_that_asks_late_gets_all_epochs_in_bounded_parts() -> None:
    state = np.arange(80_000, dtype=np.float64)
    with (
        InprocServer(Coordinator(Settings(1), Apart())) as server,
        server.session(0) as session,
        server.driver() as driver,
    ):
        session.join()
        for epoch in range(100):
            session.report(EpochReport(epoch, epoch, state, ended=True))
        seen: dict[int, int] = {}
        while epochs := driver.status(since_epoch=len(seen)).epochs:
            seen.update({number: totals.rows for number, totals in epochs.items()})
    assert seen == {epoch: epoch for epoch in range(100)}


def test_a_report_that_cannot_be_encoded_is_an_error_that_says_so(
    pair: tuple[Session, Session], driver: DriverClient
) -> None:
    in_threads(*(session.join for session in pair))
    with pytest.raises(ProtocolError, match="metrics of epoch 3 cannot be sent"):
        pair[0].report(EpochReport(3, 1, np.zeros(BLOB_BYTES // 8 + 1)))
    pair[0].report(EpochReport(3, 1, np.zeros(5)))  # the connection still works
    assert driver.status().epochs[3].rows == 1


# ------------------------------------------------------------------ over a socket


def test_a_host_serves_a_coordinator_until_it_is_closed() -> None:
    settings = Settings(2, grace_s=0.2)
    with CoordinatorHost(settings, ListenOptions("socket", web=False)) as host:
        assert host.endpoint.token not in repr(host.endpoint)
        with (
            open_session(host.endpoint, rank=0) as first,
            open_session(host.endpoint, rank=1) as second,
        ):
            met = in_threads(lambda: first.meet("a"), lambda: second.meet("b"))
            assert met == [["a", "b"]] * 2
            first.keep([b"state"], 1)
            first.log(["a line"])
            assert host.driver.kept() == b"state"
            assert host.driver.take_lines() == [(0, "a line")]
            report_failure(host.endpoint, 1, 0, ValueError("bad row"))
            failure = host.driver.status().failure
            assert failure is not None
            assert (failure.rank, failure.error) == (1, "ValueError: bad row")
    with pytest.raises(TransportError, match="cannot be reached"):
        open_session(host.endpoint, rank=0)


def test_a_host_listens_only_where_it_is_told() -> None:
    with CoordinatorHost(Settings(1), ListenOptions("socket", web=False)) as host:
        assert host.endpoint.address.host == "127.0.0.1"
        assert host.endpoint.address.http == host.endpoint.address.uds == ""
    with CoordinatorHost(
        Settings(1), ListenOptions("socket", advertised_address="driver.example", web=False)
    ) as host:
        assert host.endpoint.address.host == "driver.example"
        assert host.driver.status().workers == {}  # by the address that is bound
