"""The replay buffer: who is drawn, how often, and who waits."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError, UnknownNameError, WaitTimeoutError
from sparkdl.program import Program, PyNode, ReplayBuffer, ReplayNode, launch, stop
from sparkdl.program.replay import SumTree


def test_uniform_draws_from_the_latest() -> None:
    buffer = ReplayBuffer(10)
    keys = [buffer.insert(f"item {i}") for i in range(25)]
    assert keys == list(range(25))
    assert buffer.size() == 10
    sample = buffer.sample(4000)
    assert set(sample.keys.tolist()) == set(range(15, 25))
    assert sample.items[0] == f"item {sample.keys[0]}"
    assert np.bincount(sample.keys - 15).min() > 300
    assert sample.probabilities.tolist() == [0.1] * 4000


def test_priorities_say_how_often_an_item_is_drawn() -> None:
    buffer = ReplayBuffer(7, "prioritized", alpha=1.0)
    for i in range(10):
        buffer.insert(i, priority=1.0)
    buffer.update_priorities([9, 0], [4.0, 100.0])  # 0 has left the buffer
    sample = buffer.sample(10_000)
    counts = np.bincount(sample.keys, minlength=10)
    assert counts[:3].tolist() == [0, 0, 0]
    np.testing.assert_allclose(counts[3:9], 1000, rtol=0.2)
    np.testing.assert_allclose(counts[9], 4000, rtol=0.1)
    assert all(item == key for item, key in zip(sample.items, sample.keys, strict=True))
    np.testing.assert_allclose(sample.probabilities[sample.keys == 9], 0.4)
    with pytest.raises(ConfigError, match="priority"):
        buffer.insert(1, priority=0.0)


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 1000])
def test_the_sum_tree_is_the_cumulated_sum(slots: int) -> None:
    random = np.random.default_rng(slots)
    tree, weights = SumTree(slots), random.random(slots)
    tree.set(np.arange(slots), random.random(slots))
    tree.set(np.arange(slots), weights)
    assert tree.total == pytest.approx(weights.sum())
    points = random.random(500) * tree.total * 0.999
    expected = np.searchsorted(np.cumsum(weights), points, side="right")
    np.testing.assert_array_equal(tree.find(points), expected)


def test_fifo_gives_each_item_once_and_has_bounded_room() -> None:
    buffer = ReplayBuffer(4, "fifo")
    for i in range(4):
        buffer.insert(i)
    with pytest.raises(WaitTimeoutError, match="room for another item"):
        buffer.insert(4, timeout_s=0.05)
    assert buffer.sample(3).items == [0, 1, 2]
    buffer.insert(4)
    assert buffer.sample(2).items == [3, 4]
    with pytest.raises(WaitTimeoutError, match="1 items to draw"):
        buffer.sample(1, timeout_s=0.05)


def test_samples_per_insert_hold_both_sides_together() -> None:
    buffer = ReplayBuffer(1000, samples_per_insert=4.0, tolerance=8.0, min_size=2)
    drawn = threading.Event()

    def learn() -> None:
        for _ in range(100):
            buffer.sample(4)
        drawn.set()

    learner = threading.Thread(target=learn)
    learner.start()
    for i in range(10):
        buffer.insert(i)
    time.sleep(0.2)
    assert 10 * 4 - 8 <= buffer._drawn <= 10 * 4 + 8
    for i in range(90):
        buffer.insert(i)
    assert drawn.wait(10)
    learner.join()
    with pytest.raises(WaitTimeoutError, match="room for another item"):
        _ = [buffer.insert(i, timeout_s=0.05) for i in range(10)]


def test_what_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'prioritized'"):
        ReplayBuffer(1, "prioritised")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nothing could ever be drawn"):
        ReplayBuffer(1, min_size=2)


def act(replay: Any, first: int) -> None:
    for i in range(first, first + 50):
        replay.insert(np.full(3, i))


def learn(replay: Any, path: str) -> None:
    seen: set[int] = set()
    while len(seen) < 100:
        seen |= {int(item[0]) for item in replay.sample(5).items}
    Path(path).write_text(str(len(seen)))
    stop()


def test_actors_and_a_learner_share_a_node(tmp_path: Path) -> None:
    program = Program("replay")
    replay = program.add_node(ReplayNode(10, "fifo"), label="replay")
    for first in (0, 50):
        program.add_node(PyNode(act, replay, first), label="actor")
    program.add_node(PyNode(learn, replay, str(tmp_path / "seen")), label="learner")
    with launch(program, "threads") as launched:
        launched.wait(60)
    assert (tmp_path / "seen").read_text() == "100"
