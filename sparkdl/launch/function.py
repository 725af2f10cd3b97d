"""The task of ``sparkdl.run`` and ``HorovodRunner``: a user's function on every rank.

The ranks exchange the addresses of their communicators, connect them, call the function and return
what it returns.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cloudpickle
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
from sparkdl.coordinator.session import Session
from sparkdl.data.feed import FedRows
from sparkdl.errors import DataError, WorkerError
from sparkdl.failures import Failure, RankFailure
from sparkdl.launch.devices import DeviceRequest, function_environment
from sparkdl.launch.feeds.feeding import FeedSettings, FunctionFeed, RankFeed, call_while_it_feeds
from sparkdl.launch.feeds.stream_feed import StreamSettings, open_stream
from sparkdl.launch.peers import (
    DriverUnreachableError,
    LineSender,
    Peers,
    call_until_others_end,
    open_rank_session,
    peer_environment,
)
from sparkdl.launch.results import Capture, Result, of_kind
from sparkdl.launch.task import AloneGathering, RaisingTask, RankContext
from sparkdl.process import payload
from sparkdl.process.log_lines import Sink, log_through, show
from sparkdl.settings.network import THIS_HOST, RankListening
from sparkdl.transport.address import Endpoint
from sparkdl.wire.tls import Certificate

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
            described = (
                peer_environment(self.peers, exit_barrier, self.listening)
                if self.peers
                else nullcontext()
            )
            serves = self.peers is not None and self.peers.waits_for_others(rank.rank)
            with use(communicator), described:
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
            content = None
            if self.all_results or rank.rank == 0:
                content = _dump_result(result, rank.rank)
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
        """A rank's result."""
        try:
            return payload.load(self.results[rank])
        except Exception as error:
            raise WorkerError(
                rank, f"its result cannot be read on the driver: {type(error).__name__}: {error}",
                hint="return plain objects: numbers, lists, NumPy arrays",
            ) from error  # fmt: skip
