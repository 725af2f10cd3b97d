"""The rows of a stream on a rank: received once, taken micro-batch by micro-batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.errors import WaitTimeoutError
from sparkdl.launch.feeding import call_while_it_feeds
from sparkdl.launch.stream_feed import (
    StreamFeed,
    StreamIntake,
    StreamKind,
    StreamSettings,
    send_rows,
)
from sparkdl.ps.kinds import StoreKind
from sparkdl.transport.address import Listeners, ListenOptions
from sparkdl.transport.frames import Kind, Message
from sparkdl.transport.server import Server
from sparkdl.wire.tls import Certificate

ENDED = {"end": True}


def batch(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64())})


class Script:
    """Answers what the driver would, and remembers what it was told."""

    def __init__(self, *answers: dict[str, int | bool]) -> None:
        self.answers, self.told = list(answers), []  # type: ignore[var-annotated]

    def tell(self, **told: Any) -> dict[str, int | bool]:
        self.told.append(told)
        return self.answers.pop(0) if "taken" in told else {}


def offer(number: int, rows: int, attempt: int = 7) -> dict[str, int | bool]:
    return {"number": number, "batch_id": 10 + number, "rows": rows, "attempt": attempt}


def sent(number: int, rows: pa.RecordBatch, intake: StreamIntake, attempt: int = 7) -> None:
    """Sends rows twice in one frame each, as after an answer that was lost."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    body = np.frombuffer(sink.getvalue(), np.uint8)
    for _ in range(2):
        message = Message(
            StreamKind.ROWS, attempt=attempt, sequence=1, total=body.size,
            meta={"number": number}, body=body,
        )  # fmt: skip
        [(_, reply)] = intake.receive(1, message, 0.0)
        assert reply.kind is Kind.OK, reply


def test_micro_batches_are_taken_one_after_the_other() -> None:
    intake = StreamIntake(1 << 20)
    sent(0, batch(1, 2, 3), intake)
    sent(0, batch(-1), intake, attempt=6)  # of a task that Spark repeated
    sent(1, batch(4, 5), intake)
    desk = Script(offer(0, 3), {}, offer(1, 2), offer(2, 0), ENDED)
    feed = StreamFeed(StreamSettings(), desk, intake, 0)
    assert feed.is_due
    assert feed.next_batch(2)["id"].tolist() == [1, 2]
    assert feed.batch_id == 10
    assert feed.next_batch(2)["id"].tolist() == [3]
    assert desk.told == [{"taken": -1}]
    assert not feed.should_stop()
    assert [told["taken"] for told in desk.told] == [-1, 0, 0]
    assert [b["id"].tolist() for b in feed.batches(8)] == [[4, 5]]
    assert feed.should_stop()
    assert feed.epoch == 3
    assert not feed.is_due
    feed.terminate()
    assert desk.told[-1] == {"taken": 2}  # nothing more to say


@pytest.mark.parametrize(("rows", "done"), [(1, -1), (3, 0)])
def test_a_function_that_ends_the_stream_says_whether_rows_were_left(rows: int, done: int) -> None:
    intake = StreamIntake(1 << 20)
    sent(0, batch(1, 2, 3), intake)
    desk = Script(offer(0, 3))
    feed = StreamFeed(StreamSettings(), desk, intake, 0)
    feed.next_batch(rows)
    feed.terminate()
    assert desk.told[-1] == {"left": True, "done": done}
    assert feed.should_stop()
    assert feed.next_batch(1) == {}
    message = Message(StreamKind.ROWS, attempt=1, sequence=1, meta={"number": 1})
    [(_, reply)] = intake.receive(1, message, 0.0)
    assert reply.meta == {"left": True}


def test_a_wait_for_rows_is_no_stall_and_a_function_that_sleeps_is() -> None:
    class Slow(Script):
        def tell(self, **told: Any) -> dict[str, int | bool]:
            time.sleep(0.6)
            return super().tell(**told)

    feed = StreamFeed(StreamSettings(), Slow(ENDED), StreamIntake(1), 0)
    assert call_while_it_feeds(feed.should_stop, feed, 0.3)
    feed = StreamFeed(StreamSettings(), Script(), StreamIntake(1), 0)
    with pytest.raises(WaitTimeoutError, match="takes no rows"):
        call_while_it_feeds(lambda: time.sleep(3), feed, 0.3)


@pytest.mark.parametrize("encrypted", [False, True])
def test_rows_go_over_a_socket(encrypted: bool) -> None:
    intake = StreamIntake(1000)  # all goes to the disk
    certificate = Certificate.make() if encrypted else None
    listeners = Listeners.bind(ListenOptions("socket", web=False), None)
    wide = [
        pa.RecordBatch.from_pydict({"x": pa.array([bytes([k]) * (5 << 20)] * 4)}) for k in range(3)
    ]
    with Server(intake, "secret", listeners, 1, certificate).start() as server:
        where = server.address.host, server.address.port
        fingerprint = "" if certificate is None else certificate.fingerprint
        for number, rows in ((0, 12), (1, 0)):
            assert rows == send_rows(
                wide if rows else [], where, "secret", fingerprint, number=number, attempt=3
            )
        chunks = intake.take(0, 3)
        assert sum(chunk.num_rows for chunk in chunks) == 12
        values = [value for chunk in chunks for value in chunk.column(0).to_pylist()]
        assert [v[:1] for v in values] == [bytes([k]) for k in (0, 1, 2) for _ in range(4)]
        assert {len(v) for v in values} == {5 << 20}
        assert intake.take(1, 3) == []
        assert send_rows(wide, where, "secret", fingerprint, number=1, attempt=4) == 0  # too late


def test_other_frames_are_refused() -> None:
    intake = StreamIntake(1)
    for message in (
        Message(StoreKind.PULL),
        Message(StreamKind.ROWS),
        Message(StreamKind.ROWS, meta={"number": "1"}),
    ):
        [(_, reply)] = intake.receive(1, message, 0.0)
        assert reply.kind is Kind.ERROR
        assert reply.meta["code"] == "protocol"
