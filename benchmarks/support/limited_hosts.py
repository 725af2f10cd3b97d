"""Hosts with slow links on one machine, and workers and servers as processes on them.

With the rights for it (root, ``ip``, ``tc``) each host is a network namespace with one link to a
common switch, limited in both directions by a token bucket. Without, :class:`Relay` forwards
connections to one server at a limited rate.

The workers' processes run from the first job to the last. A job trains a real model through the
library's own loop, over a parameter server or the built-in communicator's ring, and notes when each
exchange ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import workload

CHUNK = 65_536
_LETTERS = itertools.cycle("abcdefghijklmnopqrstuvwxyz")
LENGTH = struct.Struct("<Q")
LARGE = (784, 2560, 4096, 3072, 10)
"""Units of a network of 25.1 million values (100 MB)."""


class LimitedNetwork:
    """Hosts with a link of so many Mbit/s each, in both directions; a context manager.

    Args:
        hosts: How many hosts.
        mbit: Rate of each link.
        queue_ms: How long a byte may wait before a link; with a queue that is much longer than a
            real switch's, acknowledgements are late where both directions are busy.

    Raises:
        PermissionError: Namespaces or limits are not permitted here.
    """

    def __init__(self, hosts: int, mbit: float, queue_ms: int = 200) -> None:
        # the links of one that was closed before may still be there for a moment
        self._id = f"sl{os.getpid() % 100_000}{next(_LETTERS)}"
        self._net = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
        self._hosts, self._rate = hosts, f"{mbit:g}mbit"
        # a bucket below 1 ms of the rate would not reach it; tbf takes some kilobytes at least
        self._bucket = f"{max(16_384, int(mbit * 125))}"
        self._queue = f"{queue_ms}ms"
        self._made: list[list[str]] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise PermissionError("network namespaces need root, ip and tc")
        try:
            switch = f"{self._id}s"
            self._ip("link", "add", switch, "type", "bridge", undo=["link", "del", switch])
            self._ip("link", "set", switch, "up")
            for host in range(self._hosts):
                self._add(host, switch)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise PermissionError(f"no limited links here: {error}") from error
        return self

    def _add(self, host: int, switch: str) -> None:
        name, port = self.name(host), f"{self._id}p{host}"
        self._ip("netns", "add", name, undo=["netns", "del", name])
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("link", "set", port, "master", switch, "up")
        self._ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._ip("-n", name, "link", "set", "eth0", "up")
        self._ip("-n", name, "link", "set", "lo", "up")
        limit = ["root", "tbf", "rate", self._rate, "burst", self._bucket]
        limit += ["latency", self._queue]
        _call(["tc", "qdisc", "add", "dev", port, *limit])
        _call([*self.command(host), "tc", "qdisc", "add", "dev", "eth0", *limit])

    def _ip(self, *words: str, undo: list[str] | None = None) -> None:
        _call(["ip", *words])
        if undo is not None:
            self._made.append(["ip", *undo])

    def name(self, host: int) -> str:
        """The name of a host's namespace."""
        return f"{self._id}h{host}"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{self._net}.{host + 1}"

    def command(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self.name(host)]

    def close(self) -> None:
        """Removes all namespaces and links; can be repeated."""
        while self._made:
            subprocess.run(self._made.pop(), capture_output=True, check=False, timeout=10)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _call(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=10)


class Relay:
    """Forwards connections to a server on this machine, at a limited rate in each direction.

    All connections share the rate, as they share a server's link.

    Args:
        port: The server's port on the loopback interface.
        mbit: The rate in each direction, in Mbit/s.
    """

    def __init__(self, port: int, mbit: float) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._rates = [_Rate(mbit * 125_000), _Rate(mbit * 125_000)]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, timeout=10)
            except OSError:
                return
            far.settimeout(None)
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK)
                self._open.append(connection)
            for pair, rate in (((near, far), 0), ((far, near), 1)):
                thread = threading.Thread(
                    target=self._forward, args=(*pair, self._rates[rate]), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _forward(self, source: socket.socket, target: socket.socket, rate: _Rate) -> None:
        buffer = bytearray(CHUNK)
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                rate.wait(count)
                target.sendall(memoryview(buffer)[:count])
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends all connections."""
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(5)


class _Rate:
    """Lets bytes pass one after the other at a rate; thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free = bytes_per_s, 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + count / self._bytes_per_s
            until = self._free
        time.sleep(max(0.0, until - now))


@dataclass(frozen=True)
class Job:
    """What the workers train.

    Args:
        sizes: Units of a network of dense layers, on made-up rows; empty for the CNN on MNIST.
        workers: How many ranks take part, from rank 0 on.
        rule: The server's rule; None for all-reduce over the ring.
        window: Batches between two exchanges.
        epochs: Of ``batches`` batches on each worker.
        batches: Per epoch.
        batch_size: Rows per batch.
        seed: Gives the order of the rows and, for the CNN, the initial weights.
        alone: A worker does only its own part of the exchanges, ``'delta'`` or ``'gradient'``, and
            sends nothing; ``'step'``: a whole step of all-reduce among this worker alone.
        stagger_s: Each worker begins so much later than the one before it.
    """

    sizes: tuple[int, ...]
    workers: int
    rule: Any = None
    window: int = 1
    epochs: int = 1
    batches: int = 4
    batch_size: int = 16
    seed: int = 0
    alone: str = ""
    stagger_s: float = 0.0


@dataclass(frozen=True)
class Told:
    """What one worker reports of a job.

    Args:
        steps: Times of the start and of the end of each exchange.
        moved: Bytes (sent, received) until the end of each exchange; with a server only.
        cpu_s: The process' processor time until the end of each exchange.
    """

    steps: list[float]
    moved: list[list[int]]
    cpu_s: list[float]


def make_model(sizes: tuple[int, ...], seed: int = 0) -> Any:
    """A network of dense layers with plain SGD; without sizes the CNN of MNIST with Adam."""
    import keras

    if not sizes:
        return workload.mnist_model(7 + seed)
    keras.utils.set_random_seed(1)
    layers: list[Any] = [keras.Input((sizes[0],))]
    layers += [keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
    model = keras.Sequential([*layers, keras.layers.Dense(sizes[-1], activation="softmax")])
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def rows_of(job: Job, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one worker."""
    count = job.batches * job.batch_size
    if job.sizes:
        return workload.make_data(count, seed=rank)
    x, y, _, _ = workload.mnist()
    return x[rank :: job.workers][:count], y[rank :: job.workers][:count]


# -- the processes --------------------------------------------------------------------------------


def be_server() -> None:
    """Runs a server until the standard input closes; prints its address."""
    from sparkdl.transport.address import Listeners
    from sparkdl.transport.server import Server

    config, center = _read_object()
    listeners = Listeners.bind(config.listen, None)
    service = config.service(center)
    with Server(service, config.token, listeners, config.num_workers).start() as server:
        print(json.dumps([server.address.host, server.address.port]), flush=True)
        sys.stdin.buffer.read()


def be_worker() -> None:
    """Trains the jobs that come by standard input; prints one line for each."""
    if os.environ.get("KERAS_BACKEND") == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    from sparkdl.config import LoopSettings
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner
    from sparkdl.worker import train

    learners: dict[tuple[int, ...], Any] = {}
    directory = sys.argv[2]
    while (given := _read_object()) is not None:
        job, meeting, rank = given
        if job.sizes not in learners:
            learner = make_learner(make_model(job.sizes))
            learners[job.sizes] = learner, learner.optimizer.state()
        learner, fresh = learners[job.sizes]
        learner.optimizer.load_state(fresh)
        rows = rows_from_numpy(*rows_of(job, rank))
        batches = Batches(rows, job.batch_size, rank=rank, seed=job.seed)
        settings = LoopSettings(epochs=job.epochs, batch_size=job.batch_size, window=job.window)
        with _synchronizer(job, meeting, rank, learner.layout) as inner:
            timed = _Timed(inner, job.stagger_s * rank)
            train(
                learner, timed, batches, settings, num_rows=len(rows), num_workers=job.workers
            )  # fmt: skip
        flat = np.empty(learner.layout.size, np.float32)
        learner.read_weights(flat)
        np.save(f"{directory}/{rank}.npy", flat)
        print(json.dumps([timed.steps, timed.moved, timed.cpu_s]), flush=True)


@contextlib.contextmanager
def _synchronizer(job: Job, meeting: Any, rank: int, layout: Any) -> Iterator[Any]:
    if job.alone == "step":
        from sparkdl.collective.current import SoloCommunicator

        yield _stepping(SoloCommunicator(), layout)
    elif job.alone:
        yield _Alone(job.alone, layout)
    elif job.rule is not None:
        with meeting.open(_Identity(rank), layout) as synchronizer:
            yield synchronizer
    else:
        from sparkdl.collective.builtin import BuiltinConnector
        from sparkdl.collective.communicator import Member

        host, token = meeting
        options = {"bind_host": host} if host else {"advertised_host": "127.0.0.1"}
        connector = BuiltinConnector(rank, host_id=str(rank), **options)
        print(connector.prepare().to_json(), flush=True)
        members = [Member.from_json(text) for text in _read_object()]
        with connector.connect(members, token) as communicator:
            yield _stepping(communicator, layout)


def _stepping(communicator: Any, layout: Any) -> Any:
    """A synchronizer of all-reduce."""
    from sparkdl.collective import gradient_synchronizer
    from sparkdl.collective.synchronizer import AllReduceSynchronizer

    steps = gradient_synchronizer.AllReduceGradientSynchronizer(communicator, layout)
    return AllReduceSynchronizer(communicator, layout, steps=steps)


@dataclass(frozen=True)
class _Identity:
    rank: int
    attempt: int = 0


class _Alone:
    """A synchronizer that does a worker's own part of each exchange, and sends nothing."""

    every_batch = cuts_stacks = False
    transport = "none"
    bytes_sent = bytes_received = 0

    def __init__(self, payload: str, layout: Any) -> None:
        self._payload = payload
        self._flat, self._other = (np.zeros(layout.size, np.float32) for _ in range(2))

    @property
    def orders(self) -> Any:
        from sparkdl.training.syncing import Orders

        return Orders()

    def take_changes(self, learner: Any) -> None:
        pass

    def outcome(self, learner: Any, epoch: int) -> Any:
        from sparkdl.training.syncing import Outcome

        return Outcome(self.transport)

    def start(self, learner: Any, rows: int, batches: int, windows: int) -> Any:
        from sparkdl.training.syncing import Start

        return Start()

    def train(self, learner: Any, window: Any, report: Any) -> None:
        if self._payload == "gradient":
            learner.gradients(window, self._flat)
            learner.apply_gradients(self._flat)
            return
        learner.train(window)
        learner.read_weights(self._flat)
        np.subtract(self._flat, self._other, out=self._other)
        np.copyto(self._other, self._flat)
        learner.write_weights(self._flat)

    train_on = train

    def end_epoch(self, *given: Any) -> None:
        pass

    def finish(self, *given: Any) -> None:
        pass


class _Timed:
    """A synchronizer that notes when each exchange ended, and how many bytes it moved."""

    cuts_stacks = False

    def __init__(self, inner: Any, delay_s: float = 0.0) -> None:
        self._inner, self._delay_s = inner, delay_s
        self.steps: list[float] = []
        self.moved: list[tuple[int, int]] = []
        self.cpu_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, *given: Any) -> Any:
        started = self._inner.start(*given)
        time.sleep(self._delay_s)
        self._note()
        return started

    def train(self, learner: Any, window: Any, report: Any) -> None:
        """One exchange; a window that has one in each batch is trained batch by batch."""
        if not self._inner.every_batch:
            self._inner.train(learner, window, report)
            self._note()
            return
        for batch in window.single_batches():
            self._inner.train(learner, batch, report)
            self._note()

    def _note(self) -> None:
        session = getattr(self._inner, "_session", None)  # of a worker of a server
        sent = (0, 0) if session is None else (session.bytes_sent, session.bytes_received)
        self.steps.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        self.moved.append(sent)


def _read_object() -> Any:
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))


def _send_object(process: subprocess.Popen[bytes], value: Any) -> None:
    text = pickle.dumps(value)
    assert process.stdin is not None
    process.stdin.write(LENGTH.pack(len(text)) + text)
    process.stdin.flush()


def _read_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the benchmark ended: {process.args}")
    return line.decode()


class Hosts:
    """Where a server and some workers run; a context manager.

    Args:
        workers: The largest number of workers of any job.
        mbit: Rate of each host's link, in each direction.
        directory: For the workers' final weights, ``<rank>.npy``.
        relay: Limit by a relay beside the server even where namespaces are permitted.
        queue_ms: See :class:`LimitedNetwork`.
    """

    def __init__(
        self, workers: int, mbit: float, directory: str, relay: bool = False, queue_ms: int = 200
    ) -> None:
        self.network: LimitedNetwork | None = None
        self.directory = Path(directory)
        self._mbit, self._stack = mbit, contextlib.ExitStack()
        self.description = f"a relay before the server that forwards at {mbit:g} Mbit/s"
        if not relay:
            try:
                self.network = self._stack.enter_context(
                    LimitedNetwork(workers + 1, mbit, queue_ms)
                )
                self.description = f"network namespaces, links of {mbit:g} Mbit/s (tc tbf)"
            except PermissionError as error:
                print(f"({error})")
        self._workers = [self._spawn("worker", rank + 1) for rank in range(workers)]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _spawn(self, role: str, host: int) -> subprocess.Popen[bytes]:
        prefix = [] if self.network is None else self.network.command(host)
        process = subprocess.Popen(
            [*prefix, sys.executable, os.path.abspath(__file__), role, str(self.directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process

    def run(self, job: Job) -> list[Told]:
        """What each worker reports of the job."""
        workers = self._workers[: job.workers]
        if job.alone:
            meetings: list[Any] = [None] * job.workers
            return self._finish(job, workers, meetings)
        if job.rule is not None:
            return self._run_with_server(job, workers)
        token = secrets.token_bytes(32)
        hosts = [
            "" if self.network is None else self.network.address(rank + 1)
            for rank in range(job.workers)
        ]
        for rank, worker in enumerate(workers):
            _send_object(worker, (job, (hosts[rank], token), rank))
        members = [_read_line(worker) for worker in workers]
        for worker in workers:
            _send_object(worker, members)
        return [Told(*json.loads(_read_line(worker))) for worker in workers]

    def _finish(self, job: Job, workers: list[Any], meetings: list[Any]) -> list[Told]:
        for rank, worker in enumerate(workers):
            _send_object(worker, (job, meetings[rank], rank))
        return [Told(*json.loads(_read_line(worker))) for worker in workers]

    def _run_with_server(self, job: Job, workers: list[Any]) -> list[Told]:
        from sparkdl.coordinator.settings import Settings
        from sparkdl.learner.state.model_weights import model_layout, read_model
        from sparkdl.ps.server import ServerConfig
        from sparkdl.ps.strategy import ServerStrategy

        model = make_model(job.sizes, job.seed)
        layout = model_layout(model)
        rule = job.rule.bind(job.workers)
        config = ServerConfig(
            layout, rule, job.workers, mode="socket",
            settings=Settings(job.workers, gather=job.workers),
        )  # fmt: skip
        with self._server(config, read_model(model, layout)) as endpoint:
            strategy = ServerStrategy(
                endpoint, layout, rule, compression=config.compression(),
                overlap=False,  # what is measured is the exchange
            )  # fmt: skip
            return self._finish(job, workers, [strategy] * job.workers)

    @contextlib.contextmanager
    def _server(self, config: Any, center: np.ndarray) -> Iterator[Any]:
        from sparkdl.transport.address import Address, Endpoint

        if self.network is not None:
            config = replace(config, bind_address=self.network.address(0))
        process = self._spawn("server", 0)
        _send_object(process, (config, center))
        host, port = json.loads(_read_line(process))
        relay = None if self.network is not None else Relay(port, self._mbit)
        try:
            port = port if relay is None else relay.port
            yield Endpoint(Address("", host, port, mode="socket"), config.token)
        finally:
            _end(process)
            if relay is not None:
                relay.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes a process' standard input, and kills the process if that does not end it."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    be_server() if sys.argv[1] == "server" else be_worker()
