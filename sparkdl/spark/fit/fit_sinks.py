"""The sinks that are told of a fit, and the fit's name."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.config import AUTO_WINDOW, FitConfig, without_network
from sparkdl.learner.description import describe_model
from sparkdl.progress.bar import ProgressBar
from sparkdl.progress.events import Json, RunDescription, Sink
from sparkdl.spark.fit.arguments import FitArguments, verbosity
from sparkdl.spark.fit.plan import FitPlan
from sparkdl.spark.fit.training import StageSummary
from sparkdl.tracking.event_files import Timeline
from sparkdl.tracking.notebook import NotebookCurves, curves_take_the_bars_place
from sparkdl.tracking.page.dashboard import process_dashboard
from sparkdl.tracking.profile import Facts
from sparkdl.tracking.sinks import GivenSink, GuardedSink, sinks_of
from sparkdl.worker import auto_window

DASHBOARD = "spark.sparkdl.dashboard"
"""Spark's configuration key: ``true`` for the page."""


def open_sinks(
    sinks: Sequence[GivenSink] | GivenSink | None,
    timeline: str | None,
    model: Callable[[], object],
    spark: Any,
    began_at: float | None = None,
) -> list[GuardedSink]:
    """The sinks of a fit: the user's, the timeline's, and those that stand for every fit.

    With ``spark.sparkdl.dashboard=true`` the first fit of the process opens the page. The timeline
    begins at ``began_at``, in seconds since 1970.

    Raises:
        ConfigError: Something is no sink.
    """
    if str(spark.conf.get(DASHBOARD, "false")).lower() == "true":
        process_dashboard()
    given = [] if sinks is None else list(sinks) if isinstance(sinks, Sequence) else [sinks]
    if timeline is not None:
        given.append(Timeline(timeline, began_at=began_at))
    return sinks_of(given, model)


def progress_sink(verbose: str | int) -> Sink:
    """The view of a fit for its caller: curves in a notebook, else a bar or lines."""
    if curves_take_the_bars_place(verbose):
        return GuardedSink(NotebookCurves())
    return ProgressBar(verbosity(verbose))


def describe_run(
    config: FitConfig, arguments: FitArguments, model: Any, num_workers: int
) -> RunDescription:
    """Which fit it is, with what it was asked to do; nothing of where servers listen."""
    asked: dict[str, Json] = json.loads(json.dumps(without_network(config.to_dict()), default=str))
    asked |= {
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size or config.batch_size,
        "num_workers": num_workers,
        "validation_split": arguments.validation_split,
        "shuffle": arguments.shuffle,
    }
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return RunDescription(run_id, model.name, num_workers, asked | describe_model(model))


def facts_of(plan: FitPlan, summary: StageSummary, epochs: int) -> Facts:
    """The facts for a profile of a fit's last stage."""
    return Facts(
        summary.usage, summary.rank_rows, min(epochs, summary.epochs), plan.settings.batch_size,
        window_of(plan, summary), plan.exchange.in_step, summary.transports, plan.config.mode,
    )  # fmt: skip


def window_of(plan: FitPlan, summary: StageSummary) -> int:
    """Batches between two exchanges; of the automatic window those of a worker with mean rows."""
    if plan.settings.window != AUTO_WINDOW:
        return plan.settings.window
    workers = len(summary.usage)
    steps = summary.rows // max(workers, 1) // plan.settings.batch_size
    return auto_window(steps, plan.settings.at_once or workers)
