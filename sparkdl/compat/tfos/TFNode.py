"""The tools of a function on its node: its context, and the rows that it is fed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sparkdl.compat.tfos.TFManager import TFManager
from sparkdl.errors import ConfigError
from sparkdl.settings.values import require_int

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:/")
_WORKERS = ("chief", "master", "worker")


class DataFeed:
    """The rows of a node, as the elements of the RDD that ``train`` or ``inference`` got.

    Args:
        mgr: The node's manager, ``ctx.mgr``.
        train_mode: Whether results are refused.
        qname_in: ``'input'``: the rows; or another queue of the manager.
        qname_out: Where results go, if the elements come from a queue.
        input_mapping: Column -> name of a tensor: ``next_batch`` gives a dict of columns then. An
            element's values belong to the columns in their alphabetical order.

    Raises:
        ConfigError: The node is fed no rows, and has no such queue.
    """

    def __init__(
        self,
        mgr: TFManager,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self._elements, self._train = mgr.elements(qname_in, qname_out), train_mode
        self._tensors = None
        if input_mapping is not None:
            self._tensors = [input_mapping[column] for column in sorted(input_mapping)]

    def next_batch(self, batch_size: int) -> Any:
        """The next elements: a list, or a dict of lists by tensor if there is a mapping.

        It has fewer than ``batch_size`` at the end of an epoch or partition, none after the last.
        """
        found = self._elements.take(require_int("batch_size", batch_size, 1), self._train)
        if self._tensors is None:
            return found
        return {name: [row[i] for row in found] for i, name in enumerate(self._tensors)}

    @property
    def done_feeding(self) -> bool:
        return self.should_stop()

    def should_stop(self) -> bool:
        """Whether there are no more elements."""
        return self._elements.should_stop()

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
        self._elements.give(results)

    def terminate(self) -> None:
        """Gives no more elements; what is left is dropped."""
        self._elements.terminate()


class TFNodeContext:
    """The identity of a node.

    Args:
        executor_id: Its number among all nodes.
        job_name: ``'chief'`` (``'master'`` if the cluster was made with that name), ``'worker'``,
            ``'ps'`` or ``'evaluator'``.
        task_index: Its number among the nodes of that name.
        cluster_spec: Name -> addresses, as in ``TF_CONFIG`` (where a master is the chief).
        defaultFS: The default file system of Spark.
        working_dir: The directory in which it runs.
        mgr: Its values and queues.

    Attributes:
        num_workers: Workers, the chief included.
        worker_num: The old name of ``executor_id``.
        tmp_socket: None: no port is held, see :meth:`release_port`.
    """

    tmp_socket = None

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, list[str]] = MappingProxyType({}),
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: TFManager | None = None,
    ) -> None:
        self.executor_id, self.job_name, self.task_index = executor_id, job_name, task_index
        self.worker_num = executor_id
        self.cluster_spec = dict(cluster_spec)
        self.num_workers = sum(len(self.cluster_spec.get(name, ())) for name in _WORKERS)
        self.defaultFS, self.working_dir = defaultFS, working_dir
        self.mgr = TFManager(queues=()) if mgr is None else mgr

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
        """The node's rows; the arguments are those of :class:`DataFeed`.

        Raises:
            ConfigError: The cluster has ``InputMode.TENSORFLOW``.
        """
        return DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def release_port(self) -> None:
        """Nothing: the node's port in ``cluster_spec`` is free when the function is called."""


def hdfs_path(ctx: Any, path: str) -> str:
    """A path as an absolute one of the default file system.

    Args:
        ctx: Has ``defaultFS`` and ``working_dir``.
        path: With a scheme: returned as it is; relative: below the user's home, or below the
            working directory of a local file system.

    >>> from types import SimpleNamespace
    >>> hdfs_path(SimpleNamespace(defaultFS='hdfs://nn:8020', working_dir='/w'), '/data')
    'hdfs://nn:8020/data'
    >>> hdfs_path(SimpleNamespace(defaultFS='file://', working_dir='/w'), 'data')
    'file:///w/data'
    """
    if _SCHEME.match(path):
        return path
    given = str(ctx.defaultFS)
    fs = "file://" if given.rstrip("/") == "file:" else given.rstrip("/")
    if path.startswith("/"):
        return fs + path
    if fs.startswith("file://"):
        return f"{fs}{ctx.working_dir}/{path}"
    return f"{fs}/user/{os.environ.get('USER', 'root')}/{path}"
