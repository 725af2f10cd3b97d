"""What holds for every rule of the all-reduce family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rank_threads import on_ranks, part, take_step

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules import (
    ExchangeRule,
    GradientExchange,
    OneBitAdam,
    OptimizerExchange,
    Sliced,
    StragglerDrop,
    StreamingDiLoCo,
    WeightsExchange,
    make_rule,
    rule_names,
)
from sparkdl.optimizers.flat import FlatAdam
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of(
    [("w", (6, 5), "float32"), ("b", (5,), "float32"), ("none", (0,), "float32")],
    [("mean", (3,), "float32")],
)
N, T = LAYOUT.size, LAYOUT.trained_size


@dataclass(frozen=True)
class SignMean(ExchangeRule):
    """A rule of one's own, as docs/rules.md has it."""

    size: float = 1e-3
    name: ClassVar[str] = "sign_mean"

    def open(self, communicator: Communicator, layout: Layout) -> SignMeanExchange:
        return SignMeanExchange(communicator, layout, self.size)


class SignMeanExchange(GradientExchange):
    def __init__(self, communicator: Communicator, layout: Layout, size: float) -> None:
        super().__init__(communicator, layout)
        self.size = np.float32(size)

    def reduce(self, rows: int) -> bool:
        np.sign(self.trained, out=self.trained)
        if not self.average(self.whole, rows):
            return False
        self.trained[:] = self.size * np.sign(self.trained)
        return True


CONFIGURED: dict[str, ExchangeRule] = {
    "sliced": Sliced(FlatAdam()),
    "onebit_adam": OneBitAdam(FlatAdam(), freeze_step=1),
    "straggler_drop": StragglerDrop(least=1.0),
    "streaming_diloco": StreamingDiLoCo(fragments=2, period=1, delay=1),
}
RULES = [*(CONFIGURED.get(name, make_rule(name)) for name in rule_names()), SignMean()]
LOCAL = {"easgd", "streaming_diloco"}  # the ranks keep weights of their own beside the center

buffers = arrays.arrays(np.float32, N, elements=st.floats(-4, 4, width=32))
row_counts = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda r: len(r) != 3)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
few = settings(max_examples=12, deadline=None)


def step(
    rule: ExchangeRule,
    c: Communicator,
    start: FloatArray,
    changes: list[FloatArray],
    rows: list[int],
) -> tuple[FloatArray, FloatArray]:
    """This rank's weights and the model after one exchange; gradients act as SGD with rate 1."""
    exchange = rule.open(c, LAYOUT)
    x, change, n = start.copy(), changes[c.rank], rows[c.rank]
    parts = [part(change, n)] if n else []
    before = change.copy()

    def apply(flat: FloatArray) -> None:
        assert flat.shape == (N,)
        assert flat.dtype == np.float32
        x[:T] -= flat[:T]
        x[T:] = flat[T:]

    model = x
    if isinstance(exchange, GradientExchange):
        assert exchange.take_step(parts, apply) == any(rows)
    elif isinstance(exchange, OptimizerExchange):
        assert take_step(exchange, x, exchange.fill(parts), 0.1) == any(rows)
    else:
        assert isinstance(exchange, WeightsExchange)
        exchange.start(x)
        if n:
            x[:T] -= change[:T]
            x[T:] = change[T:]
        exchange.after_window(x, n, 1.0, 0.1)
        model = x.copy()
        exchange.finish(model)
    c.barrier()
    exchange.close()
    np.testing.assert_array_equal(change, before)
    assert x.shape == (N,)
    assert x.dtype == np.float32
    return x, model


@every_rule
@few
@given(start=buffers, changes=st.lists(buffers, min_size=4, max_size=4), rows=row_counts)
def test_ranks_end_equal_and_statistics_are_the_row_weighted_mean(rule, start, changes, rows):
    results = on_ranks(len(rows), lambda c: step(rule, c, start, changes, rows))
    models = {model.tobytes() for _, model in results}
    assert len(models) == 1
    if rule.name not in LOCAL:
        assert all(x.tobytes() in models for x, _ in results)
    model = results[0][1]
    assert np.isfinite(model).all()
    if not any(rows):
        np.testing.assert_array_equal(model, start)
        return
    # A fragment under way lands in finish(), where statistics are averaged once more.
    want = sum(c[T:] * n for c, n in zip(changes, rows, strict=False)) / sum(rows)
    np.testing.assert_allclose(model[T:], want, atol=1e-4)


@every_rule
@few
@given(start=buffers, rows=row_counts)
def test_a_zero_gradient_changes_nothing(rule, start, rows):
    zero = np.zeros(N, np.float32)
    zero[T:] = start[T:]
    results = on_ranks(len(rows), lambda c: step(rule, c, start, [zero] * 4, rows))
    for x, model in results:
        np.testing.assert_allclose(x, start, atol=1e-6)
        np.testing.assert_allclose(model, start, atol=1e-6)


@every_rule
@few
@given(start=buffers, change=buffers, rows=st.integers(1, 9), size=st.sampled_from([1, 2, 4]))
def test_a_rank_without_rows_is_as_if_it_were_not_there(rule, start, change, rows, size):
    """One rank with rows among idle ones, whatever their buffers hold, is the world of one."""
    if rule.name == "easgd":
        return  # the elastic force depends on the number of ranks by its default
    noise = np.full(N, np.nan, np.float32)
    changes, counts = [noise] * size, [0] * size
    changes[-1], counts[-1] = change, rows
    alone = step_alone(rule, start, change, rows)
    for _, model in on_ranks(size, lambda c: step(rule, c, start, changes, counts)):
        np.testing.assert_allclose(model, alone, atol=1e-4)


def step_alone(rule: ExchangeRule, start: FloatArray, change: FloatArray, n: int) -> FloatArray:
    model: FloatArray = on_ranks(1, lambda c: step(rule, c, start, [change], [n]))[0][1]
    return model


@every_rule
def test_ten_against_eleven_steps_end_and_leave_equal_ranks(rule: ExchangeRule) -> None:
    def work(c: Any) -> FloatArray:
        exchange = rule.open(c, LAYOUT)
        random = np.random.default_rng(c.rank)
        x = np.ones(N, np.float32)

        def apply(flat: FloatArray) -> None:
            np.subtract(x, 0.1 * flat, out=x)

        if isinstance(exchange, WeightsExchange):
            exchange.start(x)
        for i in range(11):
            g = random.normal(size=N).astype(np.float32)
            parts = [part(g, 4)] if i < 10 + c.rank else []
            if isinstance(exchange, GradientExchange):
                exchange.take_step(parts, apply)
            elif isinstance(exchange, OptimizerExchange):
                take_step(exchange, x, exchange.fill(parts), 0.1)
            else:
                x -= np.float32(0.1) * g * bool(parts)
                exchange.after_window(x, 4 * len(parts), 1.0, 0.1)
        if isinstance(exchange, WeightsExchange):
            exchange.finish(x)
        c.barrier()
        exchange.close()
        assert exchange.sent_bytes > 0
        return x

    first, second = on_ranks(2, work)
    assert first.tobytes() == second.tobytes()
    assert np.isfinite(first).all()
    assert (first != 1.0).any()
