"""``Study``: what a search found; the hyper-parameters that matter, and the charts."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkdl.errors import ConfigError
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.process.closing import Closing
from sparkdl.tune.journal import Journal, TrialRecord
from sparkdl.tune.searchers.searcher import Goal
from sparkdl.tune.suggestions import Value

if TYPE_CHECKING:
    import keras
    import pandas as pd
    from matplotlib.axes import Axes


def ranked(records: Iterable[TrialRecord], goal: Goal) -> list[TrialRecord]:
    """The trials that have a score and did not fail, best first; by their last comparison, or by
    their best epoch where the search keeps that. Of equal ones the lower number is first."""
    whole = [r for r in records if r.metrics and r.state != "failed"]
    return sorted(whole, key=lambda r: (-goal.score(r.model_metrics), r.number))


def dispensable(
    records: Collection[TrialRecord], goal: Goal, done: Collection[int], keep_best: int
) -> list[TrialRecord]:
    """The trials whose checkpoints may go, as nobody will ask for them.

    They will not train again, and ``keep_best`` such trials are better. One that still trains does
    not count as better: it may end worse.
    """
    ended = [r for r in records if r.number in done]
    kept = {r.number for r in ranked(ended, goal)[:keep_best]}
    return [r for r in ended if r.number not in kept and r.kept]


class Study(Closing):
    """The trials of a search, best first, and the models of the best.

    Models are read from the search's folder when they are asked for. Without a ``checkpoint_dir``
    that folder is temporary and goes with the study: at :meth:`close`, the end of a ``with`` block,
    or the end of the process.
    """

    def __init__(
        self,
        journal: Journal,
        goal: Goal,
        load: Callable[[TrialRecord], keras.Model],
        ensemble_of: Callable[[list[keras.Model], str], keras.Model],
        *,
        temporary: TemporaryFolder | None,
    ) -> None:
        self._journal, self.goal = journal, goal
        self._load, self._ensemble_of = load, ensemble_of
        self._delete = None if temporary is None else weakref.finalize(self, temporary.close)

    def close(self) -> None:
        """Deletes the checkpoints if their folder is temporary."""
        if self._delete is not None:
            self._delete()

    @property
    def records(self) -> list[TrialRecord]:
        return [self._journal.trials[n] for n in sorted(self._journal.trials)]

    def ranked(self) -> list[TrialRecord]:
        """The trials with a score, best first; see :func:`sparkdl.tune.study.ranked`."""
        return ranked(self.records, self.goal)

    @property
    def best_trial(self) -> TrialRecord:
        """The trial with the best metric.

        Raises:
            ConfigError: No trial has one.
        """
        ranked = self.ranked()
        if not ranked:
            raise ConfigError(
                "the study has no trial with a metric",
                expected="at least one trial that trained to its first comparison",
                received=f"{len(self.records)} trials: "
                + (", ".join(sorted({r.error or r.state for r in self.records})) or "none"),
            )
        return ranked[0]

    @property
    def best_params(self) -> dict[str, Value]:
        """The hyper-parameters of :attr:`best_trial`."""
        return dict(self.best_trial.params)

    @property
    def best_value(self) -> float:
        """The metric of :attr:`best_trial`: that of :attr:`best_model`."""
        return self.best_trial.model_metrics[self.goal.metric]

    @property
    def best_model(self) -> keras.Model:
        """The model of :attr:`best_trial`, compiled, with its optimizer's state."""
        return self._model_of(self.best_trial)

    def best_models(self, count: int) -> list[keras.Model]:
        """The models of the ``count`` best trials, best first.

        Raises:
            ConfigError: The search had a smaller ``keep_best``.
        """
        return [self._model_of(record) for record in self.ranked()[:count]]

    def _model_of(self, record: TrialRecord) -> keras.Model:
        if not record.kept:
            kept = sum(r.kept for r in self.ranked())
            raise ConfigError(
                f"the model of trial {record.number} was not kept",
                expected=f"one of the {kept} best trials", received=f"trial {record.number}",
                hint="tune.search(..., keep_best=) says how many are kept; None keeps all",
            )  # fmt: skip
        return self._load(record)

    def ensemble(self, count: int, voting: str = "soft") -> keras.Model:
        """One model of the ``count`` best: ``'soft'`` predicts the mean of their predictions,
        ``'hard'`` the share of them that prefers each class.

        Raises:
            ConfigError: Another voting, or fewer trials than ``count``.
        """
        models = self.best_models(count)
        if voting not in ("soft", "hard") or len(models) < count:
            raise ConfigError(
                "these models cannot vote",
                expected=f"voting='soft' or 'hard', and count of at most {len(models)}",
                received=f"count={count!r}, voting={voting!r}",
            )
        return self._ensemble_of(models, voting)

    @property
    def trials(self) -> pd.DataFrame:
        """A row a trial: number, state, epochs, the metric, ``param_...``; best first."""
        import pandas as pd

        ranked = self.ranked()
        rest = [r for r in self.records if r not in ranked]
        rows = [
            {
                "trial": r.number,
                "state": r.state,
                "epochs": r.epochs,
                self.goal.metric: r.model_metrics.get(self.goal.metric, math.nan),
                **{f"param_{name}": value for name, value in r.params.items()},
                "error": r.error,
            }
            for r in [*ranked, *rest]
        ]
        return pd.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the metric of every trial over its epochs; the best one stands out.

        Args:
            ax: Where to draw; None for new axes. Needs matplotlib.
        """
        ax, metric, best = _axes(ax, (7, 4)), self.goal.metric, self.best_trial.number
        for record in self.records:
            values = {e: m.get(metric, math.nan) for e, m in sorted(record.metrics.items())}
            lines = ax.plot(list(values), list(values.values()), color=GREY, alpha=0.6, lw=1)
            if record.number == best:
                lines[0].set(color=BEST, alpha=1, linewidth=2.5, zorder=3)
                lines[0].set_label(f"best: trial {best}")
            lines[0].set(marker="o", markersize=3)
        ax.set(xlabel="epochs", ylabel=metric, title=f"{len(self.records)} trials")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
        return ax

    def plot_scatter(self) -> list[Axes]:
        """Draws the metric over each hyper-parameter; hollow dots are trials that ended early."""
        import matplotlib.pyplot as plt

        ranked, metric = self._compared(), self.goal.metric
        names, longest = names_of(ranked), max(record.epochs for record in ranked)
        count = len(names)
        across = max(1, min(count, 3))
        down = max(1, -(-count // across))
        size = (3 * across, 2.4 * down)
        figure, axes = plt.subplots(
            down, across, figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        found = list(axes.flat)
        for unused in found[count:]:
            figure.delaxes(unused)
        for ax, name in zip(found[:count], names, strict=True):
            having = [r for r in ranked if name in r.params]
            x, ticks, log = _coordinates(having, name)
            y = np.array([_last(r, metric) for r in having])
            whole = np.array([r.epochs == longest for r in having])
            ax.scatter(x[whole], y[whole], s=22, color=BLUE, alpha=0.7)
            ax.scatter(x[~whole], y[~whole], s=22, facecolors="none", edgecolors=GREY)
            if having[0] is ranked[0]:
                ax.scatter(x[:1], y[:1], s=60, color=BEST, zorder=3)
            if ticks is not None:
                ax.set_xticks(list(ticks.values()), list(ticks))
                ax.set_xlim(min(ticks.values()) - 0.3, max(ticks.values()) + 0.3)
            elif log:
                ax.set_xscale("log")
            cell = ax.get_subplotspec()
            ax.set(xlabel=name, ylabel=metric if cell is None or cell.is_first_col() else "")
            ax.grid(alpha=0.3)
        return found[:count]

    def plot_parallel(self, ax: Axes | None = None) -> Axes:
        """Draws each trial as a line through its hyper-parameters and its metric.

        The best tenth is orange; see :meth:`plot`.
        """
        ranked, metric = self._compared(), self.goal.metric
        names, best = names_of(ranked), max(1, round(len(ranked) / 10))
        ax = _axes(ax, (2.2 * (1 + len(names)), 3.5))
        columns = []
        for place, name in enumerate(names):
            having = [r for r in ranked if name in r.params]
            x, ticks, log = _coordinates(having, name)
            by_number = dict(zip((r.number for r in having), x, strict=True))
            values = np.array([by_number.get(r.number, math.nan) for r in ranked])
            columns.append(_axis(ax, place, values, ticks, log=log))
        values = np.array([_last(r, metric) for r in ranked])
        columns.append(_axis(ax, len(names), values, None, log=False))
        heights = np.stack(columns)
        for place in reversed(range(len(ranked))):
            there = np.flatnonzero(np.isfinite(heights[:, place]))  # past what a trial has not
            line = ax.plot(there, heights[there, place], color=GREY, alpha=0.45, lw=1)[0]
            if place < best:
                line.set(color=BEST, alpha=1, linewidth=2.5 if place == 0 else 1.5, zorder=3)
        ax.set_xticks(range(len(columns)), [*names, metric])
        ax.set(xlim=(-0.35, len(names) + 0.35), ylim=(-_MARGIN, 1 + _MARGIN), yticks=[])
        ax.tick_params(length=0)
        for side in ("left", "right", "top", "bottom"):
            ax.spines[side].set_visible(False)
        return ax

    def plot_importances(self, ax: Axes | None = None) -> Axes:
        """Draws :attr:`importances` as bars; see :meth:`plot`."""
        shares = self.importances
        ax, names = _axes(ax, (7, 0.5 + 0.5 * max(2, len(shares)))), list(shares)[::-1]
        bars = ax.barh(names, [shares[n] for n in names], color=BLUE)
        ax.bar_label(bars, [f" {shares[n]:.0%}" for n in names])
        ax.set(xlim=(0, 1.1), xlabel="share of the metric's variance that it explains")
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        return ax

    @property
    def importances(self) -> dict[str, float]:
        """Hyper-parameter -> the share of the metric's variance that it explains by itself, the
        largest first; empty for fewer than ten trials. See
        :func:`sparkdl.tune.study.importances`."""
        return importances(self.records, self.goal.metric)

    def _compared(self) -> list[TrialRecord]:
        _ = self.best_trial  # raises where there is none
        return self.ranked()

    def __repr__(self) -> str:
        best = ""
        if self.ranked():
            best = f", best {self.goal.metric} {self.best_value:.4g}: {self.best_params}"
        return f"Study({len(self.records)} trials{best})"


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    made: Axes = plt.subplots(figsize=size, layout="constrained")[1]
    return made


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
    found = {}
    for name in sorted({name for r in compared for name in r.params}):
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


GREY, BLUE, BEST = "#7f8fa6", "#0072b2", "#d55e00"
_MARGIN = 0.06
_FEW = 6
"""Whole numbers up to this count stand each by itself on an axis."""


def names_of(records: Sequence[TrialRecord]) -> list[str]:
    """The hyper-parameters that any trial has, in the order in which ``build`` asked for them."""
    return list(dict.fromkeys(name for record in records for name in record.params))


def _last(record: TrialRecord, metric: str) -> float:
    return record.metrics[max(record.metrics)].get(metric, math.nan)


def _coordinates(
    records: Sequence[TrialRecord], name: str
) -> tuple[NDArray[np.float64], dict[str, float] | None, bool]:
    """The places of values on an axis; the places of choices by name; whether it is a log."""
    values = [r.params[name] for r in records]
    space = next((r.spaces[name] for r in records if name in r.spaces), None)
    if space is not None and space.kind == "int" and space.high - space.low < _FEW:
        ticks = {str(n): float(n) for n in range(int(space.low), int(space.high) + 1)}
        return np.array([float(v or 0) for v in values]), ticks, False
    if space is None or space.kind != "categorical":
        numbers = [float(v) for v in values if v is not None]  # only choices can be None
        return np.array(numbers), None, space is not None and space.log
    places = {str(choice): float(place) for place, choice in enumerate(space.choices)}
    return np.array([places[str(v)] for v in values]), places, False


def _axis(
    ax: Axes, place: int, values: NDArray[Any], ticks: Mapping[str, float] | None, *, log: bool
) -> NDArray[Any]:
    """Draws an upright axis; returns the heights of the values on it, from 0 to 1."""
    f = np.log10 if log else np.asarray
    ends = list(ticks.values()) if ticks is not None else [np.nanmin(values), np.nanmax(values)]
    low, high = float(f(min(ends))), float(f(max(ends)))
    width = (high - low) or 1.0
    middle = 0.5 if high == low else 0.0
    if ticks is None:
        steps = [low] if high == low else list(np.linspace(low, high, 5))
        ticks = {f"{10**s if log else s:.3g}": 10**s if log else s for s in steps}
    ax.axvline(place, color="#444444", lw=0.8, zorder=0)
    for text, value in ticks.items():
        height = (float(f(value)) - low) / width + middle
        ax.annotate(
            text, (place, height), (4, 0), textcoords="offset points", va="center", fontsize=8,
            zorder=4, bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5},
        )  # fmt: skip
    heights: NDArray[Any] = (f(values) - low) / width + middle
    return heights
