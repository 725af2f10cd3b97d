"""Errors as frames: what the meta of an ERROR frame says, and the error that it stands for."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import (
    BEATS,
    MAX_BEAT_CHARS,
    AuthenticationError,
    ConfigError,
    ProtocolError,
    SparkDLError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.failures import Failure
from sparkdl.wire.greeting import BusyError


def _codes() -> dict[str, type[SparkDLError]]:
    return {
        "aborted": WorkerError,
        "timeout": WaitTimeoutError,
        "busy": BusyError,
        "authentication": AuthenticationError,
        "protocol": ProtocolError,
        "transport": TransportError,
        "config": ConfigError,
        "error": SparkDLError,
    }


def error_to_meta(error: SparkDLError) -> dict[str, Any]:
    """An error as the meta of an ERROR frame; long texts are cut, so that it can be sent."""
    code = next(code for code, cls in _codes().items() if isinstance(error, cls))
    meta: dict[str, Any] = {"code": code}
    meta.update({name: str(getattr(error, name))[:MAX_BEAT_CHARS] for name in BEATS})
    if isinstance(error, WorkerError):
        meta.update(Failure.heard(error).to_wire())
    return meta


def error_from_meta(meta: dict[str, Any]) -> SparkDLError:
    """The error that an ERROR frame carries; unknown codes become a plain SparkDLError."""

    def text(key: str) -> str:
        return str(meta.get(key, ""))

    if meta.get("code") == "aborted":
        return Failure.from_wire(meta).worker_error()
    cls = _codes().get(text("code"), SparkDLError)
    return cls(
        text("what") or "the server refused a frame",
        expected=text("expected"),
        received=text("received"),
        hint=text("hint"),
    )
