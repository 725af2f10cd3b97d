"""Which ranks share a host, and which rings join the hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparkdl.collective.arithmetic import shard_edges


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
        edges = shard_edges(size, count)
        return edges + [size] * (len(self.local) - count)
