"""Claim: the parameter server's transports move weights as fast as the host's sockets and memory.

Push and pull of one buffer, for each transport, beside ``memcpy`` and a raw socket loop between
two processes: all alternate within each repetition, so a busy machine slows all of them alike.

    python benchmarks/transport.py [--megabytes 100] [--repetitions 9] [--rule none|downpour]

With ``--rule none`` the server's rule does nothing, so that the transport alone is measured;
``downpour`` adds the commit's addition to the center.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from sparkdl.ps.client import Client, Progress, connect
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.weights import FloatArray, Layout

TARGETS = {"socket": (0.9, "raw socket"), "http": (0.6, "raw socket"), "shm": (0.4, "memcpy")}


class NoRule(Rule):
    """Leaves the center alone."""

    name = "none"

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        pass


class Downpour(Rule):
    """Adds the commit to the center, as the base class does."""

    name = "downpour"


RAW_PEER = """
import socket, sys
size = int(sys.argv[1])
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
buffer = bytearray(size)
buffer[:] = bytes(size)
view = memoryview(buffer)
while True:
    verb = peer.recv(1)
    if verb == b"p":
        position = 0
        while position < size:
            position += peer.recv_into(view[position:])
        peer.sendall(b"k")
    elif verb == b"g":
        peer.sendall(view)
    else:
        break
"""


class RawLoop:
    """What the transports are compared with: two processes, one socket, nothing else."""

    def __init__(self, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RAW_PEER, str(size)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._view = memoryview(np.ones(size, np.uint8).data)

    def push(self) -> None:
        self._socket.sendall(b"p")
        self._socket.sendall(self._view)
        self._socket.recv(1)

    def pull(self) -> None:
        self._socket.sendall(b"g")
        position = 0
        while position < len(self._view):
            position += self._socket.recv_into(self._view[position:])

    def close(self) -> None:
        self._socket.close()
        self._process.wait(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(megabytes: int, repetitions: int, rule: Rule) -> dict[str, list[float]]:
    """Seconds of each action, per repetition."""
    size = megabytes * 1_000_000
    layout = Layout.of([("weights", (size // 4,), "float32")])
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    raw = RawLoop(size)
    center = np.zeros(layout.size, np.float32)
    times: dict[str, list[float]] = {}
    with ServerProcess(ServerConfig(layout, rule, len(TARGETS)), center) as server:
        clients: list[Client] = []
        actions: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(target, source),
            "raw socket push": raw.push,
            "raw socket pull": raw.pull,
        }
        progress = Progress(epoch=0, batch=1, batches=1, rows=1)
        for rank, mode in enumerate(TARGETS):
            client = connect(server.endpoint, mode, rank=rank, layout=layout)
            client.join()
            client.buffer[...] = 0
            clients.append(client)
            actions[f"{mode} push"] = lambda c=client: c.push(progress)  # type: ignore[misc]
            actions[f"{mode} pull"] = client.pull
            actions[f"{mode} push_pull"] = lambda c=client: c.push_pull(progress)  # type: ignore[misc]
        for repetition in range(repetitions + 2):
            for name, action in actions.items():
                seconds = timed(action)
                if repetition >= 2:  # the first ones touch the pages
                    times.setdefault(name, []).append(seconds)
        for client in clients:
            client.close()
    raw.close()
    return times


def table(times: dict[str, list[float]], megabytes: int) -> str:
    """The medians as a Markdown table, each with what it is compared with."""
    median = {name: statistics.median(values) for name, values in times.items()}
    lines = [
        "| what | ms (median) | ms (best) | GB/s | yardstick | ratio | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seconds in median.items():
        mode, _, verb = name.rpartition(" ")
        target, yardstick = TARGETS.get(mode, (0.0, ""))
        ratio = ""
        if yardstick and verb != "push_pull":
            base = "memcpy" if yardstick == "memcpy" else f"raw socket {verb}"
            ratio = f"{median[base] / seconds:.2f}"
        goal = f">= {target}" if ratio else ""
        lines.append(
            f"| {name} | {seconds * 1e3:.1f} | {min(times[name]) * 1e3:.1f} "
            f"| {megabytes / 1e3 / seconds:.2f} | {yardstick if ratio else ''} | {ratio} | {goal} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rule", choices=("none", "downpour"), default="none")
    options = parser.parse_args()
    rule: Rule = NoRule() if options.rule == "none" else Downpour()
    print(
        f"{options.megabytes} MB, rule {rule.name}, {os.cpu_count()} CPUs, load {os.getloadavg()}"
    )
    print(table(measure(options.megabytes, options.repetitions, rule), options.megabytes))


if __name__ == "__main__":
    main()
