"""A user's function on every node of a cluster: through ``sparkdl.run``, or on a partition."""

from __future__ import annotations

import json
import os
import pickle
import queue
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import pyarrow as pa

from sparkdl.collective.current import current
from sparkdl.compat.tfos.board import BoardRequest, board_of
from sparkdl.compat.tfos.TFManager import TFManager
from sparkdl.compat.tfos.TFNode import TFNodeContext
from sparkdl.data.feed import RowFeed
from sparkdl.errors import DataError, WaitTimeoutError
from sparkdl.launch.devices import DeviceRequest, function_environment
from sparkdl.launch.threads import ThreadCall
from sparkdl.process import payload
from sparkdl.spark.executor.stage import rank_of

_END = object()
_LEAVE_S = 5.0


class PartitionFeed:
    """The elements of one partition, for a function that runs in a thread.

    The function asks, and the partition's own thread takes the elements from Spark and passes the
    results on; so no more elements and results are in memory than the function has asked for.
    """

    def __init__(self, elements: Iterator[Any], timeout_s: float) -> None:
        self._elements, self._timeout_s = elements, timeout_s
        self._said: queue.SimpleQueue[tuple[Literal["take", "give", "end"], Any]]
        self._said = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._next = next(elements, _END)
        self._ended = self._next is _END

    def take(self, count: int, train_mode: bool) -> list[Any]:
        if self._ended:
            return []
        self._said.put(("take", count))
        # without a limit: Spark may compute the next elements for as long as it takes
        return self._answers.get()

    def give(self, results: Sequence[Any]) -> None:
        self._said.put(("give", list(results)))

    def should_stop(self) -> bool:
        return self._ended

    def terminate(self) -> None:
        self._ended = True

    def results(self, function: Callable[[], object]) -> Iterator[Any]:
        """Calls the function and yields what it gives; it is not called if there are no elements.

        Raises:
            WaitTimeoutError: The function stalls; with the lines at which it stands.
            DataError: It gave another number of results than there are elements.
            Exception: What it raised.
        """
        if self._ended:
            return
        called = ThreadCall(function, "sparkdl-inference")
        called.outcome.add_done_callback(lambda _: self._said.put(("end", None)))
        given = taken = 0
        try:
            while True:
                kind, content = self._listen(called)
                if kind == "take":
                    found = [self._next, *islice(self._elements, content - 1)]
                    taken += len(found)
                    self._next = next(self._elements, _END)
                    self._ended = self._ended or self._next is _END
                    self._answers.put(found)
                elif kind == "give":
                    given += len(content)
                    if given > taken:
                        raise _wrong_count(f"{taken} for the elements so far", f"{given}")
                    yield from content
                else:
                    break
            called.outcome.result()
            if given != taken or self._next is not _END:
                rest = " and an end of the function before the last" * (self._next is not _END)
                raise _wrong_count(f"{taken} for as many elements", f"{given}{rest}")
        finally:
            self._ended = True
            self._answers.put([])  # for a function that waits while nobody wants its results
            with suppress(TimeoutError):  # else it is left behind
                called.outcome.exception(_LEAVE_S)

    def _listen(self, called: ThreadCall) -> tuple[Literal["take", "give", "end"], Any]:
        try:
            return self._said.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise WaitTimeoutError(
                "a function for inference takes no rows and gives no results",
                expected=f"a call of its feed within {self._timeout_s:g} s",
                received=f"none; it stands here:\n{called.stack()}",
                hint="feed_timeout is the limit",
            ) from error


def _wrong_count(expected: str, received: str) -> DataError:
    return DataError(
        "a function for inference gave another number of results than it was given elements",
        expected=expected, received=received,
        hint="batch_results takes one result for each element of next_batch, in order",
    )  # fmt: skip


MapFunction = Callable[[Any, TFNodeContext], object]


class RankElements:
    """The pickled elements of a rank's feed, as :mod:`~sparkdl.compat.tfos.TFManager` reads it."""

    def __init__(self, rows: RowFeed) -> None:
        self._rows = rows
        self.should_stop, self.terminate = rows.should_stop, rows.terminate

    def take(self, count: int, train_mode: bool) -> list[Any]:
        table = self._rows.next_arrow(count)
        return [] if table is None else [pickle.loads(x) for x in table.column(0).to_pylist()]

    def give(self, results: Sequence[Any]) -> None:
        """Drops them: ``train`` has no results, as in TensorFlowOnSpark."""


@dataclass(frozen=True)
class ClusterFacts:
    """The facts that the nodes of a cluster are told."""

    default_fs: str
    chief: str = "chief"


def call_fed_node(
    rows: RowFeed, map_fun: MapFunction, tf_args: object, facts: ClusterFacts,
    board: BoardRequest | None = None,
) -> None:  # fmt: skip
    """Calls the function on a node that is fed; a server and an evaluator have no rows."""
    call_node(map_fun, tf_args, facts, board, TFManager(elements=RankElements(rows)))


def call_node(
    map_fun: MapFunction, tf_args: object, facts: ClusterFacts, board: BoardRequest | None = None,
    mgr: TFManager | None = None,
) -> None:  # fmt: skip
    """Calls the function on a node; one without a manager of its own is not fed."""
    config = json.loads(os.environ["TF_CONFIG"])
    job, index, cluster = config["task"]["type"], config["task"]["index"], config["cluster"]
    leads = job == "chief" or (job == "worker" and index == 0 and "chief" not in cluster)
    # TensorFlow's strategies know a chief alone, so TF_CONFIG keeps that name
    cluster = {facts.chief if name == "chief" else name: cluster[name] for name in cluster}
    job = facts.chief if job == "chief" else job
    context = TFNodeContext(current().rank, job, index, cluster, facts.default_fs, os.getcwd(), mgr)
    with _arguments(tf_args), board_of(board) if board and leads else nullcontext():
        map_fun(tf_args, context)


def infer_elements(
    number: int, elements: Iterable[Any], content: bytes, default_fs: str, job: str, stall_s: float
) -> Iterator[Any]:
    """The function's results for a partition; see :class:`PartitionFeed`."""
    from pyspark import TaskContext

    map_fun, (tf_args,), _ = payload.load(content)
    feed = PartitionFeed(iter(elements), stall_s)
    mgr = TFManager(elements=feed)
    context = TFNodeContext(number, job, 0, {job: ["localhost:0"]}, default_fs, os.getcwd(), mgr)
    placement = DeviceRequest(None, unscheduled=True).place(rank_of(TaskContext.get(), 0).resources)
    with function_environment(placement), _arguments(tf_args):
        yield from feed.results(lambda: map_fun(tf_args, context))


@contextmanager
def _arguments(tf_args: object) -> Iterator[None]:
    """``sys.argv`` is the function's argument meanwhile, if that is a list: absl reads it there."""
    before = sys.argv
    if isinstance(tf_args, list):
        sys.argv = tf_args
    try:
        yield
    finally:
        sys.argv = before


def pickled(elements: Iterable[Any]) -> Iterator[tuple[bytearray]]:
    """Elements of an RDD as rows of a DataFrame with one binary column."""
    for element in elements:
        yield (bytearray(pickle.dumps(element, protocol=5)),)


def pickled_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of a DataFrame as elements: tuples, pickled, in one binary column."""
    for batch in batches:
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        elements = [pickle.dumps(row, protocol=5) for row in rows]
        yield pa.RecordBatch.from_pydict({"element": pa.array(elements, pa.binary())})
