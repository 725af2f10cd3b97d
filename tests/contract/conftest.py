"""Worlds of ranks that all modules share: a world of processes takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from communicator_worlds import WORLDS, ProcessWorld, ThreadWorld


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[ThreadWorld | ProcessWorld]:
    """A connected world; a module chooses by name in its ``pytest_generate_tests``.

    Pytest runs the tests of one world together, whatever their module, and closes it after them.
    """
    made = WORLDS[request.param]()
    made.run("in_order", count=1, size=1)  # the queue's thread lives as long as the communicator
    yield made
    made.close()
