"""Frames of tables that nobody uses any more are given back before the JVM is full."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.spark.columns import shipped
from sparkdl.spark.columns.shipped import ship_table


class Frame:
    """In a reference cycle, as everything of py4j."""

    def __init__(self) -> None:
        self.itself = self


class Session:
    def createDataFrame(self, table: pa.Table) -> Frame:
        return Frame()


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_frames_that_are_gone_hold_at_most_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_LIMIT_BYTES", 1000)
    monkeypatch.setattr(shipped, "_shipped_bytes", 0)
    table = pa.table({"x": np.zeros(50)})  # 400 bytes
    kept = ship_table(Session(), table)
    made = [weakref.ref(ship_table(Session(), table)) for _ in range(4)]
    assert [frame() is not None for frame in made] == [False, False, False, True]
    assert kept.itself is kept


def test_a_table_above_the_limit_frees_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_LIMIT_BYTES", 1000)
    monkeypatch.setattr(shipped, "_shipped_bytes", 0)
    table = pa.table({"x": np.zeros(500)})
    made = [weakref.ref(ship_table(Session(), table)) for _ in range(3)]
    assert [frame() is not None for frame in made] == [False, False, True]
