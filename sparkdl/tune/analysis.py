"""The hyper-parameters that matter, by the trials of a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkdl.tune.journal import TrialRecord
from sparkdl.tune.suggestions import Value

FEWEST = 10
"""Trials without which nothing is said."""
_GROUPS = 6
_FEWEST_IN_GROUP = 4


def importances(records: Iterable[TrialRecord], metric: str) -> dict[str, float]:
    """The share of the metric's variance that each hyper-parameter explains by itself.

    Trials are compared after the same epochs: those after which most of them were. The metric is
    taken by its ranks ``r``, so that a few diverged trials do not decide. The values of a
    hyper-parameter are put into ``k`` groups (each choice, or up to six of equal size), and::

        share = 1 - (n - 1) / (n - k) * sum_g sum_i (r_i - mean_g)^2 / sum_i (r_i - mean)^2

    not below 0 (Kelley's epsilon squared, 1935: the correlation ratio without its bias). It is the
    main effect of a functional analysis of variance (Hutter et al., ICML 2014); what they do only
    together is in none of them.

    Returns:
        Hyper-parameter -> share from 0 to 1, the largest first; empty for fewer than 10 trials.
    """
    compared = [r for r in records if r.state != "failed"]
    at: Counter[int] = Counter(e for r in compared for e in r.metrics if _is_there(r, e, metric))
    if not at:
        return {}
    epochs = max(at, key=lambda e: (at[e], e))
    compared = [r for r in compared if _is_there(r, epochs, metric)]
    names = sorted({name for r in compared for name in r.params})
    found = {}
    for name in names:
        having = [r for r in compared if name in r.params]
        if len(having) >= FEWEST:
            ranks = _ranks(np.array([r.metrics[epochs][metric] for r in having]))
            found[name] = _share(ranks, _groups([r.params[name] for r in having]))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _is_there(record: TrialRecord, epochs: int, metric: str) -> bool:
    return math.isfinite(record.metrics.get(epochs, {}).get(metric, math.nan))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values have the mean of theirs."""
    order = np.sort(values)
    left, right = np.searchsorted(order, values), np.searchsorted(order, values, side="right")
    middle: NDArray[np.float64] = (left + right - 1) / 2
    return middle


def _groups(values: Sequence[Value]) -> NDArray[np.int64]:
    """The group of each value: of few different ones each has its own."""
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    distinct = {repr(v) for v in values}
    if len(numbers) < len(values) or len(distinct) <= _GROUPS:
        order = {text: place for place, text in enumerate(sorted(distinct))}
        return np.array([order[repr(v)] for v in values])
    count = max(2, min(_GROUPS, len(values) // _FEWEST_IN_GROUP))
    ranks = _ranks(np.array(numbers, float))
    return np.minimum((ranks * count / len(values)).astype(np.int64), count - 1)


def _share(ranks: NDArray[np.float64], groups: NDArray[np.int64]) -> float:
    present = np.unique(groups)
    number = len(ranks)
    total = float(((ranks - ranks.mean()) ** 2).sum())
    if total == 0.0 or not 1 < len(present) < number:
        return 0.0
    parts = (ranks[groups == group] for group in present)
    within = sum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    return max(0.0, 1 - (number - 1) / (number - len(present)) * within / total)
