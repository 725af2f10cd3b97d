"""Model-parallel softmax: ranks together are one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks

from sparkdl.collective.partial_softmax import Margin, PartialSoftmax
from sparkdl.errors import ConfigError, DataError

CLASSES, WIDTH = 11, 6
MARGINS = [Margin(), Margin(m2=0.5), Margin(m3=0.4), Margin(m1=1.35, m2=0.1, m3=0.05, scale=16)]


def data(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(4)
    x = random.normal(size=(rows, WIDTH)).astype(np.float32)
    return x, random.integers(0, CLASSES, rows), random.normal(size=(CLASSES, WIDTH)).astype("f4")


def together(sizes: list[int], margin: Margin, sample: float = 1.0) -> tuple[Any, ...]:
    """Loss, features' gradient and centers' gradient, put together from all ranks."""
    x, y, centers = data(sum(sizes))
    edges = np.cumsum([0, *sizes])

    def work(c: Any) -> Any:
        layer = PartialSoftmax(c, CLASSES, WIDTH, margin, sample=sample)
        layer.centers[:] = centers[layer.first : layer.stop]
        rows = slice(edges[c.rank], edges[c.rank + 1])
        return layer.step(x[rows], y[rows]), layer.first

    results = on_ranks(len(sizes), work)
    back = np.zeros((CLASSES, WIDTH))
    for step, first in results:
        back[first + step.classes] = step.centers
    assert len({step.loss for step, _ in results}) == 1
    return results[0][0].loss, np.concatenate([s.features for s, _ in results]), back


@pytest.mark.parametrize("sizes", [[8, 8], [5, 0, 11], [4, 4, 4, 4]], ids=str)
@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_ranks_equal_one_process(margin, sizes):
    for got, want in zip(together(sizes, margin), together([16], margin), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_gradients_are_the_losses_slopes(margin):
    x, y, centers = (a.astype(np.float64) if a.dtype == np.float32 else a for a in data(16))

    def loss(x: np.ndarray, w: np.ndarray) -> float:
        cosine = (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (
            w / np.linalg.norm(w, axis=1, keepdims=True)
        ).T
        logits = margin.scale * cosine
        own = np.arange(16), y
        angle = np.arccos(cosine[own])
        logits[own] = margin.scale * (np.cos(margin.m1 * angle + margin.m2) - margin.m3)
        logits -= logits.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[own]))

    value, back_x, back_w = together([16], margin)
    assert value == pytest.approx(loss(x, centers), abs=1e-6)
    random = np.random.default_rng(0)
    for _ in range(5):
        dx, dw = random.normal(size=x.shape), random.normal(size=centers.shape)
        h = 1e-6
        slope = (loss(x + h * dx, centers + h * dw) - loss(x - h * dx, centers - h * dw)) / (2 * h)
        assert (back_x * dx).sum() + (back_w * dw).sum() == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_sampling_keeps_every_class_that_occurs():
    x = data(4)[0]

    def work(c: Any) -> Any:
        layer = PartialSoftmax(c, 1000, WIDTH, sample=0.1, seed=3)
        labels = np.array([1, 2, 999, 2]) + c.rank
        steps = [layer.step(x, labels - 1) for _ in range(2)]
        return layer.first, steps

    for first, (one, two) in on_ranks(2, work):
        wanted = {v - first for v in (0, 1, 2, 998, 999) if 0 <= v - first < 500}
        assert wanted <= set(one.classes)
        assert len(one.classes) == 50
        assert set(one.classes) != set(two.classes)
        assert one.centers.shape == (50, WIDTH)


def test_a_layer_in_two_halves_learns():
    random = np.random.default_rng(1)
    means = random.normal(size=(CLASSES, WIDTH)).astype(np.float32)

    def work(c: Any) -> tuple[float, float]:
        layer = PartialSoftmax(c, CLASSES, WIDTH, Margin(scale=8), sample=0.8)
        mine = np.random.default_rng(c.rank)
        losses = []
        for _ in range(200):
            y = mine.integers(0, CLASSES, 32)
            x = means[y] + mine.normal(0, 0.1, (32, WIDTH)).astype("f4")
            step = layer.step(x, y)
            layer.centers[step.classes] -= 0.02 * step.centers
            losses.append(step.loss)
        return losses[0], losses[-1]

    for first, last in on_ranks(2, work):
        assert last < 0.3 * first


def test_bad_input_is_refused():
    x, y, _ = data(3)
    with pytest.raises(DataError, match="no class"):
        on_ranks(2, lambda c: PartialSoftmax(c, 5, WIDTH).step(x, np.array([0, 5, 1])))
    with pytest.raises(DataError, match="without rows"):
        on_ranks(2, lambda c: PartialSoftmax(c, 5, WIDTH).step(x[:0], y[:0]))
    with pytest.raises(ConfigError, match="do not fit"):
        on_ranks(1, lambda c: PartialSoftmax(c, 5, WIDTH + 1).step(x, y))
    with pytest.raises(ConfigError, match="sample"):
        on_ranks(1, lambda c: PartialSoftmax(c, 5, WIDTH, sample=1.5))
    with pytest.raises(ConfigError, match="m1"):
        Margin(m1=0.0)
