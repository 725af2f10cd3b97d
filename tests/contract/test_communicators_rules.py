"""The rules of the all-reduce family over the communicators that a run uses."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_communicators_worlds import ProcessWorld, ThreadWorld

from sparkdl.collective.rules import (
    OneBitAdam,
    Sliced,
    StragglerDrop,
    StreamingDiLoCo,
    make_rule,
    rule_names,
)
from sparkdl.optimizers.flat import FlatAdam
from sparkdl.testing.thread_communicator import connect_threads

WORLDS = {
    "shared-2": lambda: ProcessWorld([None] * 2),
    "ring-2": lambda: ProcessWorld(["a", "b"]),
    "hosts-2x2": lambda: ProcessWorld(["a", "b", "a", "b"]),
}
if importlib.util.find_spec("horovod"):
    WORLDS["horovod-2"] = lambda: ProcessWorld([None] * 2, name="horovod")
CONFIGURED: dict[str, Any] = {
    "sliced": Sliced(FlatAdam()),
    "onebit_adam": OneBitAdam(FlatAdam(), freeze_step=2),
    "straggler_drop": StragglerDrop(least=1.0),
    "streaming_diloco": StreamingDiLoCo(fragments=2, period=1, delay=1),
}


@pytest.fixture(scope="module", params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = WORLDS[request.param]()
    made.run("in_order", count=1, size=1)  # the queue's thread lives as long as the communicator
    yield made
    made.close()


def run(world: Any, rule: Any, seconds: float = 0.0) -> list[np.ndarray]:
    answers = world.run("exchange_by_rule", rule=rule, steps=6, seconds=seconds)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@pytest.mark.parametrize("name", rule_names())
def test_ranks_end_equal_and_as_over_threads(world: Any, name: str) -> None:
    rule = CONFIGURED.get(name, make_rule(name))
    answers = run(world, rule)
    assert len({a.tobytes() for a in answers}) == 1
    threads = ThreadWorld(list(connect_threads(world.size)))
    want = run(threads, rule)[0]
    threads.close()
    np.testing.assert_allclose(answers[0], want, atol=1e-4)


def test_a_late_rank_is_dropped_and_stays_equal(world: Any) -> None:
    answers = run(world, StragglerDrop(patience=0.0, grace_s=0.02), seconds=0.5)
    assert len({a.tobytes() for a in answers}) == 1
    assert np.abs(answers[0] - run(world, StragglerDrop(least=1.0))[0]).max() > 0.01
