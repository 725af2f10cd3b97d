"""Ranks that are lost amid the rounds and come back: each row counts as often as every other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from plain_learner import PlainLearner
from ps_learner import clients

from sparkdl.config import EPOCH_WINDOW, LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.ps.client import Client
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.training.slices import Slices
from sparkdl.transport.frames import FrameLimits
from sparkdl.weights import FloatArray, Layout
from sparkdl.worker import train

pytestmark = pytest.mark.long

ROWS, BATCH, EPOCHS = 48, 4, 3
LAYOUT = Layout.of([("w", (ROWS,), "float32")], [("m", (2,), "float32")])


class Killed(BaseException):
    """What ends a rank's attempt as a signal would."""


class Counters(PlainLearner):
    """One weight per row, which counts how often that row was trained: SGD of rate 1, gradient -1.

    The mean of a round divides by its rows, ``global_rows``; the rate makes up for it. The momentum
    is the number of steps, so a lost optimizer state shows.
    """

    learning_rate = 1.0

    def __init__(self, global_rows: int, dies_at: int = -1, attempt: int = 0) -> None:
        super().__init__(LAYOUT)
        self.steps, self.seen = 0, 0
        self.counted = self.drawn = 0
        self._global_rows, self._dies_at = global_rows, dies_at

    def gradients(self, labels: Any, out: FloatArray) -> None:
        self.counted, self.drawn = self.counted + 1, self.drawn + 1
        out[...] = 0
        out[np.asarray(labels, np.int64).reshape(-1)] = -1.0 / len(labels)
        self.weights[ROWS:] += 1  # the statistics move before the gradients are joined
        out[ROWS:] = self.weights[ROWS:]

    def batches_of(self, stack: Any) -> Iterator[Any]:
        for labels in super().batches_of(stack):
            self.seen += 1
            if self.seen == self._dies_at:
                raise Killed
            yield labels

    def train(self, stack: Any) -> None:
        for labels in self.batches_of(stack):
            self.weights[np.asarray(labels, np.int64).reshape(-1)] += 1

    def apply_gradients(self, flat: FloatArray) -> None:
        self.steps += 1
        self.weights[:ROWS] -= np.float32(self._global_rows) * flat[:ROWS]
        self.weights[ROWS:] = flat[ROWS:]

    def optimizer_state(self) -> bytes:
        return self.steps.to_bytes(4, "little")

    def load_optimizer_state(self, state: bytes) -> None:
        self.steps = int.from_bytes(state, "little")

    def mark_draws(self, *place: int) -> None:
        self.drawn = 0

    def carried_state(self, steps: int = 0, wanted: int = 0) -> bytes:
        """With the draws of the steps since the epoch began, of which there is one in each."""
        assert steps in (0, self.drawn)
        return (self.counted - steps + wanted).to_bytes(4, "little")

    def load_carried_state(self, state: bytes) -> None:
        self.counted = int.from_bytes(state, "little")


class SlicedCounters(Counters):
    """The same for a table whose gradient is one row for each id of the batch.

    Each row comes ``copies`` times, with that part of its gradient.
    """

    copies = 2

    def write_gradient(self, labels: Any, reducer: Any) -> None:
        whole = np.empty(LAYOUT.size, np.float32)
        self.gradients(labels, whole)
        ids = np.repeat(np.asarray(labels, np.int32).reshape(-1), self.copies)
        reducer.send_as_slices([0])
        reducer.slices = [Slices(0, ids, whole[ids][:, None] / np.float32(self.copies))]
        reducer.buffer[...] = whole[ROWS:]

    def apply_joined(self, reducer: Any) -> None:
        (slices,) = reducer.slices
        whole = np.zeros(LAYOUT.size, np.float32)
        np.add.at(whole, slices.indices, slices.rows[:, 0])
        whole[ROWS:] = reducer.buffer
        self.apply_gradients(whole)


class Run:
    """Two ranks of equal parts; each may be killed at some of its batches, and is started again."""

    def __init__(
        self,
        rule: BSP,
        kills: dict[int, list[int]],
        window: int = 1,
        first: int = ROWS // 2,
        learner: type[Counters] = Counters,
    ) -> None:
        self.learner = learner
        self.rule, self.window, self.kills = rule, window, kills
        self.parts = [np.arange(first), np.arange(first, ROWS)]
        self.learners: dict[int, Counters] = {}
        self.errors: list[BaseException] = []
        self.attempts = [0, 0]

    def rank(self, rank: int, first: Client, server: InprocParameterServer) -> None:
        client = first
        deaths = list(self.kills.get(rank, []))
        while True:
            global_rows = 2 * BATCH if self.rule.payload == "gradient" else 1
            learner = self.learner(global_rows, deaths.pop(0) if deaths else -1)
            self.learners[rank] = learner
            ids = self.parts[rank]
            rows = rows_from_numpy(ids[:, None].astype(np.float32), ids.astype(np.float32))
            settings = LoopSettings(
                epochs=EPOCHS, batch_size=BATCH, window=self.window, keep_state=True
            )
            try:
                train(
                    learner, ServerSynchronizer(self.rule, client, LAYOUT, False),
                    Batches(rows, BATCH, seed=3, rank=rank, prefetch=0), settings,
                    num_rows=len(ids), num_workers=2,
                )  # fmt: skip
                client.close()
                return
            except Killed:
                kill(client)
                self.attempts[rank] += 1
                time.sleep(0.4)  # longer than the grace
                client = server.client(rank, attempt=self.attempts[rank])
            except BaseException as error:
                self.errors.append(error)
                return

    def __call__(self) -> None:
        with clients(self.rule, 2, LAYOUT) as (made, server):
            threads = [
                threading.Thread(target=self.rank, args=(r, made[r], server), daemon=True)
                for r in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive(), "a rank hangs"
            if self.errors:
                raise self.errors[0]
            self.center = server.center.copy()


def kill(client: Client) -> None:
    """Ends a client as the death of its process would: without a word."""
    session = client.session
    session._ended.set()
    channel = session._connection.channel
    assert channel is not None
    channel.close()


KILLS: list[dict[int, list[int]]] = [
    {1: [9]},  # amid the second epoch, amid a stack
    {1: [1]},
    {1: [7]},  # at the first batch of the second epoch
    {0: [9]},
    {1: [8, 3]},  # twice
    {0: [9], 1: [9]},  # both
    {0: [8], 1: [14]},
]


@pytest.mark.parametrize("kills", KILLS, ids=str)
def test_gradients_in_rounds(kills: dict[int, list[int]]) -> None:
    undisturbed = Run(BSP(), {})
    undisturbed()
    run = Run(BSP(), kills)
    run()
    np.testing.assert_array_equal(run.center[:ROWS], np.full(ROWS, EPOCHS))
    for learner in run.learners.values():
        assert learner.steps == EPOCHS * ROWS // (2 * BATCH)
        assert learner.counted == learner.steps
        np.testing.assert_array_equal(learner.weights, undisturbed.learners[0].weights)
    np.testing.assert_array_equal(run.center, undisturbed.center)


@pytest.mark.parametrize("kills", [{1: [3]}, {0: [9]}, {1: [2, 1]}], ids=str)
def test_a_rank_with_fewer_batches(kills: dict[int, list[int]]) -> None:
    """Eight batches and four: rank 1 takes part in half of the rounds without rows."""
    undisturbed = Run(BSP(), {}, first=32)
    undisturbed()
    run = Run(BSP(), kills, first=32)
    run()
    np.testing.assert_array_equal(run.center, undisturbed.center)
    for learner in run.learners.values():
        assert learner.steps == 8 * EPOCHS


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("first", [ROWS // 2, 32])
@pytest.mark.parametrize("kills", KILLS[:6], ids=str)
def test_gradients_that_are_slices(
    kills: dict[int, list[int]], first: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that is asked for its state holds a commit of slices; it may be in chunks."""
    if chunked:  # room for the dense part, and less than the slices of a batch
        monkeypatch.setattr(FrameLimits, "buffer_bytes", property(lambda self: self.dense_bytes))
        monkeypatch.setattr(FrameLimits, "chunk_bytes", property(lambda self: 100))
        monkeypatch.setattr(SlicedCounters, "copies", 8)
    undisturbed = Run(BSP(), {}, first=first)
    undisturbed()
    run = Run(BSP(), kills, first=first, learner=SlicedCounters)
    run()
    for learner in run.learners.values():
        assert learner.steps == undisturbed.learners[0].steps
        np.testing.assert_array_equal(learner.weights, undisturbed.learners[0].weights)
    np.testing.assert_array_equal(run.center, undisturbed.center)


@pytest.mark.parametrize("kills", KILLS, ids=str)
@pytest.mark.parametrize("window", [2, 4, EPOCH_WINDOW])
def test_windows_of_local_training(kills: dict[int, list[int]], window: int) -> None:
    """Each rank counts its rows by itself; the server adds the mean, which is half."""
    run = Run(BSP("delta"), kills, window)
    run()
    np.testing.assert_array_equal(run.center[:ROWS], np.full(ROWS, EPOCHS / 2))
