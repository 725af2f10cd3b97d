"""A node where it runs: a rank that serves its object or calls its function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from sparkdl import payload
from sparkdl.errors import ConfigError, TransportError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.failures import FailureDescription, RankFailure
from sparkdl.launch.results import Result
from sparkdl.launch.task import RankContext
from sparkdl.program.calls import CallAddress, CallClient, CallServer
from sparkdl.program.nodes import Handle, Placed, replaced

_STOP_GRACE_S = 5.0


class ProgramControl:
    """What the launching process serves: whether the program stops, and the order to stop."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stops the program."""
        self._stopping.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the stop; whether it has come."""
        return self._stopping.wait(timeout_s)


@dataclass(frozen=True)
class Running:
    """The program as the node in this thread sees it.

    Args:
        control: The launching process.
        stopping: Is set when the program stops.
    """

    control: CallClient
    stopping: threading.Event = field(default_factory=threading.Event)


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


def wait_for_stop(timeout_s: float | None = None) -> bool:
    """Waits until the program stops; whether it has."""
    return stop_event().wait(timeout_s)


@dataclass(frozen=True)
class NodeTask:
    """The nodes of a program, one for each rank; see :class:`sparkdl.launch.task.Task`.

    Args:
        nodes: The pickled nodes, in the order of ranks.
        token: The run's secret.
        control: Where the launching process serves.
        start_timeout_s: How long nodes may take to come up.
    """

    nodes: tuple[bytes, ...] = field(repr=False)
    token: bytes = field(repr=False)
    control: CallAddress
    start_timeout_s: float = 60.0
    devices: DeviceRequest = field(default_factory=lambda: DeviceRequest(None, unscheduled=True))

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the rank's node to its end."""
        for _ in batches:
            pass
        placed: Placed = payload.load(self.nodes[rank.rank])
        with ExitStack() as stack:
            control = CallClient(self.control, self.token)
            stack.callback(control.close)
            program = Running(control)
            waiting = threading.Thread(
                target=_await_stop, args=(program,), name="sparkdl-stop", daemon=True
            )
            waiting.start()
            reset = _current.set(program)
            stack.callback(_current.reset, reset)
            self._run_node(placed, rank, program, stack)
        yield from Result(rank.rank, "done", placed.name).batches()

    def _run_node(
        self, placed: Placed, rank: RankContext, program: Running, stack: ExitStack
    ) -> None:
        proxy = _Late(program)
        mine: CallAddress | None = None
        if placed.node.serves:
            server = CallServer(proxy, self.token, label=placed.label, threads=placed.node.threads)
            stack.callback(server.close)
            mine = server.address
        told = rank.all_gather(json.dumps(None if mine is None else asdict(mine)))
        addresses = [None if text == "null" else CallAddress(**json.loads(text)) for text in told]

        def client(handle: Handle) -> CallClient:
            address = addresses[handle._number]
            if address is None:
                raise ConfigError(
                    f"node {handle._label!r} cannot be called",
                    expected="a CourierNode",
                    received="the handle of a node that serves nothing",
                )
            found = CallClient(
                address, self.token, timeout_s=handle._timeout_s, connect_s=self.start_timeout_s
            )
            stack.callback(found.close)
            return found

        try:
            start = placed.node.start(lambda thing: replaced(thing, client))
            made = start()
            if placed.node.serves:
                proxy.serve(made)
                runs = callable(getattr(type(made), "run", None))  # a cacher has any method
                run: Callable[[], object] = made.run if runs else program.stopping.wait  # type: ignore[attr-defined]
                run()
        except TransportError:
            if not program.stopping.wait(_STOP_GRACE_S):
                raise  # else the other node has ended because the program stops

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it, so that the launcher ends the other nodes."""
        raise RankFailure(FailureDescription.of(rank.rank, error)) from error


def _await_stop(program: Running) -> None:
    """Sets the node's event when the launching process says so, or is gone."""
    try:
        while not program.control.wait(60.0):
            pass
    except Exception:  # the launching process has ended
        pass
    program.stopping.set()


class _Late:
    """Stands for an object that is still being made: calls of it wait until it is there."""

    def __init__(self, program: Running) -> None:
        self.__program, self.__made = program, threading.Event()
        self.__object: object = None

    def serve(self, made: object) -> None:
        """Passes calls on from now on."""
        self.__object = made
        self.__made.set()

    def __dir__(self) -> list[str]:
        return dir(self.__object)

    def __getattr__(self, name: str) -> Any:
        while not self.__made.wait(0.1):
            if self.__program.stopping.is_set():
                raise TransportError(f"{name}: the program stopped before the node was up")
        found = getattr(self.__object, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            reset = _current.set(self.__program)
            try:
                return found(*args, **kwargs)
            finally:
                _current.reset(reset)

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)
