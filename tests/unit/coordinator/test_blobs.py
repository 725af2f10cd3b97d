"""Bytes that travel in chunks: cut once, joined once, whatever kind of frame carries them."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.coordinator.blobs import BlobReplacedError, chunk_reply, chunked, read_blob, read_kept
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.errors import ProtocolError
from sparkdl.files.model_file import store_arrays, unpack_arrays
from sparkdl.files.run_state import Blob
from sparkdl.transport.frames import Kind, Message

BLOB = np.arange(10, dtype=np.uint8)


def test_chunks_say_where_they_lie() -> None:
    first = Message(CoordinatorKind.KEEP, epoch=3, meta={"own": True})
    frames = list(chunked(first, [BLOB], 4))
    assert [(m.offset, m.total, m.epoch) for m, _ in frames] == [
        (0, 10, 3), (4, 10, 3), (8, 10, 3),
    ]  # fmt: skip
    assert [chunk.tolist() for _, chunk in frames] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert frames[0][0].meta is not frames[1][0].meta
    assert list(chunked(first, [BLOB[:0]], 4)) == []

    assert (first.offset, first.total) == (0, 0)


def test_a_blob_in_several_places_travels_as_one() -> None:
    stored = store_arrays({"count": 3}, [("a", 5, [np.ones(2, "f4"), np.zeros(3, "f4")])])
    blob: Blob = [b"head", memoryview(b""), stored, np.arange(7, dtype=np.uint8)]
    whole = b"".join(map(bytes, blob))
    for limit in (1, 3, 64, 10_000):
        frames = list(chunked(Message(CoordinatorKind.KEEP), blob, limit))
        assert b"".join(chunk.tobytes() for _, chunk in frames) == whole
        assert {message.total for message, _ in frames} == {len(whole)}
        assert [message.offset for message, _ in frames] == list(range(0, len(whole), limit))
    arrays = unpack_arrays(bytes(stored), "a state")
    assert arrays["count"] == 3
    assert arrays["a"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("limit", [1, 3, 10, 100])
def test_a_blob_is_read_as_it_was_cut(limit: int) -> None:
    asked: list[int] = []

    def request(offset: int) -> Message:
        asked.append(offset)
        return chunk_reply(BLOB, offset, limit)

    assert read_blob(request) == BLOB.tobytes()
    assert asked == list(range(0, 10, limit))


def test_an_empty_blob_is_read_in_one_request() -> None:
    assert read_blob(lambda offset: chunk_reply(BLOB[:0], offset, 4)) == b""


@pytest.mark.parametrize("body", [None, BLOB[:0]])
def test_a_chunk_without_bytes_ends_the_read(body: np.ndarray | None) -> None:
    """Else a session that asks for the driver's changes would ask for ever."""
    with pytest.raises(ProtocolError, match="wrong size"):
        read_blob(lambda offset: Message(Kind.CHUNK, total=10, body=body))


def test_a_chunk_beyond_the_end_is_refused() -> None:
    with pytest.raises(ProtocolError, match="wrong size"):
        read_blob(lambda offset: Message(Kind.CHUNK, total=8, body=BLOB))


def test_a_blob_that_is_replaced_is_no_mixture() -> None:
    def request(offset: int) -> Message:
        return chunk_reply(BLOB, offset, 4, epoch=1 if offset else 0)

    with pytest.raises(BlobReplacedError):
        read_blob(request)


def test_the_kept_state_is_read_again_after_it_was_replaced() -> None:
    states = iter([(BLOB, 0), (BLOB[::-1].copy(), 1)])
    now = next(states)
    asked = 0

    def request(message: Message) -> Message:
        nonlocal now, asked
        asked += 1
        if asked == 2:
            now = next(states)
        return chunk_reply(now[0], message.offset, 4, epoch=now[1])

    assert read_kept(request) == BLOB[::-1].tobytes()
