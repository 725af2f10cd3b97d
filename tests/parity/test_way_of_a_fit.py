"""The way of a fit, counted: how often who reads it changes rooms, from the call to the loop.

The way are the functions that have begun and not ended when the driver hands the task to its
launcher, and then those of a rank when its loop begins. A *room* is a folder of ``sparkdl``; a
*stay* is a part of the way within one room, and a *return* a stay in a room that was left before.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from case import Case
from local_spark import LocalLauncher, LocalSession, LocalSparkModel
from referee import CUSTOM, as_keras, build, rows

import sparkdl
from sparkdl.launch.child import run_rank
from sparkdl.launch.task import RankContext, Task
from sparkdl.process import payload

HOME = Path(sparkdl.__file__).parent


class _Arrived(Exception):
    """The loop begins."""


def _rooms() -> list[str]:
    """The room of each function of ours that has begun, the first one first."""
    files = [Path(frame.filename) for frame in traceback.extract_stack()]
    return [str(f.parent.relative_to(HOME)) for f in files if HOME in f.parents]


def way_of(mode: str) -> list[str]:
    """The stays of a fit of one worker."""
    on_driver: list[str] = []
    on_rank: list[str] = []

    def arrive(*_: object) -> None:
        on_rank.extend(_rooms())
        raise _Arrived

    class Launcher(LocalLauncher):
        @contextlib.contextmanager
        def launch(self, task: Task) -> Iterator[None]:
            on_driver.extend(_rooms())
            batches = pa.ipc.open_stream(self._frame.partitions()[0])
            rank = RankContext(0, num_ranks=1)
            with (
                mock.patch("sparkdl.worker._Loop.run", arrive),
                contextlib.suppress(Exception),  # the task makes another one of what it raises
            ):
                list(run_rank(payload.dump(task), rank, iter(batches), lambda line: None))
            raise _Arrived
            yield

    case = Case(sizes=(8,))
    spark_model = LocalSparkModel.of(LocalSession(None, case.sizes, ()))(
        build(case), num_workers=1, custom_objects=CUSTOM, mode=mode, frequency="batch",
        batch_size=4,
    )  # fmt: skip
    with mock.patch("local_spark.LocalLauncher", Launcher), pytest.raises(_Arrived):
        spark_model.fit(as_keras(case, *rows(case, 8)), verbose=0)
    depth = len(_rooms())  # none of ours has begun here
    between = ["spark/runs", "spark/executor"]  # SparkLauncher, and the function of its stage
    return [room for room, _ in groupby([*on_driver[depth:], *between, *on_rank[len(on_driver) :]])]


@pytest.mark.parametrize("mode", ["asynchronous", "allreduce"])
def test_the_way_of_a_fit_has_few_stays_and_returns(mode: str) -> None:
    way = way_of(mode)
    print(" > ".join(way))
    returns = sum(room in way[:place] for place, room in enumerate(way))
    assert way[-1] == "."  # worker.py
    assert len(way) <= 10
    assert returns <= 2
