"""``Unwrapping``: what our code raises inside a framework's call comes out of it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Unwrapping:
    """A framework wraps what a Python function raises inside its compiled call; this undoes it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around our own code in the call: keeps what it raises."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the framework's call: raises what was kept in place of what the framework does."""
        self._error = None
        try:
            yield
        except Exception:
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise
