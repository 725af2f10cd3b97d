"""Metrics of all workers, kept so that no attempt counts twice and no dead attempt is forgotten."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import Message

_VECTORS = ("metrics", "val_metrics")
_COUNTS = ("rows", "val_rows")


News = tuple[int, dict[str, Any], bool]
"""Epoch, what is new of it, and whether its sender has ended it."""


def parse_telemetry(message: Message) -> News | None:
    """What a commit's or a report's meta says of an epoch; None if it says nothing.

    Raises:
        ProtocolError: A metric state is no list of numbers.
    """
    meta = message.meta
    if "epoch" not in meta:
        return None
    try:
        epoch = int(meta["epoch"])
        values: dict[str, Any] = {
            key: [float(v) for v in meta[key]] for key in _VECTORS if meta.get(key) is not None
        }
        values.update({key: int(meta[key]) for key in _COUNTS if meta.get(key) is not None})
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"the telemetry of rank {message.rank} is malformed",
            expected="an int epoch and lists of numbers",
            received=str(error),
        ) from error
    return epoch, values, bool(meta.get("ended"))


class Telemetry:
    """Latest metric states per ``(epoch, rank, attempt)``, summed when somebody asks.

    A metric state is a vector of sums and counts (float64), as Keras metrics hold it, so the
    elementwise sum over ranks is the state of the whole epoch.
    """

    def __init__(self) -> None:
        self._entries: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}
        self._ended: dict[int, set[int]] = {}

    def record(self, rank: int, attempt: int, news: News | None) -> None:
        """Replaces what this attempt said of that epoch; None changes nothing."""
        if news is None:
            return
        epoch, values, ended = news
        self._entries.setdefault(epoch, {}).setdefault((rank, attempt), {}).update(values)
        if ended:
            self._ended.setdefault(epoch, set()).add(rank)

    def summary(self, since: int = 0) -> dict[str, dict[str, Any]]:
        """Epoch (as text, for JSON) to ``{rows, val_rows, metrics, val_metrics, ended}``."""
        result: dict[str, dict[str, Any]] = {}
        for epoch in sorted(e for e in self._entries if e >= since):
            entries = self._entries[epoch]
            summed: dict[str, Any] = {
                key: sum(entry.get(key, 0) for entry in entries.values()) for key in _COUNTS
            }
            for key in _VECTORS:
                summed[key] = _sum([e[key] for e in entries.values() if key in e])
            summed["ended"] = sorted(self._ended.get(epoch, ()))
            result[str(epoch)] = summed
        return result


def _sum(vectors: list[list[float]]) -> list[float]:
    total: list[float] = []
    for vector in vectors:
        total += [0.0] * (len(vector) - len(total))
        for i, value in enumerate(vector):
            total[i] += value
    return total
