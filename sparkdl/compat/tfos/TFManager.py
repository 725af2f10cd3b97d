"""The store of a node beside its function: values by name, and queues."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any, Protocol

from sparkdl.errors import ConfigError, WaitTimeoutError


class Marker:
    """No element."""


class EndPartition(Marker):
    """The end of a partition: a batch for inference does not reach beyond it."""


_QUEUES = ("input", "output", "error")
_WAIT_S = 600.0


class Elements(Protocol):
    """The source of the elements of a node's feed, and the place that its results go to."""

    def take(self, count: int, train_mode: bool) -> list[Any]:
        """The next elements: at most ``count``, fewer at an end, none when all are taken."""

    def give(self, results: Sequence[Any]) -> None:
        """Takes the results of elements, in their order."""

    def should_stop(self) -> bool:
        """Whether there are no more elements."""

    def terminate(self) -> None:
        """Gives no more elements."""


class TFManager:
    """``ctx.mgr``: values and queues of one node's process.

    TensorFlowOnSpark has them in a process beside the node, for the jobs that feed it. No job does
    that here: they are the process' own, for all of its threads; :meth:`get` is the value itself.

    Args:
        queues: Names of the queues.
        elements: The elements that the queue ``'input'`` would hold, if Spark feeds the node.
    """

    def __init__(self, queues: Sequence[str] = _QUEUES, elements: Elements | None = None) -> None:
        self._values: dict[str, Any] = {"state": "running"}
        self._queues: dict[str, queue.Queue[Any]] = {name: queue.Queue() for name in queues}
        self._elements = elements

    def get(self, key: str) -> Any:
        """The value that was set; None if none was. ``'state'`` is ``'running'`` at first."""
        return self._values.get(key)

    def set(self, key: str, value: object) -> None:
        self._values[key] = value

    def get_queue(self, qname: str) -> queue.Queue[Any] | None:
        """A queue with ``put``, ``get``, ``task_done`` and ``join``; None if there is none."""
        return self._queues.get(qname)

    def elements(self, qname_in: str, qname_out: str) -> Elements:
        """The elements of a feed: Spark's rows, or those put into a queue of this process.

        Raises:
            ConfigError: There are no rows, and no such queue.
        """
        if self._elements is not None and qname_in == "input":
            return self._elements
        taken, given = self.get_queue(qname_in), self.get_queue(qname_out)
        if taken is None:
            raise ConfigError(
                "this node is fed no rows",
                expected="TFCluster.run(..., input_mode=InputMode.SPARK), or the name of a queue "
                f"among {sorted(self._queues)}",
                received=f"qname_in={qname_in!r}",
            )
        return _QueueElements(self, taken, given)


class _QueueElements:
    """The elements that a thread of this process puts into a queue; None is the end."""

    def __init__(
        self, mgr: TFManager, taken: queue.Queue[Any], given: queue.Queue[Any] | None
    ) -> None:
        self._mgr, self._taken, self._given = mgr, taken, given
        self._ended = False

    def take(self, count: int, train_mode: bool) -> list[Any]:
        found: list[Any] = []
        while len(found) < count and not self._ended:
            try:
                element = self._taken.get(timeout=_WAIT_S)
            except queue.Empty as error:
                raise WaitTimeoutError(
                    "nobody fills the queue of a feed",
                    expected=f"an element within {_WAIT_S:g} s, or None at the end",
                    received="nothing",
                ) from error
            self._taken.task_done()
            if element is None:
                self._ended = True
            elif not isinstance(element, EndPartition):
                found.append(element)
            elif not train_mode and found:
                break
        return found

    def give(self, results: Sequence[Any]) -> None:
        if self._given is None:
            raise ConfigError(
                "the results of a feed have nowhere to go",
                expected="the name of a queue as qname_out", received="the name of none",
            )  # fmt: skip
        for result in results:
            self._given.put(result)

    def should_stop(self) -> bool:
        return self._ended

    def terminate(self) -> None:
        self._mgr.set("state", "terminating")
        self._ended = True
        while True:
            try:
                self._taken.get_nowait()
            except queue.Empty:
                return
            self._taken.task_done()


def start(authkey: bytes, queues: Sequence[str], mode: str = "local") -> TFManager:
    """A manager for this process, to fill the queues of a ``DataFeed`` by hand, as tests do.

    Args:
        authkey: As TensorFlowOnSpark has it; nobody connects.
        queues: Names of its queues.
        mode: ``'local'``.

    Raises:
        ConfigError: Another mode.
    """
    if mode != "local":
        raise _nobody_connects(f"mode={mode!r}", "mode='local'")
    return TFManager(queues)


def connect(address: object, authkey: bytes) -> TFManager:
    """Refused: nobody connects to a manager.

    Raises:
        ConfigError: Always.
    """
    raise _nobody_connects(f"connect({address!r})", "ctx.mgr in the node's own process")


def _nobody_connects(received: str, expected: str) -> ConfigError:
    return ConfigError(
        "other processes cannot use a node's manager", expected=expected, received=received,
        hint="sparkdl.program has nodes that call each other: CourierNode, launch",
    )  # fmt: skip
