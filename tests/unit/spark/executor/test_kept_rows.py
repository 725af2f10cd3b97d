"""Rows that a Python worker keeps for the next task that wants the same."""

from __future__ import annotations

from typing import cast

import pytest

from sparkdl.data import Partition
from sparkdl.spark.executor import trainer
from sparkdl.spark.executor.trainer import Key, lent, read_or_kept


class Rows:
    """In place of a partition: only whether it is closed, and where its rows are."""

    def __init__(self, is_spilled: bool = False) -> None:
        self.is_spilled, self.closed = is_spilled, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_kept", None)


def use(key: Key | None, rows: Rows) -> Rows:
    """One task: the rows that it trains on, which are ``rows`` if it has to read them."""
    partition = read_or_kept(key, lambda: cast(Partition, rows))
    with lent(key, partition):
        assert not cast(Rows, partition).closed
    return cast(Rows, partition)


def test_the_next_task_takes_what_was_read() -> None:
    first, second = Rows(), Rows()
    assert use(("a", 1), first) is first
    assert use(("a", 1), second) is first
    assert use(("a", 1), second) is first
    assert not first.closed


@pytest.mark.parametrize("key", [("b", 1), ("a", 2), None])
def test_other_rows_take_their_place(key: Key | None) -> None:
    first, second = Rows(), Rows()
    use(("a", 1), first)
    assert use(key, second) is second
    assert first.closed
    assert second.closed == (key is None)


def test_rows_on_disk_are_not_kept() -> None:
    spilled, second = Rows(is_spilled=True), Rows()
    use(("a", 1), spilled)
    assert spilled.closed
    assert use(("a", 1), second) is second


def test_rows_of_a_failed_task_are_not_kept() -> None:
    rows, second = Rows(), Rows()
    with pytest.raises(KeyError), lent(("a", 1), cast(Partition, rows)):
        raise KeyError
    assert rows.closed
    assert use(("a", 1), second) is second
