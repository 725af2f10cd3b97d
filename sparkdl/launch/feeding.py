"""What ``run(fn, data=...)`` gives to the function on each rank: its feed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.collective.communicator import Communicator
from sparkdl.data.feed import Feed, RowSpool, Uneven, equal_rows


@dataclass(frozen=True)
class FeedSettings:
    """How the rows are given.

    Args:
        columns: Names of the columns, in the order in which they travel.
        epochs: Times that all rows are given; None for ever.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the order.
        uneven: What becomes of ranks that have different numbers of rows.
        memory_budget_bytes: Rows beyond this are kept on the rank's disk.
    """

    columns: tuple[str, ...]
    epochs: int | None = 1
    shuffle: bool = False
    seed: int = 0
    uneven: Uneven = "drop"
    memory_budget_bytes: int = 1 << 30

    def read(self, batches: Iterator[pa.RecordBatch]) -> RowSpool:
        """Keeps the rank's rows, under their own names."""
        spool = RowSpool(self.memory_budget_bytes)
        for batch in batches:
            spool.add(pa.RecordBatch.from_arrays(batch.columns, names=list(self.columns)))
        return spool

    def open(self, spool: RowSpool, communicator: Communicator) -> RankFeed:
        """The feed of a rank; all ranks call this together.

        Raises:
            DataError: A rank without rows is to repeat them.
        """
        gathered = communicator.all_gather(np.array([spool.num_rows], np.int64))
        counts = [int(count[0]) for count in gathered]
        rank = communicator.rank
        return RankFeed(
            spool.finish(),
            epochs=self.epochs,
            rows=equal_rows(counts, self.uneven)[rank],
            shuffle=self.shuffle,
            seed=self.seed * 1009 + rank,
        )


class RankFeed(Feed):
    """A :class:`~sparkdl.data.feed.Feed` that frameworks take, too."""

    def to_tf_data(self, batch_size: int) -> Any:
        """A ``tf.data.Dataset`` of batches: dicts of tensors by column name."""
        from sparkdl.learner.feed_adapters import tf_dataset

        return tf_dataset(self, batch_size)

    def to_torch(self, batch_size: int) -> Any:
        """A ``torch.utils.data.IterableDataset`` of batches: dicts of tensors by column name."""
        from sparkdl.learner.feed_adapters import torch_dataset

        return torch_dataset(self, batch_size)
