"""The communicator of the function that runs here now; alone, that of a world of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from sparkdl.collective.arithmetic import Array, put_scaled, reduction_factors
from sparkdl.collective.communicator import DEFAULT_TIMEOUT_S, Communicator, Member
from sparkdl.errors import ConfigError


class SoloCommunicator(Communicator):
    """The world of one: every operation as with many ranks, and no one to talk to.

    >>> SoloCommunicator().all_reduce([1.0, 3.0], 'weighted', weight=5.0)
    array([1., 3.])
    """

    name = "solo"

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(0, 1, timeout_s=timeout_s)

    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        put_scaled(source, reduction_factors(op, [weight])[0], target)

    _reduce_scatter = _all_reduce

    def _all_gather(self, source: Array) -> list[Array]:
        return [np.array(source)]

    def _all_to_all(self, parts: list[Array]) -> list[Array]:
        return [np.array(parts[0])]

    def _broadcast(self, target: Array, root: int) -> None:
        return

    def _barrier(self) -> None:
        return

    def _group(self, ranks: list[int]) -> Communicator:
        return SoloCommunicator(timeout_s=self._timeout_s)


class SoloConnector:
    """Makes a :class:`SoloCommunicator`; refuses more than one member."""

    def __init__(self, rank: int = 0, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.rank, self._timeout_s = rank, timeout_s

    def prepare(self) -> Member:
        """A member with no address: nobody connects."""
        return Member("", 0, "solo", communicator="solo")

    def connect(self, members: Sequence[Member], token: bytes) -> SoloCommunicator:
        if len(members) != 1 or self.rank != 0:
            raise ConfigError(
                "cannot connect the solo communicator", expected="one member, rank 0",
                received=f"{len(members)} members, rank {self.rank}",
                hint="communicator='builtin' connects any number of ranks",
            )  # fmt: skip
        return SoloCommunicator(timeout_s=self._timeout_s)

    def close(self) -> None:
        """Nothing to free."""


_current: Communicator | None = None


def current() -> Communicator:
    """The communicator among all ranks of this run; outside of any run a world of one.

    So the same training function runs under ``sparkdl.run``, under ``HorovodRunner`` and alone::

        import numpy as np
        import sparkdl

        def train():
            communicator = sparkdl.communicator()
            return communicator.all_reduce(np.ones(3), 'sum')   # size, on every rank

    It is closed when the function returns. One rank runs per process, and its threads share it.
    """
    return SoloCommunicator() if _current is None else _current


@contextlib.contextmanager
def use(communicator: Communicator) -> Iterator[None]:
    """Makes ``communicator`` the :func:`current` one of this process."""
    global _current
    before, _current = _current, communicator
    try:
        yield
    finally:
        _current = before
