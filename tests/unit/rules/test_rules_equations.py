"""Each rule against its equation, written out in NumPy on small scripted inputs."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.rules import Commit, Rule, make_rule
from sparkdl.weights import FloatArray

N = 70_001  # more than one block, and not a multiple of anything


def vector(seed: int, size: int = N, scale: float = 1.0) -> FloatArray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def commit(**changes: Any) -> Commit:
    fields = {
        "worker": 0, "num_workers": 2, "clock": 0, "pulled_clock": 0, "batches": 1, "rows": 32,
        "learning_rate": 0.1,
    }  # fmt: skip
    return Commit(**{**fields, **changes})


def apply(rule: Rule, center: FloatArray, deltas: list[FloatArray], **changes: Any) -> FloatArray:
    """The center after the deltas, one commit each."""
    center = center.copy()
    state = rule.init(center)
    for i, delta in enumerate(deltas):
        rule.update(
            center, delta, state, commit(**{"clock": i, "pulled_clock": i, **changes}), center
        )
    return center


class FakePeer:
    """A server of one rule, in this process."""

    def __init__(self, rule: Rule, center: FloatArray, **changes: Any) -> None:
        self.rule, self.center, self.changes = rule, center, changes
        self.state = rule.init(center)
        self.buffer = np.zeros_like(center)
        self.pushes = 0

    def push(self) -> None:
        self.pushes += 1
        self.rule.update(self.center, self.buffer, self.state, commit(**self.changes), self.center)
        self.buffer.fill(np.nan)

    def pull(self) -> None:
        self.buffer[...] = self.center

    def push_pull(self) -> None:
        self.push()
        self.pull()


def test_downpour_adds_all_deltas() -> None:
    x0, deltas = vector(0), [vector(i + 1, scale=0.1) for i in range(5)]
    want = x0 + np.sum(deltas, axis=0)
    np.testing.assert_allclose(apply(make_rule("downpour"), x0, deltas), want, atol=2e-6)


def test_downpour_window_of_the_worker() -> None:
    rule, x0 = make_rule("downpour"), vector(0)
    peer = FakePeer(rule, x0.copy())
    local, base = x0.copy(), x0.copy()
    for step in range(3):
        local += np.float32(0.5 + step)
        rule.exchange(local, base, peer)
    np.testing.assert_allclose(peer.center, x0 + 4.5, atol=2e-6)
    np.testing.assert_array_equal(local, peer.center)
    np.testing.assert_array_equal(base, peer.center)


@pytest.mark.parametrize("payload", ["delta", "gradient"])
def test_downpour_adagrad(payload: str) -> None:
    rule = make_rule("downpour_adagrad", gamma=0.05, payload=payload)
    x0, gradients = vector(0), [vector(i + 1) for i in range(4)]
    sent = [g * np.float32(-0.1) if payload == "delta" else g for g in gradients]
    x, total = x0.astype(np.float64), np.zeros(N)
    for g in gradients:
        total += g.astype(np.float64) ** 2
        x -= 0.05 * g / (np.sqrt(total) + 1e-7)
    np.testing.assert_allclose(apply(rule, x0, sent), x, atol=2e-6)


def test_adag_divides_by_the_batches_of_the_commit() -> None:
    x0, delta = vector(0), vector(1)
    for batches in (1, 3, 12):
        got = apply(make_rule("adag"), x0, [delta], batches=batches)
        np.testing.assert_allclose(got, x0 + delta / np.float32(batches), atol=1e-6)


def test_adag_with_window_one_is_downpour() -> None:
    x0, deltas = vector(0), [vector(1), vector(2)]
    adag, downpour = make_rule("adag"), make_rule("downpour")
    np.testing.assert_array_equal(apply(adag, x0, deltas), apply(downpour, x0, deltas))


def test_dynsgd_one_intervening_commit_halves_the_delta() -> None:
    x0, delta = np.zeros(N, np.float32), np.ones(N, np.float32)
    for staleness, want in ((0, 1.0), (1, 0.5), (3, 0.25)):
        got = apply(make_rule("dynsgd"), x0, [delta], clock=7, pulled_clock=7 - staleness)
        np.testing.assert_allclose(got, want)


def test_staleness_aware_without_staleness_is_downpour() -> None:
    x0, delta = vector(0), vector(1)
    rule = make_rule("staleness_aware")
    downpour = apply(make_rule("downpour"), x0, [delta])
    for staleness in (0, 1):
        got = apply(rule, x0, [delta], clock=4, pulled_clock=4 - staleness)
        np.testing.assert_array_equal(got, downpour)
    got = apply(rule, x0, [delta], clock=4, pulled_clock=0)
    np.testing.assert_allclose(got, x0 + delta / 4, atol=1e-6)


@pytest.mark.parametrize("learning_rate", [0.2, None])
def test_experimental(learning_rate: float | None) -> None:
    rule = make_rule("experimental", learning_rate=learning_rate)
    rate = learning_rate or 0.1
    x0, a, b, c = (vector(i) for i in range(4))
    center, state = x0.copy(), rule.init(x0)
    # Worker 0 commits twice, worker 1 once in between from what it pulled at the start.
    rule.update(center, a, state, commit(worker=0, batches=5), center)
    after_a = x0 + a / 5
    np.testing.assert_allclose(center, after_a, atol=1e-6)
    rule.update(center, b, state, commit(worker=1, batches=5), center)
    after_b = after_a + b / 5 / (1 + (after_a - x0) ** 2 / rate)
    np.testing.assert_allclose(center, after_b, atol=1e-6)
    rule.update(center, c, state, commit(worker=0, batches=5), center)
    want = after_b + c / 5 / (1 + (after_b - after_a) ** 2 / rate)
    np.testing.assert_allclose(center, want, atol=1e-6)


@pytest.mark.parametrize("name", ["aeasgd", "eamsgd"])
def test_elastic_exchange_leaves_the_sum_unchanged(name: str) -> None:
    rule = make_rule(name, alpha=0.3).bind(2)
    x0, x = vector(0), vector(1)
    peer = FakePeer(rule, x0.copy())
    local, base = x.copy(), vector(2)
    rule.exchange(local, base, peer)
    np.testing.assert_allclose(local + peer.center, x + x0, atol=1e-6)
    np.testing.assert_allclose(local, x - 0.3 * (x - x0), atol=1e-6)
    np.testing.assert_array_equal(base, x0)


def test_elastic_alpha() -> None:
    assert make_rule("aeasgd", rho=5, learning_rate=0.1).bind(2).config()["alpha"] == 0.5
    assert make_rule("aeasgd").bind(1).config()["alpha"] == 0.5
    assert make_rule("aeasgd").bind(10).config()["alpha"] == pytest.approx(0.09)
    with pytest.raises(ConfigError, match="alpha · workers <= 1"):
        make_rule("aeasgd", alpha=0.5).bind(3)
    with pytest.raises(ConfigError):
        make_rule("aeasgd", alpha=0.5, rho=1.0, learning_rate=0.1)
    with pytest.raises(ConfigError):
        make_rule("aeasgd", rho=5.0)


def test_ssp_bounds_the_gap() -> None:
    rule = make_rule("ssp", staleness=3)
    assert [rule.may_continue(clock, 2) for clock in (2, 4, 5, 6)] == [True, True, True, False]
    assert make_rule("ssp", staleness=0).may_continue(3, 3)
    assert not make_rule("ssp", staleness=0).may_continue(3, 2)
    assert make_rule("ssp", staleness=-1).may_continue(10**6, 0)


def test_ssp_round_without_staleness_is_a_bsp_round() -> None:
    x0, deltas = vector(0), [vector(1), vector(2)]
    bsp = apply(make_rule("bsp", payload="delta"), x0, [(deltas[0] + deltas[1]) / 2])
    np.testing.assert_allclose(apply(make_rule("ssp", staleness=0), x0, deltas), bsp, atol=1e-6)
    summed = apply(make_rule("ssp", scale="sum"), x0, deltas)
    np.testing.assert_allclose(summed, x0 + deltas[0] + deltas[1], atol=1e-6)


def test_ssp_five_times_slower_worker() -> None:
    """Simulated clock: the gap is at most s + 1 and the run is faster than BSP."""

    def run(staleness: int, rng: np.random.Generator) -> tuple[float, int]:
        rule = make_rule("ssp", staleness=staleness)
        free, clock, widest = [0.0, 0.0], [0, 0], 0
        # The slow worker changes: each is five times slower for a while, as on a busy machine.
        while min(clock) < 200:
            ready = [w for w in (0, 1) if rule.may_continue(clock[w], min(clock))]
            worker = min(ready, key=lambda w: free[w])
            if len(ready) == 1:  # the other waits: it goes on no earlier than this one's commit
                other = 1 - worker
                free[other] = max(free[other], free[worker])
            free[worker] += 5.0 if rng.random() < 0.2 else 1.0
            clock[worker] += 1
            widest = max(widest, clock[0] - clock[1], clock[1] - clock[0])
        return max(free), widest

    bsp_time, bsp_gap = run(0, np.random.default_rng(3))
    ssp_time, ssp_gap = run(3, np.random.default_rng(3))
    assert bsp_gap <= 1
    assert ssp_gap <= 4
    assert ssp_time < bsp_time


def test_bsp_gives_the_mean() -> None:
    x0, mean = vector(0), vector(1)
    np.testing.assert_array_equal(apply(make_rule("bsp"), x0, [mean]), mean)
    got = apply(make_rule("bsp", payload="delta"), x0, [mean])
    np.testing.assert_array_equal(got, x0 + mean)


def test_bsp_gradients_equal_one_process_on_the_global_batch() -> None:
    """Linear regression, 3 workers with unequal batches, local SGD on the mean gradient."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), rng.normal(size=12)
    parts = [slice(0, 3), slice(3, 8), slice(8, 12)]

    def gradient(w: FloatArray, part: slice) -> FloatArray:
        error = x[part] @ w - y[part]
        return (2 * x[part].T @ error / len(error)).astype(np.float32)

    rule = make_rule("bsp")
    one = many = np.zeros(4, np.float32)
    for _ in range(10):
        rows = np.array([p.stop - p.start for p in parts])
        mean = np.average([gradient(many, p) for p in parts], axis=0, weights=rows)
        reply = np.empty(4, np.float32)
        rule.update(many, mean.astype(np.float32), {}, commit(), reply)
        many = many - np.float32(0.05) * reply
        one = one - np.float32(0.05) * gradient(one, slice(0, 12))
    np.testing.assert_allclose(many, one, atol=1e-6)


@pytest.mark.parametrize("payload", ["delta", "gradient"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_dc_asgd(payload: str, adaptive: bool) -> None:
    rule = make_rule("dc_asgd", payload=payload, adaptive=adaptive)
    rate = 0.1
    gradients = [vector(i + 1) for i in range(4)]
    workers = [0, 1, 1, 0]
    x = vector(0).astype(np.float64)
    backups, square = {0: x.copy(), 1: x.copy()}, np.zeros(N)
    center = vector(0)
    state = rule.init(center)
    for g, worker in zip(gradients, workers, strict=True):
        strength: Any = 0.04
        if adaptive:
            square = 0.95 * square + 0.05 * g.astype(np.float64) ** 2
            strength = 2.0 / np.sqrt(square + 1e-7)
        x = x - rate * (g + strength * g * g * (x - backups[worker]))
        backups[worker] = x.copy()
        sent = g if payload == "gradient" else g * np.float32(-rate)
        rule.update(center, sent, state, commit(worker=worker, learning_rate=rate), center)
    np.testing.assert_allclose(center, x, rtol=2e-5, atol=2e-5)


def test_dc_asgd_without_compensation_is_asgd() -> None:
    x0, deltas = vector(0), [vector(1), vector(2)]
    rule = make_rule("dc_asgd", compensation=0.0)
    got = apply(rule, x0, deltas)
    np.testing.assert_array_equal(got, apply(make_rule("downpour"), x0, deltas))


@pytest.mark.parametrize("payload", ["delta", "gradient"])
def test_gap_aware(payload: str) -> None:
    rule = make_rule("gap_aware", payload=payload)
    rates, workers = [0.1, 0.2, 0.05], [0, 1, 1]
    gradients = [vector(i + 1) for i in range(3)]
    x = vector(0).astype(np.float64)
    stale, v, highest = {0: x.copy(), 1: x.copy()}, np.zeros(N), 0.0
    center = vector(0)
    state = rule.init(center)
    for t, (g, worker, rate) in enumerate(zip(gradients, workers, rates, strict=True), start=1):
        v = 0.999 * v + 0.001 * g.astype(np.float64) ** 2
        highest = max(highest, rate)
        typical = highest * (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        x = x - rate * g / (1 + np.abs(x - stale[worker]) / typical)
        stale[worker] = x.copy()
        sent = g if payload == "gradient" else g * np.float32(-rate)
        rule.update(center, sent, state, commit(worker=worker, learning_rate=rate), center)
    np.testing.assert_allclose(center, x, rtol=1e-4, atol=1e-5)


def test_gap_aware_without_gap_is_asgd() -> None:
    x0, deltas = vector(0), [vector(1), vector(2)]
    got = apply(make_rule("gap_aware"), x0, deltas)  # one worker: it holds the center
    np.testing.assert_allclose(got, apply(make_rule("downpour"), x0, deltas), atol=1e-6)


@pytest.mark.parametrize("name", ["dc_asgd", "gap_aware", "experimental"])
def test_a_pull_renews_the_backup(name: str) -> None:
    rule, x0 = make_rule(name), vector(0)
    center, state = x0.copy(), rule.init(x0)
    rule.update(center, vector(1), state, commit(worker=0), center)
    rule.pulled(center, state, 1)
    before = center.copy()
    rule.update(center, vector(2), state, commit(worker=1), center)
    np.testing.assert_allclose(center, before + vector(2), atol=1e-6)  # no gap, so no damping


@pytest.mark.parametrize("name", ["dc_asgd", "gap_aware", "downpour_adagrad", "adam", "sgd"])
def test_a_commit_without_learning_rate_is_refused(name: str) -> None:
    rule, x = make_rule(name), np.zeros(8, np.float32)
    with pytest.raises(ConfigError, match="learning rate"):
        rule.update(x, x, rule.init(x), commit(learning_rate=0.0), x.copy())


def run_writers(deltas: list[FloatArray], size: int, commits: int) -> FloatArray:
    rule, center = make_rule("hogwild"), np.zeros(size, np.float32)
    start = threading.Barrier(len(deltas))

    def write(worker: int) -> None:
        start.wait()
        for _ in range(commits):
            sent = commit(worker=worker, num_workers=len(deltas))
            rule.update(center, deltas[worker], {}, sent, center)

    threads = [threading.Thread(target=write, args=(w,)) for w in range(len(deltas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return center


def test_hogwild_loses_nothing_on_disjoint_coordinates() -> None:
    even = np.zeros(40_000, np.float32)
    even[::2] = 1.0
    np.testing.assert_array_equal(run_writers([even, 1 - even], even.size, 1000), 1000.0)


def test_hogwild_keeps_99_percent_on_the_same_coordinates() -> None:
    ones = np.ones(40_000, np.float32)
    assert run_writers([ones, ones], ones.size, 1000).mean() >= 0.99 * 2000


def test_geo_with_one_worker_equals_the_center() -> None:
    rule, x0 = make_rule("geo").bind(1), vector(0)
    peer = FakePeer(rule, x0.copy(), num_workers=1)
    local, base = x0.copy(), x0.copy()
    for i in range(4):
        local += vector(i + 1, scale=0.1)
        rule.exchange(local, base, peer)
        np.testing.assert_allclose(peer.center, local, atol=1e-6)


def test_geo_two_workers_that_stopped_halve_their_gap_each_cycle() -> None:
    rule, x0 = make_rule("geo").bind(2), np.zeros(9, np.float32)
    server = FakePeer(rule, x0.copy())
    locals_, bases = [x0 + 8, x0.copy()], [x0.copy(), x0.copy()]
    gaps = []
    for _ in range(6):
        for local, base in zip(locals_, bases, strict=True):
            rule.exchange(local, base, server)
        gaps.append(float(np.abs(locals_[0] - server.center).max()))
    for before, after in itertools.pairwise(gaps):
        assert after == pytest.approx(before / 2, rel=1e-4)


def test_diloco_without_momentum_is_averaging() -> None:
    x0, mean = vector(0), vector(1)
    got = apply(make_rule("diloco", momentum=0.0, learning_rate=1.0), x0, [mean])
    np.testing.assert_array_equal(got, apply(make_rule("averaging"), x0, [mean]))


def test_diloco_takes_nesterov_steps() -> None:
    x0, means = vector(0), [vector(i + 1, scale=0.1) for i in range(4)]
    x, m = x0.astype(np.float64), np.zeros(N)
    for d in means:
        m = 0.9 * m + d
        x = x + 0.7 * (d + 0.9 * m)
    np.testing.assert_allclose(apply(make_rule("diloco"), x0, means), x, atol=5e-6)


def test_diloco_loss_falls_after_the_first_outer_step() -> None:
    x0 = vector(0)  # loss = ‖x‖² / 2; a local step shrinks x
    after = apply(make_rule("diloco"), x0, [x0 * np.float32(-0.3)])
    assert np.dot(after, after) < np.dot(x0, x0)


def test_async_diloco_over_a_round_is_diloco() -> None:
    x0, deltas = vector(0), [vector(i + 1, scale=0.1) for i in range(6)]
    rounds = [np.mean(deltas[i : i + 2], axis=0) for i in (0, 2, 4)]
    sync = apply(make_rule("diloco"), x0, rounds)
    asynchronous = apply(make_rule("async_diloco"), x0, deltas, num_workers=2)
    np.testing.assert_allclose(asynchronous, sync, atol=5e-6)
    alone = apply(make_rule("async_diloco"), x0, deltas, num_workers=1)
    np.testing.assert_allclose(alone, apply(make_rule("diloco"), x0, deltas), atol=5e-6)


def test_averaging_after_two_epochs_is_the_mean_of_the_workers() -> None:
    rule = make_rule("averaging")
    center, rng = vector(0), np.random.default_rng(1)
    for _ in range(2):
        trained = [center + rng.normal(0, 1, N).astype(np.float32) for _ in range(3)]
        mean = np.mean([x - center for x in trained], axis=0).astype(np.float32)
        center = apply(rule, center, [mean])
        np.testing.assert_allclose(center, np.mean(trained, axis=0), atol=2e-6)


def test_ensemble_never_exchanges() -> None:
    rule, x0 = make_rule("ensemble"), vector(0)
    peer = FakePeer(rule, x0.copy())
    local, base = vector(1), x0.copy()
    rule.exchange(local, base, peer)
    assert peer.pushes == 0
    assert rule.independent
    np.testing.assert_array_equal(local, vector(1))


def test_single_refuses_a_second_worker() -> None:
    rule = make_rule("single")
    assert rule.bind(1) is rule
    with pytest.raises(ConfigError, match="one worker"):
        rule.bind(2)


@pytest.mark.parametrize("name", ["aeasgd", "geo"])
def test_a_rule_that_must_be_bound_says_so(name: str) -> None:
    rule, x = make_rule(name), np.zeros(4, np.float32)
    with pytest.raises(ConfigError, match="number of workers"):
        rule.exchange(x, x.copy(), FakePeer(rule, x.copy()))
