"""The rules of the all-reduce family against their equations, ranks as threads."""

from __future__ import annotations

import doctest
import pickle
from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks, part, vector

from sparkdl.collective import rules
from sparkdl.collective.rules import (
    EASGD,
    AdaptiveLocalSGD,
    Adasum,
    DiLoCoExchangeRule,
    ExchangeRule,
    LocalSGD,
    Mean,
    PowerSGD,
    RoundRule,
    StreamingDiLoCo,
    Sum,
    local,
    make_rule,
    rule_names,
)
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.rules import Commit, DiLoCo, Downpour, Rule, State
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("a", (2, 2), "float32"), ("b", (2,), "float32")], [("m", (1,), "float32")])
N, T = LAYOUT.size, LAYOUT.trained_size


def reduced(rule: ExchangeRule, buffers: list[Any], rows: list[int]) -> list[FloatArray | None]:
    """What one step of a gradient rule gives on each rank; None if nothing was applied."""

    def work(c: Any) -> FloatArray | None:
        exchange = rule.open(c, LAYOUT)
        applied: list[FloatArray] = []
        n = rows[c.rank]
        parts = [part(np.asarray(buffers[c.rank], np.float32), n)] if n else []
        done = exchange.take_step(parts, lambda flat: applied.append(flat.copy()))
        c.barrier()
        exchange.close()
        assert done == bool(applied)
        return applied[0] if applied else None

    return on_ranks(len(rows), work)


def exchanged(
    rule: ExchangeRule, start: FloatArray, rounds: list[list[FloatArray]], rows: list[int]
) -> list[tuple[FloatArray, FloatArray]]:
    """Weights and center of each rank after local changes ``rounds[t][rank]`` and exchanges."""

    def work(c: Any) -> tuple[FloatArray, FloatArray]:
        exchange = rule.open(c, LAYOUT)
        x = start.copy()
        exchange.start(x)
        for changes in rounds:
            x += changes[c.rank] if rows[c.rank] else 0
            exchange.after_window(x, rows[c.rank], 1.0, 0.1)
        own = x.copy()
        exchange.finish(x)
        np.testing.assert_array_equal(x, exchange.center)
        return own, exchange.center

    return on_ranks(len(rows), work)


def test_examples_in_docstrings():
    for module in (local, rules):
        assert doctest.testmod(module).failed == 0


# -- gradients ------------------------------------------------------------------------------------


def test_the_mean_is_the_global_batchs_gradient():
    buffers, rows = [vector(r, N) for r in range(4)], [5, 0, 3, 8]
    want = sum(b * n for b, n in zip(buffers, rows, strict=True)) / 16
    for got in reduced(Mean(), buffers, rows):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_accumulating_two_batches_equals_the_doubled_batch():
    halves = [[vector(10 * r + k, N) for k in range(2)] for r in range(2)]
    rows = [[4, 2], [3, 7]]

    def work(c: Any) -> FloatArray:
        exchange = Mean().open(c, LAYOUT)
        parts = [part(v, n) for v, n in zip(halves[c.rank], rows[c.rank], strict=True)]
        assert exchange.take_step(parts, lambda flat: None)
        return exchange.buffer.copy()

    whole = [
        sum(v * n for v, n in zip(halves[r], rows[r], strict=True)) / sum(rows[r]) for r in range(2)
    ]
    doubled = reduced(Mean(), whole, [sum(n) for n in rows])
    for got, want in zip(on_ranks(2, work), doubled, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_sum_adds_gradients_and_averages_statistics():
    buffers = [vector(r, N) for r in range(3)]
    for got in reduced(Sum(), buffers, [2, 0, 6]):
        np.testing.assert_allclose(got[:T], (buffers[0] + buffers[2])[:T], atol=1e-6)
        np.testing.assert_allclose(got[T:], (2 * buffers[0] + 6 * buffers[2])[T:] / 8, atol=1e-6)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ConfigError, match="without rows"):
        on_ranks(1, lambda c: Mean().open(c, LAYOUT).fill([part(vector(0, N), 0)]))


def test_adasum_sums_orthogonal_and_averages_parallel_per_variable():
    for got in reduced(Adasum(), [[1, 0, 0, 0, 2, 4, 1], [0, 3, 0, 0, 2, 4, 3]], [1, 1]):
        np.testing.assert_allclose(got, [1, 3, 0, 0, 2, 4, 2], atol=1e-6)
    for got in reduced(Adasum(), [[0] * 7, [1, 2, 3, 4, 5, 6, 7]], [1, 1]):
        np.testing.assert_allclose(got, [1, 2, 3, 4, 5, 6, 3.5], atol=1e-6)
    for got in reduced(Adasum(), [[np.nan] * 7, [1, 2, 3, 4, 5, 6, 7]], [0, 9]):
        np.testing.assert_allclose(got, [1, 2, 3, 4, 5, 6, 7], atol=1e-6)


def test_adasum_of_four_is_a_tree_of_pairs():
    buffers = [vector(r, N) for r in range(4)]

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        dot = a @ b
        return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b

    results = reduced(Adasum(), buffers, [1] * 4)
    x = np.array(buffers)
    for place in (slice(0, 4), slice(4, 6)):
        want = pair(pair(x[0][place], x[1][place]), pair(x[2][place], x[3][place]))
        np.testing.assert_allclose(results[0][place], want, atol=1e-5)


def test_adasum_refuses_three_ranks():
    with pytest.raises(ConfigError, match="power of two"):
        Adasum().bind(3)
    with pytest.raises(ConfigError, match="power of two"):
        on_ranks(3, lambda c: Adasum().open(c, LAYOUT))


WIDE = Layout.of(
    [("w", (5, 3), "float32"), ("b", (4,), "float32"), ("k", (2, 3, 4), "float32")],
    [("m", (2,), "float32")],
)


def test_power_sgd_of_full_rank_is_dense():
    def work(c: Any) -> np.ndarray:
        exchange = PowerSGD(rank=6).open(c, WIDE)
        exchange.take_step([part(vector(c.rank, WIDE.size), c.rank + 1)], lambda flat: None)
        return exchange.buffer

    want = (vector(0, WIDE.size) + 2 * vector(1, WIDE.size)) / 3
    results = on_ranks(2, work)
    np.testing.assert_allclose(results[0], want, atol=1e-5)
    assert results[0].tobytes() == results[1].tobytes()


def test_power_sgd_feeds_its_error_back_and_sends_thin_factors():
    big = Layout.of([("w", (20, 30), "float32")])
    gradient = vector(0, 600)

    def work(c: Any) -> tuple[float, float, float]:
        exchange = PowerSGD(rank=2).open(c, big)
        total = np.zeros(600, np.float32)
        first = 0.0
        for i in range(60):
            exchange.take_step([part(gradient, 1)], lambda flat: np.add(total, flat, out=total))
            if i == 0:
                first = float(np.linalg.norm(total - gradient) / np.linalg.norm(gradient))
        last = float(np.linalg.norm(total / 60 - gradient) / np.linalg.norm(gradient))
        return first, last, exchange.sent_bytes / 60

    for first, last, sent in on_ranks(2, work):
        assert last < 0.3 * first
        assert sent == 4 * (2 * (20 + 30) + 1)


def test_power_sgd_keeps_the_error_of_a_rank_without_rows():
    big = Layout.of([("w", (6, 8), "float32")])

    def work(c: Any) -> tuple[FloatArray, FloatArray]:
        exchange = PowerSGD().open(c, big)
        exchange.take_step([part(vector(c.rank, 48), 1)], lambda flat: None)
        before = exchange._errors[0].copy()
        exchange.take_step([part(vector(9, 48), 1)] if c.rank else [], lambda flat: None)
        return before, exchange._errors[0]

    (kept, after), (before, changed) = on_ranks(2, work)
    np.testing.assert_array_equal(kept, after)
    assert (before != changed).any()


# -- weights --------------------------------------------------------------------------------------


def test_local_sgd_with_one_step_is_synchronous_sgd():
    start, rows = vector(99, N), [4, 1, 3]
    gradients = [[vector(10 * t + r, N) for r in range(3)] for t in range(5)]
    rounds = [[-0.1 * g for g in at] for at in gradients]
    want = start.astype(float)
    for at in gradients:
        want[:T] -= 0.1 * sum(g[:T] * n for g, n in zip(at, rows, strict=True)) / 8
    for x, center in exchanged(LocalSGD(), start, rounds, rows):
        np.testing.assert_allclose(x[:T], want[:T], atol=1e-6)
        np.testing.assert_array_equal(x, center)


def test_local_sgd_leaves_out_who_trained_nothing():
    start, change = vector(1, N), vector(2, N)
    for x, _ in exchanged(LocalSGD(), start, [[np.full(N, np.nan, "f"), change]], [0, 3]):
        np.testing.assert_allclose(x, start + change, atol=1e-6)


def test_adaptive_window():
    assert local.adaptive_window(1.0, 1.0, 0.1, 0.1, 1) == 1
    assert local.adaptive_window(1.0, 1.0, 0.01, 0.1, 4) == 7  # sqrt(40) = 6.3
    assert local.adaptive_window(9.0, 1.0, 1e-6, 0.1, 4) == 16
    assert local.adaptive_window(0.0, 1.0, 0.1, 0.1) == 1
    assert local.adaptive_window(np.nan, 1.0, 0.1, 0.1, 4) == 1


def test_the_adaptive_window_follows_the_mean_loss_on_all_ranks_alike():
    losses = [[2.0, 4.0], [2.0, 4.0], [1.5, 1.5], [0.1, 0.3]]  # means by rows 1:3 are below

    def work(c: Any) -> list[int | None]:
        exchange = AdaptiveLocalSGD(first_window=16, warm_up=2).open(c, LAYOUT)
        x = np.zeros(N, np.float32)
        exchange.start(x)
        windows = [exchange.after_window(x, 1 + 2 * c.rank, at[c.rank], 0.1) for at in losses]
        windows.append(exchange.after_window(x, 0))
        return windows

    first, second = on_ranks(2, work)
    # losses 3.5 (warm-up), 3.5 -> L0: sqrt(16) = 4; 1.5: sqrt(6.86) = 2.6; 0.25: sqrt(1.14)
    assert first == [1, 4, 3, 2, 2]
    assert first == second

    with pytest.raises(ConfigError, match="loss"):
        on_ranks(1, lambda c: AdaptiveLocalSGD().open(c, LAYOUT).after_window(np.zeros(N, "f"), 1))


def test_elastic_averaging_conserves_and_equals_numpy():
    start = vector(50, N)
    changes = [vector(r, N) for r in range(4)]
    xs = start + np.array(changes)
    results = exchanged(EASGD(), start, [changes], [2, 2, 2, 2])
    for rank, (x, center) in enumerate(results):
        np.testing.assert_allclose(x[:T], (xs[rank] - changes[rank] / 4)[:T], atol=1e-6)
        np.testing.assert_allclose(center[:T], (start + sum(changes) / 4)[:T], atol=1e-6)
        np.testing.assert_allclose(x[T:], xs.mean(0)[T:], atol=1e-6)
    total = sum(x for x, _ in results) + results[0][1]
    np.testing.assert_allclose(total[:T], (xs.sum(0) + start)[:T], atol=1e-5)


def test_elastic_averaging_conserves_with_a_rank_that_trained_nothing():
    start = vector(50, N)
    rounds = [[vector(10 * t + r, N) for r in range(3)] for t in range(4)]
    results = exchanged(EASGD(alpha=0.2), start, rounds, [3, 0, 5])
    total = sum(x for x, _ in results) + results[0][1]
    want = 4 * start + sum(at[0] + at[2] for at in rounds)
    np.testing.assert_allclose(total[:T], want[:T], atol=1e-5)
    np.testing.assert_array_equal(results[1][0][:T], start[:T])


def test_elastic_averaging_refuses_to_overshoot():
    with pytest.raises(ConfigError, match="diverge"):
        EASGD(alpha=0.6).bind(2)
    assert EASGD(alpha=0.5).bind(2).alpha == 0.5


def diloco_by_hand(start: FloatArray, rounds: list[list[FloatArray]]) -> np.ndarray:
    center, m = start[:T].astype(float), np.zeros(T)
    for changes in rounds:
        d = np.mean([c[:T] for c in changes], axis=0)
        m = 0.9 * m + d
        center = center + 0.7 * (d + 0.9 * m)
    return center


def test_diloco_equals_numpy():
    start = vector(3, N)
    rounds = [[0.1 * vector(10 * t + r, N) for r in range(2)] for t in range(6)]
    for x, _ in exchanged(DiLoCoExchangeRule(), start, rounds, [2, 2]):
        np.testing.assert_allclose(x[:T], diloco_by_hand(start, rounds), atol=1e-5)
    plain = exchanged(DiLoCoExchangeRule(learning_rate=1.0, momentum=0.0), start, rounds, [2, 3])
    averaged = exchanged(LocalSGD(), start, rounds, [2, 3])
    for (x, _), (want, _) in zip(plain, averaged, strict=True):
        np.testing.assert_allclose(x, want, atol=1e-6)


def test_diloco_is_one_rule_with_and_without_a_server():
    """The same bits as the server's rule makes of the mean changes of the same rounds."""
    start = vector(3, N)
    rounds = [[0.1 * vector(10 * t + r, N) for r in range(2)] for t in range(3)]
    server, center = DiLoCo(momentum=0.8), start[:T].copy()
    state = server.init(center)
    for number, changes in enumerate(rounds):
        at = np.array([center + c[:T] - center for c in changes])
        mean = np.float32(0.5) * at[0] + np.float32(0.5) * at[1]
        server.update(center, mean, state, Commit(0, 2, number, number, 1, 2), center)
    for x, _ in exchanged(make_rule(DiLoCo(momentum=0.8)), start, rounds, [2, 2]):
        np.testing.assert_array_equal(x[:T], center)
    assert make_rule(DiLoCo(momentum=0.8)) == DiLoCoExchangeRule(momentum=0.8)
    with pytest.raises(ConfigError, match="server"):
        make_rule(Downpour())


class Fading(Rule):
    """A rule of one's own for both families: ``center += D / (rounds so far + 1)``."""

    name = "fading"
    blocking = True

    def init(self, center: FloatArray) -> State:
        return {"rounds": 0, "share": 1.0}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        assert commit.clock == commit.pulled_clock == state["rounds"]
        state["rounds"] += 1
        np.add(center, np.float32(state["share"]) * delta, out=out)
        state["share"] = 1 / (state["rounds"] + 1)


class FadingExchangeRule(Fading, RoundRule):
    """Fading without a server."""


def test_a_rule_of_ones_own_is_written_once_for_server_and_all_reduce():
    start = vector(3, N)
    rounds = [[vector(10 * t + r, N) for r in range(2)] for t in range(3)]
    want = start[:T] + sum((at[0] + at[1])[:T] / 2 / (t + 1) for t, at in enumerate(rounds))
    for x, _ in exchanged(FadingExchangeRule(), start, rounds, [1, 1]):
        np.testing.assert_allclose(x[:T], want, atol=1e-6)


def test_the_outer_momentum_goes_on_in_a_second_run():
    start = vector(3, N)
    rounds = [[0.1 * vector(10 * t + r, N) for r in range(2)] for t in range(6)]

    def work(c: Any) -> FloatArray:
        x, state = start.copy(), None
        for half in (rounds[:3], rounds[3:]):
            exchange = DiLoCoExchangeRule().open(c, LAYOUT)
            exchange.start(x)
            if state is not None:
                exchange.load_state(state)
            for changes in half:
                x += changes[c.rank]
                exchange.after_window(x, 2)
            exchange.finish(x)
            state = exchange.state()
        return x

    for x in on_ranks(2, work):
        np.testing.assert_allclose(x[:T], diloco_by_hand(start, rounds), atol=1e-5)


def test_streaming_diloco_of_one_fragment_without_delay_is_diloco():
    start = vector(3, N)
    rounds = [[0.1 * vector(10 * t + r, N) for r in range(3)] for t in range(5)]
    rule = StreamingDiLoCo(fragments=1, period=1, delay=0)
    want = exchanged(DiLoCoExchangeRule(), start, rounds, [2, 0, 5])
    for (x, _), (expected, _) in zip(exchanged(rule, start, rounds, [2, 0, 5]), want, strict=True):
        np.testing.assert_array_equal(x, expected)


def test_streaming_diloco_staggers_mixes_and_comes_late():
    """Two fragments, one window on the way, by hand."""
    rule = StreamingDiLoCo(fragments=2, period=1, delay=1, learning_rate=1.0, momentum=0.0)
    start = np.zeros(N, np.float32)
    rounds = [[np.full(N, v, np.float32) for v in at] for at in [(1, 3), (1, 1), (2, 0)]]
    results = exchanged(rule, start, rounds, [1, 1])
    h = T // 2
    for rank, (x, _) in enumerate(results):
        # First half: sent after window 1 with 1 and 3 (mean 2); lands after window 2: half of it
        # and half of the local 2 and 4. Sent again after window 3.
        first = 0.5 * [2, 4][rank] + 0.5 * 2.0 + [2, 0][rank]
        np.testing.assert_allclose(x[:h], first)
        # Second half: sent after window 2 with 2 and 4 (mean 3), lands after window 3.
        np.testing.assert_allclose(x[h:T], 0.5 * [4, 4][rank] + 0.5 * 3.0)
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_streaming_diloco_sends_a_fragment_at_a_time():
    def work(c: Any) -> tuple[int, int]:
        exchange = StreamingDiLoCo(fragments=2, period=2, delay=1).open(c, LAYOUT)
        x = np.zeros(N, np.float32)
        exchange.start(x)
        sizes = []
        for _ in range(4):
            exchange.after_window(x, 1)
            sizes.append(exchange.sent_bytes)
        exchange.finish(x)
        return sizes

    # the statistics go with the first fragment, the flag with each
    assert on_ranks(2, work)[0] == [0, 4 * (3 + 1 + 1), 20, 20 + 4 * (3 + 1)]


def test_streaming_diloco_refuses_a_delay_beyond_its_turn():
    with pytest.raises(ConfigError, match="delay"):
        StreamingDiLoCo(fragments=2, period=2, delay=4)


# -- common ---------------------------------------------------------------------------------------


def test_ten_against_eleven_batches_end():
    def work(c: Any) -> int:
        exchange = Mean().open(c, LAYOUT)
        taken = 0
        for i in range(12):
            parts = [part(vector(i, N), 2)] if i < 10 + c.rank else []
            taken += exchange.take_step(parts, lambda flat: None)
        return taken

    assert on_ranks(2, work) == [11, 11]


def test_even_and_odd_ranks_sum_apart():
    def work(c: Any) -> FloatArray:
        group = c.group([c.rank % 2, c.rank % 2 + 2])
        exchange = Sum().open(group, LAYOUT)
        exchange.take_step([part(np.full(N, c.rank + 1, np.float32), 1)], lambda flat: None)
        return exchange.buffer[0]

    assert on_ranks(4, work) == [4, 6, 4, 6]


def test_names():
    assert rule_names() == [
        *("adaptive_local_sgd", "adasum", "diloco", "easgd", "local_sgd", "mean"),
        *("onebit_adam", "powersgd", "sliced", "straggler_drop", "streaming_diloco", "sum"),
    ]
    for name in rule_names():
        rule = make_rule(name)
        assert rule.name == name
        assert pickle.loads(pickle.dumps(rule)) == rule
        assert rule.default_window >= 1
        assert type(rule)(**rule.config()) == rule
    assert make_rule("ZeRO1") == make_rule("sliced")
    assert make_rule("Local-SGD") == make_rule(LocalSGD) == make_rule({"name": "local_sgd"})
    assert make_rule(DiLoCoExchangeRule, momentum=0.1) == DiLoCoExchangeRule(momentum=0.1)
    with pytest.raises(UnknownNameError, match="'adasum'"):
        make_rule("adasumm")
    with pytest.raises(ConfigError, match="momentum"):
        make_rule("mean", momentum=0.5)
    with pytest.raises(ConfigError, match="server"):
        make_rule(object())
    with pytest.raises(ConfigError, match="further options"):
        make_rule(DiLoCoExchangeRule(), momentum=0.5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("diloco", {"momentum": 1.0}),
        ("diloco", {"learning_rate": 0}),
        ("powersgd", {"rank": 0}),
        ("easgd", {"alpha": -1.0}),
        ("adaptive_local_sgd", {"limit": 0}),
        ("straggler_drop", {"least": 0.0}),
        ("straggler_drop", {"patience": -1.0}),
        ("onebit_adam", {"freeze_step": 0}),
        ("streaming_diloco", {"fragments": 0}),
    ],
)
def test_wrong_options_are_refused(name, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_rule(name, **options)
