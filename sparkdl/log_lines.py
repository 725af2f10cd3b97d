"""Lines of text on their way from a rank to the driver.

On a rank a *sink* takes lines. Whoever runs the rank installs one for the time that the user's
code runs; without a sink a line is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

MESSAGE_CHARS = 4000
"""Longer messages and lines are cut."""

Sink = Callable[[str], None]
_sink: Sink | None = None


def log_to_driver(message: object) -> None:
    """Shows a message on the driver, with the rank in front; outside of a run it is printed here.

    Args:
        message: Any object; its text is cut after 4,000 characters.
    """
    text = shorten(str(message))
    if _sink is None:
        print(text, flush=True)
    else:
        _sink(text)


def shorten(text: str) -> str:
    """At most :data:`MESSAGE_CHARS` characters; the cut is marked.

    >>> len(shorten('x' * 5000)), shorten('x' * 5000)[-3:]
    (4000, '...')
    """
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 3] + "..."


@contextlib.contextmanager
def log_through(sink: Sink) -> Iterator[None]:
    """:func:`log_to_driver` passes its messages to ``sink`` inside the block."""
    global _sink
    before, _sink = _sink, sink
    try:
        yield
    finally:
        _sink = before


def show(rank: int, text: str) -> None:
    """Prints a rank's line on the driver."""
    print(f"[rank {rank}] {text}", flush=True)
