"""Which of its addresses a rank tells to the others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sparkdl.wire import hosts
from sparkdl.wire.hosts import address_in, own_address, rank_addresses

IPV4, IPV6, DRIVER6 = "10.0.0.5", "fd77::5", "fd77::1"


class Routes:
    """Stands for ``socket.socket``: a machine's routes, without its network."""

    def __init__(self, routes: dict[tuple[int, str], str]) -> None:
        self._routes = routes
        self._asked: tuple[int, str] | None = None

    def __call__(self, family: int, kind: int) -> Routes:
        made = Routes(self._routes)
        made._asked = (family, "")
        return made

    def __enter__(self) -> Routes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, target: tuple[str, int]) -> None:
        assert self._asked is not None
        self._asked = (self._asked[0], target[0])
        if self._asked not in self._routes:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        assert self._asked is not None
        return self._routes[self._asked], 9


V4, V6 = socket.AF_INET, socket.AF_INET6
BOTH = {
    (V4, "192.0.2.1"): IPV4,
    (V6, "2001:db8::1"): IPV6,
    (V4, "10.0.0.1"): IPV4,
    (V6, DRIVER6): IPV6,
    (V4, "driver"): IPV4,
    (V4, "myself"): "127.0.0.1",  # a line of /etc/hosts
    (V4, "127.0.0.1"): "127.0.0.1",
    (V4, "localhost"): "127.0.0.1",
    (V6, "::1"): "::1",
}
ONLY_IPV6 = {key: value for key, value in BOTH.items() if key[0] == V6}


@pytest.mark.parametrize(
    ("routes", "towards", "expected"),
    [
        (BOTH, "", IPV4),
        (BOTH, "10.0.0.1", IPV4),
        (BOTH, "driver", IPV4),
        (BOTH, DRIVER6, IPV6),
        (BOTH, f"[{DRIVER6}]", IPV6),  # as Spark writes it
        (BOTH, "myself", IPV4),
        (BOTH, "127.0.0.1", "127.0.0.1"),
        (BOTH, "localhost", "127.0.0.1"),
        (BOTH, "[::1]", "::1"),
        (BOTH, "nowhere", IPV4),
        (ONLY_IPV6, "", IPV6),
        (ONLY_IPV6, f"[{DRIVER6}]", IPV6),
        ({(V4, "myself"): "127.0.0.1"}, "myself", "127.0.0.1"),
        ({}, "10.0.0.1", "127.0.0.1"),
    ],
)
def test_own_address(
    monkeypatch: pytest.MonkeyPatch,
    routes: dict[tuple[int, str], str],
    towards: str,
    expected: str,
) -> None:
    def made(family: int, kind: int) -> Any:
        return Routes(routes)(family, kind)

    monkeypatch.setattr(hosts.socket, "socket", made)
    assert own_address(towards) == expected


def test_brackets_of_spark_are_taken_off() -> None:
    assert rank_addresses("[::1]", "[fd77::1]") == ("::1", "fd77::1")
    assert rank_addresses(None, "[fd77::1]") == ("fd77::1", "fd77::1")


def test_a_network_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert address_in("::1/128") == "::1"
