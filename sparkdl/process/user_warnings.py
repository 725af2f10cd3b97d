"""Warnings that show the user's own line, however deep in the library they are given."""

from __future__ import annotations

import inspect
import warnings

_BETWEEN = ("sparkdl", "pyspark", "contextlib")
"""Packages whose lines say nothing to the user: decorated methods are called by ``contextlib``."""


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the line of the nearest caller that belongs neither to sparkdl nor to PySpark."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + (frame is not None))
