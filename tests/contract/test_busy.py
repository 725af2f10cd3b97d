"""A server that has no room says so, and a member tries again until there is some."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.session import open_session
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import TransportError
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.encryption import Certificate, connect_encrypted
from sparkdl.transport.frames import HEADER_BYTES, Kind, Message, encode
from sparkdl.transport.listeners import Listeners, ListenOptions
from sparkdl.transport.server import Server

TOKEN = "a token"
ROOM = 40  # of a server for one worker


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_member_waits_for_room_and_is_not_told_of_a_wrong_token(encrypted: bool) -> None:
    certificate = Certificate.make() if encrypted else None
    fingerprint = certificate.fingerprint if certificate else ""
    listeners = Listeners.bind(ListenOptions("socket", web=False), None)
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, certificate).start()
    endpoint = Endpoint(server.address, TOKEN, fingerprint)
    address = (server.address.host, server.address.port)
    opening = encode(Message(Kind.OPEN, meta={"token": TOKEN}))
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        held = []
        for _ in range(ROOM):
            connection = socket.create_connection(address, 20)
            if encrypted:
                connection = connect_encrypted(connection, TOKEN, fingerprint)
            held.append(stack.enter_context(connection))
            connection.sendall(opening)
            assert connection.recv(HEADER_BYTES)[5] == Kind.OK
        with pytest.raises(TransportError, match="no room"):
            open_session(endpoint, rank=0, timeouts=Timeouts(connect_s=0.3))

        def join() -> str:
            with open_session(endpoint, rank=0, timeouts=Timeouts(connect_s=20.0)) as session:
                return session.meet("in")[0]

        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join)
            time.sleep(0.5)
            assert not joining.done()
            for connection in held[:5]:
                connection.close()
            assert joining.result(20) == "in"
