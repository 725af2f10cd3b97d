"""Every error that sparkdl raises, as one tree.

::

    SparkDLError
    ├── ConfigError (ValueError)          an argument that cannot be used, found before any job
    │   ├── UnknownNameError              a name that is not in the list of known ones
    │   │   └── UnknownArgumentError (TypeError)   an argument that a call does not take
    │   ├── ParamTypeError (TypeError)    a value of another type than the Param of a stage has
    │   ├── UnpicklableError (TypeError)  an object that stays in its process, and was to be sent
    │   ├── NoParamError (AttributeError) an argument of a stage that no grid can vary
    │   └── ReadOnlyError (AttributeError)   an attribute that cannot be assigned to
    ├── DataError (ValueError)            the data do not fit the model or the call
    ├── ModelError (ValueError)           the model cannot be trained or sent as it is
    ├── ResourceError (RuntimeError)      too few slots, no GPU, a port in use
    ├── ProtocolError (RuntimeError)      a frame that the peer should not have sent
    │   └── AuthenticationError (PermissionError)   a token that is not the run's, or none
    ├── TransportError (ConnectionError)  the other side cannot be reached any more, or never was
    │   └── WaitTimeoutError (TimeoutError)  a wait that passed its limit; names who was missing
    └── WorkerError (RuntimeError)        a worker raised; carries its rank and traceback

Each message has four beats: what failed and where; what was expected; what was received; a hint.
Every error survives pickling, so that an executor can raise it and the driver can show it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pickle import PicklingError
from types import TracebackType
from typing import Any, TypeVar

BEATS = ("what", "expected", "received", "hint")
MAX_BEAT_CHARS = 10_000
"""The longest text that tells of an error over the network."""
_Error = TypeVar("_Error", bound=BaseException)
_CHAIN = 8
"""Exceptions that are looked at, each the cause or the context of the one before."""
_OWN, _PYTHON = os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep
_LIBRARY = re.compile(
    r"[/\\](?:[a-z]+-packages|\w+\.zip)[/\\]"
    r"(pyspark|py4j|keras|tensorflow|jax|torch|numpy|pyarrow|cloudpickle)[/\\]"
)


class Cause(StrEnum):
    """The kind of failure that ended a rank."""

    OWN = "own"
    """The rank itself failed: the user's code, the data, the model."""
    LOST = "lost"
    """The connection to another rank or to the server ended: the cause is there."""
    JOINED = "joined"
    """Numbers that came from another rank were not finite."""
    TIMEOUT = "timeout"
    """Others did not come in time."""
    UNREACHED = "unreached"
    """The driver could not be reached; the rank has not begun."""

    @property
    def secondary(self) -> bool:
        """Whether another rank's failure is most likely behind it."""
        return self in (Cause.LOST, Cause.JOINED)

    @classmethod
    def named(cls, name: object) -> Cause:
        """The cause of that name; :attr:`OWN` for a name that is not known."""
        return next((cause for cause in cls if cause.value == name), cls.OWN)


class SparkDLError(Exception):
    """Base of all errors of this library; catching it catches them all.

    Args:
        what: What failed, and where.
        expected: What would have been accepted.
        received: What was found instead.
        hint: What to do about it.
    """

    cause: Cause = Cause.OWN

    def __init__(
        self, what: str, *, expected: str = "", received: str = "", hint: str = ""
    ) -> None:
        self.what, self.expected, self.received, self.hint = what, expected, received, hint
        super().__init__(what)

    def __str__(self) -> str:
        said = [(name, getattr(self, name)) for name in BEATS[1:]]
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in said if text)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, dict(self.__dict__))


def beats_of(error: BaseException) -> dict[str, str] | None:
    """The class and the beats of an error of this library, as what JSON can hold; see `raised_of`.

    None of any other error, and of a WorkerError, which tells of another error.
    """
    if not isinstance(error, SparkDLError) or isinstance(error, WorkerError):
        return None
    return {"type": type(error).__name__, **{name: getattr(error, name) for name in BEATS}}


def raised_of(beats: Mapping[str, object], rank: int) -> SparkDLError | None:
    """The error that :func:`beats_of` described on a rank; None if there is no such class.

    Args:
        beats: As they came over the network: each text is cut after :data:`MAX_BEAT_CHARS`.
    """
    cls: Any = globals().get(str(beats.get("type", "")))
    is_error = isinstance(cls, type) and issubclass(cls, SparkDLError)
    if not is_error or issubclass(cls, WorkerError):
        return None
    texts = {name: str(beats.get(name, ""))[:MAX_BEAT_CHARS] for name in BEATS}
    texts["what"] += f" (worker {rank})"
    return _rebuild(cls, texts["what"], texts)


def _rebuild(cls: type[SparkDLError], what: str, state: dict[str, Any]) -> SparkDLError:
    base = OSError if issubclass(cls, OSError) else Exception
    error: SparkDLError = base.__new__(cls)
    Exception.__init__(error, what)
    error.__dict__.update(state)
    return error


def fold(error: _Error) -> _Error:
    """The exception, in whose traceback, and those of its causes, only users' frames are left."""
    seen: BaseException | None = error
    for _ in range(_CHAIN):
        if seen is None:
            break
        frames: list[TracebackType] = []
        at, own = seen.__traceback__, None
        while at is not None:
            frames, at = [*frames, at], at.tb_next
        for at in reversed(frames):
            if not package_of(at.tb_frame.f_code.co_filename):
                own = TracebackType(own, at.tb_frame, at.tb_lasti, at.tb_lineno)
        seen.__traceback__ = own
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return error


def package_of(path: str) -> str:
    """The known library that a file of code is of; empty for one of the user's."""
    if path.startswith(_OWN):
        return "sparkdl"
    found = _LIBRARY.search(path)
    if found:
        return found[1]
    return "Python" if path.startswith(("<frozen", _PYTHON)) and "-packages" not in path else ""


class ConfigError(SparkDLError, ValueError):
    """An argument that cannot be used, found before any Spark job starts."""


class UnknownNameError(ConfigError):
    """A name that is not in the list of known ones.

    Args:
        kind: What the name stands for, e.g. ``'mode'``.
        name: The name received.
        known: The names that would have been accepted.
        hint: What to do about it; by default the closest of the known names.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str], hint: str = "") -> None:
        names = [str(k) for k in known]
        close = closest(str(name), names)
        super().__init__(
            f"unknown {kind} {name!r}",
            expected="one of " + ", ".join(repr(k) for k in names) if names else "no such names",
            received=repr(name),
            hint=hint or (f"did you mean {close!r}?" if close else ""),
        )


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant; None if none is close."""
    names, text = list(known), name.lower()
    by_lower_case = {k.lower(): k for k in reversed(names)}
    begun = [k for k in names if len(text) > 2 and k.lower().startswith(text)]
    # What a name is about is its last word: worker -> num_workers rather than worker_port.
    begun = [k for k in names if k.lower().rpartition("_")[2] in (text, f"{text}s")] + begun
    close = difflib.get_close_matches(text, by_lower_case, n=1)
    return begun[0] if begun else by_lower_case[close[0]] if close else None


class UnknownArgumentError(UnknownNameError, TypeError):
    """An argument that a call does not take; the message lists those that it takes."""


class ParamTypeError(ConfigError, TypeError):
    """A value of another type than the Param of a pipeline stage has."""


class UnpicklableError(ConfigError, PicklingError, TypeError):
    """An object that cannot be sent to another process or copied, and was to be."""


class NoParamError(ConfigError, AttributeError):
    """An argument of a pipeline stage that is no Param, where a Param was asked for."""


class ReadOnlyError(ConfigError, AttributeError):
    """An attribute that is settled when its object is made, and was assigned to later."""


class DataError(SparkDLError, ValueError):
    """The data do not fit the model or the call."""


class ModelError(SparkDLError, ValueError):
    """The model cannot be trained or sent as it is."""


class ResourceError(SparkDLError, RuntimeError):
    """Too few slots, no GPU, a port in use, a path that cannot be written."""


class ProtocolError(SparkDLError, RuntimeError):
    """A frame that the peer should not have sent: malformed, too large, out of order."""


class RowsAheadError(ProtocolError):
    """Rows of tables have steps that the weights lost together with all workers."""


class AuthenticationError(ProtocolError, PermissionError):
    """The peer sent no token, or one that is not the run's."""


class TransportError(SparkDLError, ConnectionError):
    """The other side cannot be reached any more, or never was."""

    cause = Cause.LOST


class WaitTimeoutError(TransportError, TimeoutError):
    """A wait that passed its limit; the message names who was missing."""

    cause = Cause.TIMEOUT


class WorkerError(SparkDLError, RuntimeError):
    """A worker raised; the message ends with that worker's own traceback, and the hint once more.

    Args:
        rank: The worker's rank; below 0 where it is no single worker's failure.
        error: The exception as one line, e.g. ``"ValueError: bad row"``; what happened to all of
            them where there is no rank.
        traceback: The worker's formatted traceback.
        beats: The result of :func:`beats_of`, where the worker raised an error of this library.
        cause: What kind of failure it was on that worker.
    """

    def __init__(
        self,
        rank: int,
        error: str,
        traceback: str = "",
        hint: str = "",
        beats: dict[str, str] | None = None,
        cause: Cause = Cause.OWN,
    ) -> None:
        super().__init__(error if rank < 0 else f"worker {rank} failed: {error}", hint=hint)
        self.rank, self.error, self.traceback = rank, error, traceback
        self.beats, self.cause = beats, cause

    def __str__(self) -> str:
        text = super().__str__()
        if not self.traceback:
            return text
        of = f"Traceback on worker {self.rank}" if self.rank >= 0 else "What Spark said"
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{text}\n\n{of}:\n{self.traceback.rstrip()}{hint}"
