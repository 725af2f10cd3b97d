"""What a function finds on its node: its context, and the rows that it is fed."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from sparkdl.collective.current import current
from sparkdl.errors import ConfigError

_SCHEMES = ("hdfs://", "viewfs://", "file://", "s3://", "s3a://", "gs://", "abfss://", "wasb://")


class FedRows(Protocol):
    """What :class:`DataFeed` needs of a rank's feed."""

    def next_arrow(self, batch_size: int) -> pa.Table | None:
        """The next rows; None if there are no more."""

    def should_stop(self) -> bool:
        """Whether there are no more rows."""

    def terminate(self) -> None:
        """Gives no more rows."""


class DataFeed:
    """The rows of a node, as the elements of the RDD that ``train`` or ``inference`` got.

    Args:
        rows: The rank's feed, of pickled elements.
        results: Takes what ``batch_results`` is given.
        train_mode: Whether results are refused.
        input_mapping: Column -> name of a tensor: ``next_batch`` gives a dict of columns then. An
            element's values belong to the columns in their alphabetical order.
    """

    def __init__(
        self,
        rows: FedRows,
        results: list[Any],
        train_mode: bool = True,
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self._rows, self._results, self._train = rows, results, train_mode
        self._tensors = None
        if input_mapping is not None:
            self._tensors = [input_mapping[column] for column in sorted(input_mapping)]

    def next_batch(self, batch_size: int) -> Any:
        """The next elements: a list, or a dict of lists by tensor if there is a mapping.

        It has fewer than ``batch_size`` at the end of an epoch, and none when there are no more.
        """
        table = self._rows.next_arrow(batch_size)
        found = [] if table is None else [pickle.loads(x) for x in table.column(0).to_pylist()]
        if self._tensors is None:
            return found
        return {name: [row[i] for row in found] for i, name in enumerate(self._tensors)}

    def should_stop(self) -> bool:
        """Whether there are no more elements."""
        return self._rows.should_stop()

    def batch_results(self, results: Sequence[Any]) -> None:
        """Gives the results of the last batch: one for each element, in order.

        Raises:
            ConfigError: The feed is for training.
        """
        if self._train:
            raise ConfigError(
                "a feed for training takes no results",
                expected="ctx.get_data_feed(train_mode=False) in a function for inference",
                received="train_mode=True",
            )
        self._results.extend(results)

    def terminate(self) -> None:
        """Gives no more elements; what is left is dropped."""
        self._rows.terminate()


class TFNodeContext:
    """Who a node is.

    Args:
        rows: Its feed; None with ``InputMode.TENSORFLOW``.
        default_fs: The default file system of Spark.

    Attributes:
        executor_id: Its number among all nodes.
        job_name: ``'chief'``, ``'worker'``, ``'ps'`` or ``'evaluator'``.
        task_index: Its number among the nodes of that name.
        cluster_spec: Name -> addresses, as in ``TF_CONFIG``.
        num_workers: Workers, the chief included.
        defaultFS: The default file system of Spark.
        working_dir: The directory in which it runs.
    """

    def __init__(self, rows: FedRows | None, default_fs: str) -> None:
        config = json.loads(os.environ["TF_CONFIG"])
        self.executor_id: int = current().rank
        self.job_name: str = config["task"]["type"]
        self.task_index: int = config["task"]["index"]
        self.cluster_spec: dict[str, list[str]] = config["cluster"]
        workers = ("chief", "master", "worker")
        self.num_workers = sum(len(self.cluster_spec.get(name, ())) for name in workers)
        self.defaultFS, self.working_dir = default_fs, os.getcwd()
        self.results: list[Any] = []
        self._rows = rows

    def absolute_path(self, path: str) -> str:
        """A path with the default file system in front, see :func:`hdfs_path`."""
        return hdfs_path(self, path)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """The node's rows.

        Args:
            train_mode: Whether no results are given.
            qname_in, qname_out: As TensorFlowOnSpark has them; there are no queues here.
            input_mapping: See :class:`DataFeed`.

        Raises:
            ConfigError: The cluster has ``InputMode.TENSORFLOW``.
        """
        if self._rows is None:
            raise ConfigError(
                "this node is fed no rows",
                expected="TFCluster.run(..., input_mode=InputMode.SPARK)",
                received="InputMode.TENSORFLOW",
            )
        return DataFeed(self._rows, self.results, train_mode, input_mapping)

    def release_port(self) -> None:
        """Does nothing: the node's port is free when the function begins."""


def hdfs_path(ctx: Any, path: str) -> str:
    """A path as an absolute one of the default file system.

    Args:
        ctx: Has ``defaultFS`` and ``working_dir``.
        path: With a scheme: returned as it is; relative: below the user's home, or below the
            working directory of a local file system.

    >>> from types import SimpleNamespace
    >>> hdfs_path(SimpleNamespace(defaultFS='hdfs://nn:8020', working_dir='/w'), '/data')
    'hdfs://nn:8020/data'
    """
    if path.startswith(_SCHEMES):
        return path
    fs = str(ctx.defaultFS).rstrip("/") if ctx.defaultFS != "file:///" else "file://"
    if path.startswith("/"):
        return fs + path
    if fs.startswith("file://"):
        return f"{fs}{ctx.working_dir}/{path}"
    return f"{fs}/user/{os.environ.get('USER', 'root')}/{path}"
