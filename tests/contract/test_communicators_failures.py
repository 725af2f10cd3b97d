"""What happens when ranks die, stay away, disagree or do not belong: an error, never a hang."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from communicator_worlds import TOKEN, ProcessWorld, ThreadWorld

from sparkdl.collective.communicator import make_communicator
from sparkdl.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    ResourceError,
    TransportError,
    WaitTimeoutError,
)
from sparkdl.testing.inproc import connect_threads
from sparkdl.wire.hosts import own_address

PATHS = {
    "shared": ["a", "a", "a"],
    "ring": ["a", "b", "c"],
    "hosts": ["a", "a", "b", "b"],
}


@pytest.fixture(scope="module", params=list(PATHS))
def processes(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    """Ranks as processes; tests that kill one of them start their own."""
    world = ProcessWorld(PATHS[request.param])
    yield world
    world.close()


@pytest.fixture
def world(processes: ProcessWorld) -> ProcessWorld:
    """The same processes with a new communicator."""
    processes.connect_again()
    return processes


@pytest.fixture(params=list(PATHS))
def killed(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    """Processes of the test's own."""
    world = ProcessWorld(PATHS[request.param])
    yield world
    world.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = {n for n in set(os.listdir("/dev/shm")) - before if "sparkdl" in n}
    assert not left


@pytest.mark.parametrize("size", [1, 2_000_000])
def test_a_killed_rank_is_an_error_on_all_others_within_seconds(killed, size):
    for rank in range(killed.size):
        killed.tell(rank, ("run", "reduce_until", {"seconds": 300.0, "size": size}))
    time.sleep(0.3)
    killed.processes[1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    answers = [killed.hear(r, 60.0) for r in range(killed.size) if r != 1]
    assert time.monotonic() - start < 60
    assert all(isinstance(a, TransportError) for a in answers), answers
    assert not any(isinstance(a, WaitTimeoutError) for a in answers)
    assert any("rank 1 is gone" in str(a) for a in answers)


def test_a_killed_rank_is_noticed_in_a_barrier(killed):
    for rank in range(killed.size):
        if rank != 2:
            killed.tell(rank, ("run", "absent", {"who": 2, "seconds": 0}))
    time.sleep(0.2)
    killed.processes[2].send_signal(signal.SIGKILL)
    answers = [killed.hear(r) for r in range(killed.size) if r != 2]
    assert all(isinstance(a, TransportError) for a in answers), answers


def test_a_rank_that_closes_is_an_error_on_the_others(world):
    answers = world.run("close_now", who=1)
    assert answers[1] is None
    others = [a for r, a in enumerate(answers) if r != 1]
    assert all(isinstance(a, TransportError) for a in others), answers


@pytest.mark.parametrize("who", [0, 2])
def test_a_missing_rank_is_named(processes, who):
    processes.connect_again(timeout_s=1.5)
    others = [r for r in range(processes.size) if r != who]
    for rank in others:
        processes.tell(rank, ("run", "absent", {"who": who, "seconds": 0}))
    answers = [processes.hear(rank) for rank in others]
    timeouts = [a for a in answers if isinstance(a, WaitTimeoutError)]
    assert timeouts
    assert any(f"missing rank {who}" in str(a) for a in timeouts), timeouts
    assert all(isinstance(a, TransportError) for a in answers), answers


def test_a_handle_waits_again_and_names_the_missing(world):
    answers = world.run("absent_handle", who=1)
    assert all(isinstance(a, str) for a in answers), answers
    assert any("rank 1" in a for r, a in enumerate(answers) if r != 1), answers


def test_ranks_that_disagree_get_an_error(world):
    answers = world.run("disagree")
    assert all(isinstance(a, (ProtocolError, TransportError)) for a in answers), answers
    assert any("disagree" in str(a) for a in answers)
    again = world.run("meet")
    assert all("has failed before" in str(a) for a in again)


def test_a_wrong_token_is_refused(processes):
    tokens = [TOKEN] * processes.size
    tokens[1] = TOKEN[::-1]
    processes.connect_again(tokens, connect_timeout_s=2.0)
    told = processes.connected
    assert all(isinstance(a, TransportError | AuthenticationError) for a in told), told
    assert any(isinstance(a, AuthenticationError) for a in processes.connected)


def test_nothing_is_left_open_after_close(world):
    world.run("parity", size=1000)
    answers = world.run("descriptors")
    assert all(files <= 6 and threads == 1 for files, threads in answers), answers


# -- the same with threads ---------------------------------------------------------------------


def test_threads_name_who_is_missing_and_who_closed():
    world = ThreadWorld(list(connect_threads(3, timeout_s=0.3)))
    answers = world.run("absent", who=2, seconds=0.6)
    assert all(isinstance(a, TransportError) for a in answers[:2]), answers
    assert any("missing rank 2" in str(a) and "in absent" in str(a) for a in answers[:2])
    world.close()
    world = ThreadWorld(list(connect_threads(3)))
    answers = world.run("close_now", who=0)
    assert all("closed" in str(a) for a in answers[1:]), answers
    world.close()


def test_threads_that_disagree_get_an_error():
    world = ThreadWorld(list(connect_threads(3)))
    assert all(isinstance(a, ProtocolError | TransportError) for a in world.run("disagree"))
    world.close()


# -- connecting --------------------------------------------------------------------------------


def connector(rank: int, **options: Any) -> Any:
    return make_communicator("builtin", rank=rank, advertised_host="127.0.0.1", **options)


def test_a_rank_that_never_comes_is_named():
    first, second = connector(0, connect_timeout_s=0.5), connector(1)
    members = [first.prepare(), second.prepare()]
    second.close()
    with pytest.raises(WaitTimeoutError, match="missing rank 1"):
        first.connect(members, TOKEN)


def test_a_silent_stranger_delays_nobody():
    world_hosts = ["a", "b"]
    first, second = (connector(r, host_id=h) for r, h in enumerate(world_hosts))
    members = [first.prepare(), second.prepare()]
    strangers = [socket.create_connection((m.host, m.port)) for m in members for _ in range(3)]
    noisy = socket.create_connection((members[0].host, members[0].port))
    noisy.sendall(b"GET / HTTP/1.1\r\n" * 20)
    try:
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda c: c.connect(members, TOKEN), [first, second]))
            assert time.monotonic() - start < 4  # an unknown process may be silent for 5 s
            assert [float(x) for x in pool.map(lambda c: c.all_reduce(1.0), made)] == [2.0, 2.0]
        for communicator in made:
            communicator.close()
    finally:
        for stranger in (*strangers, noisy):
            stranger.close()


def test_hundreds_of_strangers_delay_nobody():
    """They take the places of those who prove nothing, not those of ranks."""
    first, second = (connector(r, host_id=h) for r, h in enumerate("ab"))
    members = [first.prepare(), second.prepare()]
    strangers = []
    try:
        for number in range(600):
            member = members[number % 2]
            strangers.append(socket.create_connection((member.host, member.port), 10))
            strangers[-1].sendall(b"s")
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda c: c.connect(members, TOKEN), [first, second]))
            assert time.monotonic() - start < 4  # a stranger may be silent for 5 s
            assert [float(x) for x in pool.map(lambda c: c.all_reduce(1.0), made)] == [2.0, 2.0]
        for communicator in made:
            communicator.close()
    finally:
        for stranger in strangers:
            stranger.close()


def listening_addresses() -> set[str]:
    """Of the TCP sockets that this process listens on."""
    found = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, own_address()),
        ({"towards": "127.0.0.1"}, "127.0.0.1"),
        ({"bind_host": "127.0.0.0/8"}, "127.0.0.1"),
        ({"advertised_host": "127.0.0.2"}, "127.0.0.2"),
        ({"bind_host": "0.0.0.0", "advertised_host": "127.0.0.3"}, "0.0.0.0"),
    ],
)
def test_a_rank_listens_on_one_address(options: dict[str, Any], expected: str):
    before = listening_addresses()
    made = make_communicator("builtin", rank=0, **options)
    member = made.prepare()
    assert listening_addresses() - before <= {expected}
    with socket.create_connection((member.host, member.port), 10):
        assert member.host == options.get("advertised_host", expected)
    made.close()


def test_a_host_without_an_address_in_the_network_says_which_it_has():
    with pytest.raises(ResourceError, match=r"(?s)no address in the network 203.0.*lo: 127"):
        connector(0, bind_host="203.0.113.0/24").prepare()


def test_a_port_in_use_is_an_error_and_a_range_goes_on():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match="cannot listen"):
            connector(0, bind_host="127.0.0.1", port=port).prepare()
        ranged = connector(0, bind_host="127.0.0.1", port=(port, min(port + 20, 65535)))
        assert ranged.prepare().port > port
        ranged.close()


def test_connect_checks_its_arguments():
    made = connector(0)
    with pytest.raises(ConfigError, match="prepare"):
        made.connect([], TOKEN)
    member = made.prepare()
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        made.connect([member], b"short")
    with pytest.raises(ConfigError, match="member for rank 0"):
        made.connect([], TOKEN)
    made.close()
