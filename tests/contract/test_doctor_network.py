"""The doctor's common probe without Spark: real sockets, ranks as threads."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from sparkdl.diagnosis import network
from sparkdl.diagnosis.cluster_checks import check_probe
from sparkdl.diagnosis.network import Answer, Attempt, Echo, ProbeTask
from sparkdl.errors import ResourceError
from sparkdl.launch.task import of_kind
from sparkdl.launch.threads import ThreadLauncher
from sparkdl.wire.hosts import reachable_host
from sparkdl.wire.proving import BUSY, TOKEN_BYTES

TOKEN = secrets.token_bytes(TOKEN_BYTES)


def test_measures_of_a_connection() -> None:
    with Echo("127.0.0.1", 0, TOKEN) as echo:
        link = Attempt(*echo.address, TOKEN, 3, 5.0, threading.Lock()).link()
    assert link.problem == ""
    assert 0 < link.round_trip_s < 5
    assert link.rate > 1e6
    assert abs(link.skew_s) < 5
    assert echo.callers == {3}


@pytest.mark.parametrize("bind", ["0.0.0.0", "127.0.0.1"])
def test_others_are_told_an_address_that_they_can_connect_to(bind: str) -> None:
    """As a run's server does; ``0.0.0.0`` means this machine on every machine."""
    with Echo(bind, 0, TOKEN) as echo:
        assert echo.address[0] == ("127.0.0.1" if bind == "127.0.0.1" else reachable_host(bind))
        assert echo.address[0] != "0.0.0.0"


def test_without_the_token_nothing_is_told() -> None:
    with Echo("127.0.0.1", 0, TOKEN) as echo:
        link = Attempt(*echo.address, secrets.token_bytes(TOKEN_BYTES), 0, 5.0).link()
    assert link.problem
    assert link.rate == 0
    assert echo.callers == set()


def test_strangers_cost_no_thread_and_end_after_a_few_seconds_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkdl.wire.greeting.FIRST_WORDS_S", 0.5)
    with Echo("127.0.0.1", 0, TOKEN) as echo, ExitStack() as stack:
        threads = threading.active_count()
        idle = [stack.enter_context(socket.create_connection(echo.address)) for _ in range(300)]
        slow = stack.enter_context(socket.create_connection(echo.address, 0.2))
        link = Attempt(*echo.address, TOKEN, 3, 5.0).link()
        assert link.problem == ""
        assert threading.active_count() <= threads + 2
        began = time.monotonic()
        with suppress(ConnectionError):
            for byte in TOKEN:  # each in time for a limit that counts from the last one
                slow.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    assert slow.recv(1) in (b"", BUSY)
                    break
        assert time.monotonic() - began < 5
        idle[-1].settimeout(20)
        assert idle[-1].recv(1) in (b"", BUSY)


def test_no_descriptors_for_a_while_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, refused = socket.socket.accept, []

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if len(refused) < 3:
            refused.append(listener)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with Echo("127.0.0.1", 0, TOKEN) as echo:
        assert Attempt(*echo.address, TOKEN, 3, 5.0).link().problem == ""
    assert len(refused) == 3


def test_nobody_listens() -> None:
    with Echo("127.0.0.1", 0, TOKEN) as echo:
        address = echo.address
    link = Attempt(*address, TOKEN, 0, 5.0).link()
    assert "refused" in link.problem
    assert link.target == f"{address[0]}:{address[1]}"


def test_silent_peer_costs_the_limit_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        began = time.monotonic()
        link = Attempt("127.0.0.1", silent.getsockname()[1], TOKEN, 0, 0.3).link()
    assert "timed out" in link.problem
    assert time.monotonic() - began < 30


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ResourceError):
        Echo("127.0.0.1", taken.getsockname()[1], TOKEN)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_connect_to_the_driver_and_to_each_other(num_ranks: int) -> None:
    with Echo("127.0.0.1", 0, TOKEN) as echo:
        task = ProbeTask(echo.address, TOKEN, 20.0, with_facts=True)
        with ThreadLauncher(num_ranks).launch(task) as ranks:
            assert ranks.wait(60)
            results = of_kind(ranks.results(), "probe")
    answers = [Answer.from_json(result.text) for result in results.values()]
    assert [answer.rank for answer in answers] == list(range(num_ranks))
    assert echo.callers == set(range(num_ranks))
    for answer in answers:
        assert answer.driver is not None
        assert answer.driver.problem == ""
        assert set(answer.ranks) == set(range(num_ranks)) - {answer.rank}
        assert {link.problem for link in answer.ranks.values()} <= {""}
        bulk = {other for other, link in answer.ranks.items() if link.rate}
        assert bulk == ({(answer.rank + 1) % num_ranks} if num_ranks > 1 else set())
        assert answer.facts is not None
        assert answer.facts["packages"]["sparkdl"]


def test_driver_that_is_out_of_reach_is_an_answer_and_no_failure() -> None:
    with Echo("127.0.0.1", 0, TOKEN) as echo:
        gone = echo.address
    with ThreadLauncher(2).launch(ProbeTask(gone, TOKEN, 20.0)) as ranks:
        assert ranks.wait(60)
        results = of_kind(ranks.results(), "probe")
    answers = [Answer.from_json(result.text) for result in results.values()]
    assert all(a.driver is not None and "refused" in a.driver.problem for a in answers)
    assert all(link.problem == "" for a in answers for link in a.ranks.values())


@pytest.fixture
def dropping() -> Iterator[tuple[str, int]]:
    """An address to which no connection comes about: packets to it are not answered."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        for _ in range(8):  # nobody accepts these, and those that come later find no room
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(address)
            except TimeoutError:
                break
        else:
            pytest.skip("this system answers to connections that nobody accepts")
        yield address


def test_dropped_packets_are_named_within_the_limit(
    dropping: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks reach neither the driver nor each other: all links cost what one costs."""

    class Unreached(Echo):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__("127.0.0.1", 0, TOKEN)
            self.address = dropping

    monkeypatch.setattr(network, "Echo", Unreached)
    with ThreadLauncher(4).launch(ProbeTask(dropping, TOKEN, 4.0)) as ranks:
        assert ranks.wait(60)
        results = of_kind(ranks.results(), "probe")
    answers = [Answer.from_json(result.text) for result in results.values()]
    assert [len(answer.ranks) for answer in answers] == [3, 3, 3, 3]
    for answer in answers:  # one after another they take 8 s, two for each
        assert 2.0 <= answer.ran_s < 7.5
    checks = {check.name: check for check in check_probe(answers, 0.5, 4.0)}
    assert checks["barrier"].status == "ok"
    for name in ("driver port", "between ranks"):
        assert checks[name].status == "error"
        assert "timed out after 2 s, as where a firewall drops packets" in checks[name].found
