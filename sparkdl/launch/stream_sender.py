"""The task that sends a micro-batch to the ranks: its rank ``r`` sends to the run's rank ``r``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.results import Result
from sparkdl.launch.stream_intake import send_rows
from sparkdl.launch.task import RaisingTask, RankContext


def _anywhere() -> DeviceRequest:
    return DeviceRequest(None, unscheduled=True)


@dataclass(frozen=True)
class SendTask(RaisingTask):
    """Sends rows; see :class:`sparkdl.launch.task.Task`.

    Args:
        number: Of the offer that the rows will be.
        columns: Names of the columns, in the order in which they travel.
        addresses: Rank -> where it listens.
        token, fingerprint: Of the run.
    """

    number: int
    columns: tuple[str, ...]
    addresses: Mapping[int, tuple[str, int]]
    token: str = field(repr=False)
    fingerprint: str = ""
    devices: DeviceRequest = field(default_factory=_anywhere)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sends the rows; the result ``sent`` has the attempt and their number."""
        names = list(self.columns)
        named = (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)
        rows = send_rows(
            named, self.addresses[rank.rank], self.token, self.fingerprint,
            number=self.number, attempt=rank.attempt,
        )  # fmt: skip
        yield from Result(rank.rank, "sent", f"{rank.attempt} {rows}").batches()
