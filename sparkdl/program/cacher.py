"""``CacherNode``: stands between many callers and one node, and calls it only now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from sparkdl.errors import WaitTimeoutError
from sparkdl.program.calls import list_methods
from sparkdl.program.messages import pieces_of
from sparkdl.program.nodes import CourierNode, Handle
from sparkdl.settings.values import require_seconds

_MAX_RESULTS = 1024


class Cacher:
    """Passes calls on to a node and gives each result again for some time.

    Calls with the same arguments that come while one is on its way wait for that one. An error is
    raised in all of them and not kept.

    Args:
        source: The node.
        refresh_interval_ms: How old a result may be.
        timeout_s: How long a call of the source may take; then it is taken back, all that wait for
            it get WaitTimeoutError, and the next caller asks again. None for ever.
    """

    def __init__(self, source: Any, refresh_interval_ms: float, timeout_s: float | None) -> None:
        self._source, self._interval_s = source, refresh_interval_ms / 1000
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._results: dict[bytes, tuple[float, Future[Any]]] = {}

    def __dir__(self) -> list[str]:
        return list_methods(self._source)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the node itself."""
        return self._call("__call__", args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        pieces = pieces_of((name, args, sorted(kwargs.items())))
        key = b"".join(pieces)
        with self._lock:
            asked, future = self._results.get(key, (0.0, None))
            fresh = future is not None and time.monotonic() - asked < self._interval_s
            if future is None or (future.done() and not fresh):
                if len(self._results) >= _MAX_RESULTS:
                    self._results.clear()
                future = getattr(self._source.futures, name)(*args, **kwargs)
                asked = time.monotonic()
                self._results[key] = asked, future
        try:
            return self._result(name, future, asked)
        except BaseException:
            with self._lock:
                if self._results.get(key, (0.0, None))[1] is future:
                    del self._results[key]
            raise

    def _result(self, name: str, future: Future[Any], asked: float) -> Any:
        if self._timeout_s is None:
            return future.result()
        try:
            return future.result(max(0.0, asked + self._timeout_s - time.monotonic()))
        except (TimeoutError, CancelledError) as error:
            if future.done() and not future.cancelled():  # the source raised a TimeoutError
                raise
            future.cancel()  # for all that wait for it
            raise WaitTimeoutError(
                f"the source of a cacher does not answer {name}",
                expected=f"a result within {self._timeout_s:g} s",
                received="none",
                hint="CacherNode(..., source_timeout_s=...) is the limit",
            ) from error


class CacherNode(CourierNode):
    """A :class:`Cacher` as a node: give its handle to the callers instead of the source's.

    Args:
        source: Handle of the node whose methods are called.
        refresh_interval_ms: How old a result may be.
        source_timeout_s: How long a call of the source may take; None for ever.
        client_timeout_s: How long a call of the cacher may take; None for ever.
    """

    def __init__(
        self,
        source: Handle,
        refresh_interval_ms: float = 200.0,
        *,
        source_timeout_s: float | None = 60.0,
        client_timeout_s: float | None = None,
    ) -> None:
        require_seconds("refresh_interval_ms", refresh_interval_ms)
        if source_timeout_s is not None:
            require_seconds("source_timeout_s", source_timeout_s)
        super().__init__(
            Cacher, source, refresh_interval_ms, source_timeout_s,
            client_timeout_s=client_timeout_s, threads=256,
        )  # fmt: skip
