"""How ranks of a host tell each other, in shared memory, how far they are.

Each rank has a few counters, which it alone writes and the others wait for. A wait first looks at
them again and again for a short time, then sleeps in ``poll`` on the Unix sockets that join every
two ranks: a rank that has counted on wakes those that sleep by one byte, and the socket of a
process that has died is closed by the system.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence

from sparkdl.collective.builtin.waiting import SLICE_MS, SPIN_S, Watch, peer_gone, spin_until

_ASLEEP = 8  # a flag beside the counters, in a cache line of its own


class Counters:
    """The counters of the ranks of one host.

    Args:
        index: This rank among those of the host.
        ranks: The ranks of the host, as the communicator numbers them.
        links: A connected Unix socket to each other index.
        words: The mapping as 64-bit integers.
        stride: Words from one rank's counters to the next one's.
        watch: Deadline and messages of the operation under way.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        links: Mapping[int, socket.socket],
        words: memoryview,
        stride: int,
        watch: Watch,
    ) -> None:
        self._index, self._ranks, self._words, self._watch = index, list(ranks), words, watch
        self._links = dict(links)
        self._indices = {s.fileno(): i for i, s in self._links.items()}
        self._gone: set[int] = set()
        self._poll = select.poll()
        for number in self._indices:
            self._poll.register(number, select.POLLIN)
        self._base = [i * stride for i in range(len(ranks))]
        self._others = [i for i in range(len(ranks)) if i != index]
        self._fence = threading.Lock()
        self._fence.acquire()

    def tell(self, counter: int, value: int) -> None:
        """Sets this rank's counter, and wakes ranks that sleep."""
        self._order()
        words, base = self._words, self._base
        words[base[self._index] + counter] = value
        self._order()
        for i in self._others:
            if words[base[i] + _ASLEEP]:
                self._wake(i)

    def wait(self, counter: int, value: int) -> None:
        """Returns when every other rank's counter has reached ``value``.

        Raises:
            WaitTimeoutError: Some did not in time; they are named.
            TransportError: One of them is gone.
        """
        words, base = self._words, self._base
        for i in self._others:
            if words[base[i] + counter] < value:
                self._wait_slowly(counter, value)
                break
        self._order()

    def _order(self) -> None:
        """A full memory barrier: what is written before is seen before (needed beyond x86)."""
        self._fence.release()
        self._fence.acquire()

    def _wake(self, index: int) -> None:
        # A full socket buffer wakes as well; a peer that is gone is found by whoever waits for it.
        with contextlib.suppress(OSError):
            self._links[index].send(b"!", socket.MSG_DONTWAIT)

    def _wait_slowly(self, counter: int, value: int) -> None:
        words = self._words
        places = [(self._base[i] + counter, i) for i in self._others]

        def ready() -> bool:
            return all(words[place] >= value for place, _ in places)

        if spin_until(ready, SPIN_S):
            return
        asleep = self._base[self._index] + _ASLEEP
        words[asleep] = 1
        try:
            self._order()
            while not ready():
                late = [i for place, i in places if words[place] < value]
                for i in late:
                    if i in self._gone:
                        raise peer_gone(self._ranks[self._index], self._ranks[i])
                self._watch.look([self._ranks[i] for i in late])
                self._sleep()
        finally:
            words[asleep] = 0

    def _sleep(self) -> None:
        for number, _ in self._poll.poll(SLICE_MS):
            index = self._indices[number]
            try:
                received = self._links[index].recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            if not received:
                # Its counters may have reached what is waited for before its process ended: only a
                # wait for a value that they have not reached fails.
                self._gone.add(index)
                self._poll.unregister(number)
