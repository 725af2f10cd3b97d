"""Tasks for the tests of the launchers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.errors import TransportError
from sparkdl.failures import Failure, RankFailure
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RankContext, Result


@dataclass(frozen=True)
class WorkTask:
    """Does what its name says, and returns some bytes."""

    how: str
    size: int = 3
    thing: Any = None
    timeout_s: float = 60.0
    devices = DeviceRequest(None)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = sum(batch.num_rows for batch in batches)
        mine = rank.rank == 1
        if self.how == "one raises" and mine:
            raise ValueError("bad row 17")
        if self.how == "one exits" and mine:
            raise SystemExit("enough")
        if self.how == "one dies" and mine:
            print("the end is near", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "one stops" and mine:
            print("status three", file=sys.stderr, flush=True)
            os._exit(3)
        if self.how == "one is late" and mine:
            time.sleep(3 * self.timeout_s)
        if self.how == "one loses its connection" and not mine:
            raise TransportError("rank 1 is gone; rank 0 cannot go on")
        if self.how == "one loses its connection" and mine:
            time.sleep(0.5)
            raise KeyError("the cause")
        if self.how == "others compute":
            if mine:
                raise ValueError("bad row 17")
            time.sleep(60)
        told = rank.all_gather(f"I am {rank.rank}", self.timeout_s)
        again = rank.all_gather(told[0], self.timeout_s)
        assert again == ["I am 0"] * rank.num_ranks
        if rank.log is not None:
            rank.log(f"logged {rank.rank}")
        text = self.thing.scaled() if self.thing is not None else " ".join(told)
        yield from Result(rank.rank, "text", str(text)).batches()
        yield from Result(rank.rank, "rows", str(rows), bytes([rank.rank]) * self.size).batches()

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        raise RankFailure(Failure.of(rank.rank, error)) from error
