"""What strangers cost the members of a run: idle connections and new ones, none with the token.

A member exchanges 0.4 MB with a server while strangers from the same machine hold thousands of
connections and open a thousand more each second, with one byte each; with TLS every second one
replays a member's proof. Quiet and hostile rounds alternate. Of the strangers' connections the
server ends what is too many or too slow; new ones come at once. The script fails where members are
slowed down by more than :data:`MOST_RATIO`, where an exchange takes longer than
:data:`SLOWEST_MS`, or where strangers came more seldom than asked.

    python benchmarks/strangers.py [--encrypt]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import socket
import statistics
import time
from collections import deque
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import numpy as np

from sparkdl.ps.client import Client, Progress, connect
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules import Downpour
from sparkdl.weights import Layout
from sparkdl.wire.proving import NONCE_BYTES, PROOF_BYTES, WELCOME, proof_of
from sparkdl.wire.tls import KNOCK, Certificate

LAYOUT = Layout.of([("w", (100_000,), "float32")])
PAUSE_S = 0.005
WARM_UP_S = 1.0
MOST_RATIO, SLOWEST_MS, LEAST_RATE = 1.3, 1000.0, 0.9


def intrude(
    address: tuple[str, int], idle: int, per_second: int, words: list[bytes], held: Event,
    ended: Event, made: Synchronized[int],
) -> None:  # fmt: skip
    """Holds ``idle`` connections; then ``made`` counts new ones in their place, until ``ended``.

    They say one of ``words`` each, in turn.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connections: deque[socket.socket] = deque()
    word = itertools.cycle(words)

    def come() -> bool:
        try:
            connection = socket.create_connection(address, 1.0)
            connection.sendall(next(word))
        except OSError:
            return False
        connections.append(connection)
        return True

    while len(connections) < idle and not ended.is_set():
        come()
    held.set()
    began, tried = time.monotonic(), 0
    while not ended.is_set():
        if tried >= (time.monotonic() - began) * per_second:
            time.sleep(0.001)
            continue
        tried += 1
        made.value += come()
        if len(connections) > idle:
            connections.popleft().close()


def exchanges(client: Client, count: int, first_batch: int) -> list[float]:
    """Milliseconds of each exchange."""
    times = []
    for batch in range(first_batch, first_batch + count):
        began = time.perf_counter()
        client.push_pull(Progress(0, batch + 1, 1, 1))
        times.append(1e3 * (time.perf_counter() - began))
        time.sleep(PAUSE_S)
    return times


def measure(
    transport: str, rounds: int, count: int, idle: int, per_second: int, encrypt: bool
) -> tuple[list[str], bool]:
    """One row of the table, and whether it is as wanted."""
    certificate = Certificate.make() if encrypt else None
    center = np.zeros(LAYOUT.size, np.float32)
    quiet: list[float] = []
    hostile: list[float] = []
    joins: list[float] = []
    rates: list[float] = []
    with ServerProcess(
        ServerConfig(LAYOUT, Downpour(), 2, mode=transport, certificate=certificate), center
    ) as server:
        web = urlsplit(server.address.http)
        address = (server.address.host, server.address.port)
        if transport == "http":
            address = (web.hostname or "", web.port or 0)
        words = [b"S"]
        if encrypt:
            with socket.create_connection(address) as member:
                opening = KNOCK + b"n" * NONCE_BYTES
                member.sendall(opening)
                nonce = member.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
                proof = proof_of(server.config.token.encode(), b"connector", opening, nonce)
                member.sendall(proof)
                assert member.recv(1) == WELCOME
            words.append(opening + proof)
        with connect(server.endpoint, transport, rank=0, layout=LAYOUT) as client:
            client.join(batches_per_epoch=1)
            for number in range(rounds):
                quiet += exchanges(client, count, 2 * number * count)
                held, ended = multiprocessing.Event(), multiprocessing.Event()
                made = multiprocessing.Value("q", 0)
                strangers = multiprocessing.Process(
                    target=intrude,
                    args=(address, idle, per_second, words, held, ended, made),
                    daemon=True,
                )
                strangers.start()
                if not held.wait(60):
                    raise SystemExit(f"no {idle} connections within a minute")
                came = time.monotonic()
                time.sleep(WARM_UP_S)
                hostile += exchanges(client, count, (2 * number + 1) * count)
                began = time.perf_counter()
                with connect(
                    server.endpoint, transport, rank=1, attempt=number, layout=LAYOUT
                ) as other:
                    other.join(batches_per_epoch=1)
                    joins.append(1e3 * (time.perf_counter() - began))
                rates.append(made.value / (time.monotonic() - came))
                ended.set()
                strangers.join(30)
    before, during = statistics.median(quiet), statistics.median(hostile)
    ratio, slowest, rate = during / before, max(hostile), min(rates)
    good = ratio <= MOST_RATIO and slowest < SLOWEST_MS and rate >= LEAST_RATE * per_second
    return [
        transport, f"{before:.2f}", f"{during:.2f}", f"{ratio:.2f}", f"{slowest:.0f}",
        f"{max(joins):.0f}", f"{rate:,.0f}",
    ], good  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exchanges", type=int, default=200, help="in each half of a round")
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--per-second", type=int, default=1000)
    parser.add_argument("--encrypt", action="store_true", help="with TLS")
    asked = parser.parse_args()
    columns = ["transport", "quiet, ms", "with strangers, ms", "ratio", "slowest, ms"]
    columns += ["joining, ms", "strangers per s"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    missed = []
    for transport in ("socket", "http"):
        row, good = measure(
            transport, asked.rounds, asked.exchanges, asked.idle, asked.per_second, asked.encrypt
        )
        print("| " + " | ".join(row) + " |", flush=True)
        missed += [] if good else [transport]
    if missed:
        raise SystemExit(
            f"not as wanted: {', '.join(missed)} (a ratio of at most {MOST_RATIO}, no exchange of "
            f"{SLOWEST_MS:.0f} ms, strangers as often as asked)"
        )


if __name__ == "__main__":
    main()
