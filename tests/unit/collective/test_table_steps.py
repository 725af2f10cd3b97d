"""Steps of a model with a table over ranks are those of one process, a rank without a batch too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_learner import PlainLearner
from rank_threads import on_ranks

from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.table_exchange import TableSteps
from sparkdl.tables.checkpoints import TableCheckpoints
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.training.learning import BatchStack
from sparkdl.weights import Layout

DIM, BATCH, RATE, IDS = 3, 4, 0.1, 50
LAYOUT = Layout.of([("w", (DIM,), "float32")], [])
SPEC = TableSpec("words", RowStore(DIM, "sgd", "uniform", name="words", seed=3).settings)


def gradients(rows: np.ndarray, ids: np.ndarray, w: np.ndarray, y: np.ndarray) -> Any:
    """Of the mean of ``(w · (row a + row b) - y)²``, by ``w`` and by all rows."""
    hidden = rows[ids].sum(1)
    upstream = 2 * (hidden @ w - y) / len(y)
    by_rows = np.zeros_like(rows)
    np.add.at(by_rows, ids, (upstream[:, None] * w)[:, None, :])
    return upstream @ hidden, by_rows


class Model(PlainLearner):
    """Its rows lie in a table; each batch looks up two ids a row."""

    learning_rate = RATE

    def __init__(self, told: str, has_schedule: bool) -> None:
        super().__init__(LAYOUT)
        self.weights[:] = [0.5, -1.0, 2.0]
        self.has_schedule, self.told, self.service = has_schedule, told, None
        self.tables = SimpleNamespace(
            specs=[SPEC], give_rows=lambda *_: None, id_reader=lambda: self.read,
            serve_from=lambda service: setattr(self, "service", service),
        )  # fmt: skip

    def read(self, batch: BatchStack) -> Any:
        if self.told == "fails":
            raise ValueError("no such layer")
        return [("words", np.unique(batch.x["ids"]) + (self.told == "wrong"))]

    def batches_of(self, stack: BatchStack) -> Any:
        return stack.single_batches()

    def rows_of(self, batch: BatchStack) -> int:
        return batch.num_rows

    def write_gradient(self, batch: BatchStack, reducer: Any) -> None:
        unique, places = np.unique(batch.x["ids"][0], return_inverse=True)
        rows, number = self.service.pull("words", unique, training=True)
        places = places.reshape(-1, 2)
        of_w, of_rows = gradients(rows, places, self.weights, batch.y["y"][0])
        self.service.push(number, of_rows, np.bincount(places.reshape(-1)))
        reducer.buffer[:] = of_w

    def apply_gradients(self, flat: np.ndarray) -> None:
        self.weights -= RATE * flat


@pytest.mark.parametrize("told", ["right", "wrong", "fails"])
@pytest.mark.parametrize("has_schedule", [False, True], ids=["stacks", "single batches"])
@pytest.mark.parametrize("steps", [[5], [5, 3], [2, 0, 4]], ids=str)
def test_ranks_with_a_table_are_one_process(
    steps: list[int], has_schedule: bool, told: str, tmp_path
) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, IDS, (len(steps), max(steps), BATCH, 2))
    y = random.normal(size=ids.shape[:3])

    def work(communicator: Any) -> Any:
        rank = communicator.rank
        dense = AllReduceGradientSynchronizer(communicator, LAYOUT)
        found = TableSteps(dense, communicator, TableCheckpoints(str(tmp_path)))
        model, count = Model(told, has_schedule), steps[rank]
        found.start(model, steps=max(steps))
        found.stop_wanted = rank == 0
        if count:
            x, labels = {"ids": ids[rank, :count]}, {"y": y[rank, :count]}
            found.train(model, BatchStack(x, labels, None, count, count * BATCH))
        for _ in range(max(steps) - count):
            found.skip(model)
        with found.evaluating():
            rows, _ = model.service.pull("words", np.arange(IDS), training=False)
        known = found.stores["words"].known(np.arange(IDS))
        found.close()
        return model.weights, np.where(known[:, None], rows, 0), known, found.stop_agreed

    of_ranks = on_ranks(len(steps), work)
    w = np.array([0.5, -1.0, 2.0])
    rows = RowStore.from_settings(SPEC.settings).pull(np.arange(IDS)).astype(float)
    seen = np.zeros(IDS, bool)
    for step in range(max(steps)):
        batch = [rank for rank, count in enumerate(steps) if step < count]
        given = ids[batch, step].reshape(-1, 2)
        of_w, of_rows = gradients(rows, given, w, y[batch, step].reshape(-1))
        w, rows = w - RATE * of_w, rows - RATE * of_rows
        seen[given] = True
    for weights, _, _, stopping in of_ranks:
        np.testing.assert_allclose(weights, w, atol=1e-5)
        assert stopping
    known = np.array([of for _, _, of, _ in of_ranks])
    np.testing.assert_array_equal(known.sum(0), seen)  # each row has one owner
    own = sum(found for _, found, _, _ in of_ranks)
    np.testing.assert_allclose(own[seen], rows[seen], atol=1e-5)
