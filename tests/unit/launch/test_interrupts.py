from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sparkdl.launch import interrupts


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def _swallowed() -> None:
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_a_library_swallowed_is_raised() -> None:
    after: list[str] = []

    @interrupts.heard()
    def body() -> None:
        _swallowed()
        after.append("swallowed")
        interrupts.check()
        after.append("not here")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert after == ["swallowed"]


def test_an_interrupt_that_nobody_checks_for_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.heard():
        _swallowed()


def test_an_error_that_was_an_interrupt_is_one() -> None:
    @interrupts.heard()
    def body() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("no such shape") from None

    with pytest.raises(KeyboardInterrupt) as raised:
        body()
    assert isinstance(raised.value.__cause__, ValueError)


def test_one_interrupt_ends_one_call() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.heard():
        signal.raise_signal(signal.SIGINT)
    with interrupts.heard():
        interrupts.check()
    with pytest.raises(ValueError, match="another"), interrupts.heard():
        raise ValueError("another")


def test_inside_held_it_waits_for_the_end() -> None:
    done: list[str] = []

    @interrupts.heard()
    def body() -> None:
        with interrupts.held():
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
            done.append("inner")
            signal.raise_signal(signal.SIGINT)
            done.append("outer")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done == ["inner", "outer"]
    with interrupts.heard(), interrupts.held():
        pass  # nothing is left over


def test_a_handler_that_raises_nothing_interrupts_nothing() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts.heard():
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_handler_set_in_the_body_stays() -> None:
    def new(number: int, frame: Any) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts.heard():
            signal.signal(signal.SIGINT, new)
        assert signal.getsignal(signal.SIGINT) is new
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_let_be() -> None:
    results: list[str] = []

    def work() -> None:
        with interrupts.heard(), interrupts.held():
            interrupts.check()
            results.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert results == ["done"]


@pytest.mark.parametrize("when", ["entering", "entered", "leaving"])
def test_what_a_clean_stack_began_is_ended_whenever_the_interrupt_comes(when: str) -> None:
    done: list[str] = []

    @contextlib.contextmanager
    def process() -> Iterator[None]:
        if when == "entering":
            signal.raise_signal(signal.SIGINT)
        done.append("started")  # as a process whose handle nobody has yet
        try:
            yield
        finally:
            if when == "leaving":
                signal.raise_signal(signal.SIGINT)
            done.append("ended")

    @interrupts.heard()
    def body() -> None:
        with interrupts.CleanStack() as stack:
            stack.begin(process())
            if when == "entered":
                signal.raise_signal(signal.SIGINT)
            assert when == "leaving"

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done == ["started", "ended"]


def test_sparks_handler_waits_until_the_end_while_something_is_kept() -> None:
    """PySpark's cancels all jobs, whose tasks are still to leave what they have."""
    told: list[str] = []

    def handler(number: int, frame: Any) -> None:
        told.append("cancelled")
        raise KeyboardInterrupt

    @interrupts.heard()
    def body() -> None:
        with interrupts.keeping():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                told.append("kept")

    before = signal.signal(signal.SIGINT, handler)
    try:
        for module, first in (("pyspark.core.context", "kept"), ("mine", "cancelled")):
            handler.__module__ = module
            told.clear()
            with pytest.raises(KeyboardInterrupt):
                body()
            assert told[0] == first
            assert sorted(told) == ["cancelled", "kept"]
    finally:
        signal.signal(signal.SIGINT, before)
