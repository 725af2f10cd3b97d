"""A user's function on every node of a cluster: through ``sparkdl.run``, or on a partition."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from sparkdl import payload
from sparkdl.collective.current import current
from sparkdl.compat.tfos.board import BoardRequest, board_of
from sparkdl.compat.tfos.partition_feed import PartitionFeed
from sparkdl.compat.tfos.TFManager import TFManager
from sparkdl.compat.tfos.TFNode import TFNodeContext
from sparkdl.launch.devices import DeviceRequest, function_environment
from sparkdl.spark.executor.stage import rank_of

MapFunction = Callable[[Any, TFNodeContext], object]


class FedRows(Protocol):
    """What a node needs of its rank's feed."""

    def next_arrow(self, batch_size: int) -> pa.Table | None:
        """The next rows; None if there are no more."""

    def should_stop(self) -> bool:
        """Whether there are no more rows."""

    def terminate(self) -> None:
        """Gives no more rows."""


class RankElements:
    """The pickled elements of a rank's feed; see :class:`~sparkdl.compat.tfos.TFManager.Elements`.

    Args:
        rows: The feed.
    """

    def __init__(self, rows: FedRows) -> None:
        self._rows = rows
        self.should_stop, self.terminate = rows.should_stop, rows.terminate

    def take(self, count: int, train_mode: bool) -> list[Any]:
        """The next elements; fewer at the end of an epoch."""
        table = self._rows.next_arrow(count)
        return [] if table is None else [pickle.loads(x) for x in table.column(0).to_pylist()]

    def give(self, results: Sequence[Any]) -> None:
        """Drops them: ``train`` has no results, as in TensorFlowOnSpark."""


@dataclass(frozen=True)
class ClusterFacts:
    """What the nodes of a cluster are told.

    Args:
        default_fs: The default file system of Spark.
        chief: What the chief is called: ``'chief'`` or ``'master'``.
    """

    default_fs: str
    chief: str = "chief"


def call_node(
    map_fun: MapFunction, tf_args: Any, facts: ClusterFacts, board: BoardRequest | None = None
) -> None:
    """Calls the function on a node that is not fed."""
    _call_rank(map_fun, tf_args, facts, TFManager(queues=()), board)


def call_fed_node(
    rows: FedRows,
    map_fun: MapFunction,
    tf_args: Any,
    facts: ClusterFacts,
    board: BoardRequest | None = None,
) -> None:
    """Calls the function on a node that is fed; a server and an evaluator have no rows."""
    _call_rank(map_fun, tf_args, facts, TFManager(elements=RankElements(rows)), board)


def _call_rank(
    map_fun: MapFunction,
    tf_args: Any,
    facts: ClusterFacts,
    mgr: TFManager,
    board: BoardRequest | None,
) -> None:
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
    """The function's results for a partition; see :class:`PartitionFeed`.

    Args:
        number: The partition's number.
        elements: Its elements.
        content: The pickled call of the function with its argument.
        default_fs: The default file system of Spark.
        job: ``'chief'``, ``'master'`` or ``'worker'``.
        stall_s: See :class:`PartitionFeed`.
    """
    from pyspark import TaskContext

    map_fun, (tf_args,), _ = payload.load(content)
    feed = PartitionFeed(iter(elements), stall_s)
    cluster = {job: ["localhost:0"]}
    mgr = TFManager(elements=feed)
    context = TFNodeContext(number, job, 0, cluster, default_fs, os.getcwd(), mgr)
    placement = DeviceRequest(None, unscheduled=True).place(rank_of(TaskContext.get(), 0).resources)
    with function_environment(placement), _arguments(tf_args):
        yield from feed.results(lambda: map_fun(tf_args, context))


@contextmanager
def _arguments(tf_args: Any) -> Iterator[None]:
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
