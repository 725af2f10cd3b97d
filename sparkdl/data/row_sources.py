"""Where the rows of a feed come from, epoch after epoch, if not all of them are kept beforehand."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from sparkdl.data.feed import RowSpool

T = TypeVar("T")
_POLL_S = 0.1


class RereadRows:
    """Rows that are read anew in each epoch: files that cost next to nothing to read.

    Args:
        read: Reads all rows.
        num_rows: How many there are.
    """

    def __init__(self, read: Callable[[], Iterator[pa.RecordBatch]], num_rows: int) -> None:
        self._read, self.num_rows = read, num_rows

    def record_batches(self) -> Generator[pa.RecordBatch]:
        """All rows, in their order."""
        yield from self._read()


class RowsOfOneEpoch:
    """Rows that are read ahead, while those before them are used, and not kept.

    Args:
        read: Reads all rows.
        num_rows: How many there are.
    """

    def __init__(self, read: Callable[[], Iterator[pa.RecordBatch]], num_rows: int) -> None:
        self._read, self.num_rows = read, num_rows

    def record_batches(self) -> Generator[pa.RecordBatch]:
        """All rows, in their order."""
        with contextlib.closing(read_ahead(self._read)) as batches:
            yield from batches


class RowsKeptAsRead:
    """Rows that are read ahead in the first epoch, and kept for those after it.

    Args:
        read: Reads all rows.
        num_rows: How many there are.
        spool: Keeps them.
    """

    def __init__(
        self, read: Callable[[], Iterator[pa.RecordBatch]], num_rows: int, spool: RowSpool
    ) -> None:
        self._read, self.num_rows, self._spool = read, num_rows, spool
        self._kept: Sequence[pa.RecordBatch] | None = None
        self._begun = False

    def record_batches(self) -> Generator[pa.RecordBatch]:
        """All rows, in their order; an epoch that left its last rows out does not keep them."""
        if not self._begun:
            self._begun = True
            with contextlib.closing(read_ahead(self._read)) as batches:
                for batch in batches:
                    self._spool.add(batch)
                    yield batch
            return
        if self._kept is None:
            self._kept = self._spool.finish()
        yield from self._kept


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """After the last item."""


def read_ahead(read: Callable[[], Iterator[T]], depth: int = 2) -> Generator[T]:
    """The items of an iterator, which a thread makes while those before them are used.

    The thread ends with the generator, also when that is closed early.

    Args:
        read: Makes the iterator; called in the thread.
        depth: Items that wait to be taken.

    >>> list(read_ahead(lambda: iter("abc")))
    ['a', 'b', 'c']
    """
    waiting: queue.Queue[T | _Failure | _End] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: T | _Failure | _End) -> bool:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=_POLL_S)
                return True
        return False

    def fill() -> None:
        try:
            for item in read():
                if not put(item):
                    return
            put(_End())
        except BaseException as error:
            put(_Failure(error))

    thread = threading.Thread(target=fill, name="sparkdl-read-ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := waiting.get(), _End):
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        closed.set()
        thread.join()
