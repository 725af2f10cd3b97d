"""Frames: what is encoded comes back, and what does not fit is refused before it costs anything."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.errors import ConfigError, ProtocolError, SparkDLError, WaitTimeoutError, WorkerError
from sparkdl.launch.stream_feed import StreamKind
from sparkdl.ps.kinds import StoreKind
from sparkdl.transport.frames import (
    BLOB_BYTES,
    HEADER,
    HEADER_BYTES,
    Body,
    Flag,
    FrameKind,
    FrameLimits,
    Kind,
    Message,
    decode_header,
    decode_meta,
    encode,
    error_from_meta,
    error_to_meta,
    kinds_of,
)

KINDS = kinds_of(CoordinatorKind, StoreKind, StreamKind)
LIMITS = FrameLimits(dense_bytes=400, encoded_bytes=50, blob_bytes=1000, max_meta_bytes=1000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3)
    ),
    max_leaves=8,
)
messages = st.builds(
    Message,
    kind=st.sampled_from(sorted(KINDS.values())),
    flags=st.integers(0, 1023).map(Flag),
    rank=st.integers(-1, 2**31 - 1),
    attempt=st.integers(-(2**63), 2**63 - 1),
    sequence=st.integers(0, 2**64 - 1),
    clock=st.integers(0, 2**64 - 1),
    rows=st.integers(0, 2**64 - 1),
    batches=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    batch=st.integers(0, 2**32 - 1),
    learning_rate=st.floats(allow_nan=False),
    offset=st.integers(0, 2**64 - 1),
    total=st.integers(0, 2**64 - 1),
    meta=st.dictionaries(st.text(), json_values, max_size=4),
)


@given(messages)
def test_what_is_encoded_comes_back(message: Message) -> None:
    frame = encode(message)
    decoded, meta_len, body_len = decode_header(frame[:HEADER_BYTES], KINDS)
    assert HEADER_BYTES + meta_len == len(frame)
    assert body_len == 0
    decoded.meta = decode_meta(decoded.kind, frame[HEADER_BYTES:])
    assert decoded == message


def test_the_body_is_counted_not_copied() -> None:
    body = np.zeros(400, np.uint8)
    frame = encode(Message(StoreKind.PUSH, body=body))
    decoded, _, body_len = decode_header(frame[:HEADER_BYTES], KINDS)
    assert len(frame) == HEADER_BYTES
    assert body_len == 400
    assert decoded.kind.body is Body.DENSE
    assert math.isnan(decoded.learning_rate)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(head, KINDS)


@given(st.binary(min_size=HEADER_BYTES - 4, max_size=HEADER_BYTES - 4))
def test_a_header_is_decoded_or_refused_never_worse(rest: bytes) -> None:
    try:
        message, meta_len, body_len = decode_header(b"SPDL" + rest, KINDS)
        LIMITS.check(message, meta_len, body_len)
    except ProtocolError:
        return
    assert meta_len <= 1000
    assert body_len <= LIMITS.buffer_bytes


@given(
    st.sampled_from(sorted(KINDS.values())),
    st.integers(0, 1023).map(Flag),
    st.integers(0, 2**64 - 1) | st.integers(0, 120),
    st.integers(0, 2**64 - 1) | st.integers(0, 1100),
)
def test_what_passes_the_check_fits_the_buffer(
    kind: FrameKind, flags: Flag, offset: int, body_len: int
) -> None:
    message = Message(kind, flags, offset=offset)
    try:
        LIMITS.check(message, 0, body_len)
    except ProtocolError:
        return
    assert body_len <= LIMITS.allocate().size


@given(st.binary(max_size=64))
def test_any_meta_is_an_object_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_meta(StoreKind.PUSH, raw), dict)


def check(kind: FrameKind, body_len: int, limits: FrameLimits = LIMITS, **fields: Any) -> None:
    limits.check(Message(kind, **fields), 0, body_len)


@pytest.mark.parametrize(
    ("kind", "body_len", "fields"),
    [
        (StoreKind.PULL, 0, {}),
        (StoreKind.PUSH, 400, {}),
        (StoreKind.PUSH, 50, {"flags": Flag.ENCODED}),
        (StoreKind.PUSH, 0, {"flags": Flag.ENCODED}),
        (StoreKind.PUSH, 1000, {"flags": Flag.SLICED}),
        (StoreKind.PUSH, 1000, {"flags": Flag.SLICED | Flag.ENCODED}),
        (Kind.CHUNK, 1000, {}),
        (Kind.CHUNK, 0, {}),
        (Kind.CHUNK, 1, {"offset": 2**63, "total": 2**63 + 1}),
    ],
)
def test_bodies_within_bounds(kind: FrameKind, body_len: int, fields: dict[str, Any]) -> None:
    check(kind, body_len, **fields)


@pytest.mark.parametrize(
    ("kind", "body_len", "fields"),
    [
        (StoreKind.PULL, 4, {}),
        (StoreKind.PULL, 2**63, {}),
        (StoreKind.PUSH, 396, {}),
        (StoreKind.PUSH, 404, {}),
        (StoreKind.PUSH, 51, {"flags": Flag.ENCODED}),
        (StoreKind.PUSH, 400, {"flags": Flag.ENCODED}),
        (StoreKind.PUSH, 1001, {"flags": Flag.SLICED}),
        (StoreKind.PUSH, 2**63, {"flags": Flag.SLICED}),
        (Kind.CHUNK, 1001, {}),
        (Kind.CHUNK, 2**63, {}),
    ],
)
def test_bodies_out_of_bounds(kind: FrameKind, body_len: int, fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        check(kind, body_len, **fields)


@pytest.mark.parametrize("kind", [StoreKind.PULL, StoreKind.PUSH, Kind.CHUNK])
def test_where_there_is_nothing_of_a_kind_no_body_of_it_passes(kind: FrameKind) -> None:
    nothing = FrameLimits(blob_bytes=0)
    for flags in (Flag.NONE, Flag.ENCODED):
        with pytest.raises(ProtocolError, match="does not fit"):
            check(kind, 4, nothing, flags=flags)
    assert nothing.buffer_bytes == 0


def test_a_meta_that_is_too_large_is_refused_whatever_the_body_is() -> None:
    LIMITS.check(Message(StoreKind.PUSH), 1000, 400)
    with pytest.raises(ProtocolError, match="meta of a PUSH frame is too large"):
        LIMITS.check(Message(StoreKind.PUSH), 1001, 400)


def test_a_chunk_of_a_blob_is_as_large_as_the_weights_where_they_are_larger() -> None:
    assert FrameLimits(dense_bytes=10, blob_bytes=20).chunk_bytes == 20
    large = FrameLimits(dense_bytes=2 * BLOB_BYTES)
    assert large.chunk_bytes == large.buffer_bytes == 2 * BLOB_BYTES
    check(Kind.CHUNK, 2 * BLOB_BYTES, large)


def test_the_dense_buffer_is_the_start_of_the_connections_buffer() -> None:
    raw = LIMITS.allocate()
    assert raw.size == LIMITS.buffer_bytes == 1000
    LIMITS.dense(raw)[...] = 1.0
    np.testing.assert_array_equal(raw[:400].view(np.float32), np.ones(100))


def test_an_unknown_kind_is_refused() -> None:
    head = bytearray(encode(Message(StoreKind.PULL)))
    assert head[5] == StoreKind.PULL
    head[5] = 200
    with pytest.raises(ProtocolError, match="unknown"):
        decode_header(head, KINDS)


def test_each_number_is_of_one_service() -> None:
    enums = (Kind, CoordinatorKind, StoreKind, StreamKind)
    assert len(KINDS) == sum(len(enum) for enum in enums)


def test_a_kind_of_another_service_is_refused_by_its_header() -> None:
    head = encode(Message(StoreKind.PULL))
    with pytest.raises(ProtocolError, match="unknown kind"):
        decode_header(head, kinds_of(CoordinatorKind))


def test_another_version_says_so() -> None:
    head = bytearray(encode(Message(StoreKind.PULL)))
    head[4] = 99
    with pytest.raises(ProtocolError, match="version 99"):
        decode_header(head, KINDS)


def test_meta_too_large_or_not_json_is_refused_before_sending() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        encode(Message(CoordinatorKind.REPORT, meta={"x": "y" * 2000}), max_meta_bytes=1000)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode(Message(CoordinatorKind.REPORT, meta={"x": object()}))
    with pytest.raises(ProtocolError, match="does not fit"):
        encode(Message(StoreKind.PUSH, rank=2**40))


def test_the_header_size_is_fixed() -> None:
    assert HEADER.size == HEADER_BYTES == 96


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(3, "ValueError: x", "trace", hint="h"),
        WaitTimeoutError("w", expected="e", received="r", hint="h"),
        ConfigError("c"),
        SparkDLError("s"),
    ],
)
def test_errors_cross_the_wire(error: SparkDLError) -> None:
    back = error_from_meta(error_to_meta(error))
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_an_error_without_sense_is_still_an_error() -> None:
    assert isinstance(error_from_meta({"code": "?", "rank": "x"}), SparkDLError)
    assert isinstance(error_from_meta({"code": "aborted", "rank": "x"}), WorkerError)
