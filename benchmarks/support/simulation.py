"""A discrete-event simulation of training steps: server, sharded server, ring, grid, hierarchy.

Time is in seconds, data in bytes, rates in bytes per second. A *resource* (a link's one direction,
a server's core) serves one request after the other; the simulation computes who waits for whom.

Messages stream: a byte enters the receiver's link while the next one leaves the sender's. In a ring
all ranks do the same step at the same time, so its times are computed step by step, for all ranks
together.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Work = Callable[[], None]


@dataclass(frozen=True)
class Machine:
    """The constants of a cluster: every host has one link to a switch that limits nothing.

    Args:
        compute_s: One step of one worker.
        spread: Standard deviation of a step's logarithm.
        link: Bytes per second of a host's link, each way.
        duplex: Share of that which is left to each direction where both are busy.
        latency_s: From one host to another, software included.
        apply: Bytes per second that a server adds to its center, or a rank to its sum.
        memory: Bytes per second that ranks of one host reduce through shared memory.
        overhead_s: Of each exchange on the worker, whatever its size.
        copy: Bytes per second that a worker moves between model and buffer, both ways counted.
    """

    compute_s: float
    link: float
    latency_s: float = 50e-6
    apply: float = float("inf")
    memory: float = float("inf")
    overhead_s: float = 0.0
    copy: float = float("inf")
    spread: float = 0.0
    duplex: float = 1.0

    def draw(self, steps: int, workers: int, window: int = 1, seed: int = 0) -> np.ndarray:
        """Seconds of each window of ``window`` steps, of shape (steps // window, workers)."""
        rng = np.random.default_rng(seed)
        noise = np.exp(self.spread * rng.standard_normal((steps, workers)) - self.spread**2 / 2)
        seconds = self.compute_s * noise
        whole = steps // window * window
        return np.asarray(seconds[:whole].reshape(-1, window, workers).sum(1))


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Work]] = []
        self._numbers = itertools.count()

    def at(self, time: float, work: Work) -> None:
        """Calls ``work`` when the clock is at ``time``."""
        heapq.heappush(self._events, (time, next(self._numbers), work))

    def run(self) -> float:
        """Runs until nothing is left; returns the time of the last event."""
        while self._events:
            self.now, _, work = heapq.heappop(self._events)
            work()
        return self.now


class Resource:
    """Serves requests one after the other: a server's core, or one direction of a link."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self.clock, self.rate, self.free = clock, rate, 0.0
        self.opposite: Resource = self
        self.duplex = 1.0

    @property
    def rate_now(self) -> float:
        """The rate, or what the opposite direction leaves of it."""
        busy = self.opposite is not self and self.opposite.free > self.clock.now
        return self.rate * (self.duplex if busy else 1.0)

    def use(self, amount: float, then: Work) -> None:
        """Calls ``then`` when ``amount`` is done, after all that was asked for before."""
        self.free = max(self.free, self.clock.now) + amount / self.rate
        self.clock.at(self.free, then)


def make_links(clock: Clock, machine: Machine, count: int) -> tuple[list[Resource], list[Resource]]:
    """Both directions of the links of ``count`` hosts: out of them, and into them."""
    out, into = ([Resource(clock, machine.link) for _ in range(count)] for _ in range(2))
    for one, other in zip(out, into, strict=True):
        one.opposite, other.opposite = other, one
        one.duplex = other.duplex = machine.duplex
    return out, into


PIECES = (10, 20)
"""Of a message, at least and at most; connections that share a link take turns, a piece each. TCP
does not share evenly, so their number is drawn: of two (four) equal messages that begin at once the
first is then through after 0.88 (0.80) of the time of all; in network namespaces it was 0.90 and
0.91 (0.78 and 0.81; tried by hand, 200 Mbit/s, 12 times with each of two queues)."""


def send(
    source: Resource,
    target: Resource,
    amount: float,
    latency_s: float,
    sent: Work,
    arrived: Work,
    pieces: int,
) -> None:
    """Streams through the sender's link and the receiver's at once, piece by piece.

    Calls ``sent`` when the last byte has left, and ``arrived`` when it is there.
    """
    clock = source.clock
    begin = max(clock.now, source.free)
    source.free = begin + amount / pieces / source.rate_now
    # what the receiver's link cannot take at once waits in the switch
    target.free = max(begin, target.free) + amount / pieces / target.rate_now
    end = max(source.free, target.free)
    if pieces == 1:
        clock.at(end, sent)
        clock.at(end + latency_s, arrived)
    else:
        rest = amount * (pieces - 1) / pieces
        clock.at(end, lambda: send(source, target, rest, latency_s, sent, arrived, pieces - 1))


def server_seconds(
    machine: Machine,
    workers: int,
    size: float,
    *,
    steps: int = 32,
    window: int = 1,
    shards: int = 1,
    waits: bool = False,
    stagger_s: float = 0.0,
) -> float:
    """Mean seconds per step and worker with a parameter server of ``shards`` hosts.

    A worker computes ``window`` steps, then sends ``size / shards`` to each shard, which applies
    it and sends as much back; the next window begins when all shards have answered.

    Args:
        machine: The constants.
        workers: Each on a host of its own.
        size: Bytes of the model.
        steps: To simulate, of each worker.
        window: Steps between two exchanges.
        shards: Hosts that share the model.
        waits: The server answers when all workers' pushes have arrived (synchronous).
        stagger_s: Each worker begins so much later than the one before it.
    """
    clock = Clock()
    durations = machine.draw(steps, workers, window)
    rounds, share, latency = len(durations), size / shards, machine.latency_s
    few = workers <= 64  # among many it makes no difference
    lots = np.random.default_rng(0)

    def pieces() -> int:
        return int(lots.integers(PIECES[0], PIECES[1] + 1)) if few else 1

    local_s = machine.overhead_s + 2 * size / machine.copy
    up, down = make_links(clock, machine, workers)
    out, into = make_links(clock, machine, shards)
    core = [Resource(clock, machine.apply) for _ in range(shards)]
    done = [0] * workers  # windows
    missing = [0] * workers  # answers to the push under way
    gathered: list[list[int]] = [[] for _ in range(shards)]
    ended = [0.0] * workers

    def begin(worker: int) -> None:
        if done[worker] == rounds:
            ended[worker] = clock.now - worker * stagger_s
            return
        missing[worker] = shards
        clock.at(clock.now + durations[done[worker], worker] + local_s, lambda: push(worker, 0))

    def push(worker: int, number: int) -> None:
        if number < shards:
            shard = (worker + number) % shards  # not all begin with the same one
            send(
                up[worker], into[shard], share, latency,
                lambda: push(worker, number + 1), lambda: apply(worker, shard), pieces(),
            )  # fmt: skip

    def apply(worker: int, shard: int) -> None:
        core[shard].use(share, lambda: answer(worker, shard))

    def answer(worker: int, shard: int) -> None:
        gathered[shard].append(worker)
        if waits and len(gathered[shard]) < workers:
            return
        asked, gathered[shard] = gathered[shard], []
        for other in asked:
            send(
                out[shard], down[other], share, latency, _nothing, lambda w=other: end(w), pieces()
            )  # fmt: skip

    def end(worker: int) -> None:
        missing[worker] -= 1
        if not missing[worker]:
            done[worker] += 1
            begin(worker)

    for worker in range(workers):
        clock.at(worker * stagger_s, lambda w=worker: begin(w))
    clock.run()
    return float(np.mean(ended)) / (rounds * window)


def _nothing() -> None:
    return None


def ring_seconds(
    machine: Machine, workers: int, size: float, *, steps: int = 32, window: int = 1
) -> float:
    """Mean seconds per step with a ring all-reduce after each ``window`` steps.

    Each of ``2 (p − 1)`` steps of the ring sends ``size / p`` to the next rank and joins what the
    one before has sent; pieces stream, so a byte costs its time on the link or in the sum,
    whichever is longer. A rank starts a ring step when it and the rank before have ended the last.
    """
    durations = machine.draw(steps, workers, window)
    now = np.zeros(workers)
    piece = size / workers
    join = machine.latency_s + piece / min(machine.link * machine.duplex, machine.apply)
    pass_on = machine.latency_s + piece / (machine.link * machine.duplex)
    for duration in durations:
        now = now + duration + machine.overhead_s + 2 * size / machine.copy
        for number in range(2 * (workers - 1)):
            now = np.maximum(now, np.roll(now, 1)) + (join if number < workers - 1 else pass_on)
    return float(now.mean()) / (len(durations) * window)


def hierarchical_seconds(
    machine: Machine,
    workers: int,
    size: float,
    *,
    local: int = 8,
    steps: int = 32,
    window: int = 1,
) -> float:
    """Ring over hosts of ``local`` workers each, which reduce and share inside the host.

    Every rank joins its ``1 / local`` of all local ranks' arrays (``memory``), the hosts' sums go
    around a ring of ``workers / local`` hosts, and all local ranks copy the result.
    """
    local = min(local, workers)
    hosts = -(-workers // local)
    durations = machine.draw(steps, hosts * local, window)
    slowest = durations.reshape(len(durations), hosts, local).max(2)
    inside = 2 * size / machine.memory if local > 1 else 0.0
    now = np.zeros(hosts)
    piece = size / hosts
    join = machine.latency_s + piece / min(machine.link * machine.duplex, machine.apply)
    pass_on = machine.latency_s + piece / (machine.link * machine.duplex)
    for duration in slowest:
        now = now + duration + machine.overhead_s + 2 * size / machine.copy + inside
        for number in range(2 * (hosts - 1)):
            now = np.maximum(now, np.roll(now, 1)) + (join if number < hosts - 1 else pass_on)
    return float(now.mean()) / (len(durations) * window)


def grid_seconds(
    machine: Machine,
    workers: int,
    size: float,
    *,
    columns: int = 0,
    parts: int = 1,
    steps: int = 32,
) -> float:
    """Mean seconds per step with an all-reduce over a grid of rings, in ``parts`` one by one.

    A row of ``columns`` workers reduces and scatters, each column reduces what its row place holds,
    the row gathers: ``2 (columns − 1) + 2 (rows − 1)`` messages in a row instead of the
    ``2 (p − 1)`` of one ring, and as many bytes.

    Args:
        machine: The constants.
        workers: A multiple of ``columns``.
        size: Bytes of the model.
        columns: Workers in a row; 0 or ``workers``: one ring of all of them.
        parts: Exchanges of ``size / parts`` each; the next begins when a worker has ended the last.
        steps: To simulate, of each worker.
    """
    columns = columns or workers
    rows = workers // columns
    durations = machine.draw(steps, workers)
    now = np.zeros((rows, columns))
    share = size / parts
    rate = machine.link * machine.duplex

    def ring(axis: int, count: int, amount: float, reduces: bool) -> None:
        nonlocal now
        piece = amount / count
        passed = piece / (min(rate, machine.apply) if reduces else rate)
        for _ in range(count - 1):
            now = np.maximum(now, np.roll(now, 1, axis)) + machine.latency_s + passed

    for duration in durations:
        now = now + duration.reshape(rows, columns) + machine.overhead_s + 2 * size / machine.copy
        for _ in range(parts):
            ring(1, columns, share, True)
            ring(0, rows, share / columns, True)
            ring(0, rows, share / columns, False)
            ring(1, columns, share, False)
    return float(now.mean()) / len(durations)


def stream_rate(link: float, window: float, round_trip_s: float, streams: int) -> float:
    """Bytes per second that some TCP streams carry together over one link.

    A stream has at most ``window`` bytes under way, so it sends ``window / round_trip_s``.
    """
    return min(link, streams * window / round_trip_s) if round_trip_s else link


TOPOLOGIES: dict[str, Callable[..., float]] = {
    "server": server_seconds,
    "sharded server": lambda machine, workers, size, **options: server_seconds(
        machine, workers, size, shards=min(workers, 16), **options
    ),
    "ring": ring_seconds,
    "hierarchical": hierarchical_seconds,
    "local SGD": lambda machine, workers, size, **options: ring_seconds(
        machine, workers, size, window=16, **options
    ),
}


def efficiency(name: str, machine: Machine, workers: int, size: float, **options: Any) -> float:
    """Share of ``workers`` times one worker's speed without any exchange."""
    return machine.compute_s / TOPOLOGIES[name](machine, workers, size, **options)
