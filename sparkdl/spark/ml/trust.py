"""Whether code in saved stages may run: only where the reader is told so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_trusted: ContextVar[bool] = ContextVar("sparkdl_trusted", default=False)


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Within, stages are loaded with the code in their files, also those inside of a pipeline.

    ::

        with sparkdl.ml.trusted():
            pipeline_model = PipelineModel.load('models/churn')

    Code is what pickle holds and runs when it is loaded: layers, losses and callbacks of the
    user's own, decoders, model builders. Only for files of people whom you trust. Holds for the
    thread that enters it.
    """
    before = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(before)


def is_trusted() -> bool:
    """Whether the caller is inside of :func:`trusted`."""
    return _trusted.get()
