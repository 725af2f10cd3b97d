"""The rules that take the optimizer's place, against one process with the whole optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks, part, take_step, vector

from sparkdl.collective.rules import ExchangeRule, OneBitAdam, Sliced
from sparkdl.collective.rules.sliced import AroundStep
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.optimizers import blocks
from sparkdl.optimizers.flat import (
    FlatAdagrad,
    FlatAdam,
    FlatAdamW,
    FlatOptimizer,
    FlatRMSprop,
    FlatSGD,
)
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("a", (3, 3), "float32"), ("b", (2,), "float32")], [("m", (2,), "float32")])
N, T = LAYOUT.size, LAYOUT.trained_size


def gradients(step: int, ranks: int) -> list[FloatArray]:
    return [vector(100 * step + r, N) for r in range(ranks)]


def alone(optimizer: FlatOptimizer, rows: list[int], steps: int, rate: float) -> FloatArray:
    """One process on the global batches."""
    x = vector(5, N)
    state = optimizer.init(x[:T])
    for i in range(steps):
        shares = zip(gradients(i, len(rows)), rows, strict=True)
        mean = (sum(g * n for g, n in shares) / sum(rows)).astype(np.float32)
        optimizer.step(x[:T], mean[:T], state, rate, x[:T])
        x[T:] = mean[T:]
    return x


def together(
    rule: ExchangeRule, rows: list[int], steps: int, rate: float | None
) -> list[tuple[FloatArray, Any]]:
    def work(c: Any) -> tuple[FloatArray, Any]:
        exchange = rule.open(c, LAYOUT)
        x = vector(5, N)
        n = rows[c.rank]
        for i in range(steps):
            mine = exchange.fill([part(gradients(i, len(rows))[c.rank], n)] if n else [])
            assert take_step(exchange, x, mine, rate)
        before = x.copy()
        assert not take_step(exchange, x, 0, rate)  # nobody has rows: nothing happens
        np.testing.assert_array_equal(x, before)
        exchange.close()
        return x, exchange

    return on_ranks(len(rows), work)


OPTIMIZERS = [
    FlatSGD(), FlatSGD(momentum=0.9), FlatSGD(momentum=0.9, nesterov=True), FlatAdam(),
    FlatAdamW(weight_decay=0.1), FlatAdagrad(), FlatRMSprop(),
]  # fmt: skip


@pytest.mark.parametrize("rows", [[4], [2, 2], [5, 0, 3], [1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_sliced_ranks_equal_one_process(optimizer: FlatOptimizer, rows: list[int]) -> None:
    want = alone(optimizer, rows, 12, 0.05)
    results = together(Sliced(optimizer), rows, 12, 0.05)
    for x, _ in results:
        np.testing.assert_allclose(x, want, atol=1e-5)
        assert x.tobytes() == results[0][0].tobytes()


def state_elements(exchange: Any) -> int:
    return sum(v.size for v in exchange.own_state.values() if isinstance(v, np.ndarray))


def test_two_ranks_keep_half_the_state_each() -> None:
    whole = state_elements(together(Sliced(FlatAdam()), [1], 1, 0.1)[0][1])
    halves = [state_elements(e) for _, e in together(Sliced(FlatAdam()), [1, 1], 1, 0.1)]
    assert whole == 2 * T
    assert sum(halves) == whole
    assert max(halves) <= whole // 2 + 2


def test_slices_are_stepped_without_numba_whatever_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take 154 MB of a process whose rule is there to save memory."""

    def refuse(loop: Any) -> Any:
        raise AssertionError("numba was asked for")

    monkeypatch.setattr(blocks, "COMPILED_FROM", 1)
    monkeypatch.setattr(blocks, "_compile", refuse)
    for optimizer in (FlatAdam(), FlatSGD(momentum=0.9), FlatAdagrad(), FlatRMSprop()):
        assert len(together(Sliced(optimizer), [1, 1], 2, 0.1)) == 2
    x = vector(5, N)
    with pytest.raises(AssertionError, match="numba"):  # as others do
        FlatAdam().step(x, gradients(0, 1)[0], FlatAdam().init(x), 0.1, x)


def test_a_sliced_run_goes_on_with_another_number_of_ranks() -> None:
    rule = Sliced(FlatAdam())

    def first(c: Any) -> tuple[FloatArray, Any]:
        exchange = rule.open(c, LAYOUT)
        x = vector(5, N)
        for i in range(6):
            take_step(exchange, x, exchange.fill([part(gradients(i, 1)[0], 1)]), 0.05)
        return x, exchange.state()

    x0, state = on_ranks(2, first)[0]

    def second(c: Any) -> FloatArray:
        exchange = rule.open(c, LAYOUT)
        exchange.load_state(state)
        x = x0.copy()
        for i in range(6, 12):
            take_step(exchange, x, exchange.fill([part(gradients(i, 1)[0], 1)]), 0.05)
        return x

    for x in on_ranks(3, second):
        np.testing.assert_allclose(x, alone(FlatAdam(), [1], 12, 0.05), atol=1e-5)


def config(name: str, **options: Any) -> dict[str, Any]:
    return {"class_name": name, "config": {"learning_rate": 0.05, **options}}


def test_the_compiled_optimizer_is_taken() -> None:
    assert Sliced().bind(2, config("SGD", momentum=0.9)).optimizer == FlatSGD(0.05, 0.9)
    assert Sliced(FlatAdam()).bind(2, config("SGD")).optimizer == FlatAdam()
    assert OneBitAdam().bind(2, config("Adam")).optimizer == FlatAdam(0.05)
    with pytest.raises(UnknownNameError, match="Lion"):
        Sliced().bind(2, config("Lion"))
    assert Sliced().bind(2, config("Adam", clipnorm=2.0)).around == AroundStep(clipnorm=2.0)
    assert Sliced().bind(2, config("Adam", amsgrad=True)).optimizer == FlatAdam(0.05, amsgrad=True)
    with pytest.raises(UnknownNameError, match="'SGD'"):
        OneBitAdam().bind(2, config("SGD"))
    with pytest.raises(ConfigError, match="weight_decay"):
        OneBitAdam().bind(2, config("Adam", weight_decay=0.1))
    for rule in (Sliced(), OneBitAdam()):
        with pytest.raises(ConfigError, match="no optimizer"):
            on_ranks(1, lambda c, rule=rule: rule.open(c, LAYOUT))


def test_the_learning_rate_given_wins() -> None:
    own = together(Sliced(FlatSGD(0.05)), [1, 1], 3, None)[0][0]
    np.testing.assert_allclose(own, alone(FlatSGD(), [1, 1], 3, 0.05), atol=1e-6)
    with pytest.raises(ConfigError, match="learning rate"):
        together(Sliced(FlatSGD()), [1, 1], 1, None)


# -- 1-bit Adam -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[4], [2, 2], [5, 0, 3]], ids=str)
def test_one_bit_adam_is_adam_before_the_freeze(rows: list[int]) -> None:
    for x, _ in together(OneBitAdam(FlatAdam(), freeze_step=20), rows, 12, 0.05):
        np.testing.assert_allclose(x, alone(FlatAdam(), rows, 12, 0.05), atol=1e-6)


def classification(seed: int) -> tuple[FloatArray, FloatArray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(400, 30)).astype(np.float32) * np.geomspace(0.05, 2, 30, dtype="f")
    x[:, 7] = 0.0  # a feature that never has a gradient
    teacher = np.random.default_rng(0).normal(size=(30, 5))
    return x, np.eye(5, dtype=np.float32)[np.argmax(x @ teacher, axis=1)]


SOFTMAX = Layout.of([("w", (30, 5), "float32"), ("b", (5,), "float32")])


def softmax_loss(flat: FloatArray, x: FloatArray, y: FloatArray) -> tuple[float, FloatArray]:
    w, b = SOFTMAX.views(flat)
    scores = x @ w + b
    scores -= scores.max(1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(1, keepdims=True)
    error = (p - y) / len(x)
    gradient = np.concatenate([(x.T @ error).ravel(), error.sum(0)]).astype(np.float32)
    return float(-np.log((p * y).sum(1) + 1e-9).mean()), gradient


def train_softmax(rule: ExchangeRule, ranks: int, steps: int) -> list[Any]:
    x, y = classification(1)

    def work(c: Any) -> Any:
        exchange = rule.open(c, SOFTMAX)
        flat = np.zeros(SOFTMAX.size, np.float32)
        rows = slice(len(x) * c.rank // ranks, len(x) * (c.rank + 1) // ranks)
        losses, sent = [], 0
        random = np.random.default_rng(c.rank)
        for _ in range(steps):
            pick = random.integers(rows.start, rows.stop, 32)
            gradient = softmax_loss(flat, x[pick], y[pick])[1]
            sent = exchange.sent_bytes
            take_step(exchange, flat, exchange.fill([part(gradient, 32)]), 0.02)
            losses.append(softmax_loss(flat, x, y)[0])
        return flat, losses, exchange.sent_bytes - sent

    return on_ranks(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_bit_adam_goes_on_learning_after_the_freeze(ranks: int) -> None:
    results = train_softmax(OneBitAdam(FlatAdam(), freeze_step=60), ranks, 400)
    dense = train_softmax(Sliced(FlatAdam()), ranks, 400)
    flat, losses, sent = results[0]
    assert all(np.isfinite(losses))
    assert losses[-1] < 0.6 * losses[60]
    assert losses[-1] < 1.4 * dense[0][1][-1]
    assert max(np.diff(losses[60:])) < 0.1  # no leap at the freeze or later
    assert len({f.tobytes() for f, _, _ in results}) == 1
    assert sent < 0.15 * 4 * SOFTMAX.size + 60
    np.testing.assert_array_equal(SOFTMAX.views(flat)[0][7], 0.0)


@pytest.mark.parametrize(("floor", "thrown"), [(0.0, True), (0.1, False)])
def test_the_floor_holds_coordinates_that_hardly_had_a_gradient(floor: float, thrown: bool) -> None:
    layout = Layout.of([("a", (50,), "float32")])

    def work(c: Any) -> FloatArray:
        exchange = OneBitAdam(FlatAdam(), freeze_step=5, floor=floor).open(c, layout)
        x = np.zeros(50, np.float32)
        for i in range(10):
            gradient = vector(i, 50)
            gradient[7] = 1e-9
            take_step(exchange, x, exchange.fill([part(gradient, 1)]), 0.01)
        return x

    for x in on_ranks(2, work):
        assert (abs(x[7]) > 100.0) == thrown
        assert thrown or abs(x).max() < 1.0


def test_one_bit_adam_loses_nothing_only_late() -> None:
    """What was decoded and what is left in the errors add up to the momentum that went in."""
    layout = Layout.of([("a", (40,), "float32"), ("b", (9,), "float32")])
    n = layout.size

    def work(c: Any) -> None:
        exchange = OneBitAdam(FlatAdam(), freeze_step=1).open(c, layout)
        x = np.zeros(n, np.float32)
        take_step(exchange, x, exchange.fill([part(vector(c.rank, n), 1)]), 0.1)
        frozen = exchange._frozen
        assert frozen is not None
        for i in range(20):
            mean, errors = frozen.mean.copy(), frozen.worker_error.copy()
            server = frozen.server_error.copy()
            g = vector(50 * i + c.rank, n)
            take_step(exchange, x, exchange.fill([part(g, 1)]), 0.1)
            u = np.float32(0.9) * mean + np.float32(0.1) * g + errors
            sent = c.all_reduce(u - frozen.worker_error, "mean")  # decoded, averaged
            got = frozen.mean[frozen.mine] + frozen.server_error
            np.testing.assert_allclose(got, sent[frozen.mine] + server, atol=1e-5)

    on_ranks(2, work)


def test_one_bit_adam_goes_on_after_a_restart() -> None:
    rule = OneBitAdam(FlatAdam(), freeze_step=3)

    def work(c: Any) -> None:
        exchange = rule.open(c, LAYOUT)
        x = vector(5, N)
        for i in range(6):
            take_step(exchange, x, exchange.fill([part(gradients(i, 2)[c.rank], 1)]), 0.05)
        again = rule.open(c, LAYOUT)
        again.load_state(exchange.state())
        for name, value in exchange.state().items():
            np.testing.assert_allclose(again.state()[name], value, rtol=1e-6, atol=1e-7)
        y = x.copy()
        take_step(again, y, again.fill([part(gradients(7, 2)[c.rank], 1)]), 0.05)
        assert np.isfinite(y).all()

    on_ranks(2, work)
