"""The charts of a study show its trials."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.tune.journal import Journal
from sparkdl.tune.searchers.searcher import Goal
from sparkdl.tune.study import Study
from sparkdl.tune.suggestions import Trial

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def study_of(folder: Path, trials: int = 30) -> Study:
    """Trials whose accuracy is best near rate 0.01; every third is trained to the end."""
    journal = Journal.at(str(folder), {}, resume=False)
    for number in range(trials):
        trial = Trial(number)
        rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
        trial.suggest_int("units", 8, 64)
        kind = trial.suggest_categorical("kind", ["relu", None])
        if kind:
            trial.suggest_float("slope", 0, 1)
        journal.built(number, trial.spaces, trial.params)
        record = journal.trials[number]
        record.state = "waiting"
        for epochs in (1, 3) if number % 3 else (1, 3, 9):
            value = 0.9 - 0.1 * abs(np.log10(rate) + 2) + 0.01 * epochs
            record.metrics[epochs] = {"accuracy": float(value)}
            record.epochs = epochs
    return Study(journal, Goal("accuracy", True), _none, _none, temporary=None)


def _none(*arguments: Any) -> Any:
    raise NotImplementedError


def test_curves(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    ax = study.plot()
    assert len(ax.lines) == 30
    (marked,) = [line for line in ax.lines if line.get_linewidth() > 2]
    best = study.best_trial
    assert list(marked.get_xdata()) == sorted(best.metrics)
    assert marked.get_ydata()[-1] == study.best_value


def test_scatter_has_a_dot_for_each_trial_that_has_the_name(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    axes = study.plot_scatter()
    assert [ax.get_xlabel() for ax in axes] == ["rate", "units", "kind", "slope"]
    assert [ax.get_xscale() for ax in axes] == ["log", "linear", "linear", "linear"]
    dots = [sum(len(c.get_offsets()) for c in ax.collections[:2]) for ax in axes]
    assert dots == [30, 30, 30, sum("slope" in r.params for r in study.records)]
    assert [t.get_text() for t in axes[2].get_xticklabels()] == ["relu", "None"]


def test_parallel_coordinates_go_through_the_values(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    ax = study.plot_parallel()
    assert [t.get_text() for t in ax.get_xticklabels()] == [
        "rate", "units", "kind", "slope", "accuracy",
    ]  # fmt: skip
    lines = [line for line in ax.lines if len(line.get_xdata()) > 2]
    assert len(lines) == 30
    assert sum(len(line.get_xdata()) == 5 for line in lines) == sum(
        "slope" in r.params for r in study.records
    )
    best = lines[-1].get_ydata()
    assert best[-1] == 1.0
    rates = sorted(np.log10(float(r.params["rate"] or 0)) for r in study.records)
    rate = np.log10(float(study.best_params["rate"] or 0))
    assert best[0] == pytest.approx((rate - rates[0]) / (rates[-1] - rates[0]))


def test_importances(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert next(iter(study.importances)) == "rate"
    ax = study.plot_importances()
    assert len(ax.patches) == len(study.importances)
    assert max(p.get_width() for p in ax.patches) == study.importances["rate"]


def test_one_trial_and_none(tmp_path: Path) -> None:
    study = study_of(tmp_path / "one", 1)
    for draw in (study.plot, study.plot_scatter, study.plot_parallel, study.plot_importances):
        draw()
    empty = study_of(tmp_path / "none", 0)
    with pytest.raises(ConfigError, match="no trial with a metric"):
        empty.plot_parallel()
