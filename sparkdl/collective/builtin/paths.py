"""The connections of one rank: shared memory with the ranks of its host, and the rings of hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import select
import socket
import ssl
from collections.abc import Sequence

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.builtin.rendezvous import LOCAL, RING, Address, ConnectionKey, Listener
from sparkdl.collective.builtin.ring import Ring
from sparkdl.collective.builtin.shared import SharedMemory
from sparkdl.collective.builtin.waiting import SLICE_MS, Watch
from sparkdl.collective.communicator import Member
from sparkdl.errors import AuthenticationError, TransportError
from sparkdl.wire.tls import Certificate, require_name


@dataclasses.dataclass(frozen=True)
class Places:
    """Which ranks share a host, and which rings join the hosts.

    Args:
        hosts: The ranks of each host; hosts in the order of their first rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, host_ids: Sequence[str], rank: int) -> Places:
        """Sorts ranks by host.

        >>> Places.of(['a', 'b', 'a', 'b'], 2).hosts
        ((0, 2), (1, 3))
        """
        grouped: dict[str, list[int]] = {}
        for other, host_id in enumerate(host_ids):
            grouped.setdefault(host_id, []).append(other)
        return cls(tuple(tuple(ranks) for ranks in grouped.values()), rank)

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return next(h for h, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        """This rank's index on its host."""
        return self.local.index(self.rank)

    @property
    def num_rings(self) -> int:
        """How many rings join the hosts: one for each rank of the smallest host."""
        return min(len(ranks) for ranks in self.hosts) if len(self.hosts) > 1 else 0

    @property
    def one_each(self) -> bool:
        """Whether every host has one rank only."""
        return all(len(ranks) == 1 for ranks in self.hosts)

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks of this rank's ring; empty if it has none."""
        if self.local_rank >= self.num_rings:
            return ()
        return tuple(ranks[self.local_rank] for ranks in self.hosts)

    @property
    def neighbours(self) -> tuple[int, int]:
        """The next rank of this rank's ring, and the one before."""
        ring = self.ring
        at = ring.index(self.rank)
        return ring[(at + 1) % len(ring)], ring[at - 1]

    @property
    def order(self) -> list[int]:
        """All ranks, host by host."""
        return [r for ranks in self.hosts for r in ranks]

    def carried(self, local_rank: int) -> list[tuple[int, ...]]:
        """The ranks of each host whose shards a rank of this host takes around its ring.

        Ring ``i`` carries the shards of the local ranks ``i``, and those of local ranks without a
        ring in turn.

        >>> Places.of(['a', 'a', 'a', 'b', 'b'], 0).carried(0)
        [(0, 2), (3,)]
        """
        if local_rank >= self.num_rings:
            return []
        return [ranks[local_rank :: self.num_rings] for ranks in self.hosts]

    def edges(self, size: int) -> list[int]:
        """Edges of the portions that this host's ranks reduce: one for each ring."""
        count = self.num_rings or len(self.local)
        return shard_edges(size, count) + [size] * (len(self.local) - count)


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
            f"rank {rank} could not prove itself", expected="the certificate of this run",
            received=str(error), hint="something between the two hosts answers in its place",
        ) from error  # fmt: skip
    except OSError as error:
        raise TransportError(
            f"the encrypted connection to rank {rank} could not be made",
            expected="a TLS connection with the certificate of this run", received=str(error),
        ) from error  # fmt: skip
    return 0


_LEADER_BYTES = 4096
"""The bytes by which a record in shared memory may be longer than in a ring: its parts' lengths."""


def connect_paths(
    listener: Listener,
    places: Places,
    members: Sequence[Member],
    world: Sequence[int],
    token: bytes,
    label: str,
    capacity: int,
    watch: Watch,
    certificate: Certificate | None = None,
) -> tuple[SharedMemory | None, Ring | None]:
    """Connects this rank to those of its host and of its ring.

    Args:
        world: The members' ranks in the whole run, which handshakes use.
        capacity: Largest record in bytes.

    Returns:
        The ways to the ranks of its host, None if it is alone there, and to those of other hosts,
        None if it is in no ring.
    """
    connect_to, expect = _plan(places, members, world)
    group = hashlib.sha256(label.encode()).digest()[:16]
    made, accepted = listener.establish(
        world[places.rank], token, group, connect_to, expect, watch.timeout_s
    )
    shared = ring = None
    try:
        if len(places.local) > 1:
            connections = {**made, **accepted}
            links = {
                index: connections[ConnectionKey(LOCAL, world[other])]
                for index, other in enumerate(places.local)
                if other != places.rank
            }
            shared = SharedMemory(
                places.local_rank, places.local, links, capacity + _LEADER_BYTES, watch
            )
        if places.ring:
            after, before = places.neighbours
            to_next = made[ConnectionKey(RING, world[after])]
            from_previous = accepted[ConnectionKey(RING, world[before])]
            if certificate is not None:
                to_next, from_previous = encrypt_neighbours(
                    to_next, from_previous, places.rank, (after, before), group, certificate, watch
                )
            ring = Ring(
                places.ring.index(places.rank), places.ring, to_next, from_previous, capacity, watch
            )
    except BaseException:
        if shared is not None:
            shared.close()
        for connection in (*made.values(), *accepted.values()):
            connection.close()
        raise
    return shared, ring


def _plan(
    places: Places, members: Sequence[Member], world: Sequence[int]
) -> tuple[dict[ConnectionKey, Address], list[ConnectionKey]]:
    """The connections that this rank makes, and those that it expects.

    Of two ranks on a host the higher one connects; in a ring each connects to the next.
    """
    connect_to: dict[ConnectionKey, Address] = {}
    expect: list[ConnectionKey] = []
    for other in places.local:
        key = ConnectionKey(LOCAL, world[other])
        if other < places.rank:
            connect_to[key] = "\0" + members[other].local
        elif other > places.rank:
            expect.append(key)
    if places.ring:
        after, before = places.neighbours
        member = members[after]
        connect_to[ConnectionKey(RING, world[after])] = (member.host, member.port)
        expect.append(ConnectionKey(RING, world[before]))
    return connect_to, expect
