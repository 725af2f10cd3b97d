"""The probe that all slots run at the same time: who reaches whom, and how fast.

Every rank connects to the driver and to other ranks, as the ranks of a fit do. It tries all
connections at the same time, so that many to which nobody answers take no longer than one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import pyarrow as pa

from sparkdl.diagnosis.host_facts import collect
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RaisingTask, RankContext, Result
from sparkdl.launch.threads import ThreadCall
from sparkdl.process.closing import Closing
from sparkdl.settings.network import THIS_HOST, PortSpec, RankListening
from sparkdl.wire.greeting import Greeter
from sparkdl.wire.hosts import rank_addresses, reachable_host
from sparkdl.wire.listening import listen, receive_exactly, tune
from sparkdl.wire.proving import IncomingProof, prove

BLOCK = bytes(1 << 20)
"""The bytes that are sent at once to measure a bandwidth."""
PING, BULK = b"P", b"B"
CLOCK = struct.Struct("<d")
HELLO = struct.Struct("<q")


class Echo(Closing):
    """Answers pings with its clock, and takes blocks of bytes; closed at the end of a ``with``.

    A connection begins with the proof of the token and the rank that connects.

    Args:
        advertised: What others connect to; None for ``bind_address``, or for an address of this
            host where that is every one, as a server's.

    ``callers`` are the ranks that have connected.

    Raises:
        ResourceError: No port is free, or the address is not this host's.
    """

    def __init__(
        self, bind_address: str, port: PortSpec, token: bytes, advertised: str | None = None
    ) -> None:
        self._listener = listen(bind_address, port)
        self.address: tuple[str, int] = (
            advertised or reachable_host(bind_address), self._listener.getsockname()[1]
        )  # fmt: skip
        self.token = token
        self.callers: set[int] = set()
        self._closed = False
        self._greeter = Greeter(
            self._listener, lambda connection: IncomingProof(connection, token, HELLO.size),
            self._welcome, name="sparkdl-echo-greeter",
        )  # fmt: skip

    def close(self) -> None:
        self._closed = True
        self._greeter.close()

    def _welcome(self, caller: IncomingProof) -> None:
        self.callers.add(int(HELLO.unpack(caller.hello)[0]))
        threading.Thread(
            target=self._serve, args=(caller,), name="sparkdl-echo", daemon=True
        ).start()

    def _serve(self, caller: IncomingProof) -> None:
        connection = caller.connection
        with connection, contextlib.suppress(OSError, EOFError):
            tune(connection)
            connection.settimeout(10.0)
            caller.welcome()
            while not self._closed:
                kind = connection.recv(1)
                if kind == PING:
                    connection.sendall(CLOCK.pack(time.time()))
                elif kind == BULK:
                    receive_exactly(connection, len(BLOCK))
                    connection.sendall(b".")
                else:
                    return


MOST_BYTES = 64 << 20
"""What is sent to measure a bandwidth, or what goes through in :data:`MEASURE_S`."""
MEASURE_S = 1.0
ALL_PAIRS = 16
"""With more ranks than that each connects to the next one only."""
_COUNT_GPUS = {
    "tensorflow": "import tensorflow as t; print(len(t.config.list_physical_devices('GPU')))",
    "torch": "import torch; print(torch.cuda.device_count())",
    "jax": "import jax; print(sum(d.platform == 'gpu' for d in jax.devices()))",
}


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
    """The findings of a rank.

    Args:
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
    ran_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        values = json.loads(text)
        driver = values["driver"]
        return cls(
            int(values["rank"]), str(values["host"]), Link(**driver) if driver else None,
            {int(rank): Link(**link) for rank, link in values["ranks"].items()},
            tuple(values["gpus"]), values["seen_gpus"], values["facts"], float(values["ran_s"]),
        )  # fmt: skip


@dataclass(frozen=True)
class ProbeTask(RaisingTask):
    """The probe on one rank; see :class:`sparkdl.launch.task.Task`.

    Args:
        timeout_s: Limit for one exchange of texts and for the framework; half for all connections.
        backend: The Keras backend, whose framework shall see the GPUs.
        with_facts: Whether the rank also tells the facts of its process.
    """

    driver: tuple[str, int] | None
    token: bytes = field(repr=False)
    timeout_s: float
    backend: str = "tensorflow"
    with_facts: bool = False
    listening: RankListening = THIS_HOST
    devices: DeviceRequest = field(default_factory=lambda: DeviceRequest(None, unscheduled=True))

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        began = time.monotonic()
        for _ in batches:
            pass
        limit_s = self.timeout_s / 2
        turn = threading.Lock()
        gpus = rank.resources.gpus
        count = partial(_count_gpus, self.backend, gpus, self.timeout_s)
        counting = ThreadCall(count, "sparkdl-doctor").outcome if gpus else None
        to_driver = None
        if self.driver is not None:
            to_driver = Attempt(*self.driver, self.token, rank.rank, limit_s, turn)
        links: dict[int, Link] = {}
        if rank.gathering is not None:
            bind, advertised = rank_addresses(self.listening.bind, None, self.listening.towards)
            with Echo(bind, self.listening.port, self.token, advertised) as echo:
                own = json.dumps(echo.address)
                told = [json.loads(text) for text in rank.all_gather(own, self.timeout_s)]
                following = (rank.rank + 1) % len(told)
                attempts, turns = dict[int, Attempt](), {following: turn}
                for n in targets(rank.rank, len(told)):
                    host, port = told[n]
                    attempts[n] = Attempt(host, port, self.token, rank.rank, limit_s, turns.get(n))
                links = {other: attempt.link() for other, attempt in attempts.items()}
                rank.all_gather("done", self.timeout_s)  # the others may still be connected
        answer = Answer(
            rank.rank, socket.gethostname(), to_driver.link() if to_driver else None, links, gpus,
            counting.result() if counting else None, collect({}) if self.with_facts else None,
            time.monotonic() - began,
        )  # fmt: skip
        yield from Result(rank.rank, "probe", answer.to_json()).batches()


def _count_gpus(backend: str, gpus: Sequence[str], timeout_s: float) -> int | None:
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


class Attempt:
    """A connection to an :class:`Echo` that is tried in a thread of its own."""

    def __init__(
        self, host: str, port: int, token: bytes, rank: int, limit_s: float,
        turn: threading.Lock | None = None,
    ) -> None:  # fmt: skip
        self._host, self._port, self._limit_s, self._turn = host.strip("[]"), port, limit_s, turn
        self._deadline = time.monotonic() + limit_s
        self._target = f"[{self._host}]:{port}" if ":" in self._host else f"{host}:{port}"
        self._link: Link | None = None
        self._thread = threading.Thread(
            target=self._try, args=(token, HELLO.pack(rank)), name="sparkdl-doctor", daemon=True
        )  # a daemon: a name server that does not answer holds it beyond the limit
        self._thread.start()

    def link(self) -> Link:
        """The answer, within the limit."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 0.1)
        return self._link or self._silent()

    def _silent(self) -> Link:
        text = f"timed out after {self._limit_s:g} s, as where a firewall drops packets"
        return Link(self._target, f"TimeoutError: {text}")

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _try(self, token: bytes, hello: bytes) -> None:
        place = (self._host, self._port)
        try:
            with socket.create_connection(place, timeout=self._left()) as connection:
                tune(connection)
                prove(connection, token, hello, name=f"the end at {self._target}")
                trips = [self._ping(connection) for _ in range(10)]
                rate = 0.0
                if self._turn is not None and self._turn.acquire(timeout=self._left()):
                    with contextlib.ExitStack() as stack:
                        stack.callback(self._turn.release)
                        rate = self._bandwidth(connection)
            shortest, skew = min(trips)
            self._link = Link(self._target, "", shortest, rate, skew)
        except TimeoutError:
            self._link = self._silent()
        except (OSError, EOFError) as error:
            self._link = Link(self._target, f"{type(error).__name__}: {error}")

    def _ping(self, connection: socket.socket) -> tuple[float, float]:
        """Round trip, and how far the other clock is ahead."""
        connection.settimeout(self._left())
        began, clock = time.perf_counter(), time.time()
        connection.sendall(PING)
        theirs = CLOCK.unpack(receive_exactly(connection, CLOCK.size))[0]
        trip = time.perf_counter() - began
        return trip, theirs - (clock + trip / 2)

    def _bandwidth(self, connection: socket.socket) -> float:
        began, sent = time.perf_counter(), 0
        while sent < MOST_BYTES and time.perf_counter() - began < MEASURE_S:
            connection.settimeout(self._left())
            connection.sendall(BULK)
            connection.sendall(BLOCK)
            receive_exactly(connection, 1)
            sent += len(BLOCK)
        return sent / (time.perf_counter() - began)
