"""What tests of the transports do beside their own thread."""

from __future__ import annotations

import threading
from typing import Any

from sparkdl.ps.client import Progress

STEP = Progress(epoch=0, batch=1, batches=1, rows=1)


def in_thread(action: Any) -> tuple[threading.Thread, list[Any]]:
    """Runs ``action``; its result or its exception is appended to the list."""
    out: list[Any] = []

    def body() -> None:
        try:
            out.append(action())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, out
