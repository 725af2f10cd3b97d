"""Several servers, each with a part of the weights, as one store.

Part ``i`` of ``n`` holds the ``i``-th of ``n`` nearly equal pieces of the trained section, and of
the averaged section. A rule acts on each part alone, so only rules that work element by element
give what one server would (all but those with norms over the whole model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sparkdl.closing import Closing
from sparkdl.coordinator.session import Session, Welcome
from sparkdl.errors import ConfigError
from sparkdl.ps.client import Client, Progress
from sparkdl.slices import Slices
from sparkdl.weights import FloatArray, Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One server's part of a flat buffer.

    Args:
        trained, averaged: Where its two sections are in the whole buffer.
    """

    trained: slice
    averaged: slice

    @property
    def layout(self) -> Layout:
        """The layout of the part's own buffer ``[trained | averaged]``."""
        sizes = [part.stop - part.start for part in (self.trained, self.averaged)]
        return Layout.of(
            [("trained", (sizes[0],), "float32")], [("averaged", (sizes[1],), "float32")]
        )

    def take(self, whole: FloatArray, out: FloatArray) -> None:
        """Copies this part of ``whole`` into ``out``, a buffer of :attr:`layout`."""
        edge = self.trained.stop - self.trained.start
        out[:edge], out[edge:] = whole[self.trained], whole[self.averaged]

    def put(self, part: FloatArray, whole: FloatArray) -> None:
        """The counterpart of :meth:`take`."""
        edge = self.trained.stop - self.trained.start
        whole[self.trained], whole[self.averaged] = part[:edge], part[edge:]


def shards_of(layout: Layout, count: int) -> list[Shard]:
    """The parts of ``count`` servers.

    >>> layout = Layout.of([('w', (5,), 'float32')], [('m', (2,), 'float32')])
    >>> [(s.trained.stop, s.averaged.stop) for s in shards_of(layout, 2)]
    [(2, 6), (5, 7)]
    """
    trained, averaged = layout.trained_size, layout.size - layout.trained_size
    return [
        Shard(
            slice(trained * i // count, trained * (i + 1) // count),
            slice(trained + averaged * i // count, trained + averaged * (i + 1) // count),
        )
        for i in range(count)
    ]


class ShardRouter(Closing):
    """A worker's access to several servers; see :class:`sparkdl.ps.client.StoreAccess`.

    Each exchange goes to all servers at the same time. A worker that was lost between two servers'
    replies has committed its last window to some of them only: the next attempt trains that window
    again, and the servers that have it get no second commit.

    Args:
        clients: Of the servers, in the order of the shards; closed with the router.
        layout: Of the whole buffer.

    Raises:
        ConfigError: The rule waits for all workers in rounds, which only one server can hold.
    """

    round_rows = 0
    without_gradient: Sequence[int] = ()
    round_without_gradient: Sequence[int] = ()
    give_state: Callable[[], bytes] | None = None
    round_slices: Sequence[Slices] = ()
    encodes = False
    in_step = False
    source = "center"

    def __init__(self, clients: Sequence[Client], layout: Layout) -> None:
        self._clients = list(clients)
        self._shards = shards_of(layout, len(self._clients))
        self._committed = [(0, 0)] * len(self._clients)
        self._pool = ThreadPoolExecutor(len(self._clients), thread_name_prefix="sparkdl-shard")
        self.buffer: FloatArray = np.zeros(layout.size, np.float32)

    @property
    def session(self) -> Session:
        """With the first server, whose coordinator is the run's."""
        return self._clients[0].session

    @property
    def num_workers(self) -> int:
        """Workers of the run."""
        return self._clients[0].num_workers

    def join(self, *, rows: int = 0, batches_per_epoch: int = 0) -> Welcome:
        """Joins the run at every server; the rank goes on from the earliest position."""
        welcomes = self._on_all(lambda i: self._clients[i].join(
            rows=rows, batches_per_epoch=batches_per_epoch))  # fmt: skip
        if any(welcome.in_step for welcome in welcomes):
            raise ConfigError(
                "a rule that waits for all workers needs one server",
                expected="one endpoint, or a rule that does not wait",
                received=f"{len(self._clients)} endpoints",
            )
        self._committed = [(welcome.epoch, welcome.batch) for welcome in welcomes]
        epoch, batch = min(self._committed)
        return replace(welcomes[0], epoch=epoch, batch=batch)

    def pull(self, *, last: bool = False) -> FloatArray:
        """Fills ``buffer`` with the center, and returns it; see :meth:`Client.pull`."""
        self._on_all(lambda i: self._pull(i, last=last))
        return self.buffer

    def push(self, progress: Progress) -> None:
        """Commits what ``buffer`` holds."""
        self._on_all(lambda i: self._push(i, progress))

    def push_pull(self, progress: Progress) -> FloatArray:
        """Commits what ``buffer`` holds, and fills it with the center."""
        self._on_all(lambda i: self._push_pull(i, progress))
        return self.buffer

    def add_up(
        self, numbers: npt.NDArray[np.float64], number: int, progress: Progress
    ) -> npt.NDArray[np.float64]:
        """Never called: only rules that wait add numbers up."""
        raise NotImplementedError

    def sliced_buffer(self, size: int, places: int) -> FloatArray:
        """Never called: only rules that wait take slices."""
        raise NotImplementedError

    def push_pull_slices(self, progress: Progress, size: int, slices: Sequence[Slices]) -> None:
        """Never called: only rules that wait take slices."""
        raise NotImplementedError

    def snapshot_wanted(self, epoch: int, batch: int = 0) -> bool:
        """Never called: only rules that wait take snapshots."""
        raise NotImplementedError

    def snapshot(self, epoch: int, batch: int = 0) -> None:
        """Never called: only rules that wait take snapshots."""
        raise NotImplementedError

    def get_state(self) -> bytes:
        """Never called: only rules that wait hand a state to a joiner."""
        raise NotImplementedError

    def kept(self) -> bytearray:
        """Never called: only workers that hold the weights go back to what they left."""
        raise NotImplementedError

    def finish(self) -> None:
        """Tells every server that this rank's work is done."""
        self._on_all(lambda i: self._clients[i].session.finish())

    def close(self) -> None:
        """Closes all sessions."""
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def _pull(self, index: int, *, last: bool = False) -> None:
        self._shards[index].put(self._clients[index].pull(last=last), self.buffer)

    def _push(self, index: int, progress: Progress) -> None:
        if (progress.epoch, progress.batch) > self._committed[index]:
            client = self._clients[index]
            self._shards[index].take(self.buffer, client.buffer)
            client.push(progress)

    def _push_pull(self, index: int, progress: Progress) -> None:
        if (progress.epoch, progress.batch) <= self._committed[index]:
            self._pull(index)
            return
        client, shard = self._clients[index], self._shards[index]
        shard.take(self.buffer, client.buffer)
        shard.put(client.push_pull(progress), self.buffer)

    def _on_all(self, action: Callable[[int], T]) -> list[T]:
        return list(self._pool.map(action, range(len(self._clients))))
