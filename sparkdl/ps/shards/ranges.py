"""Which range of the flat buffer each shard holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.training.changes import VariableChanges
from sparkdl.weights import FloatArray, Layout


@dataclass(frozen=True)
class Range:
    """The range of one shard.

    Args:
        place: In the flat buffer of the model.
        layout: Layout of the values in it: one trained vector, and one of averaged statistics.
    """

    place: slice
    layout: Layout

    def written(self, changes: VariableChanges, values: FloatArray) -> FloatArray:
        """``values`` of the range with what callbacks wrote to the model's weights; a copy."""
        start, stop = self.place.start, self.place.stop
        found = values.copy()
        for offset, new in changes.weights.items():
            first, last = max(offset, start), min(offset + new.size, stop)
            if first < last:
                found[first - start : last - start] = new[first - offset : last - offset]
        return found


def ranges_of(layout: Layout, count: int) -> tuple[Range, ...]:
    """``count`` nearly equal ranges that cover the buffer; some are empty if it has fewer values.

    >>> layout = Layout.of([('w', (6,), 'float32')], [('mean', (3,), 'float32')])
    >>> [(r.place.start, r.place.stop, r.layout.trained_size) for r in ranges_of(layout, 2)]
    [(0, 4, 4), (4, 9, 2)]
    """
    return tuple(_range(layout, place) for place in layout.shards(count))


def _range(layout: Layout, place: slice) -> Range:
    edge = int(np.clip(layout.trained_size, place.start, place.stop))
    trained = [("trained", (edge - place.start,), "float32")]
    averaged = [("averaged", (place.stop - edge,), "float32")]
    return Range(place, Layout.of(trained, averaged))


def compression_of(whole: Compression | None, range_: Range) -> Compression | None:
    """The compression of a run's commits to one shard."""
    return None if whole is None else replace(whole, layout=range_.layout)
