"""Factors and steps of a reduction, and who talks to whom."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from sparkdl.codecs.quantized import to_summable
from sparkdl.collective import arithmetic, communicator, current, horovod
from sparkdl.collective.builtin import paths, shared
from sparkdl.collective.builtin.paths import Places


def test_examples_in_docstrings():
    for module in (arithmetic, communicator, current, horovod, paths, shared):
        failed, tried = doctest.testmod(module)
        assert tried
        assert not failed


@pytest.mark.parametrize("factor", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_join_scaled_in_place_and_apart(factor, dtype):
    random = np.random.default_rng(0)
    partial, source = (random.normal(size=100).astype(dtype) for _ in range(2))
    want = partial.astype("f8") + factor * source.astype("f8")
    apart = np.empty_like(source)
    arithmetic.join_scaled(partial, source, factor, np.add, apart)
    arithmetic.join_scaled(partial, source, factor, np.add, source)
    np.testing.assert_allclose(apart, want, atol=5e-3 if dtype == "float16" else 1e-6)
    assert apart.tobytes() == source.tobytes()


def test_a_factor_of_zero_does_not_read_the_source():
    bad = np.full(4, np.nan, np.float32)
    out = np.empty(4, np.float32)
    arithmetic.reduce_in_order([bad, np.ones(4, np.float32)], [0.0, 0.5], np.add, out)
    assert (out == 0.5).all()


def test_bfloat16_is_reduced_like_the_others():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    parts = [np.full(3, v, ml_dtypes.bfloat16) for v in (1.0, 2.0)]
    with current.SoloCommunicator() as alone:
        assert alone.all_reduce(parts[0], "mean").dtype == ml_dtypes.bfloat16
    out = np.empty_like(parts[0])
    arithmetic.reduce_in_order(parts, [0.25, 0.75], np.add, out)
    assert (out.astype(float) == 1.75).all()


def test_places_of_uneven_hosts():
    found = [Places.of(list("aabab"), r) for r in range(5)]
    assert found[0].hosts == ((0, 1, 3), (2, 4))
    assert [p.local_rank for p in found] == [0, 1, 0, 2, 1]
    assert [p.ring for p in found] == [(0, 2), (1, 4), (0, 2), (), (1, 4)]
    assert found[3].edges(10) == [0, 5, 10, 10]
    assert found[4].edges(10) == [0, 5, 10]
    assert found[0].order == [0, 1, 3, 2, 4]


def test_places_of_one_host_and_of_single_ranks():
    together = Places.of(["a"] * 3, 1)
    assert (together.num_rings, together.ring, together.edges(9)) == (0, (), [0, 3, 6, 9])
    apart = Places.of(["a", "b", "c"], 1)
    assert (apart.num_rings, apart.ring, apart.one_each) == (1, (0, 1, 2), True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100])
def test_the_sum_of_halves_of_all_ranks_is_no_infinity(ranks):
    sent = [to_summable(np.float32([1e6, -1e6, 2.0]), "float16", ranks)] * ranks
    total = np.empty(3, np.float16)
    arithmetic.reduce_in_order(sent, [1.0] * ranks, np.add, total)
    np.testing.assert_allclose(total, [65504, -65504, 2 * ranks], rtol=0.1)
    assert np.isfinite(total).all()
