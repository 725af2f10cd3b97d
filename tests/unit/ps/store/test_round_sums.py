"""Sums of a few numbers over the ranks of a round, before they commit."""

from __future__ import annotations

import pytest
from ps_world import Kind, Rounds, World

from sparkdl.ps.kinds import StoreKind
from sparkdl.transport.frames import Message


def ask(world: World, rank: int, numbers: list[float], number: int = 1) -> Message | None:
    return world.send(rank, StoreKind.ADD_UP, offset=number, meta={"numbers": numbers})


def started(workers: int = 2) -> World:
    world = World(Rounds("gradient"), workers=workers)
    world.join(*range(workers))
    return world


def test_each_rank_is_told_the_sums_when_all_have_asked() -> None:
    world = started()
    assert ask(world, 0, [8.0, 3.0]) is None
    reply = ask(world, 1, [4.0, 2.5])
    assert reply is not None
    assert reply.meta == {"sums": [12.0, 5.5]}
    assert world.last(0).meta == {"sums": [12.0, 5.5]}


def test_the_commit_of_a_rank_without_rows_stands_for_its_numbers() -> None:
    world = started(3)
    ask(world, 0, [8.0, 3.0])
    ask(world, 1, [4.0, 2.5])
    assert world.commit(2, 0.0, 1, rows=0) is None
    assert world.last(0).meta == {"sums": [12.0, 5.5]}
    world.commit(0, 1.0, 1, rows=8)
    world.commit(1, 4.0, 1, rows=4)
    assert world.bodies[2][0] == 2.0  # the round goes on as ever


def test_who_asks_again_in_the_same_round_is_told_the_same() -> None:
    world = started()
    ask(world, 0, [1.0])
    ask(world, 1, [2.0])
    again = ask(world, 1, [2.0])  # the first reply was lost
    assert again is not None
    assert again.meta == {"sums": [3.0]}
    assert ask(world, 0, [5.0], number=2) is None  # other sums of that round
    second = ask(world, 1, [7.0], number=2)
    assert second is not None
    assert second.meta == {"sums": [12.0]}


def test_the_next_round_has_sums_of_its_own() -> None:
    world = started()
    for rank in (0, 1):
        ask(world, rank, [1.0])
    for rank in (0, 1):
        world.commit(rank, 1.0, 1)
    assert ask(world, 0, [3.0]) is None
    reply = ask(world, 1, [4.0])
    assert reply is not None
    assert reply.meta == {"sums": [7.0]}


@pytest.mark.parametrize("numbers", [None, "1", [None], ["1"]])
def test_what_is_no_list_of_numbers_is_refused(numbers: object) -> None:
    world = started()
    reply = world.send(0, StoreKind.ADD_UP, offset=1, meta={"numbers": numbers})
    assert reply is not None
    assert reply.kind is Kind.ERROR
