"""Frames: what is encoded comes back, and what does not fit is refused before it costs anything."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, ProtocolError, SparkDLError, WaitTimeoutError, WorkerError
from sparkdl.transport.frames import (
    HEADER,
    HEADER_BYTES,
    MIN_BUFFER_BYTES,
    Flag,
    Kind,
    Limits,
    Message,
    check_sizes,
    decode_header,
    decode_meta,
    encode,
    error_from_meta,
    error_to_meta,
)

LIMITS = Limits(weights_bytes=400, max_meta_bytes=1000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3)
    ),
    max_leaves=8,
)
messages = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    flags=st.integers(0, 127).map(Flag),
    rank=st.integers(-1, 2**31 - 1),
    attempt=st.integers(-(2**63), 2**63 - 1),
    sequence=st.integers(0, 2**64 - 1),
    clock=st.integers(0, 2**64 - 1),
    rows=st.integers(0, 2**64 - 1),
    batches=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    batch=st.integers(0, 2**32 - 1),
    learning_rate=st.floats(allow_nan=False),
    meta=st.dictionaries(st.text(), json_values, max_size=4),
)


@given(messages)
def test_what_is_encoded_comes_back(message: Message) -> None:
    frame = encode(message)
    decoded, meta_len, body_len = decode_header(frame[:HEADER_BYTES])
    assert HEADER_BYTES + meta_len == len(frame)
    assert body_len == 0
    decoded.meta = decode_meta(decoded.kind, frame[HEADER_BYTES:])
    assert decoded == message


def test_the_body_is_counted_not_copied() -> None:
    frame = encode(Message(Kind.PUSH, body=np.zeros(400, np.uint8)))
    decoded, _, body_len = decode_header(frame[:HEADER_BYTES])
    assert len(frame) == HEADER_BYTES
    assert body_len == 400
    assert math.isnan(decoded.learning_rate)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(head)


@given(st.binary(min_size=HEADER_BYTES - 4, max_size=HEADER_BYTES - 4))
def test_a_header_is_decoded_or_refused_never_worse(rest: bytes) -> None:
    try:
        message, meta_len, body_len = decode_header(b"SPDL" + rest)
        check_sizes(message.kind, meta_len, body_len, LIMITS)
    except ProtocolError:
        return
    assert meta_len <= 1000
    assert body_len <= MIN_BUFFER_BYTES


@given(st.binary(max_size=64))
def test_any_meta_is_an_object_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_meta(Kind.PUSH, raw), dict)


@pytest.mark.parametrize(
    ("kind", "meta_len", "body_len"),
    [
        (Kind.PUSH, 1001, 400),
        (Kind.PUSH, 0, 396),
        (Kind.PUSH_PULL, 0, 404),
        (Kind.SNAPSHOT, 0, 0),
        (Kind.PULL, 0, 4),
        (Kind.HELLO, 0, 2**63),
        (Kind.STATE_PUT, 0, MIN_BUFFER_BYTES + 1),
        (Kind.WEIGHTS, 0, 0),
    ],
)
def test_sizes_out_of_bounds(kind: Kind, meta_len: int, body_len: int) -> None:
    with pytest.raises(ProtocolError):
        check_sizes(kind, meta_len, body_len, LIMITS)


def test_another_version_says_so() -> None:
    head = bytearray(encode(Message(Kind.PULL)))
    head[4] = 99
    with pytest.raises(ProtocolError, match="version 99"):
        decode_header(head)


def test_meta_too_large_or_not_json_is_refused_before_sending() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        encode(Message(Kind.REPORT, meta={"x": "y" * 2000}), max_meta_bytes=1000)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode(Message(Kind.REPORT, meta={"x": object()}))
    with pytest.raises(ProtocolError, match="does not fit"):
        encode(Message(Kind.PUSH, rank=2**40))


def test_the_header_size_is_fixed() -> None:
    assert HEADER.size == HEADER_BYTES == 76


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
