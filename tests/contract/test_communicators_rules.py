"""The rules of the all-reduce family over the communicators that a run uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from communicator_worlds import RULE_WORLDS, threads

from sparkdl.collective.rules import (
    OneBitAdam,
    Sliced,
    StragglerDrop,
    StreamingDiLoCo,
    make_rule,
    rule_names,
)
from sparkdl.optimizers.flat import FlatAdam

CONFIGURED: dict[str, Any] = {
    "sliced": Sliced(FlatAdam()),
    "onebit_adam": OneBitAdam(FlatAdam(), freeze_step=2),
    "straggler_drop": StragglerDrop(least=1.0),
    "streaming_diloco": StreamingDiLoCo(fragments=2, period=1, delay=1),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("world", RULE_WORLDS, indirect=True, scope="session")


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
    others = threads(world.size)
    want = run(others, rule)[0]
    others.close()
    np.testing.assert_allclose(answers[0], want, atol=1e-4)


def test_a_late_rank_is_dropped_and_stays_equal(world: Any) -> None:
    answers = run(world, StragglerDrop(patience=0.0, grace_s=0.02), seconds=0.5)
    assert len({a.tobytes() for a in answers}) == 1
    assert np.abs(answers[0] - run(world, StragglerDrop(least=1.0))[0]).max() > 0.01
