"""How a rank meets the coordinator, and how a framework that connects the ranks finds them."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.coordinator.session import Session, open_session
from sparkdl.errors import Cause, ConfigError, ResourceError, TransportError
from sparkdl.launch.task import RankContext
from sparkdl.launch.threads import ThreadCall
from sparkdl.settings.network import RankListening
from sparkdl.settings.values import require_int, require_name
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.listening import listen

KEPT_BYTES = 1 << 20
"""Most bytes of lines that a rank keeps to be sent: the latest."""


class LineSender:
    """Sends lines through the rank's session, in a thread: a slow driver never stops the rank.

    Args:
        session: The rank's; None where the driver cannot be reached, and the lines are kept.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._lines: collections.deque[str] = collections.deque()
        self._bytes = self._dropped = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if session is not None:
            self._thread = threading.Thread(target=self._send, name="sparkdl-lines", daemon=True)
            self._thread.start()

    def send(self, text: str) -> None:
        """Sends or keeps a message, which may have several lines; never waits."""
        with self._changed:
            for line in text.split("\n"):
                self._lines.append(line)
                self._bytes += len(line) + 1
            while self._bytes > KEPT_BYTES:
                self._bytes -= len(self._lines.popleft()) + 1
                self._dropped += 1
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Sends what is left; returns the lines that could not be sent."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            return self._take()

    def _take(self) -> list[str]:
        lines = list(self._lines)
        if self._dropped:
            lines.insert(0, f"[{self._dropped} lines dropped: the driver was too slow]")
        self._lines.clear()
        self._bytes = self._dropped = 0
        return lines

    def _send(self) -> None:
        assert self._session is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._ended)
                lines = self._take()
            if not lines:
                return
            try:
                self._session.log([line or " " for line in lines])
            except Exception:  # the driver is gone: they may still come with the result
                with self._changed:
                    self._lines.extendleft(reversed(lines))
                return


CONNECT_TIMEOUT_S = 5.0
"""Seconds for which a rank tries to reach the coordinator."""


class DriverUnreachableError(ResourceError):
    """A rank cannot reach the coordinator. The others may: all must meet in another way."""

    cause = Cause.UNREACHED


def open_rank_session(endpoint: Endpoint, rank: RankContext) -> Session:
    """A session with the coordinator.

    Raises:
        DriverUnreachableError: It cannot be reached from here.
    """
    timeouts = Timeouts(connect_s=CONNECT_TIMEOUT_S, reconnect_s=CONNECT_TIMEOUT_S)
    try:
        return open_session(endpoint, rank=rank.rank, attempt=rank.attempt, timeouts=timeouts)
    except TransportError as error:
        problem = error.received
    # outside of the except: the failure is this rank's own, not a consequence of another's
    address = f"{endpoint.address.host}:{endpoint.address.port}"
    raise DriverUnreachableError(
        f"rank {rank.rank} on {socket.gethostname()} cannot reach the driver",
        expected=f"a connection to {address} within {CONNECT_TIMEOUT_S:g} s", received=problem,
        hint="network=Network(server_bind=..., server_address=..., port=...) says where it listens",
    )  # fmt: skip


Distributed = Literal["tensorflow", "torch", "jax"]
ROLES = ("chief", "worker", "ps", "evaluator")
"""Roles in the order of ranks."""


@dataclass(frozen=True)
class Peers:
    """The relation of the ranks to each other.

    Args:
        framework: Whose variables are set.
        roles: Role -> ranks that have it, in the order of :data:`ROLES`; empty: rank 0 is the
            chief, the others are workers.
        is_fed: Whether a chief and workers are given rows.
    """

    framework: Distributed
    roles: tuple[tuple[str, int], ...] = ()
    is_fed: bool = False

    def task_of(self, rank: int) -> tuple[str, int]:
        """The role of a rank, and its number among those of that role.

        >>> [Peers('tensorflow', (('chief', 1), ('ps', 2))).task_of(rank) for rank in range(3)]
        [('chief', 0), ('ps', 0), ('ps', 1)]
        """
        if not self.roles:
            return ("worker", rank - 1) if rank else ("chief", 0)
        for role, count in self.roles:
            if rank < count:
                return role, rank
            rank -= count
        raise IndexError(rank)

    def waits_for_others(self, rank: int) -> bool:
        """Whether a rank serves the others until they have returned, instead of returning itself.

        A parameter server does, and beside a chief the workers do, too: the chief of TensorFlow's
        ParameterServerStrategy sends them their work. Where rows are given, workers take theirs to
        the end, and an evaluator waits, which learns of the end by nothing else.
        """
        role, _ = self.task_of(rank)
        names = [name for name, _ in self.roles]
        if self.is_fed:
            return role in ("ps", "evaluator")
        return role == "ps" or (role == "worker" and "ps" in names and "chief" in names)


def check_roles(roles: Mapping[str, int] | None, num_workers: int | None) -> int | None:
    """The number of ranks, given the roles and the number that the user asked for.

    Raises:
        ConfigError: They do not fit, or nobody would ever return.
        UnknownNameError: An unknown role.
    """
    if roles is None:
        return num_workers
    if not isinstance(roles, Mapping):
        raise ConfigError(
            "roles must say how many ranks have each role",
            expected="role -> number of ranks, such as {'chief': 1, 'worker': 2, 'ps': 1}",
            received=repr(roles)[:200],
        )
    for name, count in roles.items():
        require_name("role", name, ROLES)
        require_int(f"roles[{name!r}]", count, 1)
    total = sum(roles.values())
    single = all(roles.get(name, 1) == 1 for name in ("chief", "evaluator"))
    leads = "chief" in roles or "worker" in roles
    if not single or not leads or num_workers not in (None, total):
        raise ConfigError(
            "these roles cannot be given to the ranks",
            expected="a chief or workers, at most one chief and one evaluator, num_workers in all",
            received=f"{dict(roles)}, num_workers={num_workers}",
        )
    return total


def fed_ranks(roles: Mapping[str, int] | None) -> int | None:
    """How many ranks get rows: the first ones, a chief and workers; None: all.

    >>> fed_ranks({'worker': 2, 'chief': 1, 'ps': 3}), fed_ranks({'worker': 2})
    (3, None)
    """
    if roles is None or not {"ps", "evaluator"} & set(roles):
        return None
    return roles.get("chief", 0) + roles.get("worker", 0)


@contextlib.contextmanager
def peer_environment(
    peers: Peers, communicator: Communicator, listening: RankListening
) -> Iterator[None]:
    """Within, the environment names what the framework needs to connect the ranks.

    ======================= =====================================================================
    framework               variables
    ======================= =====================================================================
    TensorFlow              ``TF_CONFIG``
    PyTorch                 ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE``,
                            ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``
    JAX                     ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID``
    ======================= =====================================================================

    Each rank takes a free port of the user's range, which is closed again before the framework can
    listen on it: another process might take it in between.

    Raises:
        ResourceError: None of the ports is free.
    """
    names = _variables(peers, _addresses(communicator, listening), communicator)
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _addresses(communicator: Communicator, listening: RankListening) -> list[str]:
    """``host:port`` of every rank."""
    bind, host = rank_addresses(listening.bind, towards=listening.towards)
    with listen(bind, listening.port) as held:
        mine = f"[{host}]" if ":" in host else host
        told = np.frombuffer(f"{mine}:{held.getsockname()[1]}".encode(), np.uint8)
        addresses = [bytes(a).decode() for a in communicator.all_gather(told)]
        communicator.barrier()  # no port is free again before all have one
    return addresses


def _variables(peers: Peers, addresses: list[str], communicator: Communicator) -> dict[str, str]:
    rank, size = str(communicator.rank), str(communicator.size)
    if peers.framework == "tensorflow":
        return {"TF_CONFIG": config_of(addresses, communicator.rank, peers)}
    if peers.framework == "jax":
        return {
            "JAX_COORDINATOR_ADDRESS": addresses[0],
            "JAX_NUM_PROCESSES": size,
            "JAX_PROCESS_ID": rank,
        }
    host, port = addresses[0].rsplit(":", 1)
    return {
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(communicator.local_rank),
        "LOCAL_WORLD_SIZE": str(communicator.local_size),
    }


def config_of(addresses: list[str], rank: int, peers: Peers) -> str:
    """The value of ``TF_CONFIG`` on a rank; an evaluator is no part of the cluster in it.

    >>> config_of(["a:1", "b:2"], 1, Peers("tensorflow"))
    '{"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": 0}}'
    """
    cluster: dict[str, list[str]] = {}
    for number, address in enumerate(addresses):
        role, _ = peers.task_of(number)
        if role != "evaluator":
            cluster.setdefault(role, []).append(address)
    role, index = peers.task_of(rank)
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def call_until_others_end(function: Callable[[], Any], exit_barrier: Communicator) -> Any:
    """Calls a function that may never return, until all other ranks have returned.

    It runs in a thread, which is left behind: the process must end soon.

    Returns:
        What the function returned; None if it still runs.

    Raises:
        Exception: What the function raises, at once.
        TransportError: Another rank has failed.
    """
    called = ThreadCall(function, "sparkdl-server-role")
    others = ThreadCall(exit_barrier.barrier, "sparkdl-exit-barrier")
    ended = wait([called.outcome, others.outcome], return_when=FIRST_COMPLETED).done
    if called.outcome in ended:
        called.outcome.result()  # raises what it raised
    others.outcome.result()
    return called.outcome.result() if called.outcome.done() else None
