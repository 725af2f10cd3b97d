"""Collectives of ranks on different hosts: a ring of TCP connections, used as one stream.

Each rank sends to the next and receives from the one before. An all-reduce of ``n`` elements is
``p - 1`` steps that reduce and ``p - 1`` that gather; each moves one of ``p`` portions. What a rank
sends in step ``s + 1`` is what it received (and reduced) in step ``s``. So ranks need not wait for
each other between two steps: they send bytes as soon as those that they depend on have been
received, and receive others meanwhile. Each rank sends ``2 n (p - 1)/p`` elements, which is the
least possible (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

import dataclasses
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import Array, join_scaled, put_scaled
from sparkdl.collective.builtin.waiting import SLICE_MS, SPIN_S, Watch, peer_gone, spin_until
from sparkdl.errors import ProtocolError, TransportError
from sparkdl.wire.listening import shut_down, tune

_LENGTH = struct.Struct("<I")
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 256 << 10, 1 << 20
"""Bytes received before they are reduced and sent on: with fewer the next rank begins sooner, with
more there are fewer calls."""
_WAKE_BYTES = 64 << 10
"""Bytes of a large array that arrive before a sleeping rank is woken. On a slow link it would else
wake for every few packets, and take a core from ranks that compute."""
_VAIN_SPINS = 3
"""When this many more polls have failed than succeeded, a waiting rank sleeps without polling."""


@dataclasses.dataclass
class _Step:
    """One portion to receive: where it goes, and what joins a complete piece of it."""

    target: Array
    join: Callable[[int, int, Array], None] | None = None


class Ring:
    """One rank of a ring.

    Args:
        ranks: The ranks in ring order, as the communicator numbers them.
        to_next: The connection to the next rank, non-blocking; TLS or not.
        from_previous: The connection from the previous rank, likewise.
        capacity: Largest record in bytes.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        to_next: socket.socket,
        from_previous: socket.socket,
        capacity: int,
        watch: Watch,
    ) -> None:
        self.index, self.ranks, self.count = index, list(ranks), len(ranks)
        self.capacity = capacity
        self._next, self._previous = to_next, from_previous
        self._encrypted = isinstance(from_previous, ssl.SSLSocket)
        self._watch = watch
        self._scratch = bytearray(_MOST_CHUNK_BYTES)
        self._vain = 0  # looks in vain, less those that were not
        self._wakes_at = 1  # bytes that have come
        for connection in (to_next, from_previous):
            tune(connection, silence_ms=0)  # a rank that compiles takes no bytes

    def shut_down(self) -> None:
        """Ends the connections, so that the others' waits for this rank end."""
        for connection in (self._next, self._previous):
            shut_down(connection)

    def close(self) -> None:
        self._next.close()
        self._previous.close()

    def exchange(self, record: bytes) -> list[bytes]:
        """Every rank's record in ring order; each is passed once around the ring."""
        records: list[bytes] = [b""] * self.count
        records[self.index] = record
        outgoing = memoryview(_LENGTH.pack(len(record)) + record)
        incoming = bytearray()
        for step in range(1, self.count):
            origin = (self.index - step) % self.count
            length = -1
            while length < 0 or len(incoming) < _LENGTH.size + length:
                if outgoing:
                    outgoing = outgoing[self._send(outgoing) :]
                want = _LENGTH.size if length < 0 else _LENGTH.size + length
                if len(incoming) < want:
                    part = memoryview(self._scratch)[: want - len(incoming)]
                    got = self._receive_into(part)
                    incoming += part[:got]
                    if not got:
                        # the ranks whose records have been received have come; this one has not
                        self._pause([self.ranks[origin]], True, bool(outgoing))
                if length < 0 and len(incoming) >= _LENGTH.size:
                    length = self._read_length(incoming)
            records[origin] = bytes(incoming[_LENGTH.size :])
            if step < self.count - 1:
                outgoing = memoryview(bytes(outgoing) + bytes(incoming))
            incoming.clear()
        while outgoing:
            sent = self._send(outgoing)
            outgoing = outgoing[sent:]
            if not sent:
                self._pause([self.ranks[(self.index + 1) % self.count]], False, True)
        return records

    def _read_length(self, incoming: bytearray) -> int:
        (length,) = _LENGTH.unpack_from(incoming)
        if length > self.capacity:
            raise ProtocolError(
                f"rank {self._previous_rank} sent a record that is too large",
                expected=f"at most {self.capacity} bytes", received=f"{length} bytes",
            )  # fmt: skip
        return int(length)

    def all_reduce(
        self, source: Array, target: Array, edges: Sequence[int], factor: float, ufunc: np.ufunc
    ) -> None:
        """Reduces ``source`` into ``target``; rank ``i`` reduces ``[edges[i], edges[i + 1])``.

        Args:
            source: Flat, of equal size on all ranks.
            target: Flat; may be ``source``. All of it is written to.
            edges: ``count + 1`` rising edges of the portions.
            factor: What this rank's contribution is multiplied by.
            ufunc: How contributions are joined.
        """

        def portion(array: Array, i: int) -> Array:
            i %= self.count
            return array[edges[i] : edges[i + 1]]

        first = portion(source, self.index - 1)
        if factor != 1.0:
            scaled = portion(target, self.index - 1)
            put_scaled(first, factor, scaled)
            first = scaled
        sends, steps = [first], []
        for s in range(self.count - 1):
            mine, result = (portion(of, self.index - 2 - s) for of in (source, target))
            steps.append(_Step(result, _joiner(mine, result, factor, ufunc)))
            sends.append(result)
        for s in range(self.count - 1):
            result = portion(target, self.index - 1 - s)
            steps.append(_Step(result))
            sends.append(result)
        self._stream(sends[: len(steps)], steps)

    def reduce_scatter(
        self, portions: Sequence[Array], target: Array, factor: float, ufunc: np.ufunc
    ) -> None:
        """Reduces the portions of all ranks; ``target`` is that of this rank, and no more.

        Each rank sends all portions but its own, once. The sums have the order that they have in
        :meth:`all_reduce`: the contribution of the rank behind a portion's own comes first. Two
        portions of scratch memory are enough.

        Args:
            portions: This rank's contribution to the portion of each place of the ring, flat.
            target: May be this rank's own portion.
        """
        own, last = self.index, self.count - 2
        longest = max(portion.size for portion in portions)
        scratch: dict[int, Array] = {}

        def room(number: int, size: int) -> Array:
            if number not in scratch:
                scratch[number] = np.empty(longest, target.dtype)
            return scratch[number][:size]

        first = portions[(own - 1) % self.count]
        if factor != 1.0:
            scaled = room(1, first.size)
            put_scaled(first, factor, scaled)
            first = scaled
        sends, steps = [first], []
        for s in range(self.count - 1):
            mine = portions[(own - 2 - s) % self.count]
            result = target if s == last else room(s % 2, mine.size)
            steps.append(_Step(result, _joiner(mine, result, factor, ufunc)))
            sends.append(result)
        self._stream(sends[:-1], steps, reuses=True)

    def all_gather(self, target: Array, edges: Sequence[int]) -> None:
        """Makes ``target`` whole on all ranks; rank ``i`` has ``[edges[i], edges[i + 1])``."""

        def portion(i: int) -> Array:
            i %= self.count
            return target[edges[i] : edges[i + 1]]

        sends = [portion(self.index - s) for s in range(self.count - 1)]
        self._stream(sends, [_Step(portion(self.index - 1 - s)) for s in range(self.count - 1)])

    def all_to_all(
        self, parts: Sequence[Array], result: Sequence[Array], table: npt.NDArray[np.int64]
    ) -> None:
        """Every rank's part for this one.

        A rank's parts travel together, the one for the farthest rank first; each rank keeps the
        last of them, which is its own, and passes the others on.

        Args:
            parts: Bytes for each place of the ring.
            result: Where those of each place go.
            table: ``[i, j]``: bytes from place ``i`` to place ``j``.
        """
        farthest = range(self.count - 1, 0, -1)
        sends = [np.concatenate([parts[(self.index + d) % self.count] for d in farthest])]
        steps = []
        for step in range(1, self.count):
            origin = (self.index - step) % self.count
            sizes = [int(table[origin, (origin + d) % self.count]) for d in farthest]
            came = np.empty(sum(sizes[: self.count - step]), np.uint8)
            steps.append(_Step(came))
            sends.append(came[: came.size - sizes[self.count - step - 1]])
        self._stream(sends[:-1], steps)
        for number, taken in enumerate(steps, 1):
            target = result[(self.index - number) % self.count]
            np.copyto(target, taken.target[taken.target.size - target.size :])

    def broadcast(self, target: Array, root: int) -> None:
        """Passes the root's ``target`` along the ring; ``root`` is a place in the ring."""
        place = (self.index - root) % self.count
        if place == 0:
            self._stream([target], [])
        elif place == self.count - 1:
            self._stream([], [_Step(target)])
        else:
            self._stream([target[:0], target], [_Step(target)])

    def _stream(self, sends: Sequence[Array], steps: Sequence[_Step], reuses: bool = False) -> None:
        """Sends portion ``s + 1`` as step ``s`` comes in; portion 0 is there from the start.

        With ``reuses`` a step takes the memory of the one two before it, whose portion must have
        left. Of all ranks the one that has sent least can always go on, so none waits for ever.
        """
        outgoing = [_as_bytes(a) for a in sends]
        incoming = [_as_bytes(s.target) for s in steps]
        came = [0] * len(steps)  # bytes of each step that are in place
        filled = 0  # bytes in the scratch piece
        scratch = memoryview(self._scratch)
        longest = max((len(view) for view in (*outgoing, *incoming)), default=0)
        chunk = min(_MOST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, longest // 64 // 4096 * 4096))
        s = r = sent = 0
        while True:
            moved = False
            while s < len(outgoing) and sent == len(outgoing[s]):
                s, sent = s + 1, 0
            if s < len(outgoing):
                limit = len(outgoing[0]) if s == 0 else came[s - 1]
                if sent < limit:
                    count = self._send(outgoing[s][sent : min(limit, sent + chunk)])
                    sent += count
                    moved = count > 0
            while r < len(incoming) and came[r] == len(incoming[r]):
                r += 1
            wants = r < len(incoming) and (not reuses or r <= s)
            if wants:
                end = min(len(incoming[r]), came[r] + chunk)
                join = steps[r].join
                if join is None:
                    count = self._receive_into(incoming[r][came[r] : end])
                    came[r] += count
                else:
                    count = self._receive_into(scratch[filled : end - came[r]])
                    filled += count
                    if filled == end - came[r]:
                        item = steps[r].target.dtype.itemsize
                        piece = np.frombuffer(scratch[:filled], np.uint8)
                        join(came[r] // item, end // item, piece)
                        came[r], filled = end, 0
                moved = moved or count > 0
            elif r == len(incoming) and s == len(outgoing):
                return
            if not moved:
                can_send = s < len(outgoing) and sent < (
                    len(outgoing[0]) if s == 0 else came[s - 1]
                )
                rest = end - came[r] - filled if wants else 1
                self._pause([self._previous_rank], wants, can_send, rest)

    @property
    def _previous_rank(self) -> int:
        return self.ranks[(self.index - 1) % self.count]

    @property
    def _next_rank(self) -> int:
        return self.ranks[(self.index + 1) % self.count]

    def _send(self, data: memoryview) -> int:
        """Bytes taken. After 0 the next call must begin with the same bytes: over TLS some of them
        may be on their way."""
        try:
            return self._next.send(data)
        except _NOT_NOW:
            return 0
        except OSError as error:
            raise peer_gone(self.ranks[self.index], self._next_rank, error) from error

    def _receive_into(self, view: memoryview) -> int:
        """Bytes received: what has come, as far as it fits."""
        got = 0
        try:
            while got < len(view):
                count = self._previous.recv_into(view[got:])
                if not count:
                    raise peer_gone(self.ranks[self.index], self._previous_rank)
                got += count
                if not self._encrypted:  # TLS gives one record of 16 KiB, TCP all it has
                    break
        except _NOT_NOW:
            pass
        except TransportError:
            raise
        except OSError as error:
            raise peer_gone(self.ranks[self.index], self._previous_rank, error) from error
        return got

    def _pause(self, missing: list[int], receiving: bool, sending: bool, wants: int = 1) -> None:
        """Waits until a socket is ready: looks for a short time, then sleeps."""
        poll = select.poll()
        if receiving:
            poll.register(self._previous, select.POLLIN)
        if sending:
            poll.register(self._next, select.POLLOUT)
        waits_for_more = receiving and self._vain == _VAIN_SPINS
        self._wake_at(min(wants, _WAKE_BYTES) if waits_for_more else 1)
        if self._vain < _VAIN_SPINS:
            if spin_until(lambda: bool(poll.poll(0))):
                self._vain = max(0, self._vain - 1)
                return
            self._vain += 1
        started = time.perf_counter()
        while not poll.poll(SLICE_MS):
            self._watch.look(missing)
        if time.perf_counter() - started < SPIN_S:
            self._vain -= 1  # to look would have been enough

    def _wake_at(self, size: int) -> None:
        """Sets how many bytes must have come for a wait to end (TLS' records are no such bytes)."""
        if size != self._wakes_at and not self._encrypted:
            self._wakes_at = size
            self._previous.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def _joiner(
    source: Array, target: Array, factor: float, ufunc: np.ufunc
) -> Callable[[int, int, Array], None]:
    def join(a: int, b: int, piece: Array) -> None:
        join_scaled(piece.view(target.dtype), source[a:b], factor, ufunc, target[a:b])

    return join


def _as_bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")
