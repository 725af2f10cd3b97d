"""What TCP carries over a link in one direction, and in each of two at once.

    python benchmarks/link_rate.py listen ADDRESS [STREAMS ...]
    python benchmarks/link_rate.py connect ADDRESS [STREAMS ...]

scale.py starts it on two hosts; the second prints bytes per second: one way, both ways. Where both
directions are busy, the acknowledgements of what comes in take a part of the rate of what goes out.
topologies.py gives numbers of streams: then the second prints the rate of each, one way, the bytes
shared among so many connections.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

PORT, SIZE, CHUNK = 7411, 20_000_000, 1 << 18


def send(connection: socket.socket) -> None:
    connection.sendall(bytes(SIZE))


def receive(connection: socket.socket) -> None:
    left, buffer = SIZE, bytearray(CHUNK)
    while left:
        count = connection.recv_into(buffer, min(CHUNK, left))
        if not count:
            raise ConnectionError("the other end is gone")
        left -= count


def together(connection: socket.socket, *works: Callable[[socket.socket], None]) -> float:
    """Bytes per second and direction, measured until both ends have sent and received all."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work, connection) for work in works]:
            future.result()
    connection.sendall(b".")
    connection.recv(1)
    return SIZE / (time.perf_counter() - started)


def striped(role: str, address: str, count: int) -> float:
    """Bytes per second over some connections at once, each with its share; once before to warm
    their windows up."""
    connections = []
    if role == "listen":
        with socket.create_server((address, PORT), backlog=count) as listener:
            listener.settimeout(60)
            print("listening", flush=True)
            connections = [listener.accept()[0] for _ in range(count)]
    else:
        for _ in range(count):
            connections.append(socket.create_connection((address, PORT), timeout=60))
    seconds = 0.0
    with ThreadPoolExecutor(count) as pool:
        for _ in range(2):
            started = time.perf_counter()
            for future in [pool.submit(share, role, c, SIZE // count) for c in connections]:
                future.result()
            connections[0].sendall(b".")
            connections[0].recv(1)
            seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return SIZE / seconds


def share(role: str, connection: socket.socket, size: int) -> None:
    connection.settimeout(60)
    if role == "connect":
        connection.sendall(bytes(size))
        return
    buffer = bytearray(CHUNK)
    while size:
        size -= connection.recv_into(buffer, min(CHUNK, size))


def main() -> None:
    role, address, *counts = sys.argv[1:]
    for count in counts:
        if role == "connect" and count != counts[0]:
            time.sleep(0.5)  # until the other end listens again
        rate = striped(role, address, int(count))
        if role == "connect":
            print(rate, flush=True)
    if counts:
        return
    if role == "listen":
        with socket.create_server((address, PORT)) as listener:
            listener.settimeout(60)
            print("listening", flush=True)
            connection = listener.accept()[0]
    else:
        connection = socket.create_connection((address, PORT), timeout=60)
    with connection:
        connection.settimeout(60)
        one = together(connection, receive if role == "listen" else send)
        both = together(connection, receive, send)
    if role == "connect":
        print(one, both, flush=True)


if __name__ == "__main__":
    main()
