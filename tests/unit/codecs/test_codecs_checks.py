"""Each codec against its equation and its known answers."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.codecs import DGC, make_codec
from sparkdl.codecs.sparse import DGCCompressor, largest
from sparkdl.weights import FloatArray

pytestmark = pytest.mark.long


def vector(seed: int, size: int) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 1, size).astype(np.float32)


def round_trip(codec: object, u: FloatArray, seed: int = 0) -> FloatArray:
    made = make_codec(codec)
    out = np.full_like(u, np.nan)
    made.decode(made.encode(u, np.random.default_rng(seed)), out)
    return out


@pytest.mark.parametrize(("name", "bound"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_halves_relative_error(name: str, bound: float) -> None:
    u = vector(0, 100_003) * np.float32(10.0)
    u = u[np.abs(u) > 1e-4]
    error = np.abs(round_trip(name, u) - u) / np.abs(u)
    assert error.max() <= bound


def test_bf16_rounds_to_nearest_even_and_keeps_special_values() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xFF7FFFFF]
    u = np.array(bits, np.uint32).view(np.float32)
    want = np.array([0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xFF80], np.uint16)
    np.testing.assert_array_equal(make_codec("bf16").encode(u).view("<u2"), want)
    special = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    special = np.append(special, np.array([0x7FFFFFFF], np.uint32).view(np.float32))
    got = round_trip("bf16", special.astype(np.float32))
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, 0.0, np.nan])


def test_fp16_cuts_what_is_finite_and_keeps_what_is_not() -> None:
    u = np.array([1e6, -1e6, np.nan, 65504, np.inf, -np.inf], np.float32)
    want = [65504, -65504, np.nan, 65504, np.inf, -np.inf]
    np.testing.assert_array_equal(round_trip("fp16", u), want)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "int8"},
        {"name": "int4"},
        {"name": "dithering", "levels": 1},
        {"name": "dithering", "levels": 3, "norm": "l2", "block": 8},
        {"name": "dithering", "levels": 100},
    ],
    ids=str,
)
def test_the_mean_of_10000_draws_is_the_value(spec: dict[str, object]) -> None:
    codec = make_codec(spec)
    u, rng, draws = vector(1, 21), np.random.default_rng(0), 10_000
    total, out = np.zeros(21), np.empty(21, np.float32)
    squares = np.zeros(21)
    for _ in range(draws):
        codec.decode(codec.encode(u, rng), out)
        total += out
        squares += (out.astype(np.float64) - u) ** 2
    deviation = np.sqrt(squares / draws / draws)
    assert (np.abs(total / draws - u) <= 5 * deviation + 1e-6).all()


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
def test_block_error_is_at_most_half_a_level_when_rounding_to_nearest(
    name: str, levels: int
) -> None:
    u = vector(2, 64 * 5 + 3)
    out = round_trip({"name": name, "block": 64, "rounding": "nearest"}, u)
    for start in range(0, u.size, 64):
        part = slice(start, start + 64)
        level = np.abs(u[part]).max() / levels
        assert np.abs(out[part] - u[part]).max() <= 0.5001 * level


def test_blocks_hold_the_extremes_exactly() -> None:
    u = np.array([0.0, 1.0, -1.0, 0.5, 0, 0, 0, 0], np.float32)
    out = round_trip({"name": "int8", "block": 8}, u)
    np.testing.assert_allclose(out[:3], u[:3], atol=1e-7)


def test_a_nan_stays_in_its_block() -> None:
    u = np.ones(32, np.float32)
    u[3], u[20] = np.nan, np.inf
    out = round_trip({"name": "int8", "block": 8}, u)
    assert np.isnan(out[:8]).all()
    assert np.isnan(out[16:24]).all()
    np.testing.assert_allclose(out[8:16], 1.0, atol=1e-6)


def test_bytes_on_the_wire() -> None:
    n = 4096
    sizes = {name: make_codec(name).encode(vector(0, n)).size for name in ("fp16", "bf16")}
    assert sizes == {"fp16": 2 * n, "bf16": 2 * n}
    assert make_codec("int8", block=1024).encode(vector(0, n)).size == n + 4 * 4
    assert make_codec("int4", block=1024).encode(vector(0, n)).size == n // 2 + 4 * 4
    assert make_codec("dithering", levels=1, block=512).max_size(n) == n // 4 + 8 * 4
    assert make_codec("onebit").encode(vector(0, n)).size == n // 8 + 4
    assert make_codec("topk", k=10).encode(vector(0, n)).size == 80
    assert make_codec("randomk", k=10).encode(vector(0, n)).size == 40 + 8


def test_onebit_is_sign_times_mean_size() -> None:
    u = vector(3, 1003)
    want = np.where(u < 0, -1, 1) * np.abs(u).mean()
    np.testing.assert_allclose(round_trip("onebit", u), want, rtol=1e-6)


@pytest.mark.parametrize("size", [1000, 300_000])
@pytest.mark.parametrize("k", [1, 7, 300, 999])
def test_topk_is_exactly_the_k_largest(size: int, k: int) -> None:
    u = vector(4, size)
    got = largest(u, k)
    want = np.sort(np.argsort(-np.abs(u), kind="stable")[:k])
    np.testing.assert_array_equal(got, want)
    out = round_trip({"name": "topk", "k": k}, u)
    assert np.count_nonzero(out) == k
    np.testing.assert_array_equal(out[want], u[want])


@pytest.mark.parametrize("kind", ["equal", "zero", "one spike", "sorted", "periodic", "nan"])
def test_topk_is_exact_on_awkward_vectors(kind: str) -> None:
    n, k = 200_000, 500
    u = np.ones(n, np.float32)
    if kind == "zero":
        u[:] = 0
    elif kind == "one spike":
        u[123] = 9
    elif kind == "sorted":
        u = np.linspace(0, 1, n, dtype=np.float32)
    elif kind == "periodic":
        u[:: n // 16_384] = 5  # just where the threshold's sample looks
    elif kind == "nan":
        u = vector(0, n)
        u[[5, 77_777]] = np.nan
    picked = largest(u, k)
    assert picked.size == k
    assert (np.diff(picked) > 0).all()
    sizes = np.sort(np.nan_to_num(np.abs(u), nan=np.inf))[::-1]
    np.testing.assert_array_equal(
        np.sort(np.nan_to_num(np.abs(u[picked]), nan=np.inf))[::-1], sizes[:k]
    )


def test_randomk_draws_every_element_equally_often() -> None:
    codec = make_codec("randomk", k=7)
    rng, u = np.random.default_rng(0), np.ones(50, np.float32)
    counts, out = np.zeros(50), np.empty(50, np.float32)
    for _ in range(4000):
        codec.decode(codec.encode(u, rng), out)
        assert out.sum() == 7
        counts += out
    assert np.abs(counts / 4000 - 7 / 50).max() < 0.03


def test_randomk_wire_format_is_pinned() -> None:
    """The receiver draws the same places from the seed, on any machine and version."""
    payload = np.zeros(8 + 4 * 4, np.uint8)
    payload[:8].view("<u8")[0] = 42
    payload[8:].view("<f4")[...] = [1, 2, 3, 4]
    out = np.empty(20, np.float32)
    make_codec("randomk", k=4).decode(payload, out)
    assert np.flatnonzero(out).tolist() == [3, 5, 11, 16]
    # splitmix64's published first output for seed 1234567
    from sparkdl.codecs.sparse import _splitmix64

    assert int(_splitmix64(1234567, 1)[0]) == 6457827717110365317


def dgc_reference(
    gradients: list[FloatArray], momentum: float, k: int
) -> tuple[FloatArray, FloatArray]:
    u = v = np.zeros_like(gradients[0])
    sent = np.zeros_like(u)
    for g in gradients:
        u = momentum * u + g
        v = v + u
        top = np.argsort(-np.abs(v))[:k]
        sent[top] += v[top]
        u, v = u.copy(), v.copy()
        u[top] = v[top] = 0
    return sent, v


def test_dgc_is_the_papers() -> None:
    gradients = [vector(i, 200) for i in range(12)]
    codec = DGC(ratio=0.05, momentum=0.9)
    compressor, out, total = DGCCompressor(codec, 200), np.empty(200, np.float32), np.zeros(200)
    for g in gradients:
        codec.decode(compressor.encode(g), out)
        total += out
    sent, backlog = dgc_reference(gradients, 0.9, 10)
    np.testing.assert_allclose(total, sent, atol=1e-5)
    np.testing.assert_allclose(compressor.residual, backlog, atol=1e-5)


def test_dgc_without_sparsity_is_momentum_sgd() -> None:
    gradients = [vector(i, 100) for i in range(8)]
    codec = make_codec("dgc", ratio=1.0, momentum=0.9)
    compressor, out = codec.compressor(100), np.empty(100, np.float32)
    x = want = np.zeros(100)
    velocity = np.zeros(100)
    for g in gradients:
        codec.decode(compressor.encode(g), out)
        x = x - 0.1 * out
        velocity = 0.9 * velocity + g
        want = want - 0.1 * velocity
    np.testing.assert_allclose(x, want, atol=1e-5)


def test_dgc_clips_by_the_workers_share() -> None:
    codec = make_codec("dgc", ratio=1.0, momentum=0.0, clip_norm=1.0, num_workers=4)
    out = np.empty(100, np.float32)
    codec.decode(codec.compressor(100).encode(np.full(100, 3.0, np.float32)), out)
    assert np.linalg.norm(out) == pytest.approx(0.5, rel=1e-5)


def test_dgc_warm_up_sends_less_and_less() -> None:
    codec = DGC(ratio=0.001, warmup_steps=10)
    shares = [codec.share(step) for step in range(12)]
    assert shares[:2] == [0.25, 0.25]
    assert shares[8:] == [0.001] * 4
    assert shares == sorted(shares, reverse=True)
    compressor = codec.compressor(10_000)
    sizes = [compressor.encode(vector(i, 10_000)).size for i in range(12)]
    assert sizes[0] == 8 * 2500 == codec.max_size(10_000)
    assert sizes[-1] == 8 * 10


def test_a_seed_makes_draws_repeatable() -> None:
    u = vector(0, 500)
    for name in ("int8", "int4", "randomk", "dithering"):
        one, two = (make_codec(name).compressor(500, seed=3) for _ in range(2))
        for _ in range(2):
            np.testing.assert_array_equal(one.encode(u), two.encode(u))
