"""Horovod's rendezvous server has no password, so it listens where ranks connect to it only."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sparkdl.collective.horovod_rendezvous import start_on

http_server = pytest.importorskip("horovod.runner.http.http_server")


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


def where_it_listens(host: str) -> tuple[bool, bool]:
    """Whether two addresses of this machine reach a server that was started on ``host``."""
    server: Any = http_server.RendezvousServer(verbose=0)
    port = start_on(server, host)
    try:
        server.init([])
        return connects("127.0.0.1", port), connects("127.0.0.2", port)
    finally:
        server.stop()
        server._httpd.server_close()


def test_it_listens_on_one_address() -> None:
    assert where_it_listens("127.0.0.1") == (True, False)
    assert where_it_listens("127.0.0.2") == (False, True)


def test_behind_a_nat_it_listens_on_all() -> None:
    assert where_it_listens("203.0.113.7") == (True, True)  # an address of nobody
