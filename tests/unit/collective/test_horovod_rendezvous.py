"""Horovod's rendezvous server has no password, so it listens where ranks connect to it only."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sparkdl.collective.horovod import start_on

http_server = pytest.importorskip("horovod.runner.http.http_server")


def where_it_listens(host: str) -> str:
    """The address of a server that was started on ``host``, which answers there."""
    server: Any = http_server.RendezvousServer(verbose=0)
    port = start_on(server, http_server, host)
    try:
        server.init([])
        bound: tuple[str, int] = server._httpd.socket.getsockname()
        assert bound[1] == port
        socket.create_connection(bound, 10).close()
        return bound[0]
    finally:
        server.stop()
        server._httpd.server_close()


def test_it_listens_on_one_address() -> None:
    assert where_it_listens("127.0.0.1") == "127.0.0.1"
    assert where_it_listens("127.0.0.2") == "127.0.0.2"


def test_behind_a_nat_it_listens_on_all() -> None:
    assert where_it_listens("203.0.113.7") == "0.0.0.0"  # an address of nobody
