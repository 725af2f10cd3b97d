"""A call in a thread of its own, which its caller may give up."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class ThreadCall:
    """Calls a function in a daemon thread; one that is given up is left behind."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.outcome: Future[Any] = Future()
        """What it returns or raises."""
        self._thread = threading.Thread(target=self._call, args=(function,), name=name, daemon=True)
        self._thread.start()

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            self.outcome.set_result(function())
        except BaseException as error:
            self.outcome.set_exception(error)

    def stack(self) -> str:
        """The lines at which the function stands, the innermost last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-8:])
