"""TLS on the connections of a ring: both ends show the run's certificate and check the other's.

All ranks hold the same certificate. So that nobody between two hosts can join the connection of one
pair of ranks to that of another pair, both ends also name the pair, in TLS' own negotiation (ALPN).
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl

from sparkdl.collective.builtin.waiting import SLICE_MS, Watch
from sparkdl.errors import AuthenticationError, TransportError
from sparkdl.wire.tls import Certificate


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
        client, server = certificate.client_context(), certificate.server_context(mutual=True)
        pairs = (_pair(group, rank, after), _pair(group, before, rank))
        for context, pair in zip((client, server), pairs, strict=True):
            context.set_alpn_protocols([pair])
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
            if connection.selected_alpn_protocol() != pair:
                raise AuthenticationError(
                    f"rank {other} could not prove itself",
                    expected=f"the connection {pair}",
                    received=str(connection.selected_alpn_protocol()),
                    hint="something between the two hosts joins connections of other ranks",
                )
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
