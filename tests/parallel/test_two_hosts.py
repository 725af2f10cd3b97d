"""The built-in communicator between two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from all_reduce import Contender, join_ranks, rank_in
from rank_programs import scatter_on
from support.network import Host, two_hosts

SIZE = 8_000_000


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts(1e9, 0.0005) as (made, _):
            yield made
    except PermissionError as error:
        pytest.skip(f"no two hosts on this machine: {error}")


@pytest.mark.parametrize("each", [1, 2, 3])
def test_each_byte_crosses_once_per_direction(hosts: Any, each: int) -> None:
    """One ring of both hosts, or as many rings as a host has ranks, each with its share."""
    places = [host for host in hosts for _ in range(each)]
    ranks = [(rank_in, (host, "builtin", rank)) for rank, host in enumerate(places)]
    contender = join_ranks(Contender("ranks", ranks))
    try:
        before = [host.sent_bytes() for host in hosts]
        contender.measure(SIZE, 4)
        after = [host.sent_bytes() for host in hosts]
    finally:
        contender.close()
    operations = 4 + 1  # one before the clock starts
    for sent in (b - a for a, b in zip(before, after, strict=True)):
        assert SIZE <= sent / operations < 1.03 * SIZE
    assert contender.times[SIZE][0] > SIZE * 8 / 1e9  # not faster than the link


@pytest.mark.parametrize("places", ["ab", "aabb", "abab", "aab"])
def test_a_host_sends_what_is_not_its_own_once(hosts: Any, places: str) -> None:
    """A reduce-scatter: of two hosts with as many ranks each, half of what an all-reduce sends."""
    of = dict(zip("ab", hosts, strict=True))
    ranks = [(scatter_on, (of[place], rank)) for rank, place in enumerate(places)]
    contender = join_ranks(Contender("ranks", ranks))
    size = SIZE + 4  # which the ranks do not divide evenly
    try:
        before = {place: of[place].sent_bytes() for place in of}
        contender.measure(size, 4)
        after = {place: of[place].sent_bytes() for place in of}
    finally:
        contender.close()
    for place in of:
        others = 1 - places.count(place) / len(places)
        sent = (after[place] - before[place]) / 4
        # acknowledgements of what comes in are counted, too
        assert 0.999 * others * size <= sent < 1.03 * others * size + 0.01 * size
