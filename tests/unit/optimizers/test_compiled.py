"""Loops that numba compiles: NumPy's numbers to the last bit, and only where they pay."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from sparkdl.optimizers import blocks
from sparkdl.optimizers.blocks import BLOCK, run_compiled, use_threads
from sparkdl.rules import Commit, make_rule

# The rules that have a loop, and the vectors that each changes or reads.
WITH_LOOP: list[dict[str, Any]] = [
    {"name": "adam"},
    {"name": "adamw", "weight_decay": 0.01},
    {"name": "adagrad"},
    {"name": "rmsprop"},
    {"name": "downpour_adagrad"},
    {"name": "downpour_adagrad", "payload": "gradient"},
    {"name": "experimental"},
    {"name": "diloco"},
    {"name": "async_diloco", "period": 1},
    {"name": "dc_asgd"},
    {"name": "dc_asgd", "payload": "gradient"},
    {"name": "dc_asgd", "adaptive": True},
    {"name": "gap_aware"},
    {"name": "gap_aware", "payload": "gradient"},
]
SIZE = 2 * BLOCK + 3


@pytest.fixture(autouse=True)
def forget() -> Any:
    blocks._compile.cache_clear()
    yield
    blocks._compile.cache_clear()
    use_threads(1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", WITH_LOOP, ids=str)
def test_a_compiled_loop_comes_to_the_numbers_of_numpy(
    spec: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    x0, *deltas = rng.normal(0, 1, (4, SIZE)).astype(np.float32)
    results = []
    for least in (SIZE, SIZE + 1):  # compiled, then NumPy's
        monkeypatch.setattr(blocks, "COMPILED_FROM", least)
        use_threads(threads if least == SIZE else 1)
        rule, center = make_rule(spec), x0.copy()
        state = rule.init(center)
        for clock, delta in enumerate(deltas):
            sent = delta.copy()
            rule.update(center, delta, state, Commit(clock % 2, 2, clock, 0, 3, 96, 0.1), center)
            np.testing.assert_array_equal(delta, sent)
        results.append((center, {k: v for k, v in state.items() if isinstance(v, np.ndarray)}))
    assert blocks._compile.cache_info().currsize == 1, "no loop was compiled"
    (center, state), (expected, expected_state) = results
    np.testing.assert_array_equal(center, expected)
    assert not np.array_equal(center, x0)
    for name, value in expected_state.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def double(x: Any, factor: float) -> None:
    for i in range(x.size):
        x[i] = x[i] * factor


def test_short_vectors_are_left_to_numpy() -> None:
    x = np.ones(blocks.COMPILED_FROM - 1, np.float32)
    assert not run_compiled(double, x, x, (), (2.0,))
    assert x.max() == 1.0
    assert blocks._compile.cache_info().currsize == 0


def test_another_vector_for_the_result_is_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "COMPILED_FROM", 1)
    x, out = np.ones(5, np.float32), np.zeros(5, np.float32)
    assert not run_compiled(double, x, out, (), (2.0,))
    assert x.max() == 1.0
    assert out.max() == 0.0


def test_scalars_do_not_widen_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(blocks, "COMPILED_FROM", 1)
    x = np.full(5, 3.0, np.float32)
    assert run_compiled(double, x, x, (), (0.1,))
    np.testing.assert_array_equal(x, np.full(5, np.float32(3.0) * np.float32(0.1)))


def test_without_numba_numpy_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(blocks, "COMPILED_FROM", 1)
    x = np.ones(5, np.float32)
    assert not run_compiled(double, x, x, (), (2.0,))
    assert not caplog.records


def test_a_numba_that_cannot_be_used_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = types.ModuleType("numba")  # raises ImportError, as one for another NumPy does
    monkeypatch.setitem(sys.modules, "numba", broken)
    monkeypatch.setattr(blocks, "COMPILED_FROM", 1)
    x = np.ones(5, np.float32)
    for _ in range(2):
        assert not run_compiled(double, x, x, (), (2.0,))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "numba cannot be used" in caplog.text


def test_numba_without_its_compiler_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(blocks, "COMPILED_FROM", 1)
    x = np.ones(5, np.float32)
    assert not run_compiled(double, x, x, (), (2.0,))
