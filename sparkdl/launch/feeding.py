"""What ``run(fn, data=...)`` gives to the function on each rank: its feed."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.collective.communicator import Communicator
from sparkdl.data.feed import Feed, RowSpool, Uneven, equal_rows
from sparkdl.errors import WaitTimeoutError

_LOOK_S = 0.1


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
        stall_timeout_s: How long the function may ask for no rows while there are some; None for
            ever.
    """

    columns: tuple[str, ...]
    epochs: int | None = 1
    shuffle: bool = False
    seed: int = 0
    uneven: Uneven = "drop"
    memory_budget_bytes: int = 1 << 30
    stall_timeout_s: float | None = None

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

    asked_at = 0.0
    """When rows were asked for last, by ``time.monotonic()``; 0: never."""

    def next_arrow(self, batch_size: int) -> pa.Table | None:
        """See :meth:`sparkdl.data.feed.Feed.next_arrow`."""
        self.asked_at = time.monotonic()
        return super().next_arrow(batch_size)

    def to_tf_data(self, batch_size: int) -> Any:
        """A ``tf.data.Dataset`` of batches: dicts of tensors by column name."""
        from sparkdl.learner.feed_adapters import tf_dataset

        return tf_dataset(self, batch_size)

    def to_torch(self, batch_size: int) -> Any:
        """A ``torch.utils.data.IterableDataset`` of batches: dicts of tensors by column name."""
        from sparkdl.learner.feed_adapters import torch_dataset

        return torch_dataset(self, batch_size)


def call_while_it_feeds(function: Callable[[], Any], feed: RankFeed, stall_timeout_s: float) -> Any:
    """Calls a function in a thread, and gives it up when it does not take its rows.

    A thread that is given up is left behind: the process must end soon.

    Args:
        function: What to call.
        feed: Its rows.
        stall_timeout_s: How long it may ask for no rows while there are some.

    Returns:
        What it returned.

    Raises:
        WaitTimeoutError: It took no rows in time; with the lines at which it stands.
        Exception: What the function raises.
    """
    returned: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            returned.append(function())
        except BaseException as error:
            errors.append(error)

    begun = time.monotonic()
    thread = threading.Thread(target=call, name="sparkdl-fed-function", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        silent_s = time.monotonic() - max(begun, feed.asked_at)
        if thread.is_alive() and silent_s > stall_timeout_s and not feed.should_stop():
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-8:])
            raise WaitTimeoutError(
                "a function that is fed takes no rows",
                expected=f"a call of its feed within {stall_timeout_s:g} s",
                received=f"none for {silent_s:.1f} s; it stands here:\n{stack}",
                hint="feed.terminate() says that it wants no more; stall_timeout_s is the limit",
            )
    if errors:
        raise errors[0]
    return returned[0]
