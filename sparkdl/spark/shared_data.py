"""``SharedData``: what several fits of one worker train on, opened and shipped once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.learner.signature import Signature
from sparkdl.spark.columns.fit_source import open_fit_source
from sparkdl.spark.columns.local_data import as_frame
from sparkdl.spark.columns.shared_rows import MOST_BYTES, SharedRows, share_rows
from sparkdl.spark.columns.sources import Columns, Source
from sparkdl.spark.driver.cluster import is_connect
from sparkdl.spark.driver.memory import megabytes

_MOST_KINDS = 4
"""So many selections of columns are shared; fits that want another read the data themselves."""


@dataclass
class _Opened:
    """A source and what it was opened for; ``source`` is None until one fit has opened it."""

    validation: Any
    signature: Signature
    columns: Columns
    split: float
    seed: int
    limit_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    source: Source | None = None

    def is_for(
        self, validation: Any, signature: Signature, columns: Columns, split: float, seed: int
    ) -> bool:
        """Whether a fit with these arguments reads the same rows."""
        same = validation is self.validation or (
            isinstance(validation, str) and validation == self.validation
        )
        mine = (self.signature, self.columns, self.split, self.seed)
        return same and (signature, columns, split, seed) == mine


class SharedData:
    """Data of fits that have one worker each and want the same rows, also at the same time.

    :meth:`SparkModel.fit` takes it as ``data``. The first fit collects and broadcasts the rows;
    the others read that. Data that are larger than :data:`MOST_BYTES` as Arrow are read by each
    fit anew, as are all data over Spark Connect, which has no broadcasts. Thread-safe.

    Args:
        data: What ``fit`` takes.
    """

    def __init__(self, data: Any) -> None:
        self._data = as_frame(data)
        self._lock = threading.Lock()
        self._opened: list[_Opened] = []
        self._closed = False

    @property
    def plain(self) -> Any:
        """The data as ``fit`` takes them, to be read anew."""
        return self._data

    def source(
        self, validation: Any, signature: Signature, columns: Columns, *,
        split: float, seed: int, limit_bytes: int,
    ) -> Source:  # fmt: skip
        """The rows of a fit; see :func:`open_fit_source`.

        Args:
            validation: As for all fits that share rows: the same object.
            signature: The model's.
            columns: Which columns mean what.
            split: Share of the rows to validate on.
            seed: Of the choice of these rows.
            limit_bytes: Larger data are not shared.
        """
        wanted = (validation, signature, columns, split, seed)
        with self._lock:
            opened = next((o for o in self._opened if o.is_for(*wanted)), None)
            if opened is None and len(self._opened) < _MOST_KINDS and not self._closed:
                opened = _Opened(*wanted, min(limit_bytes, MOST_BYTES))
                self._opened.append(opened)
        if opened is None:
            return open_fit_source(self._data, *wanted[:3], split=split, seed=seed)
        with opened.lock:
            if opened.source is None:
                source = open_fit_source(self._data, *wanted[:3], split=split, seed=seed)
                opened.source = replace(source, shared=_shared(source, opened.limit_bytes))
            return opened.source

    def close(self) -> None:
        """Frees the broadcasts. Fits that still run may fail."""
        with self._lock:
            self._closed = True
            opened, self._opened = self._opened, []
        for one in opened:
            if one.source is not None and one.source.shared is not None:
                one.source.shared.destroy()


def _shared(source: Source, limit_bytes: int) -> SharedRows | None:
    """The rows for several fits, or None where each must read them."""
    if source.files:  # the workers read them, and may keep them
        return SharedRows.make()
    if is_connect(source.spark):
        return None
    most = megabytes(source.spark.conf.get("spark.driver.maxResultSize", "1g"))
    limit_bytes = min(limit_bytes, most << 19) if most else limit_bytes  # half of it
    try:
        return share_rows(source.frame, limit_bytes)
    except Exception:  # rows that cannot be computed: the fit's own error says it better
        return None
