"""The workers' processes of the parity tests, and what makes their cases quick and the same."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import keras
import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from local_spark import Workers
from start.graph_rewriting import without_rewriting


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


@pytest.fixture(scope="module")
def graphs_run_as_they_are_traced() -> Iterator[None]:
    """In this process, too, TensorFlow does not rewrite small graphs that run a few times."""
    if keras.backend.backend() != "tensorflow":
        yield
        return
    with without_rewriting():
        yield


@pytest.fixture
def draws_of_the_seed_alone() -> Iterator[None]:
    """Hypothesis also draws numbers that it finds in the code of modules, of which this process has
    others in each run. Here it finds none, so that a seed always gives the same cases."""
    kept = providers.CONSTANTS_CACHE.cache
    kept.clear()
    with mock.patch.object(providers, "_get_local_constants", Constants):
        yield
    kept.clear()
