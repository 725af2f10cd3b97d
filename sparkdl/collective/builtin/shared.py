"""Collectives of the ranks on one host, through one memory mapping.

The mapping gives each rank one area::

    | counters: exchanged, written, reduced, taken | asleep | 2 records | DEPTH x ranks pieces |

*Records* are small messages, one per operation; two, used in turn, suffice: whoever writes record
``n + 2`` has seen all of ``n + 1``, so all have read ``n``. *Pieces* carry large arrays in rounds.
In round ``k`` each rank (1) writes its contribution to every other rank's portion, (2) reduces its
own portion from all contributions, in rank order, and publishes the result, (3) takes the other
portions' results. The steps of three rounds overlap, pieces stay in the cache, and all ranks
reduce their portions at the same time. The counters say how much a rank has done since the start;
every wait is for other ranks' counters.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sparkdl.collective.arithmetic import Array, join_scaled, put_scaled
from sparkdl.collective.builtin.waiting import SLICE_MS, Watch, peer_gone, spin_until
from sparkdl.errors import ProtocolError
from sparkdl.wire.anonymous import anonymous_file, map_received
from sparkdl.wire.listening import shut_down

_ASLEEP = 8  # a flag beside the counters, in a cache line of its own


class Counters:
    """The counters of the ranks of one host.

    Args:
        links: A connected Unix socket to each other index.
        words: The mapping as 64-bit integers.
        stride: Words from one rank's counters to the next one's.
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

        if spin_until(ready):
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


def share_mapping(
    index: int, ranks: Sequence[int], links: Mapping[int, socket.socket], size: int, watch: Watch
) -> mmap.mmap:
    """The host's mapping of ``size`` bytes; index 0 makes it and hands it to the others.

    It has no name (a memfd where there is one): nothing is left behind when all ranks are killed.

    Raises:
        TransportError: A peer ended meanwhile.
        ProtocolError: Another rank shares memory of another size.
    """
    if index > 0:
        return _receive(index, ranks, links[0], size, watch)
    number = anonymous_file(size, "sparkdl")
    try:
        for other, link in links.items():
            try:
                socket.send_fds(link, [b"m"], [number])
            except OSError as error:
                raise peer_gone(ranks[0], ranks[other], error) from error
        return mmap.mmap(number, size)
    finally:
        os.close(number)


def _receive(
    index: int, ranks: Sequence[int], link: socket.socket, size: int, watch: Watch
) -> mmap.mmap:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    watch.start()
    while not poll.poll(SLICE_MS):
        watch.look([ranks[0]])
    try:
        data, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    except OSError as error:
        raise peer_gone(ranks[index], ranks[0], error) from error
    if not data:
        raise peer_gone(ranks[index], ranks[0], "it has sent no memory")
    hint = "do all ranks run the same version of sparkdl?"
    return map_received(data, descriptors, size, f"rank {ranks[0]}", hint)


EXCHANGED, WRITTEN, REDUCED, TAKEN = range(4)

DEPTH = 2
_PAGE = 4096
_LENGTH = struct.Struct("<Q")
_PIECES_BYTES = 2 << 20
"""Bytes of all pieces of a host together: about what stays in the cores' caches."""


def piece_bytes(ranks: int) -> int:
    """Bytes of one piece when ``ranks`` share the mapping.

    >>> piece_bytes(2), piece_bytes(64)
    (262144, 4096)
    """
    return max(_PAGE, min(256 << 10, _PIECES_BYTES // (DEPTH * ranks * ranks) // _PAGE * _PAGE))


class SharedMemory:
    """The ranks of one host.

    Raises:
        TransportError: A peer ended while the mapping was shared.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        links: Mapping[int, socket.socket],
        capacity: int,
        watch: Watch,
    ) -> None:
        self.index, self.ranks, self.count = index, list(ranks), len(ranks)
        self.capacity = capacity
        self._links = dict(links)
        self._piece = piece_bytes(self.count)
        self._record = -(-(capacity + _LENGTH.size) // _PAGE) * _PAGE
        self._stride = _PAGE + 2 * self._record + DEPTH * self.count * self._piece
        self._map = share_mapping(index, self.ranks, links, self._stride * self.count, watch)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        counters = Counters(index, self.ranks, links, self._words, self._stride // 8, watch)
        self._tell, self._wait = counters.tell, counters.wait
        self._others = [i for i in range(self.count) if i != index]
        self._rounds = 0
        self._exchanges = 0
        self._pieces: dict[np.dtype[np.generic], list[list[list[Array]]]] = {}

    def shut_down(self) -> None:
        """Ends the connections, so that the others' waits for this rank end."""
        for link in self._links.values():
            shut_down(link)

    def close(self) -> None:
        """Closes connections and mapping."""
        for link in self._links.values():
            link.close()
        self._pieces.clear()
        with contextlib.suppress(BufferError):  # a result still uses it: freed with the result
            self._words.release()
            self._bytes.release()
            self._map.close()

    def exchange(self, record: bytes) -> list[bytes]:
        """Every rank's record (at most ``capacity`` bytes) in the host's order."""
        if len(record) > self.capacity:
            raise ProtocolError(
                "a record is too large for shared memory",
                expected=f"at most {self.capacity} bytes", received=f"{len(record)} bytes",
            )  # fmt: skip
        self._exchanges += 1
        offset = _PAGE + (self._exchanges % 2) * self._record
        start = self.index * self._stride + offset
        _LENGTH.pack_into(self._map, start, len(record))
        start += _LENGTH.size
        self._bytes[start : start + len(record)] = record
        self._tell(EXCHANGED, self._exchanges)
        self._wait(EXCHANGED, self._exchanges)
        records = []
        for i in range(self.count):
            start = i * self._stride + offset
            (length,) = _LENGTH.unpack_from(self._map, start)
            if length > self.capacity:
                raise ProtocolError(
                    f"rank {self.ranks[i]} sent a record that is too large",
                    expected=f"at most {self.capacity} bytes", received=f"{length} bytes",
                )  # fmt: skip
            start += _LENGTH.size
            records.append(bytes(self._bytes[start : start + length]))
        return records

    def all_reduce(
        self,
        source: Array,
        target: Array,
        edges: Sequence[int],
        factor: float,
        ufunc: np.ufunc,
        *,
        gather: bool = True,
    ) -> None:
        """Reduces ``source`` into ``target``; rank ``i`` reduces ``[edges[i], edges[i + 1])``.

        Args:
            source: Flat, of equal size on all ranks.
            target: Flat; may be ``source``.
            edges: ``count + 1`` rising edges of the portions.
            gather: False: only this rank's own portion of ``target`` is written.
        """
        parts = _PortionPieces(_spans(edges), self._piece // source.itemsize)
        own = target[edges[self.index] : edges[self.index + 1]]
        take = self._taking(target, parts) if gather else None
        self._reduce(source, own, parts, factor, ufunc, take)

    def reduce_scatter(
        self,
        source: Array,
        target: Array,
        portions: Sequence[Sequence[tuple[int, int]]],
        factor: float,
        ufunc: np.ufunc,
    ) -> None:
        """Reduces ``source``; ``target`` is this rank's portion of the result, and no more.

        Args:
            target: Flat; the spans of this rank's portion, one after the other. May be that portion
                of ``source``, if it has one span.
            portions: For each rank of the host the spans (start, stop) that it reduces, the same on
                all ranks; a rank may have none.
        """
        parts = _PortionPieces(portions, self._piece // source.itemsize)
        self._reduce(source, target, parts, factor, ufunc, None)

    def _reduce(
        self,
        source: Array,
        target: Array,
        parts: _PortionPieces,
        factor: float,
        ufunc: np.ufunc,
        take: Callable[[int, int], None] | None,
    ) -> None:
        """Reduces this rank's portion into ``target``; ``take`` gets the others' of each round."""
        own, starts = self.index, parts.starts(self.index)
        pieces = self._typed(source.dtype)

        def write(k: int, slot: int) -> None:
            for j in self._others:
                a, b = parts.range(j, k)
                if a < b:
                    put_scaled(source[a:b], factor, pieces[own][slot][j][: b - a])

        def reduce(k: int, slot: int) -> None:
            a, b = parts.range(own, k)
            if a >= b:
                return
            result = target[starts[k] : starts[k] + b - a]
            # in rank order, so that the bits do not depend on who reduces
            if own == 0:
                put_scaled(source[a:b], factor, result)
            else:
                first = pieces[0][slot][own][: b - a]
                for j in range(1, own):
                    ufunc(first, pieces[j][slot][own][: b - a], out=first)
                join_scaled(first, source[a:b], factor, ufunc, result)
            for j in range(own + 1, self.count):
                ufunc(result, pieces[j][slot][own][: b - a], out=result)
            if take is not None:
                np.copyto(pieces[own][slot][own][: b - a], result)

        self._pipeline(parts.rounds, write, reduce, take)

    def all_gather(self, target: Array, edges: Sequence[int]) -> None:
        """Makes ``target`` whole on all ranks; rank ``i`` has ``[edges[i], edges[i + 1])``."""
        own = self.index
        parts = _PortionPieces(_spans(edges), self._piece // target.itemsize)
        pieces = self._typed(target.dtype)

        def publish(k: int, slot: int) -> None:
            a, b = parts.range(own, k)
            if a < b:
                np.copyto(pieces[own][slot][own][: b - a], target[a:b])

        self._pipeline(parts.rounds, None, publish, self._taking(target, parts))

    def all_to_all(self, parts: Sequence[Array], result: Sequence[Array], longest: int) -> None:
        """Every rank's part for this one.

        Args:
            parts: Bytes for each rank of the host; this rank's own part stays where it is.
            result: Where those of each rank go.
            longest: The most bytes from any rank to any other.
        """
        own, piece = self.index, self._piece
        pieces = self._typed(np.dtype(np.uint8))

        def write(k: int, slot: int) -> None:
            for j in self._others:
                part = parts[j][k * piece : (k + 1) * piece]
                np.copyto(pieces[own][slot][j][: part.size], part)

        def read(k: int, slot: int) -> None:
            for j in self._others:
                target = result[j][k * piece : (k + 1) * piece]
                np.copyto(target, pieces[j][slot][own][: target.size])

        self._pipeline(-(-longest // piece), write, read, None)

    def broadcast(self, target: Array, root: int) -> None:
        """Copies the root's ``target`` to all; ``root`` counts among the host's ranks."""
        self.all_gather(target, [0 if i <= root else target.size for i in range(self.count + 1)])

    def _taking(self, target: Array, parts: _PortionPieces) -> Callable[[int, int], None]:
        """Copies what the others have made of a round into ``target``."""
        pieces = self._typed(target.dtype)

        def take(k: int, slot: int) -> None:
            for j in self._others:
                a, b = parts.range(j, k)
                if a < b:
                    np.copyto(target[a:b], pieces[j][slot][j][: b - a])

        return take

    def _pipeline(
        self,
        rounds: int,
        write: Callable[[int, int], None] | None,
        reduce: Callable[[int, int], None],
        take: Callable[[int, int], None] | None,
    ) -> None:
        """Runs the three steps of all rounds, three rounds overlapping."""
        base = self._rounds
        self._rounds += rounds
        for i in range(rounds + 2):
            if i < rounds:
                if write is not None:
                    self._wait(REDUCED, base + i - DEPTH + 1)  # its slot has been read
                    write(i, (base + i) % DEPTH)
                self._tell(WRITTEN, base + i + 1)
            k = i - 1
            if 0 <= k < rounds:
                if write is not None:
                    self._wait(WRITTEN, base + k + 1)
                self._wait(TAKEN, base + k - DEPTH + 1)
                reduce(k, (base + k) % DEPTH)
                self._tell(REDUCED, base + k + 1)
            k = i - 2
            if k >= 0:
                if take is not None:
                    self._wait(REDUCED, base + k + 1)
                    take(k, (base + k) % DEPTH)
                self._tell(TAKEN, base + k + 1)

    def _typed(self, dtype: np.dtype[np.generic]) -> list[list[list[Array]]]:
        if dtype not in self._pieces:
            areas = np.frombuffer(self._map, np.uint8).reshape(self.count, self._stride)
            pieces = areas[:, _PAGE + 2 * self._record :].view(dtype)
            shaped = pieces.reshape(self.count, DEPTH, self.count, -1)
            self._pieces[dtype] = [[list(slot) for slot in area] for area in shaped]
        return self._pieces[dtype]


def _spans(edges: Sequence[int]) -> list[list[tuple[int, int]]]:
    return [[pair] for pair in itertools.pairwise(edges)]


class _PortionPieces:
    """Portions cut into rounds of pieces.

    Args:
        portions: Spans (start, stop) of each portion.
        piece: Elements of a piece at most; none reaches from one span into the next.
    """

    def __init__(self, portions: Sequence[Sequence[tuple[int, int]]], piece: int) -> None:
        self._pieces = [
            [(a, min(a + piece, b)) for start, b in spans for a in range(start, b, piece)]
            for spans in portions
        ]
        self.rounds = max(map(len, self._pieces))

    def range(self, portion: int, k: int) -> tuple[int, int]:
        """Start and stop of a portion's piece of round ``k``; (0, 0) if it has none."""
        pieces = self._pieces[portion]
        return pieces[k] if k < len(pieces) else (0, 0)

    def starts(self, portion: int) -> list[int]:
        """The start of each piece of a portion in an array of this portion alone."""
        return [0, *itertools.accumulate(b - a for a, b in self._pieces[portion])]
