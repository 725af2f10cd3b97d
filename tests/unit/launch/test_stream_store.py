"""What driver and ranks tell each other about a stream's rows, as a scripted coordinator."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "coordinator"))
from coordinator_world import DRIVER, CoordinatorWorld, code

from sparkdl.launch.stream_feed import LONGEST_WAIT_S, Offer, StreamKind, StreamStore
from sparkdl.transport.frames import Kind


def world() -> tuple[CoordinatorWorld, StreamStore]:
    store = StreamStore()
    ranks = CoordinatorWorld(2, store)
    ranks.join(0, 1)
    for rank in (0, 1):
        reply = ranks.send(100 + rank, StreamKind.NEXT_ROWS, meta={"host": "h", "port": 7 + rank})
        assert reply is not None
        assert reply.kind is Kind.OK
    return ranks, store


def offers(ranks: CoordinatorWorld, store: StreamStore, offer: Offer | None) -> None:
    message = store.offer(offer)
    reply = ranks.deliver(DRIVER, message)
    assert reply is not None
    assert reply.kind is Kind.OK


def test_an_offer_is_told_once_and_its_taking_is_known() -> None:
    ranks, store = world()
    assert store.addresses == {0: ("h", 7), 1: ("h", 8)}
    assert ranks.send(100, StreamKind.NEXT_ROWS, meta={"taken": -1}) is None
    offers(ranks, store, Offer(0, 40, {0: 3, 1: 2}, {0: 70, 1: 71}))
    told = {"number": 0, "batch_id": 40, "rows": 3, "attempt": 70}
    assert ranks.last(100).meta == told
    late = ranks.send(101, StreamKind.NEXT_ROWS, meta={"taken": -1})
    assert late is not None
    assert late.meta == {"number": 0, "batch_id": 40, "rows": 2, "attempt": 71}
    assert store.taken == {0: -1, 1: -1}
    assert ranks.send(100, StreamKind.NEXT_ROWS, meta={"taken": 0}) is None
    assert store.taken == {0: 0, 1: -1}
    ranks.wait(LONGEST_WAIT_S + 1)  # it is answered, and asks again
    assert ranks.last(100).meta == {}
    assert ranks.send(100, StreamKind.NEXT_ROWS, meta={"taken": 0}) is None
    assert ranks.send(101, StreamKind.NEXT_ROWS, meta={"left": True, "done": 0}) is not None
    assert store.left == {1}
    assert store.taken == {0: 0, 1: 0}
    offers(ranks, store, None)
    assert ranks.last(100).meta == {"end": True}
    end = ranks.send(101, StreamKind.NEXT_ROWS, meta={"taken": 0})
    assert end is not None
    assert end.meta == {"end": True}


def test_what_is_no_request_for_rows() -> None:
    ranks, store = world()
    assert code(ranks.send(100, StreamKind.NEXT_ROWS, attempt=5, meta={"taken": 0})) == "protocol"
    assert code(ranks.send(100, StreamKind.NEXT_ROWS, meta={"taken": "x"})) == "protocol"
    assert code(ranks.send(100, StreamKind.NEXT_ROWS, meta={"port": 3})) == "protocol"
    assert code(ranks.send(100, StreamKind.OFFER)) == "protocol"
    assert store.taken == {}
    ranks.send(100, StreamKind.NEXT_ROWS, meta={"taken": -1})
    ranks.drop(100)
    offers(ranks, store, None)
    assert ranks.answers(100) == 5


def test_a_rank_that_begins_again_is_known() -> None:
    ranks, store = world()
    assert store.began_again == set()
    ranks.send(100, StreamKind.NEXT_ROWS, meta={"host": "h", "port": 99})
    assert store.began_again == {0}
