"""``ReverbNode``: a server of dm-reverb as a node, where that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.program.nodes import CourierNode
from sparkdl.program.running import running, wait_for_stop
from sparkdl.settings.values import require_seconds


class ReverbServing:
    """Runs a server of reverb until the program stops.

    Args:
        priority_tables_fn: Makes the server's tables, where the node runs.
        checkpoint_ctor: Makes its ``reverb.checkpointers`` object there; None: the server's own.
        checkpoint_minutes: Time between two checkpoints; None: only those that clients ask for.
        host: The address that clients of it are told; None: the one that calls of the node go to.
    """

    def __init__(
        self,
        priority_tables_fn: Callable[[], Sequence[Any]],
        checkpoint_ctor: Callable[[], Any] | None,
        checkpoint_minutes: float | None,
        host: str | None,
    ) -> None:
        options = {} if checkpoint_ctor is None else {"checkpointer": checkpoint_ctor()}
        self._server = _reverb().Server(tables=list(priority_tables_fn()), **options)
        self._minutes = checkpoint_minutes
        host = host or running().host
        shown = f"[{host}]" if ":" in host else host
        self._address = f"{shown}:{self._server.port}"

    def address(self) -> str:
        """Host and port, for ``reverb.Client(node.address())``."""
        return self._address

    def run(self) -> None:
        """Serves until the program stops, and writes checkpoints meanwhile."""
        wait_s = None if self._minutes is None else 60 * self._minutes
        while not wait_for_stop(wait_s):
            _reverb().Client(f"localhost:{self._server.port}").checkpoint()
        self._server.stop()


class ReverbNode(CourierNode):
    """A node that runs a server of dm-reverb; other nodes call its ``address()``.

    Reverb has no secret and no encryption: whoever reaches its port may use it. Without reverb,
    :class:`~sparkdl.program.ReplayNode` does the same job.

    Args:
        priority_tables_fn: Called where the node runs; returns a list of ``reverb.Table``.
        checkpoint_ctor: Called where the node runs; returns a checkpointer of reverb, such as
            ``reverb.checkpointers.DefaultCheckpointer(folder)``. None: the server's own.
        checkpoint_time_delta_minutes: Time between two checkpoints; None: only those that a client
            asks for (``reverb.Client(address).checkpoint()``).
        host: The address of the node's machine that others connect to; None: the one that calls of
            this node go to (127.0.0.1 where all nodes are on one machine).

    Raises:
        ConfigError: dm-reverb is not installed here, or a time that is none.
    """

    def __init__(
        self,
        priority_tables_fn: Callable[[], Sequence[Any]],
        checkpoint_ctor: Callable[[], Any] | None = None,
        checkpoint_time_delta_minutes: float | None = None,
        *,
        host: str | None = None,
    ) -> None:
        _reverb()
        minutes = checkpoint_time_delta_minutes
        if minutes is not None:
            require_seconds("checkpoint_time_delta_minutes", minutes)
        super().__init__(ReverbServing, priority_tables_fn, checkpoint_ctor, minutes, host)


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
