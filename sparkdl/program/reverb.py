"""``ReverbNode``: a server of dm-reverb as a node, where that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.program.nodes import CourierNode
from sparkdl.program.running import wait_for_stop


class ReverbServing:
    """Runs a server of reverb until the program stops.

    Args:
        priority_tables_fn: Makes the server's tables, where the node runs.
        host: The address that clients of it are told.
    """

    def __init__(self, priority_tables_fn: Callable[[], Sequence[Any]], host: str) -> None:
        self._server = _reverb().Server(tables=list(priority_tables_fn()))
        self._address = f"{host}:{self._server.port}"

    def address(self) -> str:
        """Host and port, for ``reverb.Client(node.address())``."""
        return self._address

    def run(self) -> None:
        """Serves until the program stops."""
        wait_for_stop()
        self._server.stop()


class ReverbNode(CourierNode):
    """A node that runs a server of dm-reverb; other nodes call its ``address()``.

    Reverb has no secret and no encryption: whoever reaches its port may use it. Without reverb,
    :class:`~sparkdl.program.ReplayNode` does the same job.

    Args:
        priority_tables_fn: Called where the node runs; returns a list of ``reverb.Table``.
        host: The address of the node's machine that others connect to.

    Raises:
        ConfigError: dm-reverb is not installed here.
    """

    def __init__(
        self, priority_tables_fn: Callable[[], Sequence[Any]], host: str = "127.0.0.1"
    ) -> None:
        _reverb()
        super().__init__(ReverbServing, priority_tables_fn, host)


def _reverb() -> Any:
    try:
        return importlib.import_module("reverb")
    except ImportError as error:
        raise ConfigError(
            "ReverbNode needs dm-reverb",
            expected="a package 'reverb' that can be imported",
            received=str(error),
            hint="pip install dm-reverb, or ReplayNode: uniform, prioritised and FIFO replay "
            "without it",
        ) from error
