"""The task of ``sparkdl.run`` and ``HorovodRunner``: a user's function on every rank.

The ranks exchange the addresses of their communicators, connect them, call the function and return
what it returns.

Also how a rank meets the coordinator, and how a framework that connects the ranks finds them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import cloudpickle
import numpy as np
import pyarrow as pa

from sparkdl.collective.communicator import (
    Communicator,
    Connector,
    Maker,
    Member,
    make_communicator,
)
from sparkdl.collective.current import use
from sparkdl.config import Limits
from sparkdl.coordinator.session import Session, open_session
from sparkdl.data.feed import FedRows
from sparkdl.errors import Cause, ConfigError, DataError, ResourceError, TransportError, WorkerError
from sparkdl.failures import Failure, RankFailure
from sparkdl.launch.devices import DeviceRequest, function_environment
from sparkdl.launch.feeding import FeedSettings, FunctionFeed, RankFeed, call_while_it_feeds
from sparkdl.launch.stream_feed import StreamSettings, open_stream
from sparkdl.launch.task import AloneGathering, Capture, RaisingTask, RankContext, Result, of_kind
from sparkdl.launch.threads import ThreadCall
from sparkdl.process import payload
from sparkdl.process.closing import environment
from sparkdl.process.log_lines import Sink, log_through, show
from sparkdl.settings.network import THIS_HOST, RankListening
from sparkdl.settings.values import require_int, require_name
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.listening import listen
from sparkdl.wire.tls import Certificate

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
    with environment(**_variables(peers, _addresses(communicator, listening), communicator)):
        yield


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


_LINES_IN_FAILURE = 2000
"""Characters of unsent lines that a failure carries."""


@dataclass(frozen=True)
class FunctionTask(RaisingTask):
    """A function to be called on every rank; see :class:`sparkdl.launch.task.Task`.

    Args:
        start_timeout_s: Limit for all ranks to come.
        all_results: Whether other ranks than 0 return their result.
        capture: Whether lines that the rank's process prints go to the driver; else only those
            of :func:`sparkdl.log_to_driver` do.
        endpoint: The coordinator, where the ranks meet and which takes their lines; None where
            there is none: they meet by the launcher, and lines come with the result.
        peers: What a framework that connects the ranks itself finds in its environment; None:
            nothing.
        feed: How the rank's rows are given to the function, as its first argument; None if it gets
            none of its own.
        stream: How the rows of a stream are given to it; None if there is none.
    """

    call: bytes = field(repr=False)
    token: bytes = field(repr=False)
    devices: DeviceRequest
    communicator: str | Maker = "auto"
    timeout_s: float = 600.0
    start_timeout_s: float = Limits.start_timeout_s
    all_results: bool = True
    capture: bool = True
    endpoint: Endpoint | None = None
    listening: RankListening = THIS_HOST
    certificate: Certificate | None = None
    peers: Peers | None = None
    feed: FeedSettings | None = None
    stream: StreamSettings | None = None

    def opened_session(self, rank: RankContext) -> Session | None:
        """The rank's session with the coordinator; None where there is none."""
        try:
            return None if self.endpoint is None else open_rank_session(self.endpoint, rank)
        except DriverUnreachableError as error:
            raise RankFailure(Failure.of(rank.rank, error)) from error

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = None if self.feed is None else self.feed.read(batches, rank.rank)
        for _ in batches:
            pass
        session = self.opened_session(rank)
        lines = LineSender(session)
        try:
            with self._environment(rank, rank.log or lines.send):
                communicator, result = self._call(rank, session, rows)
        except (Exception, SystemExit) as error:
            unsent = "\n".join(lines.close())[-_LINES_IN_FAILURE:]
            described = Failure.of(rank.rank, error)
            raise RankFailure(replace(described, lines=unsent)) from error
        finally:
            unsent = "\n".join(lines.close())
            if session is not None:
                session.close()
        if unsent:
            yield from Result(rank.rank, "log", unsent).batches()
        yield from Result(rank.rank, "communicator", communicator).batches()
        if result is not None:
            yield from Result(rank.rank, "result", "", result).batches()

    @contextlib.contextmanager
    def _environment(self, rank: RankContext, sink: Sink) -> Iterator[None]:
        captured = Capture(sink) if self.capture else contextlib.nullcontext()
        placement = self.devices.place(rank.resources)
        with function_environment(placement), log_through(sink), captured:
            yield

    def _call(
        self, rank: RankContext, session: Session | None, rows: FedRows | None
    ) -> tuple[str, bytes | None]:
        """The communicator's name, and the pickled result if the driver wants it."""
        with (
            connected(self, rank, session) as (communicator, exit_barrier),
            self._feed(rank, rows, exit_barrier) as feed,
        ):
            function, args, kwargs = _load_call(self.call, rank.rank)
            args = args if feed is None else (feed, *args)
            serves = self.peers is not None and self.peers.waits_for_others(rank.rank)
            with contextlib.ExitStack() as stack:
                stack.enter_context(use(communicator))
                if self.peers is not None:
                    stack.enter_context(peer_environment(self.peers, exit_barrier, self.listening))
                call = partial(function, *args, **kwargs)
                given = self.stream or self.feed
                limit_s = None if given is None else given.stall_timeout_s
                if serves:
                    result = call_until_others_end(call, exit_barrier)
                elif feed is not None and limit_s is not None:
                    result = call_while_it_feeds(call, feed, limit_s)
                else:
                    result = call()
            if feed is not None:
                feed.terminate()  # of a stream the others learn by this that it ends
            wanted = self.all_results or rank.rank == 0
            content = _dump_result(result, rank.rank) if wanted else None
            if not serves:
                # a rank that is done stays, so that its leaving does not look like a failure
                exit_barrier.barrier()
            return communicator.name, content

    @contextlib.contextmanager
    def _feed(
        self, rank: RankContext, rows: FedRows | None, exit_barrier: Communicator
    ) -> Iterator[FunctionFeed | None]:
        """The feed that gives rows to the function; None if it gets none."""
        stream = self.stream
        if stream is not None and stream.fed is not None and rank.rank >= stream.fed:
            yield RankFeed([])
        elif stream is not None and self.endpoint is not None:
            attempt = rank.rank, rank.attempt
            with open_stream(
                stream, self.endpoint, attempt, self.token.hex(), self.listening,
                self.certificate,
            ) as opened:  # fmt: skip
                yield opened
        elif self.feed is not None and rows is not None:
            yield self.feed.open(rows, exit_barrier)
        else:
            yield None


@contextlib.contextmanager
def connected(
    task: FunctionTask, rank: RankContext, session: Session | None = None
) -> Iterator[tuple[Communicator, Communicator]]:
    """The communicator among all ranks, and one for the exit barrier; closed whatever happens.

    Nothing that may fail comes before it, and nothing waits for the launcher after it: a barrier
    stage that ends while a task waits in ``allGather`` takes that task's executor down with it.
    """

    def connector_of(name: str | Maker, timeout_s: float) -> Connector:
        return make_communicator(
            name, rank=rank.rank, timeout_s=timeout_s, certificate=task.certificate,
            **task.listening.options(),
        )  # fmt: skip

    connectors = (
        connector_of("builtin", math.inf),  # the other ranks may train for days
        connector_of(task.communicator, task.timeout_s),
    )
    with contextlib.ExitStack() as stack:
        for connector in connectors:
            stack.callback(connector.close)
        mine = json.dumps([c.prepare().to_json() for c in connectors])
        if session is None:
            texts = rank.all_gather(mine, task.start_timeout_s)
        else:  # which takes no second, as a barrier stage's exchange does
            texts = session.meet(mine)
        told = [json.loads(text) for text in texts]

        def connect(index: int) -> Communicator:
            members = [Member.from_json(addresses[index]) for addresses in told]
            communicator = connectors[index].connect(members, task.token)
            stack.callback(communicator.close)
            return communicator

        exit_barrier = connect(0)  # now all ranks have left the gathering: from here one may fail
        yield connect(1), exit_barrier


def call_here(task: FunctionTask, function: Callable[[], Any]) -> Any:
    """Calls a function in this process as the only rank, and returns what it returns."""
    rank = RankContext(0, gathering=AloneGathering())
    with connected(task, rank) as (communicator, _), use(communicator):
        return function()


def dump_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """A call as bytes; whatever stands in the user's own files goes by value."""
    return payload.dump((function, tuple(args), dict(kwargs)))


def _load_call(content: bytes, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    try:
        function, args, kwargs = payload.load(content)
    except Exception as error:
        raise DataError(
            f"rank {rank} cannot unpickle the function or its arguments",
            expected="modules that the executors can import",
            received=f"{type(error).__name__}: {error}",
            hint="ship them with spark.submit.pyFiles (addPyFile), or install them there",
        ) from error
    return function, args, kwargs


def _dump_result(result: object, rank: int) -> bytes:
    try:
        # by name where that goes: the driver has the user's modules, and shall get its own classes
        content: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise DataError(
            f"the result of rank {rank} cannot be sent to the driver",
            expected="an object that cloudpickle can pickle",
            received=f"{type(result).__name__} ({type(error).__name__}: {error})",
            hint="return numbers, arrays or model.get_weights(); save what is large to a file",
        ) from error
    return content


@dataclass(frozen=True)
class Returned:
    """The results of the ranks of a :class:`FunctionTask`.

    Args:
        communicator: Name of the communicator that connected them; ``''`` if none was started.
        results: Rank -> its pickled result; only those that the driver wants.
    """

    communicator: str
    results: dict[int, bytes]

    @classmethod
    def of(cls, results: list[Result]) -> Returned:
        """Takes the launch's results; shows the lines that the ranks could not send before."""
        for rank, result in of_kind(results, "log").items():
            for line in result.text.splitlines():
                show(rank, line)
        contents = {rank: r.content for rank, r in of_kind(results, "result").items()}
        communicators = of_kind(results, "communicator")
        return cls(communicators[0].text if communicators else "", contents)

    def load(self, rank: int) -> Any:
        try:
            return payload.load(self.results[rank])
        except Exception as error:
            raise WorkerError(
                rank, f"its result cannot be read on the driver: {type(error).__name__}: {error}",
                hint="return plain objects: numbers, lists, NumPy arrays",
            ) from error  # fmt: skip
