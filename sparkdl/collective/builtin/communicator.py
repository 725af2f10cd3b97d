"""The built-in communicator: who is on which host, and which path an operation takes.

Every operation begins with an *exchange of records*: each rank tells all others, in 128 bytes, what
it is about to do, and sends its data along if they are few. So all ranks know all weights; ranks
that call different operations get an error instead of a hang; a missing rank is named; and small
operations are done. Large arrays follow:

* all ranks on one host: shared memory;
* one rank per host: the ring;
* both: reduce inside each host, ring between the hosts, gather inside each host. The first ranks
  of each host, as many as the smallest host has, each take a portion around a ring of their own,
  so each byte crosses between hosts once per direction. For a reduce-scatter this portion is the
  shards of one local rank of each host, so that a host sends only what is not its own.
"""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import (
    DTYPES,
    KINDS,
    MAX_DIMENSIONS,
    OPS,
    Array,
    dtype_name,
    put_scaled,
    reduce_in_order,
    reduction_factors,
    reduction_ufunc,
    shard_edges,
)
from sparkdl.collective.builtin.paths import Places, connect_paths
from sparkdl.collective.builtin.records import (
    HEADER_BYTES,
    LENGTH,
    SAME,
    WEIGHT,
    Record,
    pack_records,
    payload_of,
    unpack_records,
)
from sparkdl.collective.builtin.rendezvous import Listener
from sparkdl.collective.builtin.waiting import Watch
from sparkdl.collective.communicator import DEFAULT_TIMEOUT_S, Communicator, Member, refuse_others
from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.settings.network import PortSpec
from sparkdl.wire import hosts
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.tls import Certificate

_SMALL_BYTES = 16 << 10
_CAPACITY = 128 << 10
_IN_MEMORY = 8
"""Times as large are these on one host, where a record costs a copy, and a wait for others more."""
_ZEROS = (0,) * MAX_DIMENSIONS


class BuiltinCommunicator(Communicator):
    """One rank of a connected world; made by :class:`BuiltinConnector` or :meth:`group`.

    Args:
        world: The members' ranks in the whole run, which handshakes use (differ in groups).
        listener: This process's sockets; shared with groups.
        label: Name of this communicator among those that share the listener.
    """

    name = "builtin"

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        world: Sequence[int],
        listener: Listener,
        token: bytes,
        label: str,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        owns_listener: bool = True,
        certificate: Certificate | None = None,
    ) -> None:
        places = Places.of([m.host_id for m in members], rank)
        super().__init__(
            rank,
            len(members),
            local_rank=places.local_rank,
            local_size=len(places.local),
            timeout_s=timeout_s,
        )
        self._members, self._world = list(members), list(world)
        self._listener, self._token, self._label = listener, token, label
        self._owns_listener, self._certificate = owns_listener, certificate
        self._connect_timeout_s = connect_timeout_s
        self._places = places
        self._watch = Watch(rank, connect_timeout_s)
        self._made: dict[tuple[int, ...], int] = {}
        # one record of each rank must fit, host by host, into one record of the leaders
        times = 1 if places.num_rings else _IN_MEMORY
        capacity = max(_CAPACITY * times, 512 * len(members))
        each = capacity // len(members) - LENGTH.size - HEADER_BYTES
        self._small_bytes = min(_SMALL_BYTES * times, each)
        self._shared, self._ring = connect_paths(
            listener, places, members, world, token, label, capacity, self._watch, certificate
        )
        self._paths = [path for path in (self._shared, self._ring) if path is not None]
        try:
            self._barrier()  # a rank that has connected knows that all have
        except BaseException:
            self._close_paths()
            raise
        self._watch.timeout_s = timeout_s

    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        small = source.nbytes <= self._small_bytes
        records = self._agree("all_reduce", source, op, weight, inline=small)
        factors = self._factors(op, records)
        if factors is None:
            target.fill(0)
        elif small:
            parts = [payload_of(text, target.dtype, target.size) for text in records]
            reduce_in_order(parts, factors, reduction_ufunc(op), target)
        else:
            self._reduce_large(source, target, op, factors[self.rank])

    def _reduce_large(self, source: Array, target: Array, op: str, factor: float) -> None:
        ufunc = reduction_ufunc(op)
        shared, ring = self._shared, self._ring
        if shared is None:
            if ring is None:
                put_scaled(source, factor, target)
            else:
                ring.all_reduce(source, target, shard_edges(source.size, ring.count), factor, ufunc)
            return
        edges = self._places.edges(source.size)
        if self._places.num_rings == 0:
            shared.all_reduce(source, target, edges, factor, ufunc)
            return
        shared.all_reduce(source, target, edges, factor, ufunc, gather=False)
        if ring is not None:
            mine = target[edges[shared.index] : edges[shared.index + 1]]
            ring.all_reduce(mine, mine, shard_edges(mine.size, ring.count), 1.0, ufunc)
        shared.all_gather(target, edges)

    def _reduce_scatter(self, source: Array, target: Array, op: str, weight: float) -> None:
        small = source.nbytes <= self._small_bytes
        records = self._agree("reduce_scatter", source, op, weight, inline=small)
        factors = self._factors(op, records)
        edges = shard_edges(source.size, self.size)
        ufunc = reduction_ufunc(op)
        if factors is None:
            target.fill(0)
        elif small:
            own = slice(edges[self.rank], edges[self.rank + 1])
            parts = [payload_of(text, target.dtype, source.size)[own] for text in records]
            reduce_in_order(parts, factors, ufunc, target)
        else:
            self._scatter_large(source, target, edges, factors[self.rank], ufunc)

    def _scatter_large(
        self, source: Array, target: Array, edges: list[int], factor: float, ufunc: np.ufunc
    ) -> None:
        places, shared, ring = self._places, self._shared, self._ring
        if places.num_rings == 0:
            if shared is None:
                put_scaled(source, factor, target)
            else:
                shards = [[(edges[r], edges[r + 1])] for r in places.local]
                shared.reduce_scatter(source, target, shards, factor, ufunc)
            return
        if places.one_each and ring is not None:
            portions = [source[edges[r] : edges[r + 1]] for r in places.ring]
            ring.reduce_scatter(portions, target, factor, ufunc)
            return
        # Each local rank reduces what its ring carries: the shards of one rank of each host, and of
        # more where a host has more ranks than there are rings.
        carried = [places.carried(i) for i in range(len(places.local))]
        spans = [[(edges[r], edges[r + 1]) for ranks in of for r in ranks] for of in carried]
        mine = spans[places.local_rank]
        work = np.empty(sum(b - a for a, b in mine), source.dtype)
        if shared is not None:
            shared.reduce_scatter(source, work, spans, factor, ufunc)
        else:
            ends = np.cumsum([b - a for a, b in mine])
            for (a, b), end in zip(mine, ends, strict=True):
                put_scaled(source[a:b], factor, work[end - (b - a) : end])
        complete = places.num_rings == len(places.local)
        if ring is not None:
            sizes = [sum(edges[r + 1] - edges[r] for r in ranks)
                     for ranks in places.carried(places.local_rank)]  # fmt: skip
            portions = [work[a:b] for a, b in itertools.pairwise(np.cumsum([0, *sizes]).tolist())]
            reduced = target if complete else portions[places.host]
            ring.reduce_scatter(portions, reduced, 1.0, ufunc)
            work = reduced
        if not complete:
            self._hand_over(work, target, edges)

    def _hand_over(self, reduced: Array, target: Array, edges: list[int]) -> None:
        """Gives the shards of local ranks without a ring to them."""
        places, rings = self._places, self._places.num_rings
        sizes = [(edges[r + 1] - edges[r]) * target.itemsize for r in places.local]
        none = np.empty(0, np.uint8)
        parts, result = [none] * len(sizes), [none] * len(sizes)
        if places.local_rank < rings:
            rest = reduced.view(np.uint8)
            for i in range(places.local_rank, len(sizes), rings):
                parts[i], rest = rest[: sizes[i]], rest[sizes[i] :]
            np.copyto(target, parts[places.local_rank].view(target.dtype))
        else:
            result[places.local_rank % rings] = target.view(np.uint8)
        if self._shared is not None:
            self._shared.all_to_all(parts, result, max(sizes[rings:]))

    def _all_gather(self, source: Array) -> list[Array]:
        texts = self._agree("all_gather", source, inline=source.nbytes <= self._small_bytes)
        records = [Record.of(text) for text in texts]
        flat = source.reshape(-1)
        if all(r.inline for r in records):
            return [r.array() for r in records]
        order = self._places.order
        starts = np.cumsum([0] + [records[r].size_bytes for r in order]).tolist()
        work = np.empty(starts[-1], np.uint8)
        place = {r: slice(starts[i], starts[i + 1]) for i, r in enumerate(order)}
        if flat.size:
            np.copyto(work[place[self.rank]], flat.view(np.uint8))
        self._gather_bytes(work, starts)
        return [records[r].shaped(work[place[r]]) for r in range(self.size)]

    def _gather_bytes(self, work: Array, starts: list[int]) -> None:
        """``work`` is laid out host by host; ``starts`` are the edges of the ranks' parts."""
        counts = np.cumsum([0] + [len(ranks) for ranks in self._places.hosts]).tolist()
        hosts = [starts[c] for c in counts]
        h = self._places.host
        if self._shared is not None:
            inner = [s - hosts[h] for s in starts[counts[h] : counts[h + 1] + 1]]
            self._shared.all_gather(work[hosts[h] : hosts[h + 1]], inner)
        if self._places.num_rings == 0:
            return
        if self._ring is not None and self.local_rank == 0:
            self._ring.all_gather(work, hosts)
        if self._shared is not None:
            self._shared.broadcast(work, 0)

    def _all_to_all(self, parts: list[Array]) -> list[Array]:
        dtype = parts[0].dtype
        data = [part.view(np.uint8) for part in parts]
        sizes = np.array([part.nbytes for part in parts], np.int64)
        small = sizes.nbytes + int(sizes.sum()) <= self._small_bytes
        mine = np.concatenate([sizes.view(np.uint8), *(data if small else ())])
        texts = self._agree("all_to_all", mine, root=DTYPES.index(dtype_name(dtype)))
        records = [Record.of(text) for text in texts]
        if len({record.root for record in records}) > 1:
            raise ProtocolError(
                f"the ranks disagree about the operation on rank {self.rank}",
                expected=f"all_to_all of {dtype_name(dtype)} on all ranks",
                received=", ".join(DTYPES[r.root] for r in records if 0 <= r.root < len(DTYPES)),
            )
        told = [record.array() for record in records]
        table = np.stack([array[: sizes.nbytes].view(np.int64) for array in told])
        own = table[:, self.rank]
        if all(
            array.size == sizes.nbytes + row.sum() for array, row in zip(told, table, strict=True)
        ):
            before = sizes.nbytes + table[:, : self.rank].sum(axis=1)
            found = [a[b : b + n].copy() for a, b, n in zip(told, before, own, strict=True)]
            return [array.view(dtype) for array in found]
        result = [np.empty(int(size), np.uint8) for size in own]
        np.copyto(result[self.rank], data[self.rank])
        if self._shared is not None and self._places.num_rings == 0:
            self._shared.all_to_all(data, result, int(table.max()))
        elif self._places.one_each and self._ring is not None:
            self._ring.all_to_all(data, result, table)
        elif self.size > 1:  # rings follow hosts: all parts reach all ranks
            self._gather_parts(np.concatenate(data), result, table)
        return [array.view(dtype) for array in result]

    def _gather_parts(
        self, whole: Array, result: list[Array], table: npt.NDArray[np.int64]
    ) -> None:
        order, sums = self._places.order, table.sum(axis=1)
        starts = np.cumsum([0, *(sums[r] for r in order)]).tolist()
        work = np.empty(starts[-1], np.uint8)
        place = dict(zip(order, starts, strict=False))
        work[place[self.rank] : place[self.rank] + whole.size] = whole
        self._gather_bytes(work, starts)
        for rank, target in enumerate(result):
            first = place[rank] + int(table[rank, : self.rank].sum())
            np.copyto(target, work[first : first + target.size])

    def _broadcast(self, target: Array, root: int) -> None:
        small = target.nbytes <= self._small_bytes
        mine = self.rank == root
        records = self._agree("broadcast", target, root=root, inline=small, empty=not mine)
        if small:
            if not mine:
                np.copyto(target, payload_of(records[root], target.dtype, target.size))
            return
        places, shared, ring = self._places, self._shared, self._ring
        origin = next(h for h, ranks in enumerate(places.hosts) if root in ranks)
        if shared is not None and places.host == origin:
            shared.broadcast(target, places.local.index(root))
        if places.num_rings == 0:
            return
        edges = places.edges(target.size)
        if ring is not None:
            mine_edges = slice(edges[self.local_rank], edges[self.local_rank + 1])
            ring.broadcast(target[mine_edges], origin)
        if shared is not None and places.host != origin:
            shared.all_gather(target, edges)

    def _barrier(self) -> None:
        self._agree("barrier", np.empty(0, np.uint8))

    def _group(self, ranks: list[int]) -> Communicator:
        key = tuple(ranks)
        self._made[key] = self._made.get(key, 0) + 1
        return BuiltinCommunicator(
            ranks.index(self.rank),
            [self._members[r] for r in ranks],
            [self._world[r] for r in ranks],
            self._listener,
            self._token,
            f"{self._label}/{','.join(map(str, ranks))}#{self._made[key]}",
            timeout_s=self._timeout_s,
            connect_timeout_s=self._connect_timeout_s,
            owns_listener=False,
            certificate=self._certificate,
        )

    def _agree(
        self,
        kind: str,
        array: Array,
        op: str = "sum",
        weight: float = 1.0,
        root: int = 0,
        *,
        inline: bool = True,
        empty: bool = False,
    ) -> list[bytes]:
        """Tells all ranks what this one does, and checks that all do the same."""
        self._watch.start()
        shape = array.shape if kind == "all_gather" else (array.size,)
        same = SAME.pack(
            KINDS.index(kind), OPS.index(op), inline, len(shape), dtype_name(array.dtype).encode(),
            array.nbytes, root, *shape, *_ZEROS[len(shape) :],
        )  # fmt: skip
        payload = array.tobytes() if inline and not empty else b""
        records = self._exchange(same + WEIGHT.pack(weight) + payload)
        if kind in ("all_gather", "all_to_all"):  # shapes may differ: only the kind must not
            same = same[:1]
        for rank, text in enumerate(records):
            if not text.startswith(same):
                raise ProtocolError(
                    f"the ranks disagree about the operation on rank {self.rank}",
                    expected=f"on all ranks {Record.of(records[self.rank]).words()}",
                    received=f"on rank {rank} {Record.of(text).words()}",
                    hint="all ranks must call the same operations in the same order",
                )
        return records

    def _exchange(self, record: bytes) -> list[bytes]:
        shared, ring = self._shared, self._ring
        if self._places.one_each and ring is not None:
            return ring.exchange(record)
        inside = [record] if shared is None else shared.exchange(record)
        if self._places.num_rings == 0:
            return inside
        everything = b""
        if ring is not None and self.local_rank == 0:
            everything = b"".join(ring.exchange(pack_records(inside)))
        if shared is not None:
            everything = shared.exchange(everything)[0]
        records = unpack_records(everything)
        if len(records) != self.size:
            raise ProtocolError(
                "the leader's record is not whole", expected=f"{self.size} records",
                received=f"{len(records)}",
            )  # fmt: skip
        sorted_records = [b""] * self.size
        for rank, text in zip(self._places.order, records, strict=True):
            sorted_records[rank] = text
        return sorted_records

    def _factors(self, op: str, records: list[bytes]) -> list[float] | None:
        """The ranks' factors; None if nobody contributes."""
        weights = [WEIGHT.unpack_from(text, SAME.size)[0] for text in records]
        factors = reduction_factors(op, weights)
        return factors if any(factors) else None

    def _missing(self) -> list[int]:
        return self._watch.missing

    def _abort(self) -> None:
        self._watch.abort()
        for path in self._paths:
            path.shut_down()

    def _close_paths(self) -> None:
        for path in self._paths:
            path.close()

    def _release(self) -> None:
        self._close_paths()
        if self._owns_listener:
            self._listener.close()


_LEAST_TOKEN_BYTES = 16


class BuiltinConnector:
    """Makes the built-in communicator of one rank.

    Args:
        bind_host: Address to listen on, the IPv6 ones have a colon; or a network
            (``'10.0.0.0/8'``) of which this machine has an address; None: the advertised address.
        port: TCP ports to try; see :func:`sparkdl.settings.network.ports_of`.
        advertised_host: Address that the others connect to; None: the one listened on, or, where
            that is every address, the one from which this machine reaches ``towards``.
        towards: A host on the network of the ranks; empty for any other network.
        host_id: Equal for ranks that can share memory; None: that of this machine. Ranks with
            different ids use TCP.

    Raises:
        ResourceError: From :meth:`prepare`: no port is free, or the address is not this machine's.
    """

    def __init__(
        self,
        rank: int,
        *,
        bind_host: str | None = None,
        port: PortSpec = 0,
        advertised_host: str | None = None,
        towards: str = "",
        host_id: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = 60.0,
        certificate: Certificate | None = None,
    ) -> None:
        self.rank, self._certificate = rank, certificate
        self._bind_host, self._port, self._towards = bind_host, port, towards
        self._advertised_host, self._host_id = advertised_host, host_id
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._listener: Listener | None = None

    def prepare(self) -> Member:
        """Opens the listening sockets; returns where they are."""
        self.close()
        bind, advertised = rank_addresses(self._bind_host, self._advertised_host, self._towards)
        self._listener = Listener(bind, self._port)
        return Member(
            host=advertised, port=self._listener.port, host_id=self._host_id or _shares_memory_as(),
            local=self._listener.local, communicator=BuiltinCommunicator.name,
        )  # fmt: skip

    def connect(self, members: Sequence[Member], token: bytes) -> BuiltinCommunicator:
        """Connects all ranks; see :class:`sparkdl.collective.communicator.Connector`."""
        if self._listener is None:
            raise ConfigError(
                "cannot connect the builtin communicator", expected="prepare() before connect()",
                received="connect() without prepare(), or twice",
                hint="call prepare() on all ranks, then connect() with what it returned on each",
            )  # fmt: skip
        if not 0 <= self.rank < len(members):
            raise ConfigError(
                "cannot connect the builtin communicator",
                expected=f"a member for rank {self.rank}", received=f"{len(members)} members",
                hint="members are what prepare() returned on each rank, in rank order",
            )  # fmt: skip
        if len(token) < _LEAST_TOKEN_BYTES:
            raise ConfigError(
                "cannot connect the builtin communicator",
                expected=f"a token of at least {_LEAST_TOKEN_BYTES} bytes",
                received=f"{len(token)} bytes",
                hint="secrets.token_bytes(32), made once on the driver",
            )
        refuse_others(members, BuiltinCommunicator.name)
        listener, self._listener = self._listener, None
        try:
            return BuiltinCommunicator(
                self.rank, members, range(len(members)), listener, token, "world",
                timeout_s=self._timeout_s, connect_timeout_s=self._connect_timeout_s,
                certificate=self._certificate,
            )  # fmt: skip
        except BaseException:
            listener.close()
            raise

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _shares_memory_as() -> str:
    """The host's identity; without Linux' shared memory each process is a host of its own."""
    return hosts.host_id() if sys.platform == "linux" else secrets.token_hex(16)
