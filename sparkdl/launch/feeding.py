"""The feed that ``run(fn, data=...)`` gives to the function on each rank."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from sparkdl.collective.communicator import Communicator
from sparkdl.data.feed import Columns, FedRows, Feed, RowFeed, RowSpool, Uneven, equal_rows
from sparkdl.errors import WaitTimeoutError
from sparkdl.launch.threads import ThreadCall

_LOOK_S = 0.1


class RereadRows:
    """Rows that are read anew in each epoch, and not kept."""

    def __init__(self, read: Callable[[], Generator[pa.RecordBatch]], num_rows: int) -> None:
        self._read, self.num_rows = read, num_rows

    def record_batches(self) -> Generator[pa.RecordBatch]:
        """All rows, in their order."""
        with contextlib.closing(self._read()) as batches:
            yield from batches


class RowsKeptAsRead:
    """Rows that are read in the first epoch, and kept for those after it."""

    def __init__(
        self, read: Callable[[], Generator[pa.RecordBatch]], num_rows: int, spool: RowSpool
    ) -> None:
        self._read, self.num_rows, self._spool = read, num_rows, spool
        self._kept: Sequence[pa.RecordBatch] | None = None
        self._begun = False

    def record_batches(self) -> Generator[pa.RecordBatch]:
        """All rows, in their order; an epoch that left its last rows out does not keep them."""
        if not self._begun:
            self._begun = True
            with contextlib.closing(self._read()) as batches:
                for batch in batches:
                    self._spool.add(batch)
                    yield batch
            return
        if self._kept is None:
            self._kept = self._spool.finish()
        yield from self._kept


class RowFiles(Protocol):
    """Files that the ranks read by themselves."""

    @property
    def read_again(self) -> bool:
        """Whether to read them again costs less than to keep their rows."""

    def num_rows(self, rank: int) -> int:
        """How many rows a rank has."""

    def batches(self, rank: int) -> Generator[pa.RecordBatch]:
        """A rank's rows, each time that this is called; read ahead if they must be decoded."""


@dataclass(frozen=True)
class FeedSettings:
    """How the rows are given.

    Args:
        columns: Names of the columns, in the order in which they travel.
        epochs: Times that all rows are given; None for ever.
        shuffle: Whether each epoch has an order of its own.
        uneven: What happens to ranks that have different numbers of rows.
        memory_budget_bytes: Rows beyond this are kept on the rank's disk.
        stall_timeout_s: How long the function may ask for no rows while there are some; None for
            ever.
        files: Where the rows are; None: they are the rank's input.
        fed: How many ranks get rows, the first ones; None: all.
    """

    columns: tuple[str, ...]
    epochs: int | None = 1
    shuffle: bool = False
    seed: int = 0
    uneven: Uneven = "drop"
    memory_budget_bytes: int = 1 << 30
    stall_timeout_s: float | None = None
    files: RowFiles | None = None
    fed: int | None = None

    def read(self, batches: Iterator[pa.RecordBatch], rank: int) -> FedRows:
        """Keeps the rank's rows, under their own names; those of files are read as they are taken.

        Rows of files that are shuffled are kept, too: each epoch has an order of all batches.
        """
        spool = RowSpool(self.memory_budget_bytes)
        files = self.files
        if self.fed is not None and rank >= self.fed:
            return spool.finish()

        def read() -> Generator[pa.RecordBatch]:
            if files is None:
                yield from self._named(batches)
            else:
                with contextlib.closing(files.batches(rank)) as found:
                    yield from self._named(found)

        if files is None or self.shuffle:
            with contextlib.closing(read()) as found:
                for batch in found:
                    spool.add(batch)
            return spool.finish()
        count = files.num_rows(rank)
        if files.read_again or (self.epochs == 1 and self.uneven != "pad"):
            return RereadRows(read, count)
        return RowsKeptAsRead(read, count, spool)

    def _named(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_arrays(batch.columns, names=list(self.columns))

    def open(self, rows: FedRows, communicator: Communicator) -> RankFeed:
        """The feed of a rank; all ranks call this together."""
        if isinstance(rows, Sequence):
            num_rows = sum(batch.num_rows for batch in rows)
        else:
            num_rows = rows.num_rows
        gathered = communicator.all_gather(np.array([num_rows], np.int64))
        rank = communicator.rank
        fed = [int(count[0]) for count in gathered][: self.fed]
        given = equal_rows(fed, self.uneven) if fed else []
        return RankFeed(
            rows, epochs=self.epochs, rows=given[rank] if rank < len(given) else 0,
            joined=max(given) if self.uneven == "join" and rank < len(given) else None,
            shuffle=self.shuffle, seed=self.seed * 1009 + rank,
        )  # fmt: skip


class FunctionFeed(RowFeed):
    """A feed that frameworks take, too, and that knows how long it was not asked."""

    asked_at = 0.0
    """When rows were asked for last, by ``time.monotonic()``; 0: never."""

    @property
    @abstractmethod
    def is_due(self) -> bool:
        """Whether it is the function that should ask now, as there may be rows."""

    def to_tf_data(self, batch_size: int) -> Any:
        """A ``tf.data.Dataset`` of batches: dicts of tensors by column name."""
        from sparkdl.learner.distributed.feed_adapters import tf_dataset

        return tf_dataset(self, batch_size)

    def to_torch(self, batch_size: int) -> Any:
        """A ``torch.utils.data.IterableDataset`` of batches: dicts of tensors by column name."""
        from sparkdl.learner.distributed.feed_adapters import torch_dataset

        return torch_dataset(self, batch_size)


class RankFeed(FunctionFeed, Feed):
    """The rows of a rank, all of which it has or reads by itself."""

    _gives = False

    @property
    def is_due(self) -> bool:
        return not self._gives and not self.should_stop()

    def next_arrow(self, batch_size: int) -> pa.Table | None:
        with self._giving():
            return Feed.next_arrow(self, batch_size)

    def next_batch(self, batch_size: int) -> Columns:
        with self._giving():
            return Feed.next_batch(self, batch_size)

    @contextlib.contextmanager
    def _giving(self) -> Iterator[None]:
        self._gives = True
        try:
            yield
        finally:
            self.asked_at, self._gives = time.monotonic(), False


def call_while_it_feeds(
    function: Callable[[], Any], feed: FunctionFeed, stall_timeout_s: float
) -> Any:
    """Calls a function in a thread, and gives it up when it does not take its rows.

    A thread that is given up is left behind: the process must end soon.

    Returns:
        What it returned.

    Raises:
        WaitTimeoutError: It took no rows in time; with the lines at which it stands.
        Exception: What the function raises.
    """
    begun = time.monotonic()
    called = ThreadCall(function, "sparkdl-fed-function")
    while not wait([called.outcome], _LOOK_S).done:
        silent_s = time.monotonic() - max(begun, feed.asked_at)
        if silent_s > stall_timeout_s and feed.is_due:
            raise WaitTimeoutError(
                "a function that is fed takes no rows",
                expected=f"a call of its feed within {stall_timeout_s:g} s",
                received=f"none for {silent_s:.1f} s; it stands here:\n{called.stack()}",
                hint="feed.terminate() says that it wants no more; stall_timeout_s is the limit",
            )
    return called.outcome.result()
