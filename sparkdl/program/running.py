"""A node where it runs: a rank that serves its object or calls its function."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import cloudpickle
import pyarrow as pa

from sparkdl.coordinator.session import Session
from sparkdl.errors import ConfigError, ResourceError, SparkDLError, TransportError
from sparkdl.failures import one_line
from sparkdl.launch.child import Child
from sparkdl.launch.devices import DeviceRequest, function_environment
from sparkdl.launch.function import CONNECT_TIMEOUT_S, LineSender, open_rank_session
from sparkdl.launch.task import Capture, Gathering, RaisingTask, RankContext, Result
from sparkdl.launch.threads import RestartedRanks
from sparkdl.process import payload
from sparkdl.process.log_lines import log_through
from sparkdl.program.calls import LOOPBACK, CallAddress, CallClient
from sparkdl.program.nodes import Handle, Placed, replaced
from sparkdl.program.serving import CallServer
from sparkdl.settings.network import THIS_HOST, PortSpec, RankListening
from sparkdl.transport.address import Endpoint
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.tls import Certificate

Meet = Callable[[str], list[str]]
"""Exchanges texts with all nodes: this one's in, every node's out, in order."""
RETURNED = "returned"
"""Kind of the result that holds what a node returned; its text says why it could not be pickled."""
_STOP_GRACE_S = 5.0
_REBIND_S, _LOOK_S, _ASK_S = 10.0, 0.05, 60.0


class ProgramControl:
    """The service of the launching process: whether the program stops, and the order to stop."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._to_tell: list[Future[None]] = []

    def stop(self) -> None:
        self._stopping.set()
        self._tell()

    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def when_stopping(self) -> Future[None]:
        """A future that is done when the program stops: a node that waits holds no thread here."""
        told: Future[None] = Future()
        with self._lock:
            self._to_tell = [one for one in self._to_tell if not one.done()]
            self._to_tell.append(told)
        if self._stopping.is_set():
            self._tell()
        return told

    def _tell(self) -> None:
        with self._lock:
            to_tell, self._to_tell = self._to_tell, []
        for told in to_tell:
            if told.set_running_or_notify_cancel():
                told.set_result(None)


@dataclass(frozen=True)
class Running:
    """The program as the node in this thread sees it."""

    control: CallClient
    stopping: threading.Event = field(default_factory=threading.Event)
    host: str = LOOPBACK


_current: ContextVar[Running | None] = ContextVar("sparkdl_program", default=None)


def running() -> Running:
    """The program that the caller is a node of.

    Raises:
        ConfigError: The caller is no node.
    """
    found = _current.get()
    if found is None:
        raise ConfigError(
            "no program runs here",
            expected="a call in the thread of a node, or in a method that another node calls",
            received="a call outside of any node",
            hint="launched.stop() stops a program from where it was launched",
        )
    return found


def stop() -> None:
    """Stops the program that the caller is a node of: all nodes end, with no error."""
    running().control.stop()


def stop_event() -> threading.Event:
    """An event that is set when the program stops; a node that loops looks at it."""
    return running().stopping


def is_stopping() -> bool:
    """Whether the caller is in a node whose program stops."""
    found = _current.get()
    return found is not None and found.stopping.is_set()


def wait_for_stop(timeout_s: float | None = None) -> bool:
    """Waits until the program stops; whether it has."""
    return stop_event().wait(timeout_s)


def register_stop_handler(handler: Callable[[], object]) -> None:
    """Has a function called, in a thread of its own, when the program stops or the node ends.

    For a node that waits in a library which does not look at :func:`stop_event`.

    Args:
        handler: Ends what the node waits for.
    """
    stopping = stop_event()

    def wait() -> None:
        stopping.wait()
        handler()

    threading.Thread(target=wait, name="sparkdl-stop-handler", daemon=True).start()


@dataclass(frozen=True)
class NodeTask(RaisingTask):
    """The nodes of a program, one for each rank; see :class:`sparkdl.launch.task.Task`.

    Args:
        control: Where the launching process serves.
        start_timeout_s: How long nodes may take to come up.
        endpoint: The coordinator, where the nodes meet and which takes their lines; None: they
            meet by the launcher, which also has their lines.
    """

    nodes: tuple[bytes, ...] = field(repr=False)
    token: bytes = field(repr=False)
    control: CallAddress
    start_timeout_s: float = 60.0
    devices: DeviceRequest = field(default_factory=lambda: DeviceRequest(None, unscheduled=True))
    listening: RankListening = THIS_HOST
    certificate: Certificate | None = None
    endpoint: Endpoint | None = None

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        placed: Placed = payload.load(self.nodes[rank.rank])
        if self.endpoint is not None and placed.needs.restarts:
            yield from self._watch(rank, self.endpoint, placed.needs.restarts)
            return
        with ExitStack() as stack:
            meet = self._open_meeting(rank, stack)
            control = CallClient(
                self.control, self.token, connect_s=CONNECT_TIMEOUT_S, certificate=self.certificate
            )
            stack.callback(control.close)
            program = Running(control, host=self._addresses()[1])
            # Before the connection closes: then nothing is left to wait for.
            stack.callback(program.stopping.set)
            threading.Thread(
                target=await_stop, args=(program,), name="sparkdl-stop", daemon=True
            ).start()
            stack.callback(_current.reset, _current.set(program))
            stopped = rank.attempt and control.is_stopping()  # it failed while the program stopped
            returned = None if stopped else self._run_node(rank.rank, placed, meet, program, stack)
        yield from _result(rank.rank, returned).batches()

    def _watch(
        self, rank: RankContext, endpoint: Endpoint, restarts: int
    ) -> Iterator[pa.RecordBatch]:
        """Runs the node in a process of its own, and in another one when that fails.

        Spark starts no task of a barrier stage again. This process, the task's, stays: it meets the
        others for the node and sends its lines.
        """
        content = payload.dump(replace(self, endpoint=None))
        placement = self.devices.place(rank.resources, rank.rank)
        with ExitStack() as stack:
            session = stack.enter_context(open_rank_session(endpoint, rank))
            lines = LineSender(session)
            stack.callback(lines.close)

            def attempt(rank: RankContext) -> Iterator[pa.RecordBatch]:
                with function_environment(placement), Child(content, rank, lines.send) as child:
                    yield from child.results(iter(()))

            watched = RestartedRanks([0] * rank.rank + [restarts], attempt)
            meeting = _SessionMeeting(session)
            yield from watched.run(replace(rank, gathering=meeting, log=lines.send))

    def _open_meeting(self, rank: RankContext, stack: ExitStack) -> Meet:
        """The exchange of addresses; where the coordinator is, what the node prints goes there."""
        if self.endpoint is None:
            return rank.all_gather
        session = stack.enter_context(open_rank_session(self.endpoint, rank))
        lines = LineSender(session)
        stack.callback(lines.close)
        stack.enter_context(function_environment(self.devices.place(rank.resources, rank.rank)))
        stack.enter_context(log_through(lines.send))
        stack.enter_context(Capture(lines.send))
        return session.meet

    def _addresses(self) -> tuple[str, str]:
        """The address at which the node listens, and the one at which others find it."""
        return rank_addresses(self.listening.bind, towards=self.listening.towards)

    def _serve(
        self, program: Running, proxy: _Late, placed: Placed, ports: PortSpec, within_s: float = 0.0
    ) -> CallServer:
        bind, advertised = self._addresses()
        deadline = time.monotonic() + within_s
        while True:
            try:
                return CallServer(
                    proxy, self.token, bind=bind, advertised=advertised, ports=ports,
                    label=placed.label, threads=placed.node.threads, certificate=self.certificate,
                )  # fmt: skip
            except ResourceError:
                # a foreign connection may have the port for a moment; nothing tells when it ends
                if time.monotonic() >= deadline or program.stopping.wait(_LOOK_S):
                    raise

    def _run_node(
        self, number: int, placed: Placed, meet: Meet, program: Running, stack: ExitStack
    ) -> object:
        proxy = _Late(program)
        mine: CallAddress | None = None
        if placed.node.serves:
            server = self._serve(program, proxy, placed, self.listening.port)
            stack.callback(lambda: server.close())
            mine = server.address
        told = meet(json.dumps(None if mine is None else asdict(mine)))
        addresses = [None if text == "null" else CallAddress(**json.loads(text)) for text in told]
        known = addresses[number]
        if known is not None and known != mine:  # this node was started again: the others know
            server.close()
            server = self._serve(program, proxy, placed, known.port, _REBIND_S)

        def client(handle: Handle) -> CallClient:
            address = addresses[handle._number]
            if address is None:
                raise ConfigError(
                    f"node {handle._label!r} cannot be called", expected="a CourierNode",
                    received="the handle of a node that serves nothing",
                )  # fmt: skip
            found = CallClient(
                address, self.token, timeout_s=handle._timeout_s, connect_s=self.start_timeout_s,
                certificate=self.certificate, wait_for_ready=handle._wait_for_ready,
            )  # fmt: skip
            stack.callback(found.close)
            return found

        try:
            made = placed.node.start(lambda thing: replaced(thing, client))()
            if not placed.node.serves:
                return made
            proxy.serve(made)
            if callable(getattr(type(made), "run", None)):  # of the type: a cacher has any method
                return made.run()  # type: ignore[attr-defined]
            program.stopping.wait()
        except TransportError:
            if not program.stopping.wait(_STOP_GRACE_S):
                raise  # else the other node has ended because the program stops
        return None


class _SessionMeeting(Gathering):
    """The exchange of texts of a node in a child, by the session of its parent."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        return self._session.meet(text)


def _result(rank: int, returned: object) -> Result:
    try:
        return Result(rank, RETURNED, "", cloudpickle.dumps(returned))
    except Exception as error:  # only who asks for it shall fail
        return Result(rank, RETURNED, one_line(error)[:2000])


def await_stop(program: Running) -> None:
    """Sets the node's event when the launching process says so, or is gone.

    A connection may break while the launching process lives: the next call connects again, for up
    to ``CONNECT_TIMEOUT_S``.
    """
    while not program.stopping.is_set():
        told: Future[None] = program.control.futures.when_stopping()
        try:
            told.result(_ASK_S)
            program.stopping.set()
        except (SparkDLError, OSError):  # also where it has waited for long: so a connection that
            told.cancel()  # broke in silence is found
            if not program.stopping.is_set() and not _is_reached(program):
                program.stopping.set()
            program.stopping.wait(_LOOK_S)


def _is_reached(program: Running) -> bool:
    """Whether the launching process answers; the first call may find that the connection broke."""
    for _ in range(2):
        answer = program.control.futures.is_stopping()
        try:
            answer.result(_ASK_S)
            return True
        except TimeoutError:  # a connection that broke in silence: the next call makes another one
            program.control.close()
        except (SparkDLError, OSError):
            pass
    return False


class _Late:
    """Stands for an object that is still being made: calls of it wait until it is there."""

    def __init__(self, program: Running) -> None:
        self.__program, self.__made = program, threading.Event()
        self.__object: object = None

    def serve(self, made: object) -> None:
        self.__object = made
        self.__made.set()

    def __dir__(self) -> list[str]:
        self.__await("dir")
        return dir(self.__object)

    def __await(self, name: str) -> None:
        while not self.__made.wait(0.1):
            if self.__program.stopping.is_set():
                raise TransportError(
                    f"{name}: the program stopped before the node was up",
                    expected="a node that is up", received="the stop",
                )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        self.__await(name)
        found = getattr(self.__object, name)
        if not callable(found):
            return found

        def call(*args: object, **kwargs: object) -> Any:
            reset = _current.set(self.__program)
            try:
                return found(*args, **kwargs)
            finally:
                _current.reset(reset)

        return call

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)
