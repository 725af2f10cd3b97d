"""The distributed optimizer in two real processes: equal to one process on the global batch."""

from __future__ import annotations

import importlib.util
import secrets
from typing import Any

import numpy as np
import pytest
import rank_programs

from sparkdl.launch.child import ProcessLauncher
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.function import FunctionTask, Returned, dump_call

WORLDS = [
    ("tensorflow", "builtin"),
    ("tensorflow", "horovod"),
    ("jax", "builtin"),
    ("torch", "builtin"),
]
HEAVIER = WORLDS[1:]
WORLD_PARAMS = [
    pytest.param(w, id="-".join(w), marks=[pytest.mark.slow] * (w in HEAVIER)) for w in WORLDS
]
_results: dict[tuple[str, str], list[dict[str, Any]]] = {}


@pytest.fixture(params=WORLD_PARAMS)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the two ranks of a world found; each world is started once."""
    backend, communicator = request.param
    for needed in (backend, communicator):
        if needed != "builtin" and importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    if request.param not in _results:
        programs = [
            *rank_programs.PROGRAMS,
            *([rank_programs.embeddings] if backend == "tensorflow" else []),
        ]
        _results[request.param] = run_ranks(
            2, communicator, backend, rank_programs.everything, programs, backend == "jax"
        )
    return _results[request.param]


def run_ranks(size: int, communicator: str, backend: str, fn: Any, *args: Any) -> list[Any]:
    task = FunctionTask(
        dump_call(fn, args, {}),
        secrets.token_bytes(32),
        DeviceRequest(backend, unscheduled=True),
        communicator,
        timeout_s=60.0,
        start_timeout_s=100.0,
        capture=False,
    )
    with ProcessLauncher(size).launch(task) as ranks:
        while not ranks.wait(1.0):
            pass
        returned = Returned.of(ranks.results())
    return [returned.load(rank) for rank in range(size)]


def test_ranks_give_what_one_process_gives_on_the_global_batch(found: list[dict[str, Any]]):
    for told in found:
        apart = told["same_as_one_process"]
        assert len(apart) == 8
        assert max(apart.values()) <= 1e-5, apart


def test_compression_and_sum(found: list[dict[str, Any]]):
    for told in found:
        apart = told["on_the_wire"]
        assert apart["none"] <= 1e-5, apart
        assert apart["sum"] <= 1e-5, apart
        assert 0 < apart["fp16"] <= 2e-3, apart
        assert 0 < apart.get("bf16", 1e-9) <= 2e-2, apart


def test_an_overflow_on_one_rank_makes_all_skip_alike(found: list[dict[str, Any]]):
    first, second = (told["overflow_on_one_rank"] for told in found)
    assert first["type"] == "LossScaleOptimizer"
    assert first["steps"] == second["steps"] == 4  # of five
    assert first["scale"] == second["scale"] == 0.5
    assert np.isfinite(first["weights"]).all()
    np.testing.assert_array_equal(first["weights"], second["weights"])


def test_callbacks_and_hand_written_loops(found: list[dict[str, Any]]):
    for told in found:
        apart = told["callbacks_and_loops"]
        assert apart["broadcast"] <= 1e-5, apart
        assert apart["losses"] <= 1e-5, apart
        assert apart["seen"], "later callbacks must see the mean"
        assert apart["loop"] <= 1e-5, apart
        assert apart["loop, 2 passes"] <= 1e-5, apart


def test_sparse_gradients(found: list[dict[str, Any]]):
    for told in found:
        apart = told.get("embeddings", {})
        assert max(apart.values(), default=0.0) <= 1e-5, apart


def test_two_optimizers_in_one_step(found: list[dict[str, Any]]):
    for told in found:
        apart = told.get("two_optimizers", {})
        assert max(apart.values(), default=0.0) <= 1e-5, apart


@pytest.mark.slow  # unit/learner/test_distributed_optimizer.py is a world of one in this process
def test_a_world_of_one_takes_the_same_path():
    (told,) = run_ranks(
        1,
        "builtin",
        "tensorflow",
        rank_programs.everything,
        [rank_programs.same_as_one_process],
        False,
    )
    assert max(told["same_as_one_process"].values()) <= 1e-5
