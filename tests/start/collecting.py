"""What makes collections of garbage cheap in a process that runs many tests (hooks of pytest).

After some thousand tests a process holds so much, of compiled steps above all, that one look at all
of it takes seconds. Python looks now and then, and Keras asks for a look with each variable that a
layer gives up. So what is there stays outside: frameworks, the list of tests, what a test has left.
What was in use then and is not any more is looked for when the process has grown.

    python -m pytest -p collecting      # where no conftest.py is
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import psutil
import pytest

GROWN_BYTES = 1 << 30
"""Bytes by which the process may grow between two looks at everything."""
_seen = [0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Frameworks and tests stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """What came with a test alone is looked at when it has ended, once."""
    result = yield
    process = psutil.Process()
    grown = process.memory_info().rss > _seen[0] + GROWN_BYTES
    if grown:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if grown:
        _seen[0] = process.memory_info().rss
    return result
