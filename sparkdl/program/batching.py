"""``batched_handler``, which answers several nodes' calls at once; ``CacherNode``, which keeps."""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdl.errors import DataError, WaitTimeoutError
from sparkdl.program.calls import list_methods
from sparkdl.program.messages import pieces_of
from sparkdl.program.nodes import CourierNode, Handle
from sparkdl.settings.values import require_int, require_seconds


def batched_handler(
    batch_size: int, *, max_parallelism: int = 1, timeout_s: float = 0.2, pad_batch: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a method of a ``CourierNode``'s object take calls together.

    The method is called with the arguments of several calls, stacked: numbers and arrays of shape
    ``s`` become one array of shape ``(n, *s)``, also inside of dicts, lists and tuples; all else
    (texts) a list of n. What it returns is taken apart in the same way: its element i, or those of
    the arrays in a dict or tuple, goes to caller i. A call that waits for others holds no thread of
    the node. Called in its own node it returns a ``concurrent.futures.Future``.

    Args:
        batch_size: The most calls of one batch, at least 1.
        max_parallelism: Batches that run at the same time.
        timeout_s: How long the first call of a batch waits for others.
        pad_batch: Whether a batch with fewer calls repeats its last one up to ``batch_size``, for
            functions compiled for one shape.

    Raises:
        ConfigError: A number that cannot be.
        DataError: In the callers: their arguments have different shapes, or what the method
            returned has not one element for each call.

    ::

        class Policy:
            @batched_handler(32)
            def act(self, observation):  # (n, 4) of n callers, who each gave (4,)
                return self.model(observation).argmax(-1)
    """
    require_int("batch_size", batch_size, 1)
    require_int("max_parallelism", max_parallelism, 1)
    require_seconds("timeout_s", timeout_s)
    limits = batch_size, max_parallelism, timeout_s, pad_batch
    return lambda function: _BatchedMethod(function, *limits)


@dataclass
class _WaitingCall:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    since: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


class _BatchedMethod:
    """The method in its class; each object has a batcher of its own."""

    def __init__(self, function: Callable[..., Any], *limits: Any) -> None:
        self._function, self._limits = function, limits
        self._place = f"_sparkdl_batches_{function.__name__}"
        self._lock = threading.Lock()
        self.__doc__ = function.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        with self._lock:
            batcher = vars(owner).get(self._place)
            if batcher is None:
                batcher = _Batcher(self._function, *self._limits)
                vars(owner)[self._place] = batcher
        return functools.partial(batcher.submit, owner)

    def __reduce__(self) -> tuple[Any, ...]:  # its lock and batchers stay where they are
        return _BatchedMethod, (self._function, *self._limits)


@dataclass(eq=False)
class _Batcher:
    function: Callable[..., Any]
    batch_size: int
    max_parallelism: int
    timeout_s: float
    pad_batch: bool
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: list[_WaitingCall] = field(default_factory=list)
    _threads: int = 0

    def submit(self, owner: object, *args: object, **kwargs: object) -> Future[Any]:
        """A call; ``owner`` lives as long as a thread works for it."""
        call = _WaitingCall(args, kwargs)
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
            if self._threads < self.max_parallelism:
                self._threads += 1
                threading.Thread(
                    target=self._work, args=(owner,), name="sparkdl-batches", daemon=True
                ).start()
        return call.future

    def _work(self, owner: object) -> None:
        while batch := self._take():
            self._run(owner, batch)

    def _take(self) -> list[_WaitingCall]:
        """The next calls; none if nobody waits, and then the thread has ended."""
        size = self.batch_size
        with self._changed:
            while self._waiting:
                left = self._waiting[0].since + self.timeout_s - time.monotonic()
                if left > 0 and len(self._waiting) < size:
                    self._changed.wait(left)
                    continue
                taken, self._waiting = self._waiting[:size], self._waiting[size:]
                batch = [call for call in taken if call.future.set_running_or_notify_cancel()]
                if batch:
                    return batch
            self._threads -= 1
            return []

    def _run(self, owner: object, batch: list[_WaitingCall]) -> None:
        try:
            name = self.function.__name__
            calls = batch + [batch[-1]] * (self.batch_size - len(batch) if self.pad_batch else 0)
            args, kwargs = _stacked([(call.args, call.kwargs) for call in calls], name)
            told = batch[0].context.run(self.function, owner, *args, **kwargs)
            results = [_element(told, i, len(calls), name) for i in range(len(batch))]
        except BaseException as error:
            for call in batch:
                call.future.set_exception(error)
            return
        for call, result in zip(batch, results, strict=True):
            call.future.set_result(result)


def _stacked(things: list[Any], name: str) -> Any:
    first = things[0]
    if isinstance(first, dict) and all(
        isinstance(thing, dict) and thing.keys() == first.keys() for thing in things
    ):
        return {key: _stacked([thing[key] for thing in things], name) for key in first}
    if isinstance(first, (list, tuple)) and all(
        type(thing) is type(first) and len(thing) == len(first) for thing in things
    ):
        parts = [_stacked(list(part), name) for part in zip(*things, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    numeric = [isinstance(thing, (bool, int, float, np.ndarray, np.generic)) for thing in things]
    if all(numeric) and len({np.shape(thing) for thing in things}) == 1:
        return np.stack([np.asarray(thing) for thing in things])
    if any(numeric) or isinstance(first, (dict, list, tuple)):
        raise DataError(
            f"calls of {name} cannot be put into one batch",
            expected="arguments of one form and shape from all callers",
            received=", ".join(sorted({_form(thing) for thing in things})),
        )
    return things


def _form(thing: Any) -> str:
    if isinstance(thing, (dict, list, tuple)):
        keys = f" {sorted(map(str, thing))}" if isinstance(thing, dict) else ""
        return f"{type(thing).__name__} of {len(thing)}{keys}"
    return f"{type(thing).__name__} of shape {np.shape(thing)}"


def _element(told: Any, index: int, count: int, name: str) -> Any:
    if told is None:
        return None
    if isinstance(told, dict):
        return {key: _element(value, index, count, name) for key, value in told.items()}
    if isinstance(told, tuple):
        parts = [_element(value, index, count, name) for value in told]
        return type(told)(*parts) if hasattr(told, "_fields") else tuple(parts)
    try:
        size = len(told)
    except TypeError:
        size = -1
    if size != count:
        raise DataError(
            f"{name} has not returned one element for each call",
            expected=f"{count} elements: an array, a list, or a dict or tuple of these",
            received=f"{type(told).__name__}" + (f" of {size}" if size >= 0 else ""),
        )
    return told[index]


_MAX_RESULTS = 1024


class Cacher:
    """Passes calls on to a node and gives each result again for some time.

    Calls with the same arguments that come while one is on its way wait for that one. An error is
    raised in all of them and not kept.

    Args:
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

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the node itself."""
        return self._call("__call__", args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        key = b"".join(pieces_of((name, args, sorted(kwargs.items()))))
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
                expected=f"a result within {self._timeout_s:g} s", received="none",
                hint="CacherNode(..., source_timeout_s=...) is the limit",
            ) from error  # fmt: skip


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
