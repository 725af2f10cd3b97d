"""A linear model spread over ranks: the steps of one process, whatever rank has which rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks

from sparkdl.collective.current import SoloCommunicator
from sparkdl.errors import ModelError
from sparkdl.linear.rank_task import Ftrl, LinearPart, LinearSettings, LinearTraining
from sparkdl.linear.sparse_rows import SparseRows, SparseVectors

STEPS, BATCH = 5, 12
RULE = Ftrl(lambda1=0.4, lambda2=0.1, alpha=0.3, beta=1.0)
SETTINGS = LinearSettings(RULE, BATCH, epochs=3)


def rows_with(entries: list[dict[int, float]], labels: list[float], weights: Any = None) -> Any:
    starts = np.cumsum([0, *map(len, entries)])
    indices = np.array([i for e in entries for i in e], np.int32)
    values = np.array([v for e in entries for v in e.values()], np.float64)
    size = int(indices.max(initial=-1)) + 1
    vectors = SparseVectors(starts, indices, None if (values == 1).all() else values, size)
    given = None if weights is None else np.array(weights, np.float64)
    return SparseRows(vectors, np.array(labels, np.float64), given)


def drawn(seed: int, dim: int, *, ones: bool = False, weighted: bool = True) -> SparseRows:
    rng = np.random.default_rng(seed)
    entries = [
        {int(i): 1.0 if ones else float(rng.normal()) for i in rng.integers(0, dim, at % 6)}
        for at in range(STEPS * BATCH)
    ]
    labels = rng.integers(0, 2, len(entries)).tolist()
    return rows_with(entries, labels, rng.random(len(entries)) if weighted else None)


def model_of(parts: list[LinearPart]) -> dict[int, float]:
    found = {}
    for part in parts:
        assert not set(found) & set(part.ids.tolist()), "a weight belongs to one rank"
        found |= dict(zip(part.ids.tolist(), part.weights.tolist(), strict=True))
    return found


def naive(
    rows: SparseRows, settings: LinearSettings
) -> tuple[dict[int, float], float, list[float]]:
    """The paper's algorithm, a coordinate after another; -1 is the intercept."""
    rule = settings.rule
    z: dict[int, float] = {}
    n: dict[int, float] = {}

    def weight(i: int) -> float:
        l1, l2 = (0.0, 0.0) if i < 0 else (rule.lambda1, rule.lambda2)
        if abs(z.get(i, 0.0)) <= l1:
            return 0.0
        over = (rule.beta + math.sqrt(n[i])) / rule.alpha + l2
        return -(z[i] - math.copysign(l1, z[i])) / over

    losses = []
    for _ in range(settings.epochs):
        loss = total = 0.0
        for first in range(0, len(rows), settings.batch_size):
            sums: dict[int, float] = {}
            for at in range(first, first + settings.batch_size):
                row = rows.cut(at, at + 1)
                values = row.vectors.values
                entries = dict(enumerate(row.vectors.indices.tolist()))
                of = 1.0 if row.weights is None else float(row.weights[0])
                margin = weight(-1) if settings.fit_intercept else 0.0
                for k, i in entries.items():
                    margin += weight(i) * (1.0 if values is None else values[k])
                label = float(row.labels[0])
                p = 1 / (1 + math.exp(-margin))
                loss -= of * math.log(p if label else 1 - p)
                total += of
                for k, i in entries.items():
                    x = 1.0 if values is None else float(values[k])
                    sums[i] = sums.get(i, 0.0) + of * (p - label) * x
                if settings.fit_intercept:
                    sums[-1] = sums.get(-1, 0.0) + of * (p - label)
            for i, g in sums.items():
                before = weight(i)
                root, more = math.sqrt(n.get(i, 0.0)), n.get(i, 0.0) + g * g
                z[i] = z.get(i, 0.0) + g - (math.sqrt(more) - root) / rule.alpha * before
                n[i] = more
        losses.append(loss / total)
    found = {i: weight(i) for i in z if i >= 0 and weight(i)}
    return found, weight(-1) if -1 in z else 0.0, losses


def train(communicator: Any, rows: SparseRows, settings: LinearSettings) -> LinearPart:
    return LinearTraining(communicator, rows, settings).train()


def test_the_first_step_by_hand() -> None:
    """p = 0.5: the gradients are -0.5, -0.5 · 2 and, for the intercept, -0.5."""
    part = train(SoloCommunicator(), rows_with([{0: 1.0, 3: 2.0}], [1.0]), LinearSettings())
    assert part.ids.tolist() == [0, 3]
    np.testing.assert_allclose(part.weights, [0.5 / 15, 1.0 / 20], rtol=1e-14)
    assert part.intercept == pytest.approx(0.5 / 15, rel=1e-14)
    assert part.losses == (pytest.approx(math.log(2)),)
    assert (part.rows, part.size) == (1, 4)


@pytest.mark.parametrize("dim", [8, 40, 2**31 - 1])
@pytest.mark.parametrize(
    ("ones", "weighted", "intercept"),
    [(False, True, True), (True, False, True), (True, True, False)],
)
def test_the_model_is_that_of_a_loop_over_coordinates(
    dim: int, ones: bool, weighted: bool, intercept: bool
) -> None:
    rows = drawn(dim % 7, dim, ones=ones, weighted=weighted)
    settings = LinearSettings(RULE, BATCH, 3, intercept)
    part = train(SoloCommunicator(), rows, settings)
    weights, free, losses = naive(rows, settings)
    found = model_of([part])
    assert found.keys() == weights.keys()
    assert found == pytest.approx(weights, abs=1e-10)
    assert part.intercept == pytest.approx(free, abs=1e-10)
    assert part.losses == pytest.approx(losses, abs=1e-10)


@pytest.mark.parametrize("shares", [(5, 7), (12, 0), (2, 3, 7), (0, 4, 8)])
@pytest.mark.parametrize("dim", [8, 2**31 - 1])
def test_ranks_train_what_one_rank_trains_on_the_same_batches(
    shares: tuple[int, ...], dim: int
) -> None:
    """Of each batch of 12 rows the ranks have so many; one may have none at all."""
    rows = drawn(3, dim)
    bounds = np.cumsum([0, *shares])
    parts = [
        SparseRows.joined(
            rows.cut(BATCH * s + a, BATCH * s + b) for s in range(STEPS)
        )
        for a, b in itertools.pairwise(bounds)
    ]  # fmt: skip
    alone = train(SoloCommunicator(), rows, SETTINGS)
    found = on_ranks(len(shares), lambda c: train(c, parts[c.rank], SETTINGS))
    expected = model_of([alone])
    assert model_of(found).keys() == expected.keys()
    assert model_of(found) == pytest.approx(expected, abs=1e-9)
    for part in found:
        assert part.intercept == pytest.approx(alone.intercept, abs=1e-9)
        assert part.losses == pytest.approx(alone.losses, abs=1e-9)
        assert part.intercept == found[0].intercept, "the same bits on all ranks"
        assert (part.rows, part.size) == (60, alone.size)


def test_a_weight_of_two_counts_as_two_rows() -> None:
    entries: list[dict[int, float]] = [{0: 1.0, 2: 0.5}, {1: -1.0}, {}]
    once = rows_with(entries, [1, 0, 1], [2, 1, 0])
    twice = rows_with([entries[0], entries[0], entries[1]], [1, 1, 0])
    found = [train(SoloCommunicator(), rows, LinearSettings(epochs=4)) for rows in (once, twice)]
    assert found[0].weights.tolist() == pytest.approx(found[1].weights.tolist(), abs=1e-12)
    assert found[0].losses == pytest.approx(found[1].losses, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rows_make_an_empty_model(ranks: int) -> None:
    nothing = SparseRows.joined([])
    for part in on_ranks(ranks, lambda c: train(c, nothing, SETTINGS)):
        assert (len(part.ids), part.intercept, part.rows) == (0, 0.0, 0)


def test_large_features_are_trained_on_and_those_beyond_all_measure_refused() -> None:
    settings = LinearSettings(Ftrl(alpha=10.0), batch_size=1, epochs=2)
    large = rows_with([{0: 1e100}, {0: -1e100}], [1.0, 1.0])
    assert np.isfinite(train(SoloCommunicator(), large, settings).losses).all()
    larger = rows_with([{0: 1e300}, {0: -1e300}], [1.0, 1.0])
    with pytest.raises(ModelError, match="too large"):
        on_ranks(2, lambda c: train(c, larger, settings))
