"""Two processes prove to each other that they know the token; nothing is worth a replay."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from sparkdl.errors import AuthenticationError
from sparkdl.wire.proving import IncomingProof, OutgoingProof, prove

TOKEN, OTHER = b"t" * 32, b"o" * 32
HELLO = b"for rank 3"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    calling, listening = socket.socketpair()
    with calling, listening:
        calling.settimeout(5)
        listening.setblocking(False)
        yield calling, listening


def answered(proof: IncomingProof, done: list[object]) -> None:
    try:
        while not proof.hear():
            pass
        proof.welcome()
        done.append(proof.hello)
    except (OSError, EOFError, AuthenticationError) as error:
        done.append(error)
        proof.connection.close()


def both(ends: tuple[socket.socket, socket.socket], mine: bytes, theirs: bytes) -> list[object]:
    """What the listener and the caller come to."""
    calling, listening = ends
    done: list[object] = []
    thread = threading.Thread(
        target=answered, args=(IncomingProof(listening, theirs, len(HELLO)), done)
    )
    thread.start()
    try:
        prove(calling, mine, HELLO, "rank 3")
        done.append("welcome")
    except (OSError, EOFError, AuthenticationError) as error:
        done.append(error)
        calling.close()
    thread.join(10)
    return done


def test_both_ends_of_one_run_are_welcome(ends: tuple[socket.socket, socket.socket]) -> None:
    assert sorted(both(ends, TOKEN, TOKEN), key=str) == [HELLO, "welcome"]


def test_the_caller_refuses_a_listener_with_another_token_and_proves_nothing_to_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    refused, gone = both(ends, TOKEN, OTHER)
    assert isinstance(refused, AuthenticationError)
    assert "rank 3 could not prove itself" in str(refused)
    assert isinstance(gone, (OSError, EOFError))


def known_proof(role: bytes, opening: bytes, nonce: bytes, token: bytes = TOKEN) -> bytes:
    return hmac.new(token, role + opening + nonce, hashlib.sha256).digest()


def test_the_bytes_are_those_of_the_description(ends: tuple[socket.socket, socket.socket]) -> None:
    """So that both ends cannot be wrong alike; whatever comes may come in pieces."""
    calling, listening = ends
    incoming = IncomingProof(listening, TOKEN, len(HELLO))
    opening = HELLO + b"n" * 32
    for byte in opening[:-1]:
        calling.sendall(bytes([byte]))
        assert not incoming.hear()
    calling.sendall(opening[-1:])
    assert not incoming.hear()
    challenge = calling.recv(100)
    nonce, shown = challenge[:32], challenge[32:]
    assert shown == known_proof(b"listener", opening, nonce)
    calling.sendall(known_proof(b"connector", opening, nonce) + b"what follows")
    assert incoming.hear()
    incoming.welcome()
    assert (incoming.hello, calling.recv(10)) == (HELLO, b"\x01")
    assert listening.recv(100) == b"what follows"


@pytest.mark.parametrize("shown", ["another token's", "the listener's own", "of another nonce"])
def test_a_wrong_proof_gets_no_welcome(
    ends: tuple[socket.socket, socket.socket], shown: str
) -> None:
    calling, listening = ends
    incoming = IncomingProof(listening, TOKEN)
    opening = b"n" * 32
    calling.sendall(opening)
    assert not incoming.hear()
    challenge = calling.recv(100)
    nonce = challenge[:32]
    calling.sendall(
        {
            "another token's": known_proof(b"connector", opening, nonce, OTHER),
            "the listener's own": challenge[32:],
            "of another nonce": known_proof(b"connector", opening, b"m" * 32),
        }[shown]
    )
    with pytest.raises(AuthenticationError, match="a wrong token"):
        incoming.hear()
    with suppress(TimeoutError):
        calling.settimeout(0.1)
        assert calling.recv(1) == b""


def test_an_unexpected_hello_is_told_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    calling, listening = ends
    incoming = IncomingProof(listening, TOKEN, len(HELLO), lambda hello: hello == b"for rank 4")
    calling.sendall(HELLO + b"n" * 32)
    with pytest.raises(AuthenticationError, match="not meant for this process"):
        incoming.hear()
    calling.settimeout(0.1)
    with pytest.raises(TimeoutError):
        calling.recv(1)


def test_a_caller_that_is_refused_hears_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    calling, listening = ends
    proof = OutgoingProof(calling, TOKEN, HELLO, "rank 3")
    proof.begin()
    listening.recv(100)
    listening.close()
    with pytest.raises((EOFError, ConnectionError)):
        proof.advance()
