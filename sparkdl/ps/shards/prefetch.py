"""``RowsAhead``: the rows of the next batch, pulled while a batch trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparkdl.errors import SparkDLError
from sparkdl.process.closing import Closing
from sparkdl.process.user_warnings import warn_user
from sparkdl.ps.shards.row_link import Fetched, RowLink
from sparkdl.tables.service import IdArray
from sparkdl.weights import FloatArray

Wanted = Callable[[], Sequence[tuple[str, IdArray]]]
"""The tables and ids that a batch will ask for, each id once and in order."""


@dataclass
class _Coming:
    """The rows of one call of a layer in the next batch."""

    table: str
    ids: IdArray
    rows: Future[Fetched]
    newer: list[tuple[npt.NDArray[np.intp], FloatArray]] = field(default_factory=list)

    def taken(self) -> Fetched:
        """The rows, with what this worker itself has changed since they were asked for."""
        found = self.rows.result()
        for places, values in self.newer:
            found.rows[places] = values
        return found


class RowsAhead(Closing):
    """Pulls the rows of the next batch by connections of its own, while a batch trains.

    What this worker pushes meanwhile is not missed: of the rows that it pushes, and that the next
    batch has too, the new values come back with the reply to the push. So one worker alone trains
    as if nothing were pulled ahead.

    Args:
        link: Used by this object alone; closed with it.
    """

    def __init__(self, link: RowLink) -> None:
        self._link = link
        self._ids = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-ids-ahead")
        self._rows = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-rows-ahead")
        self._now: list[_Coming] = []
        self._next: Future[list[_Coming]] | None = None
        self._off = False

    def begin_batch(self, wanted: Wanted | None) -> None:
        """A batch begins: what was pulled ahead is for it.

        Args:
            wanted: Finds what the batch after it will ask for; None: it is not known.
        """
        self._now = [] if self._next is None else self._next.result()
        self._next = None
        if wanted is not None and not self._off:
            self._next = self._ids.submit(self._ask, wanted)

    def take(self, table: str, ids: IdArray) -> Fetched | None:
        """The rows of a call of the present batch, or None where they were not pulled ahead."""
        for number, coming in enumerate(self._now):
            if coming.table == table and np.array_equal(coming.ids, ids):
                del self._now[number]
                return coming.taken()
        return None

    def shared(self, table: str, ids: IdArray) -> npt.NDArray[np.bool_] | None:
        """Which of some ids the next batch asks for, too; None: none."""
        if self._next is None:
            return None
        asked = [coming.ids for coming in self._next.result() if coming.table == table]
        if not asked:
            return None
        return _in_sorted(ids, asked[0] if len(asked) == 1 else np.unique(np.concatenate(asked)))

    def renew(self, table: str, ids: IdArray, values: FloatArray) -> None:
        """Takes new values of some rows, each once, in place of those that were pulled ahead."""
        if self._next is None or not len(ids):
            return
        for coming in self._next.result():
            if coming.table == table:
                there = _in_sorted(ids, coming.ids)
                places = np.searchsorted(coming.ids, ids[there])
                coming.newer.append((places, values[there]))

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of the frames that were sent and received."""
        return self._link.bytes_moved

    def _ask(self, wanted: Wanted) -> list[_Coming]:
        try:
            asked = list(wanted())
        except CancelledError:  # training ends before the next batch was read
            return []
        except Exception as error:
            if isinstance(error, SparkDLError):
                return []  # the batch itself will raise it
            self._off = True
            warn_user(
                "rows of tables are not pulled ahead: the part of the model that finds the ids of "
                f"a batch cannot be computed by itself ({type(error).__name__}: {error})"
            )
            return []
        return [
            _Coming(table, ids, self._rows.submit(self._link.fetch, table, ids, training=True))
            for table, ids in asked
        ]

    def close(self) -> None:
        """Ends the threads, and closes the connections."""
        self._link.give_up()
        for threads in (self._ids, self._rows):
            threads.shutdown(wait=True, cancel_futures=True)
        self._link.close()


def _in_sorted(ids: IdArray, ordered: IdArray) -> npt.NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(len(ids), bool)
    found: npt.NDArray[np.bool_] = ordered.take(np.searchsorted(ordered, ids), mode="clip") == ids
    return found
