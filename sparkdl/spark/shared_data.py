"""``SharedData``: what several fits of one worker train on, opened and shipped once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.learner.signature import Signature
from sparkdl.spark.columns.fit_source import open_fit_source
from sparkdl.spark.columns.local_data import as_frame
from sparkdl.spark.columns.shared_rows import MOST_BYTES, SharedRows, share_rows
from sparkdl.spark.columns.sources import Columns, Source
from sparkdl.spark.driver.cluster import is_connect
from sparkdl.spark.driver.memory import megabytes

_MOST_KINDS = 4
"""So many selections of columns are shared; fits that want another read the data themselves."""


@dataclass(frozen=True)
class _Kind:
    """What decides which rows a fit reads, and how it decodes them.

    The names of the model's inputs and outputs do not: Keras gives each model its own.
    """

    entries: tuple[ColumnSpec, ...]
    bounds: tuple[tuple[float, float] | None, ...]
    role_column: str | None
    split: float
    seed: int

    @classmethod
    def of(cls, spec: DataSpec, split: float, seed: int) -> _Kind:
        bounds = tuple(entry.bounds for entry in spec.entries)
        return cls(spec.entries, bounds, spec.role_column, split, seed)


@dataclass
class _Opened:
    """Rows of one kind; ``shared`` is None until one fit has collected them, and if it cannot."""

    kind: _Kind
    validation: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    collected: bool = False
    shared: SharedRows | None = None

    def is_for(self, kind: _Kind, validation: Any) -> bool:
        same = validation is self.validation or (
            isinstance(validation, str) and validation == self.validation
        )
        return same and kind == self.kind


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
        source = open_fit_source(self._data, validation, signature, columns, split=split, seed=seed)
        kind = _Kind.of(source.spec, split, seed)
        with self._lock:
            opened = next((o for o in self._opened if o.is_for(kind, validation)), None)
            if opened is None:
                if len(self._opened) >= _MOST_KINDS or self._closed:
                    return source
                opened = _Opened(kind, validation)
                self._opened.append(opened)
        with opened.lock:
            if not opened.collected:
                opened.shared = _shared(source, min(limit_bytes, MOST_BYTES))
                opened.collected = True
            return replace(source, shared=opened.shared)

    def close(self) -> None:
        """Frees the broadcasts. Fits that still run may fail."""
        with self._lock:
            self._closed = True
            opened, self._opened = self._opened, []
        for one in opened:
            if one.shared is not None:
                one.shared.destroy()


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
