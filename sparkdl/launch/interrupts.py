"""Ctrl-C ends the call, also where a library swallows the exception that it raises.

Keras catches every exception in some places where it builds layers (a bare ``except``), and a
``KeyboardInterrupt`` in a garbage collector's callback is only printed. One that comes there is
gone, or comes out as another error, and training would go on for hours. One that comes while
TensorFlow has a graph open leaves it open, and the next model of the session cannot be built.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")

# A signal handler belongs to the process, and so do these.
_raised = False
_holding = 0
_held: Callable[[], object] | None = None
_keeping = _put_off = False


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Remembers an interrupt in its body, for :func:`check`, which is also done at the end.

    The handler that was there is called first; one that raises nothing interrupts nothing. Other
    threads than the main one get no interrupts, and nothing is done there. Also a decorator.

    Raises:
        KeyboardInterrupt: One came, whatever became of it in the body.
    """
    global _raised, _put_off
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        global _raised, _held, _put_off
        if _holding:
            _held = lambda: hear(number, frame)  # noqa: E731
            return
        try:
            if _keeping and str(getattr(before, "__module__", "")).startswith("pyspark."):
                _put_off = True
                raise KeyboardInterrupt
            before(number, frame)
        except BaseException:
            _raised = True
            raise

    _raised = _put_off = False
    signal.signal(signal.SIGINT, hear)
    try:
        yield
        check()
    except KeyboardInterrupt:
        if _put_off:
            before(signal.SIGINT, None)
        raise
    except Exception as error:
        if _raised:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is hear:  # Spark, started meanwhile, sets its own
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Inside :func:`heard`: an interrupt waits until the body, which must be short, has ended."""
    global _holding, _held
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _holding += 1
    try:
        yield
    finally:
        _holding -= 1
        if not _holding and _held is not None:
            late, _held = _held, None
            late()


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Inside :func:`heard`: an interrupt of the body lets Spark's jobs run until ``heard`` ends.

    PySpark's own handler cancels all jobs and raises KeyboardInterrupt. Here it is called last, so
    that tasks can still leave what they have; handlers of others are called as ever.
    """
    global _keeping
    main = threading.current_thread() is threading.main_thread()
    before = _keeping
    _keeping = _keeping or main
    try:
        yield
    finally:
        if main:
            _keeping = before


def check() -> None:
    """Raises KeyboardInterrupt if one was raised since :func:`heard` began and is still around."""
    if _raised and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


class CleanStack(contextlib.ExitStack):
    """An ``ExitStack`` that no interrupt cuts in two, inside :func:`heard`.

    An interrupt between the start of a process and the ``try`` that ends it would leave the process
    behind, and so would one in the middle of ending it. Both wait until the step has ended. No
    error is swallowed.
    """

    def begin(self, context: contextlib.AbstractContextManager[T]) -> T:
        """Like ``enter_context``, for contexts that are entered quickly: interrupts wait."""
        with held():
            return self.enter_context(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        with held():
            super().__exit__(kind, error, trace)
