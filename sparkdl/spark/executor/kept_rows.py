"""Decoded rows that a Python worker keeps from one fit to the next that reads the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from sparkdl.data import Partition

Key = tuple[str, int]
"""Of the rows, and the memory budget: rows beyond it are shuffled in another way."""
_kept: tuple[Key, Partition] | None = None


def read_or_kept(key: Key | None, read: Callable[[], Partition]) -> Partition:
    """The partition that an earlier task has kept under the key, or a new one.

    A task that wants other rows frees those that are kept. Not thread-safe: a worker process runs
    one task at a time.

    Args:
        key: None for rows of one fit alone.
        read: Reads them.
    """
    global _kept
    kept, _kept = _kept, None
    if kept is not None:
        if kept[0] == key:
            return kept[1]
        kept[1].close()
    return read()


@contextlib.contextmanager
def lent(key: Key | None, partition: Partition) -> Iterator[None]:
    """Leaving keeps the partition for the next task, if it is in memory and nothing was raised."""
    global _kept
    try:
        yield
    except BaseException:
        partition.close()
        raise
    if key is None or partition.is_spilled:
        partition.close()
    else:
        _kept = key, partition
