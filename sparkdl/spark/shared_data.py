"""``SharedData``: what several fits of one worker train on, opened and shipped once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.data import ColumnSpec
from sparkdl.learner.signature import Signature
from sparkdl.spark.forms.opening import RowChoice, form_of, open_fit_source, settled
from sparkdl.spark.forms.shared_rows import MOST_BYTES, SharedRows, share_rows
from sparkdl.spark.forms.sources import Columns, Form, Source
from sparkdl.spark.runs.resources import megabytes
from sparkdl.spark.session.running import is_connect

_MOST_CHOICES = 4
"""Selections of rows that are kept; fits that want another read the data themselves."""


@dataclass
class _Opened:
    """The rows of a choice; ``shared`` is None until a fit has collected them, and if it cannot."""

    choice: RowChoice
    source: Source
    lock: threading.Lock = field(default_factory=threading.Lock)
    collected: bool = False
    shared: SharedRows | None = None


class SharedData(Form):
    """Data of fits that have one worker each and want the same rows, also at the same time.

    :meth:`SparkModel.fit` takes it as ``data``. The first fit collects and broadcasts the rows;
    the others read that. Data that are larger than :data:`MOST_BYTES` as Arrow are read by each
    fit anew, as are all data over Spark Connect, which has no broadcasts. Thread-safe.
    """

    def __init__(self, data: object) -> None:
        super().__init__(data)
        self._form = form_of(settled(data))
        self._opening = threading.Lock()
        self._opened: list[_Opened] = []
        self._closed = False

    def settled(self) -> Any:
        return self._form.settled()

    def open(self, signature: Signature, columns: Columns) -> Source:
        return self._form.open(signature, columns)

    def source(self, choice: RowChoice, limit_bytes: int) -> Source:
        """The rows of a fit; see :func:`open_fit_source`.

        Args:
            choice: With the same object as ``validation`` for all fits that share rows.
            limit_bytes: Larger data are not shared.
        """
        signature, asked = choice.signature, choice
        if not self._by_name(choice.columns):
            asked = replace(choice, signature=_unnamed(signature))
        with self._opening:  # what is on the driver is made into a frame once
            opened = next((o for o in self._opened if o.choice.is_same_as(asked)), None)
            if opened is None:
                source = open_fit_source(self._form, choice)
                if len(self._opened) >= _MOST_CHOICES or self._closed:
                    return source
                opened = _Opened(asked, source)
                self._opened.append(opened)
        with opened.lock:
            if not opened.collected:
                opened.shared = _shared(opened.source, min(limit_bytes, MOST_BYTES))
                opened.collected = True
            return _named(replace(opened.source, shared=opened.shared), signature)

    def _by_name(self, columns: Columns) -> bool:
        """Whether the names of a model's inputs and outputs decide what they get."""
        said = (columns.features, columns.label, columns.sample_weight, columns.decoder)
        arrays = self.data if isinstance(self.data, (tuple, list)) else ()
        return any(isinstance(part, Mapping) for part in (*said, columns.pad, *arrays))

    def close(self) -> None:
        """Frees the broadcasts. Fits that still run may fail."""
        with self._opening:
            self._closed = True
            opened, self._opened = self._opened, []
        for one in opened:
            if one.shared is not None:
                one.shared.destroy()


def _unnamed(signature: Signature) -> Signature:
    """A signature without the names of one input and one output, which Keras makes up."""
    if len(signature.inputs) != 1 or len(signature.outputs) != 1:
        return signature
    (given,), (made,) = signature.inputs.values(), signature.outputs.values()
    return replace(
        signature, inputs={"": replace(given, name="")}, outputs={"": replace(made, name="")},
        label_kinds=dict(zip([""], signature.label_kinds.values(), strict=False)),
        label_ranges=dict(zip([""], signature.label_ranges.values(), strict=False)),
        ignored_classes=dict(zip([""], signature.ignored_classes.values(), strict=False)),
    )  # fmt: skip


def _named(source: Source, signature: Signature) -> Source:
    spec = source.spec
    if len(signature.inputs) != 1 or len(signature.outputs) != 1:  # asked for by name
        return source

    def by_output(entries: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:  # none, or one
        return dict(zip(signature.outputs, entries.values(), strict=False))

    weight = spec.sample_weight
    renamed = replace(
        spec,
        features=dict(zip(signature.inputs, spec.features.values(), strict=True)),
        labels=by_output(spec.labels),
        sample_weight=by_output(weight) if isinstance(weight, Mapping) else weight,
    )
    return replace(source, spec=renamed)


def _shared(source: Source, limit_bytes: int) -> SharedRows | None:
    """The rows for several fits, or None where each must read them."""
    if source.files:  # the workers read them, and may keep them
        return SharedRows()
    if is_connect(source.spark):
        return None
    most = megabytes(source.spark.conf.get("spark.driver.maxResultSize", "1g"))
    limit_bytes = min(limit_bytes, most << 19) if most else limit_bytes  # half of it
    try:
        return share_rows(source.frame, limit_bytes)
    except Exception:  # rows that cannot be computed: the fit's own error says it better
        return None
