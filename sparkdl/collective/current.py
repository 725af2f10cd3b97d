"""The communicator of the function that runs here now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.solo import SoloCommunicator

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
