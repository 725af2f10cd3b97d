"""The sinks of a fit: the user's, and those that stand for every fit; what raises is contained."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from sparkdl.errors import ConfigError
from sparkdl.progress.events import Event, SearchBegan, Sink, TrainingBegan

EventFunction = Callable[[Event], object]
"""A sink of one's own: a function of one event."""
GivenSink = Sink | EventFunction


@runtime_checkable
class ModelSink(Protocol):
    """A sink that also wants the model that is trained."""

    def take_model(self, model: Callable[[], object]) -> None:
        """Takes a function that gives the Keras model of the fit that begins now: the trained one
        when the training has ended."""


@runtime_checkable
class SpanSink(Protocol):
    """A sink that may want every phase of every rank, with its times."""

    @property
    def wants_spans(self) -> bool:
        """Whether ranks are to return them."""


class GuardedSink:
    """Hands events on, and contains what a sink raises, which is no reason to lose a training.

    What it raises when the training begins is raised to the user, before a job starts: a folder
    that cannot be written, for example. Later it is a warning, and the sink is told nothing more.
    """

    def __init__(self, sink: GivenSink) -> None:
        self._sink = sink
        self._broken = False
        self.wants_spans = isinstance(sink, SpanSink) and sink.wants_spans

    @property
    def wants_progress(self) -> bool:
        """The sink's own word; a function wants all."""
        return not self._broken and (callable(self._sink) or self._sink.wants_progress)

    def take_model(self, model: Callable[[], object]) -> None:
        if isinstance(self._sink, ModelSink):
            self._sink.take_model(model)

    def handle(self, event: Event) -> None:
        if self._broken:
            return
        try:
            if callable(self._sink):
                self._sink(event)
            else:
                self._sink.handle(event)
        except Exception as error:
            self._broken = True
            if isinstance(event, (TrainingBegan, SearchBegan)):
                raise
            name = getattr(self._sink, "__name__", type(self._sink).__name__)
            warnings.warn(
                f"the sink {name} raised {type(error).__name__}: {error}; it is told nothing more "
                "of this fit, which goes on",
                RuntimeWarning,
                stacklevel=2,
            )


SinkMaker = Callable[[], GivenSink]
_standing: list[SinkMaker] = []
_standing_lock = threading.Lock()


_without_standing = ContextVar("_without_standing", default=False)


def add_standing(make: SinkMaker) -> None:
    """From now on every fit of this process tells a sink of its own that ``make`` makes."""
    with _standing_lock:
        _standing.append(make)


def remove_standing(make: SinkMaker) -> None:
    """The counterpart of :func:`add_standing`; nothing if it was not added."""
    with _standing_lock:
        _standing[:] = [other for other in _standing if other != make]


@contextmanager
def without_standing() -> Iterator[None]:
    """Fits that begin here, in this thread, are not told to the sinks that stand for every fit: the
    search whose trials they are tells these itself."""
    before = _without_standing.set(True)
    try:
        yield
    finally:
        _without_standing.reset(before)


def sinks_of(given: Iterable[GivenSink], model: Callable[[], object]) -> list[GuardedSink]:
    """The sinks of a fit that begins now.

    Raises:
        ConfigError: Something in ``given`` is no sink.
    """
    asked = list(given)
    for sink in asked:
        has_both = hasattr(sink, "handle") and hasattr(sink, "wants_progress")
        if isinstance(sink, type) or not (callable(sink) or has_both):
            raise ConfigError(
                "sinks has something that is no sink",
                expected="functions of one event, or objects with handle(event), wants_progress",
                received=f"the class {sink.__name__}" if isinstance(sink, type) else repr(sink),
                hint="sinks=[sparkdl.tracking.TensorBoard('logs'), print]",
            )
    with _standing_lock:
        makers = [] if _without_standing.get() else list(_standing)
    found = [GuardedSink(sink) for sink in (*(make() for make in makers), *asked)]
    for guarded in found:
        guarded.take_model(model)
    return found


class Thinning:
    """Lets through what comes at growing distances: ``interval_s`` first, a ``most``-th of the time
    since the beginning later. With 500 that is some 500 records in the first minutes, and another
    3,000 in a day.

    Args:
        interval_s: Least time between two records.
        most: How many times the distance fits into the time since the beginning.
    """

    def __init__(self, interval_s: float = 0.5, most: float = 500) -> None:
        self._interval_s, self._most = interval_s, most
        self._began: float | None = None
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Whether to keep a record that comes at ``now`` (in seconds)."""
        if self._began is None:
            self._began = self._due = now
        if now < self._due:
            return False
        self._due = now + max(self._interval_s, (now - self._began) / self._most)
        return True
