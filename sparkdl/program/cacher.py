"""``CacherNode``: stands between many callers and one node, and calls it only now and then."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sparkdl.config import require_seconds
from sparkdl.program.nodes import CourierNode, Handle

_MAX_RESULTS = 1024


class Cacher:
    """Passes calls on to a node and gives each result again for some time.

    Calls with the same arguments that come while one is on its way wait for that one. An error is
    raised in all of them and not kept.

    Args:
        source: The node.
        refresh_interval_ms: How old a result may be.
    """

    def __init__(self, source: Any, refresh_interval_ms: float) -> None:
        self._source, self._interval_s = source, refresh_interval_ms / 1000
        self._lock = threading.Lock()
        self._results: dict[bytes, tuple[float, Future[Any]]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the node itself."""
        return self._call("__call__", args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        key = pickle.dumps((name, args, sorted(kwargs.items())))
        with self._lock:
            asked, future = self._results.get(key, (0.0, None))
            fresh = future is not None and time.monotonic() - asked < self._interval_s
            if future is None or (future.done() and not fresh):
                if len(self._results) >= _MAX_RESULTS:
                    self._results.clear()
                future = getattr(self._source.futures, name)(*args, **kwargs)
                self._results[key] = time.monotonic(), future
        try:
            return future.result()
        except BaseException:
            with self._lock:
                if self._results.get(key, (0.0, None))[1] is future:
                    del self._results[key]
            raise


class CacherNode(CourierNode):
    """A :class:`Cacher` as a node: give its handle to the callers instead of the source's.

    Args:
        source: Handle of the node whose methods are called.
        refresh_interval_ms: How old a result may be.
        client_timeout_s: How long a call may take; None for ever.
    """

    def __init__(
        self,
        source: Handle,
        refresh_interval_ms: float = 200.0,
        *,
        client_timeout_s: float | None = None,
    ) -> None:
        require_seconds("refresh_interval_ms", refresh_interval_ms)
        super().__init__(
            Cacher, source, refresh_interval_ms, client_timeout_s=client_timeout_s, threads=256
        )
