"""A softmax by chunks of classes, with margins: values known beforehand, and those in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.tables.classes import (
    Chunk,
    ClassPart,
    ClassSpec,
    Margin,
    best,
    checked_labels,
    joined,
    measure,
)
from sparkdl.tables.store import RowStore

CLASSES, DIM, ROWS = 41, 5, 9
RNG = np.random.default_rng(4)
FEATURES = RNG.normal(size=(ROWS, DIM)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS)
UPSTREAM = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
MARGINS = {
    "none": None,
    "cosine": Margin(scale=16.0),
    "arc": Margin(m2=0.5, scale=16.0),
    "sphere": Margin(m1=1.35, scale=16.0),
    "all": Margin(m1=1.1, m2=0.2, m3=0.1, scale=8.0),
}


def store(rule: str = "sgd") -> RowStore:
    return RowStore(DIM, rule, {"name": "normal", "stddev": 0.5}, name="t", seed=3)


def loss_in_doubles(features: Any, centers: Any, margin: Margin | None) -> np.ndarray:
    if margin is not None:
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
        centers = centers / np.linalg.norm(centers, axis=1, keepdims=True)
    logits = features @ centers.T
    if margin is not None:
        angle = np.arccos(logits)
        own = margin.scale * (np.cos(margin.m1 * angle + margin.m2) - margin.m3)
        logits = np.where(np.eye(CLASSES, dtype=bool)[LABELS], own, margin.scale * logits)
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(ROWS), LABELS]


def slope(function: Any, at: np.ndarray) -> np.ndarray:
    """The gradient of a function's sum, weighted by UPSTREAM, from differences."""
    found, small = np.empty(at.shape), 1e-5
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += small
        down[place] -= small
        found[place] = (UPSTREAM * (function(up) - function(down))).sum() / (2 * small)
    return found


@pytest.mark.parametrize(("margin", "logit", "steep"), [
    (Margin(m2=0.5), 1.51018145864586, 73.880257642233),
    (Margin(m3=0.4), 6.4, 64.0),
    (Margin(m1=1.35), 10.0118057625748, 98.53783994616),
    (Margin(m2=0.5, gradient="straight_through"), 1.51018145864586, 64.0),
])  # fmt: skip
def test_logits_and_slopes_of_margins(margin: Margin, logit: float, steep: float) -> None:
    """At a cosine of .5, with a scale of 64."""
    half = np.array([0.5])
    assert margin.logit(half)[0] == pytest.approx(logit, abs=1e-9)
    assert margin.slope(half)[0] == pytest.approx(steep, abs=1e-9)
    for cosine in (-1.0, 1.0):
        assert np.isfinite(margin.slope(np.array([cosine]))).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MARGINS)
def test_loss_and_gradients_are_those_of_the_whole_softmax(name: str, ranks: int) -> None:
    margin = MARGINS[name]
    spec = ClassSpec(CLASSES, margin, chunk=7)
    stores = [store() for _ in range(ranks)]
    parts = [ClassPart(stores[r], spec, r, ranks) for r in range(ranks)]
    centers = stores[0].start.rows(np.arange(CLASSES)).astype(np.float64)
    softmax = joined([part.measure(FEATURES, LABELS, training=True) for part in parts])
    wanted = loss_in_doubles(FEATURES.astype(np.float64), centers, margin)
    np.testing.assert_allclose(softmax.losses, wanted, atol=1e-5)

    shares = np.full(ROWS, 0.25, np.float32)
    onward = sum(p.learn(FEATURES, LABELS, softmax, UPSTREAM, shares, 1.0) for p in parts)
    by_features = slope(lambda f: loss_in_doubles(f, centers, margin), FEATURES.astype(np.float64))
    np.testing.assert_allclose(onward, by_features, atol=1e-4)
    by_centers = slope(lambda c: loss_in_doubles(FEATURES.astype(np.float64), c, margin), centers)
    for each in stores:
        rows = each.export()
        stepped = centers[rows.ids] - 0.25 * by_centers[rows.ids]
        np.testing.assert_allclose(rows.values, stepped, atol=1e-4)
        assert each.clock == 1
    assert sum(len(each) for each in stores) == CLASSES


def test_parts_of_any_chunks_and_orders_are_one_softmax() -> None:
    centers = store().start.rows(np.arange(CLASSES))
    shuffled = RNG.permutation(CLASSES)
    pieces = [Chunk(part, centers[part]) for part in np.array_split(shuffled, 6)]
    whole = joined([measure([Chunk(np.arange(CLASSES), centers)], FEATURES, LABELS, None)])
    apart = joined([measure([piece], FEATURES, LABELS, None) for piece in pieces])
    np.testing.assert_allclose(apart.losses, whole.losses, atol=1e-6)
    np.testing.assert_array_equal(apart.hits, whole.hits)
    logits = FEATURES @ centers.T
    np.testing.assert_array_equal(whole.hits, logits.argmax(1) == LABELS)
    for k in (1, 3, CLASSES + 2):
        classes, values = best(iter(pieces), FEATURES, k, None)
        few = min(k, CLASSES)
        np.testing.assert_array_equal(classes[:, :few], np.argsort(-logits, 1)[:, :few])
        np.testing.assert_allclose(values[:, :few], -np.sort(-logits, 1)[:, :few], atol=1e-6)
        assert (classes[:, few:] == -1).all()


def test_a_step_that_is_tried_leaves_the_centers() -> None:
    kept = store()
    part = ClassPart(kept, ClassSpec(CLASSES))
    before = kept.export().values.copy()
    softmax = joined([part.measure(FEATURES, LABELS, training=True)])
    ones = np.ones(ROWS, np.float32)
    tried = part.learn(FEATURES, LABELS, softmax, UPSTREAM, ones, None)
    np.testing.assert_array_equal(kept.export().values, before)
    assert kept.clock == 0
    taken = part.learn(FEATURES, LABELS, softmax, UPSTREAM, ones, 0.5)
    np.testing.assert_array_equal(tried, taken)
    assert (kept.export().values != before).any()


def test_a_sample_is_the_same_after_a_retry_and_another_in_the_next_step() -> None:
    spec = ClassSpec(1000, sample=0.1)

    def sampled(clock: int) -> set[int]:
        kept = store()
        part = ClassPart(kept, spec)
        kept.clock = clock
        softmax = joined([part.measure(FEATURES, LABELS, training=True)])
        before = kept.export()
        part.learn(FEATURES, LABELS, softmax, UPSTREAM, np.ones(ROWS, np.float32), 1.0)
        moved = (kept.export().values != before.values).any(1)
        return set(before.ids[moved].tolist())

    first = sampled(0)
    assert len(first) == 100
    assert set(LABELS.tolist()) <= first
    assert sampled(0) == first
    assert sampled(1) != first


@pytest.mark.parametrize("cause", ["features", "upstream"])
def test_what_is_not_finite_is_told(cause: str) -> None:
    features, upstream = FEATURES.copy(), UPSTREAM.copy()
    (features if cause == "features" else upstream)[2] = np.nan
    part = ClassPart(store(), ClassSpec(CLASSES, Margin()))
    softmax = joined([part.measure(features, LABELS, training=True)])
    assert np.isnan(softmax.losses[2]) == (cause == "features")
    with pytest.raises(ModelError, match="gradient of a class is not finite"):
        part.learn(features, LABELS, softmax, upstream, np.ones(ROWS, np.float32), 1.0)


def test_large_logits_do_not_overflow() -> None:
    part = ClassPart(store(), ClassSpec(CLASSES, chunk=4))
    softmax = joined([part.measure(FEATURES * 1e4, LABELS, training=False)])
    assert np.isfinite(softmax.losses).all()
    assert (softmax.losses >= 0).all()


def test_momentum_is_that_of_keras() -> None:
    """w -= lr d w; m = .9 m - lr g; w += .9 m - lr g (Nesterov), two steps by hand."""
    kept = RowStore(
        1, {"name": "momentum", "momentum": 0.9, "nesterov": 1, "weight_decay": 0.1}, "zeros"
    )
    kept.load(np.array([7]), np.array([[2.0]], np.float32))
    for gradient in (1.0, -2.0):
        kept.push(np.array([7]), np.array([[gradient]], np.float32), 0.5)
    # 2 -> 1.9, m = -.5, w = 1.9 - .45 - .5 = .95; .95 -> .9025, m = -.45 + 1 = .55
    assert kept.pull(np.array([7]))[0, 0] == pytest.approx(0.9025 + 0.9 * 0.55 + 1.0)


def test_what_is_no_label_or_no_margin() -> None:
    assert checked_labels(np.array([[1.0], [3.0]]), 2, 4, "c").tolist() == [1, 3]
    for labels, rows in ((np.eye(3), 3), (np.array([0.5]), 1), (np.array([1, 2]), 1)):
        with pytest.raises(DataError, match="no labels"):
            checked_labels(labels, rows, 4, "c")
    for wrong in (-1, 4):
        with pytest.raises(DataError, match="0 to 3"):
            checked_labels(np.array([wrong]), 1, 4, "c")
    for settings in ({"m1": 0.0}, {"scale": -1.0}, {"m2": float("nan")}, {"gradient": "none"}):
        with pytest.raises(ConfigError, match="no margin"):
            Margin(**settings)
