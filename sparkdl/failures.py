"""Why a rank failed: one envelope from the rank to whoever raises it, with the cause as a field.

A :class:`Failure` is made of an exception on the rank where it was raised. It travels as JSON, so
that nothing is unpickled where it arrives: in a result row, in a frame to the coordinator and from
there to all ranks, and, where only the text of an exception is passed on (by Spark, and by the
compiled calls of TensorFlow and JAX), encoded within that text. Where a rank fails the others soon
fail too, because they lose their connections to it: theirs are *secondary failures*, and the driver
raises the first cause.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from sparkdl.errors import (
    BEATS,
    MAX_BEAT_CHARS,
    Cause,
    SparkDLError,
    WorkerError,
    beats_of,
    package_of,
    raised_of,
)
from sparkdl.weights import NotFiniteError

SECONDARY_DELAY_S = 6.0
"""A rank with a secondary failure waits this long before it tells, so that the cause is first."""
MAX_TRACEBACK_CHARS = 100_000
"""The longest traceback that is taken from the network."""
_MARK, _END = "--sparkdl-failure--", "--end--"
_ENVELOPE = re.compile(rf"\n?{_MARK}[A-Za-z0-9+/=]*{_END}")
_ERROR_CHARS, _TRACEBACK_CHARS = 2000, 8000
_ENCODED_CHARS, _DECODED_BYTES = 1_000_000, 4_000_000
_CHAIN = 8
"""Exceptions that are looked at, each the cause or the context of the one before."""
_HOROVOD = ("HorovodInternalError", "Horovod has been shut down")
"""The words of Horovod's own code about a lost rank; a compiled step keeps this text alone."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_FRAME = re.compile(r'(?m)^  File "(.*?)", line .*\n(?:(?:    .*)?\n)*')
_FRAMES = re.compile(rf"(?m)(?:{_FRAME.pattern.removeprefix('(?m)')})+")
_NODE = re.compile(r"(?m)^Detected at node (\S+) defined at")
_LED = 6
"""Frames that are left of those before a fault within sparkdl."""


class RanksLost(WorkerError):
    """Ranks ended and nobody could say why: killed processes, lost executors."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Args:
        rank: The rank that failed; below 0 for a server, or where the rank is not known yet.
        error: The exception as one line; its begin is kept.
        traceback: The formatted traceback; its end is kept.
        cause: What kind of failure it was.
        beats: The result of :func:`sparkdl.errors.beats_of`, for an error of this library.
        lines: The last lines that the rank could not send to the driver.
        hint: What to do about it.
    """

    rank: int
    error: str
    traceback: str = ""
    cause: Cause = Cause.OWN
    beats: dict[str, str] | None = None
    lines: str = ""
    hint: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describes an exception on a rank."""
        told = _told(error)
        if told is not None:
            return told
        carried = failure_in(error)
        trace = _cut(folded(_without_envelope("".join(traceback.format_exception(error)))))
        if carried is not None:  # a framework kept the text alone
            return replace(carried, rank=rank, traceback=trace)
        if isinstance(error, WorkerError):  # it tells of a rank, this one or another
            heard = cls.heard(error)
            return replace(heard, traceback=_cut(heard.traceback))
        line = headline(_without_envelope(one_line(error)))[:_ERROR_CHARS]
        beats = beats_of(error)
        return cls(rank, line, trace, cause_of(error), None if beats is None else _texts(beats))

    @classmethod
    def heard(cls, error: WorkerError) -> Failure:
        """The counterpart of :meth:`worker_error`."""
        return cls(
            error.rank, error.error, error.traceback, error.cause, error.beats, hint=error.hint
        )

    @property
    def secondary(self) -> bool:
        """Whether the rank most likely failed because another rank had failed."""
        return self.cause.secondary

    def to_wire(self) -> dict[str, Any]:
        """The counterpart of :meth:`from_wire`: what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: Mapping[str, object], rank: int | None = None) -> Failure:
        """A failure as it came over the network; what is missing or of another type is left out.

        Args:
            rank: The rank that sent them, which they cannot change; None to take theirs.
        """
        given, beats = fields.get("rank"), fields.get("beats")
        trace = str(fields.get("traceback", ""))
        told = {name: str(fields.get(name, ""))[:MAX_BEAT_CHARS] for name in ("lines", "hint")}
        return cls(
            rank if rank is not None else given if isinstance(given, int) else -1,
            str(fields.get("error", "unknown error"))[:MAX_BEAT_CHARS],
            trace[-MAX_TRACEBACK_CHARS:], Cause.named(fields.get("cause")),
            _texts(beats) if isinstance(beats, dict) and beats else None, **told,
        )  # fmt: skip

    def to_json(self) -> str:
        """The counterpart of :meth:`from_json`."""
        return json.dumps(self.to_wire())

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """The counterpart of :meth:`to_json`.

        Raises:
            ValueError: It is no JSON object.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("a failure is a JSON object")
        return cls.from_wire(fields)

    def worker_error(self, hint: str = "") -> WorkerError:
        """The error that the driver raises for any exception of the user's function."""
        return WorkerError(
            self.rank, self.error, self.traceback, hint or self.hint, self.beats, self.cause
        )

    def library_error(self) -> SparkDLError:
        """The error that the driver raises: one of this library as itself, else a WorkerError."""
        raised = None if self.beats is None else raised_of(self.beats, self.rank)
        return raised or self.worker_error()


class ChildTraceback(Exception):
    """The cause of an exception that comes from a child process: what happened there.

    Args:
        failure: The exception as the child described it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"\n{self.failure.traceback}"


class RankFailure(RuntimeError):
    """Raised where only a text is passed on: it has a sentence for people and the envelope."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        who = f"rank {failure.rank} failed: " if failure.rank >= 0 else ""
        packed = base64.b64encode(zlib.compress(failure.to_json().encode())).decode()
        super().__init__(f"{who}{failure.error}\n{_MARK}{packed}{_END}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.failure,)


def carried(function: _Function) -> _Function:
    """The function for a compiled call of a framework, which keeps the text of an exception alone.

    An error of this library, and an update that is not finite, are raised as a
    :class:`RankFailure`, whose text holds all of it.
    """

    @functools.wraps(function)
    def call(*args: object) -> Any:
        try:
            return function(*args)
        except (SparkDLError, NotFiniteError) as error:
            # the framework adds the traceback itself
            raise RankFailure(replace(Failure.of(-1, error), traceback="")) from error

    return call  # type: ignore[return-value]


def failure_in(error: BaseException) -> Failure | None:
    """The failure that the text of an exception holds; None if it holds no whole one."""
    text = str(error)
    start = text.find(_MARK)
    end = text.find(_END, start)
    start += len(_MARK)
    if start < len(_MARK) or not 0 < end - start <= _ENCODED_CHARS:
        return None
    try:
        packed = base64.b64decode(text[start:end], validate=True)
        unpacked = zlib.decompressobj().decompress(packed, _DECODED_BYTES)
        return Failure.from_json(unpacked.decode())
    except (ValueError, zlib.error):
        return None


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The first failure that no other rank caused; if all are secondary, the first of them."""
    return min(failures, key=lambda failure: failure.secondary, default=None)


def cause_of(error: BaseException) -> Cause:
    """The kind of failure that an exception is; also of one that was raised because of another."""
    found, seen = Cause.OWN, error
    for _ in range(_CHAIN):
        cause = _own_cause(seen)
        if cause.secondary or found is Cause.OWN:
            found = cause
        if found.secondary or _told(seen) is not None:
            break
        following = seen.__cause__ or seen.__context__
        if following is None:
            break
        seen = following
    return found


def is_secondary(error: BaseException) -> bool:
    """Whether a rank most likely failed because another rank had failed."""
    return cause_of(error).secondary


def one_line(error: BaseException) -> str:
    """An exception without its traceback, as Python prints it."""
    return "".join(traceback.format_exception_only(error)).strip()


def headline(text: str) -> str:
    """The failure alone, of a text that has frames of its own: that of TensorFlow's graphs."""
    found = _NODE.search(text)
    if found is None:
        return text
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    told = [line for line in lines if not line.startswith(("Detected at", "Traceback (most"))]
    return f"{' '.join(dict.fromkeys((told[0], told[-1])))} (at node {found[1]})"


def folded(text: str) -> str:
    """A text with tracebacks in which a line stands for several frames of known libraries.

    The frame that raised stays, and of a fault within sparkdl those that led to it.
    """
    return _FRAMES.sub(_folded_frames, text)


def _folded_frames(found: re.Match[str]) -> str:
    frames = [(package_of(one[1]), one[0]) for one in _FRAME.finditer(found[0])]
    led = len(frames) - (_LED if frames[-1][0] == "sparkdl" else 1)
    shown = ""
    for known, group in groupby(frames[: max(led, 0)], lambda frame: bool(frame[0])):
        some = list(group)
        if known and len(some) > 1:
            names = ", ".join(dict.fromkeys(name for name, _ in some))
            shown += f"  ... {len(some)} frames of {names}\n"
        else:
            shown += "".join(lines for _, lines in some)
    return shown + "".join(lines for _, lines in frames[max(led, 0) :])


def _told(error: BaseException) -> Failure | None:
    if isinstance(error, RankFailure):
        return error.failure
    return error.__cause__.failure if isinstance(error.__cause__, ChildTraceback) else None


def _own_cause(error: BaseException) -> Cause:
    told = _told(error) or failure_in(error)
    if told is not None:
        return told.cause
    if isinstance(error, SparkDLError):
        return error.cause
    if isinstance(error, NotFiniteError) and error.joined:
        return Cause.JOINED
    text = f"{type(error).__name__}: {error}"
    return Cause.LOST if any(said in text for said in _HOROVOD) else Cause.OWN


def _texts(beats: Mapping[str, object]) -> dict[str, str]:
    known = (name for name in ("type", *BEATS) if name in beats)
    return {name: str(beats[name])[:MAX_BEAT_CHARS] for name in known}


def _without_envelope(text: str) -> str:
    """A text for people: without what :class:`RankFailure` encodes."""
    return _ENVELOPE.sub("", text)


def _cut(trace: str) -> str:
    return trace if len(trace) <= _TRACEBACK_CHARS else f"...\n{trace[-_TRACEBACK_CHARS:]}"
