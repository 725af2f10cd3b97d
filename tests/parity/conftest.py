"""The workers' processes of the parity tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_spark import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started
