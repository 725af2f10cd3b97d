"""Which ranks get rows, and which are ended with the others."""

from __future__ import annotations

import pytest

from sparkdl.launch.function import Peers, fed_ranks

ROLES = (("chief", 1), ("worker", 1), ("ps", 1), ("evaluator", 1))


@pytest.mark.parametrize(
    ("is_fed", "ended"),
    [(False, [False, True, True, False]), (True, [False, False, True, True])],
)
def test_who_is_ended_with_the_others(is_fed: bool, ended: list[bool]) -> None:
    peers = Peers("tensorflow", ROLES, is_fed=is_fed)
    assert [peers.waits_for_others(rank) for rank in range(4)] == ended


def test_a_chief_and_workers_get_rows() -> None:
    assert fed_ranks(dict(ROLES)) == 2
    assert fed_ranks({"evaluator": 1, "worker": 3}) == 3
    assert fed_ranks({"chief": 1, "worker": 3}) is None
    assert fed_ranks(None) is None
