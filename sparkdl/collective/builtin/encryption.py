"""TLS on the connections of a ring, with the next rank and the previous one at once."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl

from sparkdl.collective.builtin.waiting import SLICE_MS, Watch
from sparkdl.errors import AuthenticationError, TransportError
from sparkdl.wire.tls import Certificate, require_name


def encrypt_neighbours(
    to_next: socket.socket,
    from_previous: socket.socket,
    rank: int,
    neighbours: tuple[int, int],
    group: bytes,
    certificate: Certificate,
    watch: Watch,
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Begins TLS with the next rank and the previous one, both at once.

    All ranks of a ring do this at the same time: with one after the other each would wait for its
    next rank's answer, which waits for its own.

    Args:
        to_next, from_previous: Connected and non-blocking; taken over, also where this fails.
        rank: This rank.
        neighbours: The next rank and the previous one.
        group: Names the communicator.
        certificate: The run's.
        watch: Deadline of the wait.

    Raises:
        AuthenticationError: A neighbour does not hold the run's certificate.
        TransportError: A neighbour is gone.
        WaitTimeoutError: A neighbour did not answer in time.
    """
    with contextlib.ExitStack() as failed:
        failed.callback(to_next.close)
        failed.callback(from_previous.close)
        after, before = neighbours
        pairs = (_pair(group, rank, after), _pair(group, before, rank))
        client = certificate.peer_context(pairs[0], listens=False)
        server = certificate.peer_context(pairs[1], listens=True)
        secured = [
            client.wrap_socket(to_next, do_handshake_on_connect=False),
            server.wrap_socket(from_previous, server_side=True, do_handshake_on_connect=False),
        ]
        for connection in secured:
            failed.callback(connection.close)
        waiting = dict(zip(secured, neighbours, strict=True))
        watch.start()
        while waiting:
            poll = select.poll()
            for connection, other in list(waiting.items()):
                wanted = _advance(connection, other)
                if wanted:
                    poll.register(connection, wanted)
                else:
                    del waiting[connection]
            if waiting and not poll.poll(SLICE_MS):
                watch.look(sorted(set(waiting.values())))
        for connection, pair, other in zip(secured, pairs, neighbours, strict=True):
            require_name(connection, pair, f"rank {other}")
        failed.pop_all()
    return secured[0], secured[1]


def _pair(group: bytes, connecting: int, listening: int) -> str:
    """The name of a connection between two ranks of a communicator."""
    return f"{group.hex()}:{connecting}-{listening}"


def _advance(connection: ssl.SSLSocket, rank: int) -> int:
    """A step of a handshake: the event of ``poll`` that it waits for next; 0 if it is done."""
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError(
            f"rank {rank} could not prove itself",
            expected="the certificate of this run",
            received=str(error),
            hint="something between the two hosts answers in its place",
        ) from error
    except OSError as error:
        raise TransportError(
            f"the encrypted connection to rank {rank} could not be made",
            expected="a TLS connection with the certificate of this run",
            received=str(error),
        ) from error
    return 0
