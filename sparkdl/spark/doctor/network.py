"""The probe that all slots run at the same time: who reaches whom, and how fast.

Every rank connects to the driver and to other ranks, as the ranks of a fit do.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from sparkdl.closing import Closing
from sparkdl.collective.builtin.sockets import rank_addresses
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.results import Result
from sparkdl.launch.task import RaisingTask, RankContext
from sparkdl.network import THIS_HOST, PortSpec, RankListening
from sparkdl.spark.doctor.host_facts import collect
from sparkdl.transport.listening import listen, tune

TOKEN_BYTES = 32
MOST_BYTES = 64 << 20
"""What is sent to measure a bandwidth, or what goes through in :data:`MEASURE_S`."""
MEASURE_S = 1.0
ALL_PAIRS = 16
"""With more ranks than that each connects to the next one only."""
_BLOCK = bytes(1 << 20)
_PING, _BULK = b"P", b"B"
_CLOCK = struct.Struct("<d")
_HELLO = struct.Struct("<q")
_COUNT_GPUS = {
    "tensorflow": "import tensorflow as t; print(len(t.config.list_physical_devices('GPU')))",
    "torch": "import torch; print(torch.cuda.device_count())",
    "jax": "import jax; print(sum(d.platform == 'gpu' for d in jax.devices()))",
}


class Echo(Closing):
    """Answers pings with its clock, and takes blocks of bytes; closed at the end of a ``with``.

    A connection begins with the token and the rank of who connects; without the token it is closed.

    Args:
        bind_address: Interface to listen on.
        port: 0 for any free one, a port or a range.
        token: The secret of this probe.
        advertised: What others connect to; None for ``bind_address``.

    ``callers`` are the ranks that have connected, ``last_call`` is when the last one did
    (``time.monotonic()``).

    Raises:
        ResourceError: No port is free, or the address is not this host's.
    """

    def __init__(
        self, bind_address: str, port: PortSpec, token: bytes, advertised: str | None = None
    ) -> None:
        self._listener = listen(bind_address, port)
        self.address: tuple[str, int] = (
            advertised or bind_address, self._listener.getsockname()[1]
        )  # fmt: skip
        self.token = token
        self.callers: set[int] = set()
        self.last_call = 0.0
        self._closed = False
        threading.Thread(target=self._accept, name="sparkdl-echo", daemon=True).start()

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="sparkdl-echo", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            tune(connection)
            connection.settimeout(10.0)
            hello = _receive(connection, TOKEN_BYTES + _HELLO.size)
            if not secrets.compare_digest(hello[:TOKEN_BYTES], self.token):
                return
            self.last_call = time.monotonic()
            self.callers.add(_HELLO.unpack(hello[TOKEN_BYTES:])[0])
            while not self._closed:
                kind = connection.recv(1)
                if kind == _PING:
                    connection.sendall(_CLOCK.pack(time.time()))
                elif kind == _BULK:
                    _receive(connection, len(_BLOCK))
                    connection.sendall(b".")
                else:
                    return


@dataclass(frozen=True)
class Link:
    """One connection that was tried.

    Args:
        target: Address and port.
        problem: Why it failed; empty if it did not.
        round_trip_s: The shortest of some pings.
        rate: Bytes per second; 0 where none was measured.
        skew_s: How far the other clock is ahead of this one.
    """

    target: str
    problem: str = ""
    round_trip_s: float = 0.0
    rate: float = 0.0
    skew_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What a rank found.

    Args:
        rank: The rank.
        host: Its machine.
        driver: Its connection to the driver; None where the driver does not listen.
        ranks: Other rank -> the connection to it.
        gpus: Addresses of the GPUs that Spark gave to the task.
        seen_gpus: How many of them the framework sees; None where it was not asked, as Spark gave
            none, or did not answer in time.
        facts: As :func:`host_facts.collect` gives them, if they were asked for.
    """

    rank: int
    host: str
    driver: Link | None
    ranks: dict[int, Link] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    seen_gpus: int | None = None
    facts: dict[str, object] | None = None

    def to_json(self) -> str:
        """The counterpart of :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The counterpart of :meth:`to_json`."""
        values = json.loads(text)
        driver = values["driver"]
        return cls(
            int(values["rank"]), str(values["host"]), Link(**driver) if driver else None,
            {int(rank): Link(**link) for rank, link in values["ranks"].items()},
            tuple(values["gpus"]), values["seen_gpus"], values["facts"],
        )  # fmt: skip


@dataclass(frozen=True)
class ProbeTask(RaisingTask):
    """The probe on one rank; see :class:`sparkdl.launch.task.Task`.

    Args:
        driver: Address and port of the driver's :class:`Echo`; None where it has none.
        token: The secret of this probe.
        timeout_s: Limit for one connection, and for one exchange of texts.
        backend: The Keras backend, whose framework shall see the GPUs.
        with_facts: Whether the rank also tells the facts of its process.
        listening: Where the ranks listen for each other.
    """

    driver: tuple[str, int] | None
    token: bytes
    timeout_s: float
    backend: str = "tensorflow"
    with_facts: bool = False
    listening: RankListening = THIS_HOST
    devices: DeviceRequest = field(default_factory=lambda: DeviceRequest(None, unscheduled=True))

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Connects to everyone; see :class:`sparkdl.launch.task.Task`."""
        for _ in batches:
            pass
        limit_s = self.timeout_s / 2
        to_driver = None
        if self.driver is not None:
            to_driver = measure(*self.driver, self.token, rank.rank, limit_s)
        links: dict[int, Link] = {}
        if rank.gathering is not None:
            bind, advertised = rank_addresses(self.listening.bind, None, self.listening.towards)
            with Echo(bind, self.listening.port, self.token, advertised) as echo:
                own = json.dumps(echo.address)
                told = [json.loads(text) for text in rank.all_gather(own, self.timeout_s)]
                for other in targets(rank.rank, len(told)):
                    host, port = told[other]
                    bulk = other == (rank.rank + 1) % len(told)
                    links[other] = measure(host, port, self.token, rank.rank, limit_s, bulk=bulk)
                rank.all_gather("done", self.timeout_s)  # the others may still be connected
        gpus = rank.resources.gpus
        answer = Answer(
            rank.rank, socket.gethostname(), to_driver, links, gpus,
            count_gpus(self.backend, gpus, self.timeout_s) if gpus else None,
            collect({}) if self.with_facts else None,
        )  # fmt: skip
        yield from Result(rank.rank, "probe", answer.to_json()).batches()


def count_gpus(backend: str, gpus: Sequence[str], timeout_s: float) -> int | None:
    """How many of some GPUs a framework sees, in a process of its own; None if it cannot tell."""
    visible = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    command = [sys.executable, "-c", _COUNT_GPUS[backend]]
    try:
        ran = subprocess.run(command, env=visible, capture_output=True, timeout=timeout_s)
        return int(ran.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def targets(rank: int, num_ranks: int) -> list[int]:
    """To whom a rank connects: all others, or the next one where there are many.

    >>> targets(2, 4), targets(19, 20)
    ([3, 0, 1], [0])
    """
    following = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    return following if num_ranks <= ALL_PAIRS else following[:1]


def measure(
    host: str, port: int, token: bytes, rank: int, timeout_s: float, *, bulk: bool = True
) -> Link:
    """Connects to an :class:`Echo`, and measures round trip, clock and (``bulk``) bandwidth."""
    target = f"{host}:{port}"
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=timeout_s) as connection:
            tune(connection)
            connection.sendall(token + _HELLO.pack(rank))
            trips = [_ping(connection) for _ in range(10)]
            rate = _bandwidth(connection) if bulk else 0.0
    except OSError as error:
        return Link(target, f"{type(error).__name__}: {error}")
    shortest, skew = min(trips)
    return Link(target, "", shortest, rate, skew)


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Round trip, and how far the other clock is ahead."""
    began, clock = time.perf_counter(), time.time()
    connection.sendall(_PING)
    theirs = _CLOCK.unpack(_receive(connection, _CLOCK.size))[0]
    trip = time.perf_counter() - began
    return trip, theirs - (clock + trip / 2)


def _bandwidth(connection: socket.socket) -> float:
    began, sent = time.perf_counter(), 0
    while sent < MOST_BYTES and time.perf_counter() - began < MEASURE_S:
        connection.sendall(_BULK)
        connection.sendall(_BLOCK)
        _receive(connection, 1)
        sent += len(_BLOCK)
    return sent / (time.perf_counter() - began)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes.

    Raises:
        ConnectionError: The other side closed before.
    """
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 18))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
