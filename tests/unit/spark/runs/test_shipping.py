"""A task on its way to the executors: large ones in several broadcasts, each of bounded size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from sparkdl.process import payload
from sparkdl.spark.executor.stage import TaskBroadcast, content_of
from sparkdl.spark.runs import launcher
from sparkdl.spark.runs.launcher import ship


class Broadcast:
    """As PySpark's: the value is read from a file at its first use, and kept."""

    def __init__(self, content: bytes) -> None:
        self._path, self.file, self.reads, self.destroyed = "path", content, 0, False

    @property
    def value(self) -> bytes:
        if not hasattr(self, "_value"):
            self.reads += 1
            self._value = self.file
        return self._value

    def destroy(self) -> None:
        self.destroyed = True


@dataclass
class Context:
    made: list[Broadcast] = field(default_factory=list)

    def broadcast(self, content: bytes) -> Broadcast:
        self.made.append(Broadcast(content))
        return self.made[-1]


def test_a_large_task_goes_in_pieces_and_no_worker_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "INLINE_BYTES", 100)
    monkeypatch.setattr(launcher, "PIECE_BYTES", 150)
    task: Any = bytes(range(256)) * 2
    context = Context()
    shipped = ship(task, context)
    assert isinstance(shipped, TaskBroadcast)
    size = len(payload.dump(task))
    assert [len(b.file) for b in context.made] == [150] * (size // 150) + [size % 150]
    for reads in (1, 2):  # a worker process that is used again has lost the first
        assert payload.load(content_of(shipped)) == task
        assert {b.reads for b in context.made} == {reads}
        assert not any(hasattr(b, "_value") for b in context.made)
    shipped.destroy()
    assert all(b.destroyed for b in context.made)


def test_a_small_task_and_one_over_connect_go_as_they_are() -> None:
    small: Any = b"small"
    assert ship(small, Context()) == payload.dump(small)
    large: Any = bytes(launcher.INLINE_BYTES + 1)
    assert ship(large, None) == payload.dump(large)
