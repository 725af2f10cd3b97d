"""The driver's end of the parameter server."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.transport.address import Address
from sparkdl.transport.connection import Link, Opener, Timeouts, explained, openers_of
from sparkdl.transport.frames import Kind, Limits, Message
from sparkdl.weights import FloatArray, Layout


class DriverClient:
    """The driver's connection: telemetry in, control out, the center at the end.

    Args:
        address: Of the server; None with ``opener``.
        token: The run's secret.
        layout: Of the flat buffer.
        mode: As in :func:`connect`.
        timeouts: How long to wait.
        opener: Opens connections instead of ``address`` (in-process servers).
        check: Called before a request is tried again; raises if the server has ended.

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """

    def __init__(
        self,
        address: Address | None,
        token: str,
        layout: Layout,
        *,
        mode: str = "auto",
        timeouts: Timeouts | None = None,
        opener: Opener | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        t = timeouts or Timeouts()
        self._limits = Limits.of(layout)
        if opener is None:
            if address is None:
                raise ConfigError("a driver's client needs an address or an opener")
            opener = openers_of(address, token, mode, self._limits, t)
        self._link = Link(opener, self._limits, t, buffered=True, name="the driver", check=check)
        with explained(opener, t):
            self._link.open()

    def status(self, since_epoch: int = 0) -> dict[str, Any]:
        """Workers, epochs (telemetry), failure, clock and counters, as one JSON object."""
        return self._link.request(Message(Kind.STATUS, meta={"since_epoch": since_epoch})).meta

    def pull(self, out: FloatArray | None = None) -> FloatArray:
        """A copy of the center (for gradient rules: of the last snapshot)."""
        self._link.request(Message(Kind.PULL))
        result = np.empty(self._limits.weights_bytes // 4, np.float32) if out is None else out
        np.copyto(result, self._limits.weights(self._link.raw))
        return result

    def kept_state(self) -> tuple[int, bytes]:
        """What a worker left last: the epochs it is of, and the state; ``(-1, b"")`` for none."""
        for _ in range(5):
            state, epoch, total = bytearray(), -1, 1
            while len(state) < total:
                reply = self._link.request(Message(Kind.STATE_GET, meta={"offset": len(state)}))
                if state and reply.meta["epoch"] != epoch:
                    break  # a newer one came meanwhile
                epoch, total = int(reply.meta["epoch"]), int(reply.meta["total"])
                if reply.body is None or not reply.body.size:
                    return -1, b""
                state += reply.body.data
            else:
                return epoch, bytes(state)
        raise ProtocolError("the state kept on the server changes faster than it can be read")

    def control(
        self,
        *,
        stop: bool = False,
        learning_rate: float | None = None,
        release: int | None = None,
    ) -> None:
        """Asks all workers to stop, sets their learning rate, or lets them pass an epoch's end.

        All three take effect together: in blocking rules at one step for all ranks.
        """
        meta: dict[str, Any] = {}
        if stop:
            meta["stop"] = True
        if learning_rate is not None:
            meta["learning_rate"] = float(learning_rate)
        if release is not None:
            meta["release"] = int(release)
        self._link.request(Message(Kind.CONTROL, meta=meta))

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
