"""``Study``: what a search found."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sparkdl.errors import ConfigError
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.process.closing import Closing
from sparkdl.tune import analysis
from sparkdl.tune.journal import Journal, TrialRecord
from sparkdl.tune.searchers.searcher import Goal
from sparkdl.tune.suggestions import Value

if TYPE_CHECKING:
    import keras
    import pandas as pd
    from matplotlib.axes import Axes


from collections.abc import Collection, Iterable


def ranked(records: Iterable[TrialRecord], goal: Goal) -> list[TrialRecord]:
    """The trials that have a score and did not fail, best first; by their last comparison, or by
    their best epoch where the search keeps that. Of equal ones that with the lower number is
    first."""
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


class EnsembleOf(Protocol):
    """Makes one model of several."""

    def __call__(self, models: list[keras.Model], voting: str) -> keras.Model: ...


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
        ensemble_of: EnsembleOf,
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
        """The trials that have a score and did not fail, best first; by their last comparison, or
        by their best epoch in a search with ``keep_epoch='best'``."""
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
        ax = _axes(ax, (7, 4))
        analysis.draw_curves(ax, self.records, self.goal.metric, self.best_trial.number)
        return ax

    def plot_scatter(self) -> list[Axes]:
        """Draws the metric over each hyper-parameter; hollow dots are trials that ended early."""
        import matplotlib.pyplot as plt

        ranked = self._compared()
        count = len(analysis.names_of(ranked))
        across = max(1, min(count, 3))
        down = max(1, -(-count // across))
        size = (3 * across, 2.4 * down)
        figure, axes = plt.subplots(
            down, across, figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        found = list(axes.flat)
        for unused in found[count:]:
            figure.delaxes(unused)
        analysis.draw_scatter(found[:count], ranked, self.goal.metric)
        return found[:count]

    def plot_parallel(self, ax: Axes | None = None) -> Axes:
        """Draws each trial as a line through its hyper-parameters and its metric.

        Args:
            ax: Where to draw; None for new axes. Needs matplotlib.
        """
        ranked = self._compared()
        ax = _axes(ax, (2.2 * (1 + len(analysis.names_of(ranked))), 3.5))
        analysis.draw_parallel(ax, ranked, self.goal.metric)
        return ax

    def plot_importances(self, ax: Axes | None = None) -> Axes:
        """Draws :attr:`importances` as bars.

        Args:
            ax: Where to draw; None for new axes. Needs matplotlib.
        """
        ax = _axes(ax, (7, 0.5 + 0.5 * max(2, len(self.importances))))
        analysis.draw_importances(ax, self.importances)
        return ax

    @property
    def importances(self) -> dict[str, float]:
        """Hyper-parameter -> the share of the metric's variance that it explains by itself, the
        largest first; empty for fewer than ten trials. See
        :func:`sparkdl.tune.analysis.importances`."""
        return analysis.importances(self.records, self.goal.metric)

    def _compared(self) -> list[TrialRecord]:
        _ = self.best_trial  # raises where there is none
        return self.ranked()

    def __repr__(self) -> str:
        ranked = self.ranked()
        best = (
            f", best {self.goal.metric} {self.best_value:.4g}: {self.best_params}" if ranked else ""
        )
        return f"Study({len(self.records)} trials{best})"


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    made: Axes = plt.subplots(figsize=size, layout="constrained")[1]
    return made
