"""The simulation of training steps, against times that can be worked out by hand."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "support" / "simulation.py"
LINK, SIZE, COMPUTE = 1e8, 1e7, 0.1
WHOLE = SIZE / LINK
"""Seconds for the whole model over one link."""


@pytest.fixture(scope="module")
def simulation() -> Any:
    spec = importlib.util.spec_from_file_location("simulation_under_test", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


def _note(times: list[float], clock: Any) -> None:
    times.append(clock.now)


def _nothing() -> None:
    pass


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 100])
def test_a_ring_moves_two_times_all_but_one_share(simulation: Any, workers: int) -> None:
    machine = simulation.Machine(COMPUTE, LINK, 0.0)
    expected = COMPUTE + 2 * (workers - 1) / workers * WHOLE
    assert simulation.ring_seconds(machine, workers, SIZE) == pytest.approx(expected)


def test_a_ring_of_many_pays_the_latency_of_each_of_its_steps(simulation: Any) -> None:
    machine = simulation.Machine(0.0, float("inf"), 1e-3)
    assert simulation.ring_seconds(machine, 50, SIZE) == pytest.approx(2 * 49 * 1e-3)


def test_a_window_of_16_pays_for_one_exchange_in_16_steps(simulation: Any) -> None:
    machine = simulation.Machine(COMPUTE, LINK, 0.0)
    expected = COMPUTE + 2 * 3 / 4 * WHOLE / 16
    assert simulation.ring_seconds(machine, 4, SIZE, window=16) == pytest.approx(expected)


def test_one_worker_at_a_server_computes_sends_and_receives(simulation: Any) -> None:
    machine = simulation.Machine(COMPUTE, LINK, 0.002, apply=1e9, overhead_s=0.003, copy=1e9)
    expected = COMPUTE + 2 * WHOLE + 2 * 0.002 + 0.01 + 0.003 + 2 * 0.01
    assert simulation.server_seconds(machine, 1, SIZE) == pytest.approx(expected)


def test_a_server_saturates_at_its_link(simulation: Any) -> None:
    """Many workers: each gets its p-th of the link; both directions are busy at once."""
    machine = simulation.Machine(COMPUTE, LINK, 0.0)
    seconds = simulation.server_seconds(machine, 50, SIZE, steps=64)
    assert seconds == pytest.approx(50 * WHOLE, rel=0.03)


def test_few_workers_do_not_disturb_each_other_at_a_server(simulation: Any) -> None:
    """Two that compute for long: at most one waits for the other, and only once."""
    machine = simulation.Machine(100 * WHOLE, LINK, 0.0)
    seconds = simulation.server_seconds(machine, 2, SIZE, steps=50)
    assert seconds == pytest.approx(102 * WHOLE, rel=0.01)


def test_a_synchronous_server_takes_all_in_and_gives_all_out(
    simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where connections share evenly; else those answered first begin to send already."""
    monkeypatch.setattr(simulation, "PIECES", (8, 8))
    machine = simulation.Machine(COMPUTE, LINK, 0.0)
    seconds = simulation.server_seconds(machine, 16, SIZE, waits=True)
    assert seconds == pytest.approx(COMPUTE + 2 * 16 * WHOLE, rel=0.1)


@pytest.mark.parametrize(("count", "measured"), [(2, 0.91), (4, 0.79)])
def test_connections_share_a_link_as_unevenly_as_measured(
    simulation: Any, count: int, measured: float
) -> None:
    """When the first of equal messages that begin at once is through, of the time of all."""
    rng, shares = np.random.default_rng(5), []
    for _ in range(200):
        clock = simulation.Clock()
        ended: list[float] = []
        note = functools.partial(_note, ended, clock)
        into = simulation.Resource(clock, LINK)
        for pieces in rng.integers(simulation.PIECES[0], simulation.PIECES[1] + 1, count):
            out = simulation.Resource(clock, LINK)
            simulation.send(out, into, SIZE, 0.0, _nothing, note, int(pieces))
        clock.run()
        assert max(ended) == pytest.approx(count * WHOLE)
        shares.append(min(ended) / max(ended))
    assert np.mean(shares) == pytest.approx(measured, abs=0.04)


def test_a_direction_slows_down_while_the_other_is_busy(simulation: Any) -> None:
    """Two hosts that send to each other at once, with 80 % left to each direction."""
    machine = simulation.Machine(0.0, LINK, 0.0, duplex=0.8)
    for both, expected in ((True, WHOLE / 0.8), (False, WHOLE)):
        clock = simulation.Clock()
        out, into = simulation.make_links(clock, machine, 2)
        times: list[float] = []
        note = functools.partial(_note, times, clock)
        for a, b in ((0, 1), (1, 0))[: 1 + both]:
            simulation.send(out[a], into[b], SIZE, 0.0, _nothing, note, 20)
        clock.run()
        assert max(times) == pytest.approx(expected, rel=0.05)
    assert simulation.ring_seconds(machine, 2, SIZE) == pytest.approx(WHOLE / 0.8)


def test_as_many_shards_as_workers_remove_the_servers_limit(simulation: Any) -> None:
    """The first shard answers while the worker still sends to the others."""
    machine = simulation.Machine(COMPUTE, LINK, 0.0)
    seconds = simulation.server_seconds(machine, 8, SIZE, shards=8, steps=32)
    assert seconds == pytest.approx(COMPUTE + 9 / 8 * WHOLE)


def test_a_slow_core_of_the_server_is_the_limit(simulation: Any) -> None:
    machine = simulation.Machine(COMPUTE, 1e12, 0.0, apply=LINK)
    seconds = simulation.server_seconds(machine, 20, SIZE, steps=64)
    assert seconds == pytest.approx(20 * WHOLE, rel=0.03)


def test_a_hierarchy_rings_over_hosts_only(simulation: Any) -> None:
    machine = simulation.Machine(COMPUTE, LINK, 0.0, memory=1e9)
    inside, between = 2 * 0.01, 2 * 3 / 4 * WHOLE
    seconds = simulation.hierarchical_seconds(machine, 32, SIZE, local=8)
    assert seconds == pytest.approx(COMPUTE + inside + between)
    alone = simulation.hierarchical_seconds(machine, 8, SIZE, local=8)
    assert alone == pytest.approx(COMPUTE + inside)


def test_the_slowest_of_many_holds_all_up(simulation: Any) -> None:
    machine = simulation.Machine(COMPUTE, float("inf"), 0.0, spread=0.1)
    few = simulation.ring_seconds(machine, 2, SIZE, steps=200)
    many = simulation.ring_seconds(machine, 200, SIZE, steps=200)
    assert COMPUTE < few < many < 1.5 * COMPUTE


@pytest.mark.parametrize("columns", [1, 2, 4, 8, 0])
def test_a_grid_moves_the_bytes_of_a_ring(simulation: Any, columns: int) -> None:
    machine = simulation.Machine(COMPUTE, LINK, 0.0)
    expected = simulation.ring_seconds(machine, 8, SIZE)
    assert simulation.grid_seconds(machine, 8, SIZE, columns=columns) == pytest.approx(expected)


def test_a_grid_waits_for_fewer_messages_and_for_each_part_anew(simulation: Any) -> None:
    machine = simulation.Machine(0.0, float("inf"), 1e-3)
    assert simulation.grid_seconds(machine, 64, SIZE) == pytest.approx(2 * 63e-3)
    assert simulation.grid_seconds(machine, 64, SIZE, columns=8) == pytest.approx(28e-3)
    assert simulation.grid_seconds(machine, 64, SIZE, columns=8, parts=3) == pytest.approx(84e-3)


def test_streams_fill_a_link_that_one_window_does_not(simulation: Any) -> None:
    rates = [simulation.stream_rate(1e8, 5e5, 0.02, n) for n in (1, 2, 4, 8)]
    assert rates == pytest.approx([2.5e7, 5e7, 1e8, 1e8])
    assert simulation.stream_rate(1e8, 5e5, 0.0, 1) == 1e8
