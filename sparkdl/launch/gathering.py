"""How the ranks of a stage exchange texts before a communicator is up, and fail together."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from sparkdl.errors import TransportError, WaitTimeoutError

TAKEN_ALONG_S = 3.0
"""A rank that failed because another one did waits so long, so that the cause is heard first."""


class Gathering(Protocol):
    """Which rank this is, and the one exchange that the launcher provides."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order."""


class AloneGathering:
    """The gathering of a world of one."""

    rank = 0

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """The only rank's text."""
        return [text]


class BarrierGathering:
    """The ranks of a barrier stage.

    Args:
        context: The task's ``BarrierTaskContext``.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.rank = int(context.partitionId())

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """``allGather``; of a stage that ends meanwhile Spark ends the waiting task's executor too.

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

        thread = threading.Thread(target=work, name="sparkdl-gather", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not answers:
            raise WaitTimeoutError(
                f"rank {self.rank} waited for the other ranks to come",
                expected=f"all ranks within {timeout_s:g} s",
                received="not all of them",
                hint="one may hang while it imports a framework or unpickles the function",
            )
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]


def taken_along(error: BaseException) -> bool:
    """Whether a rank most likely failed because another one has."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return False
        if isinstance(seen, TransportError) and not isinstance(seen, WaitTimeoutError):
            return True
        # inside a compiled graph frameworks keep only the text of an exception
        text = f"{type(seen).__name__}: {seen}"
        if "HorovodInternalError" in text or "Horovod has been shut down" in text:
            return True
        if "TransportError: " in text or "is gone; rank" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
