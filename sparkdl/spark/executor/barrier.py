"""The exchange of texts that a barrier stage of Spark provides."""

from __future__ import annotations

import threading
from typing import Any

from sparkdl.errors import WaitTimeoutError


class BarrierGathering:
    """A barrier stage's ``allGather``; see :class:`sparkdl.launch.gathering.Gathering`.

    Args:
        context: The task's ``BarrierTaskContext``.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

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
