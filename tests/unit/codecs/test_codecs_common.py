"""What holds for every codec: sizes, error feedback, malformed payloads, the registry."""

from __future__ import annotations

import contextlib
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.codecs import ErrorFeedback, TopK, codec_names, make_codec
from sparkdl.errors import ConfigError, ProtocolError, UnknownNameError
from sparkdl.weights import FloatArray

VARIANTS: list[dict[str, Any]] = [
    *({"name": name} for name in codec_names()),
    {"name": "int8", "block": 8, "rounding": "nearest"},
    {"name": "int4", "block": 64, "rounding": "nearest"},
    {"name": "dithering", "levels": 1, "norm": "l2", "block": 24},
    {"name": "dithering", "levels": 100},
    {"name": "topk", "k": 3},
    {"name": "topk", "ratio": 1.0},
    {"name": "randomk", "k": 3},
    {"name": "randomk", "ratio": 1.0},
    {"name": "dgc", "ratio": 0.5, "warmup_steps": 5},
]
every_codec = pytest.mark.parametrize("spec", VARIANTS, ids=str)


@st.composite
def vectors(draw: Any) -> FloatArray:
    size = draw(st.sampled_from([0, 1, 7, 8, 9, 255, 1025, 65_536, 70_001]))
    scale = draw(st.sampled_from([0.0, 1e-40, 1e-6, 1.0, 1e3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return (rng.normal(0, 1, size) * scale).astype(np.float32)


@every_codec
@settings(max_examples=20, deadline=None)
@given(u=vectors())
def test_round_trip(spec: dict[str, Any], u: FloatArray) -> None:
    codec, before = make_codec(spec), u.copy()
    payload = codec.encode(u, np.random.default_rng(0))
    np.testing.assert_array_equal(u, before)
    assert payload.dtype == np.uint8
    assert payload.ndim == 1
    assert payload.size <= codec.max_size(u.size)
    out = np.full_like(u, np.nan)
    codec.decode(payload, out)
    largest = np.abs(u).max(initial=0.0)
    bound = 1.0 if spec.get("norm") != "l2" else np.sqrt(24)
    assert np.isfinite(out).all()
    assert (np.abs(out) <= bound * largest * 1.005 + 1e-7).all()
    if not codec.lossy:
        np.testing.assert_array_equal(out, u)
    if not u.any():
        np.testing.assert_array_equal(out, 0.0)


@every_codec
def test_all_kinds_of_buffers_decode_alike(spec: dict[str, Any]) -> None:
    codec, u = make_codec(spec), np.linspace(-1, 1, 1000, dtype=np.float32)
    payload = codec.encode(u, np.random.default_rng(0))
    outs = []
    shifted = memoryview(b"x" + payload.tobytes())[1:]  # not aligned
    for form in (payload, payload.tobytes(), bytearray(payload), memoryview(payload), shifted):
        outs.append(np.empty(1000, np.float32))
        codec.decode(form, outs[-1])
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@every_codec
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 9, 1000, 1025]))
def test_error_feedback_loses_nothing(spec: dict[str, Any], seed: int, size: int) -> None:
    """The sum of what was sent, plus what is held back, is the sum of what was given."""
    codec, rng = make_codec(spec), np.random.default_rng(seed)
    feedback = ErrorFeedback(codec, size, seed)
    given_sum, sent_sum = np.zeros(size), np.zeros(size)
    out = np.empty(size, np.float32)
    for _ in range(8):
        u = rng.normal(0, 1, size).astype(np.float32)
        before = u.copy()
        codec.decode(feedback.encode(u), out)
        np.testing.assert_array_equal(u, before)
        given_sum += u
        sent_sum += out
    scale = max(1.0, float(np.abs(sent_sum).max()))
    np.testing.assert_allclose(sent_sum + feedback.residual, given_sum, atol=1e-5 * scale)


@every_codec
def test_default_compressor(spec: dict[str, Any]) -> None:
    codec = make_codec(spec)
    compressor = codec.compressor(100, seed=1)
    out = np.empty(100, np.float32)
    for _ in range(3):
        payload = compressor.encode(np.linspace(-1, 1, 100, dtype=np.float32))
        assert payload.size <= codec.max_size(100)
        codec.decode(payload, out)
    assert np.isfinite(out).all()


@every_codec
@pytest.mark.parametrize("change", [-1, 1, 5])
def test_a_payload_of_the_wrong_length_is_refused(spec: dict[str, Any], change: int) -> None:
    codec, u = make_codec(spec), np.ones(100, np.float32)
    payload = codec.encode(u)
    wrong = np.resize(payload, payload.size + change)
    with pytest.raises(ProtocolError, match=codec.name):
        codec.decode(wrong, np.empty_like(u))
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(np.ones(5000, np.float32)), np.empty(1, np.float32))


@every_codec
@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=200), size=st.integers(0, 40))
def test_random_bytes_are_refused_or_decoded(spec: dict[str, Any], data: bytes, size: int) -> None:
    """Whatever arrives, it is a ProtocolError or a vector: no other error, no write outside."""
    buffer = np.zeros(size + 2, np.float32)
    with contextlib.suppress(ProtocolError):
        make_codec(spec).decode(data, buffer[1:-1])
    assert buffer[0] == buffer[-1] == 0.0


def sparse_payload(indices: list[int], values: list[float]) -> bytes:
    return np.array(indices, "<u4").tobytes() + np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("indices", "reason"),
    [([5, 100], "beyond"), ([5, 5], "twice"), ([7, 5], "descending"), ([1, 2, 3], "too many")],
)
@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_bad_indices_are_refused(name: str, indices: list[int], reason: str) -> None:
    codec = make_codec(name, ratio=0.02)
    out = np.zeros(100, np.float32)
    with pytest.raises(ProtocolError):
        codec.decode(sparse_payload(indices, [1.0] * len(indices)), out)
    assert not out.any(), reason


def test_a_code_out_of_range_is_refused() -> None:
    for spec in ({"name": "int8", "block": 8}, {"name": "int4", "block": 8}):
        codec = make_codec(spec)
        payload = codec.encode(np.ones(8, np.float32))
        payload[-1] = 255
        with pytest.raises(ProtocolError, match="codes"):
            codec.decode(payload, np.empty(8, np.float32))


@pytest.mark.parametrize("bad", [-1.0, np.inf, -np.inf])
def test_a_bad_scale_is_refused(bad: float) -> None:
    for spec in ({"name": "int8", "block": 8}, {"name": "onebit"}):
        codec = make_codec(spec)
        payload = codec.encode(np.ones(8, np.float32))
        payload[:4].view("<f4")[0] = bad
        if spec["name"] == "onebit" and bad == np.inf:
            continue  # the sender's values were infinite
        with pytest.raises(ProtocolError, match="negative"):
            codec.decode(payload, np.empty(8, np.float32))


@every_codec
def test_a_codec_survives_pickle_and_its_config(spec: dict[str, Any]) -> None:
    codec = make_codec(spec)
    assert pickle.loads(pickle.dumps(codec)) == codec
    config = json.loads(json.dumps(codec.config()))
    assert make_codec(codec.name, **config) == codec
    assert make_codec({"name": codec.name, **config}) == codec
    assert make_codec(codec) is codec
    assert make_codec(type(codec)).name == codec.name


def test_no_compression_is_none() -> None:
    assert make_codec(None).name == make_codec().name == make_codec("none").name == "none"
    assert make_codec("Top-K") == TopK()


@pytest.mark.parametrize(
    ("codec", "options", "word"),
    [
        ("int8", {"block": 12}, "block"),
        ("int8", {"rounding": "up"}, "rounding"),
        ("topk", {"ratio": 0.0}, "ratio"),
        ("topk", {"ratio": 1.5}, "ratio"),
        ("topk", {"k": 0}, "'k'"),
        ("randomk", {"foo": 1}, "foo"),
        ("dithering", {"levels": 128}, "levels"),
        ("dithering", {"norm": "l1"}, "norm"),
        ("dgc", {"momentum": 1.0}, "momentum"),
        ("dgc", {"clip_norm": 0.0}, "clip_norm"),
        ("dgc", {"warmup_steps": -1}, "warmup_steps"),
        (TopK(), {"k": 3}, "'k'"),
        (3, {}, "3"),
    ],
)
def test_a_wrong_option_is_refused(codec: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_codec(codec, **options)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'onebit'"):
        make_codec("gzip")


def test_other_arrays_are_refused() -> None:
    for array in (np.zeros(3), np.zeros((2, 2), np.float32)):
        with pytest.raises(ConfigError, match="float32"):
            make_codec("topk").encode(array)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="float32"):
            make_codec("topk").compressor(3).encode(array)  # type: ignore[arg-type]
