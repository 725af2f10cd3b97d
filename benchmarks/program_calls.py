"""Calls between nodes in two processes: round trip, calls per second, large arrays beside a socket.

python benchmarks/program_calls.py
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from sparkdl.program import CourierNode, Program, PyNode, launch, stop


class Echo:
    """What is called."""

    def __call__(self, thing: object) -> object:
        return thing

    def take(self, array: np.ndarray) -> int:
        """The bytes of an array."""
        return array.nbytes


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def raw_socket(size: int) -> float:
    """Seconds to send so many bytes through a TCP connection of this host, into ready memory."""
    listener = socket.create_server(("127.0.0.1", 0))
    source, target = np.ones(size, np.uint8), memoryview(np.empty(size, np.uint8).data)

    def receive() -> None:
        accepted, _ = listener.accept()
        done = 0
        while done < size:
            done += accepted.recv_into(target[done:])
        accepted.sendall(b"x")

    thread = threading.Thread(target=receive)
    thread.start()
    with socket.create_connection(listener.getsockname()) as client:
        start = time.perf_counter()
        client.sendall(source)
        client.recv(1)
        seconds = time.perf_counter() - start
    thread.join()
    listener.close()
    return seconds


def answer_bytes(listener: socket.socket) -> None:
    """Sends back what comes; in a process of its own."""
    accepted, _ = listener.accept()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while part := accepted.recv(64):
        accepted.sendall(part)


def raw_round_trips(times: int) -> list[float]:
    """Seconds of each of so many round trips of 32 bytes between two processes, a thread each."""
    listener = socket.create_server(("127.0.0.1", 0))
    other = multiprocessing.get_context("fork").Process(target=answer_bytes, args=(listener,))
    other.start()
    with socket.create_connection(listener.getsockname()) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip() -> None:
            client.sendall(b"x" * 32)
            client.recv(64)

        found = timed(trip, times)
    other.join()
    listener.close()
    return found


def measure(echo: Echo) -> None:
    """Prints, in a node."""
    timed(lambda: echo(1), 200)
    trips = timed(lambda: echo(1), 3000)
    print(f"round trip: median {statistics.median(trips) * 1e6:.0f} us, "
          f"99 % {np.quantile(trips, 0.99) * 1e6:.0f} us, {1 / np.mean(trips):,.0f} calls/s",
          flush=True)  # fmt: skip
    start = time.perf_counter()
    futures = [echo.futures(i) for i in range(5000)]
    for future in futures:
        future.result()
    print(f"futures: {5000 / (time.perf_counter() - start):,.0f} calls/s", flush=True)
    size = 100_000_000
    array = np.ones(size, np.uint8)
    calls, raw = [], []
    for _ in range(5):
        calls.append(timed(lambda: echo.take(array), 1)[0])
        raw.append(raw_socket(size))
    ours, other = (size / statistics.median(times) / 1e9 for times in (calls, raw))
    print(f"100 MB: {ours:.2f} GB/s, raw socket {other:.2f} GB/s: {ours / other:.2f} x", flush=True)
    stop()


def main() -> None:
    trips = raw_round_trips(3000)
    print(
        f"two bare processes: round trip: median {statistics.median(trips) * 1e6:.0f} us",
        flush=True,
    )
    program = Program("calls")
    echo = program.add_node(CourierNode(Echo), label="echo")
    program.add_node(PyNode(measure, echo), label="measure")
    with launch(program, "processes") as launched:
        launched.wait(120)


if __name__ == "__main__":
    main()
