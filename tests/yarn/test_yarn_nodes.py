"""A NodeManager that is lost and does not come back: a cluster of its own for each test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_hadoop import MiniHadoop, Unavailable
from submitting import Submitter, check_repetition, result_of

FAULTS = "yarn_faults.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def hadoop(tmp_path: Path) -> Iterator[MiniHadoop]:
    try:
        with MiniHadoop(tmp_path / "hadoop") as cluster:
            yield cluster
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("mode", ["asynchronous", "allreduce"])
def test_lost_node(submit: Submitter, hadoop: MiniHadoop, mode: str) -> None:
    """All-reduce goes on from its last whole epoch, on the node that is left."""
    with submit.start(FAULTS, "lost", mode, "8") as submission:
        submission.until_file("epoch-1")
        nodes = [one.split("@")[1] for one in hadoop.ask("containers", submission.application)]
        beside = [node for node in nodes[1:] if node != nodes[0]]
        if not beside:
            pytest.skip("YARN has put both executors on the driver's node")
        hadoop.ask("stop-node", beside[0])
        began = time.monotonic()
        found = result_of(submission.wait())
    assert len(found["loss"]) == 8
    assert found["loss"][-1] < found["loss"][0] / 2
    check_repetition(found, mode, epochs=8)
    assert time.monotonic() - began < 200
