"""Several parameter servers: a round, and an asynchronous exchange, beside what the links allow.

    python benchmarks/scale.py --only servers
    python benchmarks/support/several_servers.py [--mbit 1000] [--workers 4] [--servers 1 2 4]
                                                 [--mb 32] [--repeats 5] [--rounds 6]

Each worker and each server is a process on a host of its own: network namespaces whose links a
token bucket limits in both directions (root is needed). The workers only exchange. Per round each
sends ``n`` bytes and gets ``n``: with ``S`` servers of rate ``B`` and ``p`` workers no round can
take less than ``2 n p / (S B)``, no asynchronous exchange less than ``n p / (S B)``, and neither
less than ``2 n / B``, by a worker's own link.
The layouts take turns; each number is the median of the repeats, and with it the seconds of the
processor that all servers together used for each GB that they received.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
from support.limited_hosts import LimitedNetwork, _end, _read_line, _read_object, _send_object

RULES = {"round": "bsp", "asynchronous": "downpour"}


@dataclass(frozen=True)
class Times:
    """What one run of a layout showed.

    Args:
        seconds: Of a round of all workers, or of one exchange of each.
        server_cpu_s: Seconds of the processor of all servers, per GB that they received.
    """

    seconds: float
    server_cpu_s: float


def be_server() -> None:
    """Runs a server until its standard input closes; prints its address, at the end its seconds."""
    from sparkdl.transport.address import Listeners
    from sparkdl.transport.server import Server

    config, center = _read_object()
    listeners = Listeners.bind(config.listen, None)
    with Server(
        config.service(center), config.token, listeners, config.num_workers
    ).start() as server:
        print(json.dumps([server.address.host, server.address.port]), flush=True)
        while (asked := _read_object()) is not None:
            assert asked == "cpu"
            print(json.dumps(time.process_time()), flush=True)


def be_worker() -> None:
    """Exchanges as often as each job says; prints the seconds."""
    from sparkdl.ps.client import Progress

    while (given := _read_object()) is not None:
        strategy, rank, rounds = given
        with strategy._connect(_Rank(rank), strategy.layout) as client:
            client.join(rows=1, batches_per_epoch=rounds + 1)
            client.pull()
            began = 0.0
            for number in range(rounds + 1):
                client.buffer[...] = 1e-6
                if number == 1:  # the first one opens the windows of TCP
                    began = time.perf_counter()
                client.push_pull(Progress(epoch=0, batch=number + 1, batches=1, rows=1))
            seconds = (time.perf_counter() - began) / rounds
            client.finish()
        print(json.dumps(seconds), flush=True)


@dataclass(frozen=True)
class _Rank:
    rank: int
    attempt: int = 0


class Hosts:
    """Workers on the first hosts, servers on those after them; a context manager."""

    def __init__(self, workers: int, servers: int, mbit: float) -> None:
        self._stack = contextlib.ExitStack()
        # the coordinator's messages are small; it has a host of its own as well
        self.network = self._stack.enter_context(LimitedNetwork(workers + servers + 1, mbit))
        self._num_workers = workers
        self._workers = [self._spawn("worker", host) for host in range(workers)]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _spawn(self, role: str, host: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self.network.command(host), sys.executable, os.path.abspath(__file__), role],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process

    @contextlib.contextmanager
    def server(self, config: Any, center: np.ndarray, place: int) -> Iterator[tuple[Any, Any]]:
        """A server on the host of a place; yields its endpoint and its process."""
        from sparkdl.transport.address import Address, Endpoint

        host = self._num_workers + place
        process = self._spawn("server", host)
        _send_object(process, (replace(config, bind_address=self.network.address(host)), center))
        address, port = json.loads(_read_line(process))
        try:
            yield Endpoint(Address("", address, port, mode="socket"), config.token), process
        finally:
            _end(process)

    def run(self, rule: str, size: int, servers: int, rounds: int) -> Times:
        """Exchanges of all workers with so many servers."""
        from sparkdl.coordinator.settings import Settings
        from sparkdl.ps.server import ServerConfig
        from sparkdl.ps.server.config import shards_of
        from sparkdl.ps.strategy import ServerStrategy
        from sparkdl.rules import make_rule
        from sparkdl.weights import Layout

        layout = Layout.of([("w", (size,), "float32")])
        workers = self._num_workers
        options = {"payload": "gradient"} if rule == "bsp" else {}
        made = make_rule(rule, **options).bind(workers)
        settings = Settings(workers, gather=workers)
        config = ServerConfig(layout, made, workers, mode="socket", settings=settings)
        center = np.zeros(size, np.float32)
        with contextlib.ExitStack() as stack:
            if servers == 1:
                started = [stack.enter_context(self.server(config, center, 0))]
                first, shards = started[0][0], ()
            else:
                started = [
                    stack.enter_context(self.server(shard, center[shard.place], place))
                    for place, shard in enumerate(shards_of(config, servers))
                ]
                decides = replace(config, sharded=True)
                empty = np.empty(0, np.float32)
                first, _ = stack.enter_context(self.server(decides, empty, servers))
                shards = tuple(endpoint for endpoint, _ in started)
            strategy = ServerStrategy(first, layout, made, overlap=False, shards=shards)
            before = sum(_cpu_s(process) for _, process in started)
            for rank, worker in enumerate(self._workers):
                _send_object(worker, (strategy, rank, rounds))
            seconds = [json.loads(_read_line(worker)) for worker in self._workers]
            used = sum(_cpu_s(process) for _, process in started) - before
        received = 4 * size * workers * (rounds + 1) / 1e9
        return Times(max(seconds), used / received)


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    _send_object(process, "cpu")
    return float(json.loads(_read_line(process)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mb", type=float, default=32.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args(arguments)
    size, rate = int(args.mb * 1e6 / 4), args.mbit * 1e6 / 8
    with Hosts(args.workers, max(args.servers), args.mbit) as hosts:
        print(
            f"{args.workers} workers, {args.mb:g} MB, links of {args.mbit:g} Mbit/s (tc tbf); "
            f"median of {args.repeats} runs by turns of {args.rounds} exchanges"
        )
        print("| exchange | servers | s | limit | of the limit | server CPU s per GB |")
        print("|---|---|---|---|---|---|")
        for what, rule in RULES.items():
            found: dict[int, list[Times]] = {count: [] for count in args.servers}
            for _ in range(args.repeats):
                for count in args.servers:
                    found[count].append(hosts.run(rule, size, count, args.rounds))
            for count, runs in found.items():
                seconds = statistics.median(run.seconds for run in runs)
                cpu = statistics.median(run.server_cpu_s for run in runs)
                one = 4 * size / rate  # one worker's values, in one direction
                of_servers = one * args.workers / count
                # in a round both directions follow each other; without rounds those of several
                # workers overlap, and those of one worker do not
                limit = max(2 * one, 2 * of_servers if what == "round" else of_servers)
                print(
                    f"| {what} | {count} | {seconds:.3f} | {limit:.3f} | {limit / seconds:.2f} "
                    f"| {cpu:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:] == ["server"]:
        be_server()
    elif sys.argv[1:] == ["worker"]:
        be_worker()
    else:
        main()
