"""The exchange of texts that a barrier stage of Spark provides."""

from __future__ import annotations

import threading
import time
from typing import Any

from sparkdl.errors import WaitTimeoutError

_LEAVING_S = 1.5
"""From when a rank has left an exchange until all have; Spark 4.3 ends the executor of a task that
waits there when its stage is ended."""
_ALL_COME_S = 10.0
"""A failure is told after so long also where ranks are still to come."""


class BarrierGathering:
    """A barrier stage's ``allGather``; see :class:`sparkdl.launch.gathering.Gathering`.

    Args:
        context: The task's ``BarrierTaskContext``.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._waiting = threading.Event()
        self._left = threading.Event()
        self._left_at = 0.0

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order.

        When the stage ends meanwhile, Spark ends the executor of a task that waits here.

        Raises:
            WaitTimeoutError: Not all came in time. Spark does not say who is missing; the driver
                adds it where it can.
        """
        answers: list[list[str] | BaseException] = []

        def work() -> None:
            try:
                answers.append(list(self._context.allGather(text)))
            except BaseException as error:
                answers.append(error)
            self._left_at = time.monotonic()
            self._left.set()

        self._waiting.set()
        thread = threading.Thread(target=work, name="sparkdl-gather", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not answers:
            raise WaitTimeoutError(
                f"rank {self._context.partitionId()} waited for the other ranks to come",
                expected=f"all ranks within {timeout_s:g} s",
                received="not all of them",
                hint="one may hang while it imports a framework or unpickles the function",
            )
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def settle(self) -> None:
        """Returns when every rank has left the exchange, as far as that can be known.

        Ranks look for its answer once a second, so the last one leaves a second after the first.
        """
        if self._waiting.is_set() and self._left.wait(_ALL_COME_S):
            time.sleep(max(0.0, self._left_at + _LEAVING_S - time.monotonic()))
