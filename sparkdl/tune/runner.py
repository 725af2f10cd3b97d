"""Runs a search: asks the searcher, trains segments side by side, tells the scores."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sparkdl.errors import ConfigError, DataError, ResourceError
from sparkdl.progress.events import Event, Json, Metrics, TrialBegan, TrialEnded, TrialEpochEnded
from sparkdl.tune.journal import Journal, TrialRecord
from sparkdl.tune.searchers.searcher import WORST, Goal, Searcher, Segment
from sparkdl.tune.study import dispensable, importances
from sparkdl.tune.suggestions import Draw, Drawn, Experience, Outcome, Sampler, Space, Trial, Value


class Standing:
    """The epoch that a trial stands for: its latest one, or its best one.

    Used by the thread that trains the segment, and after its end by that of the search.
    """

    def __init__(
        self,
        goal: Goal,
        best: bool,
        record: TrialRecord | None,
        begin: int,
        copied: Collection[int],
    ) -> None:
        self._goal, self._best = goal, best
        self._needed = {begin, *copied} - {0}
        self._latest = 0
        self.epoch, self.metrics, self._score = 0, dict[str, float](), WORST
        if record is not None and record.kept_metrics:
            self.epoch, self.metrics = record.kept_epoch, record.kept_metrics
            self._score = goal.score(self.metrics) if best else WORST

    def hear(self, epochs: int, metrics: Metrics) -> bool:
        """An epoch has ended; whether its checkpoint is to be kept."""
        self._latest = epochs
        numbers = {n: float(v) for n, v in metrics.items() if isinstance(v, (int, float))}
        return self._best and self._take(epochs, numbers)

    def end(
        self, epochs: int, metrics: Mapping[str, float], copied: Collection[int]
    ) -> frozenset[int]:
        """The segment has ended; the epochs whose checkpoints must stay now."""
        self._latest = self._latest or epochs
        self._take(self._latest, dict(metrics))
        return frozenset({self._latest, self.epoch, *copied} - {0})

    @property
    def needed(self) -> frozenset[int]:
        """The epochs whose checkpoints must stay meanwhile, beside the newest."""
        return frozenset({*self._needed, self.epoch} - {0})

    def _take(self, epochs: int, metrics: dict[str, float]) -> bool:
        score = self._goal.score(metrics) if self._goal.metric in metrics else WORST
        better = score > self._score
        if better:
            self.epoch, self.metrics, self._score = epochs, metrics, score
        return better


OnEpoch = Callable[[int, Metrics], None]
"""Hears that an epoch of a trial has ended, counted from 0, in any thread."""
PATIENCE = 3
"""Trials that may fail before any has succeeded; then the search ends with the first error."""
SegmentTraining = Callable[[], Mapping[str, float]]
"""Trains a segment, in any thread: writes its checkpoint, returns the last epoch's metrics."""


class TrialTrainer(Protocol):
    """Trains segments; what it needs of Spark and Keras is its own."""

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        """Calls the user's ``build``; in the thread that called ``search``."""

    def cancel(self) -> None:
        """Ends the trainings that run, which then raise."""

    def delete(self, trial: int) -> None:
        """Deletes the checkpoints of a trial."""

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        """Keeps a trial's checkpoints after these epochs beside its newest, and no others; while a
        segment of it trains, called in the thread that trains it."""


@dataclass(frozen=True)
class _Ended:
    segment: Segment
    metrics: Mapping[str, float] | None
    error: Exception | None


@dataclass(eq=False)
class SearchRun:
    """A search: its segments run each in a thread of their own; used by one thread.

    Args:
        timeout_s: The time after which the trainings that run are ended; None for no limit.
        on_score: Called with a trial and its score.
        sampler: Gives new trials their values.
        tell_sinks: Hears of the trials, in the thread that runs the search.
        keep_best: The best trials that keep their checkpoints; those of others are deleted
            when the search will not go on from them. None for all.
        best_epochs: A trial stands for the model of its best epoch, and not of its last one.
        catch: What a trial may raise and count as failed; anything else ends the search.
    """

    searcher: Searcher
    trainer: TrialTrainer
    journal: Journal
    goal: Goal
    seed: int
    max_concurrent: int
    timeout_s: float | None
    on_score: Callable[[int, float], None] = lambda trial, score: None
    sampler: Sampler = field(default_factory=Drawn)
    tell_sinks: Callable[[Event], None] = lambda event: None
    keep_best: int | None = None
    best_epochs: bool = False
    catch: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        self._heard: queue.SimpleQueue[_Ended | TrialEpochEnded] = queue.SimpleQueue()
        self._failures: list[Exception] = []
        self._standings: dict[int, Standing] = {}
        self._running: dict[int, threading.Thread] = {}

    def run(self) -> None:
        """Runs to the searcher's end, or until the time is over; the journal has what happened.

        Raises:
            SparkDLError: The first trials failed, or a mistake that all trials share.
        """
        waiting, trials = self.journal.replay(self.searcher), self.journal.trials
        self._succeeded = any(r.metrics and r.state != "failed" for r in trials.values())
        self._tell_past()
        deadline = math.inf if self.timeout_s is None else time.monotonic() + self.timeout_s
        try:
            while True:
                while len(self._running) < self.max_concurrent and time.monotonic() < deadline:
                    segment = waiting.pop(0) if waiting else self._ask()
                    if segment is None:
                        break
                    self._start(segment)
                if not self._running:
                    if time.monotonic() < deadline:  # the searcher has no segment: none will come
                        self._collect(set(trials))
                    return
                self._take(0.1)
                self._collect(self._done() - {s.parent for s in waiting})
                if time.monotonic() > deadline:
                    self._stop(heed=True)
                    return
        except BaseException:
            self._stop()
            raise

    def _tell_past(self) -> None:
        """Tells of the trials that the journal had before."""
        for record in self.journal.trials.values():
            if not record.params and not record.metrics:
                continue
            self.tell_sinks(TrialBegan(record.number, dict(record.params), 0, record.epochs))
            for epochs, metrics in sorted(record.metrics.items()):
                self._tell_ended(record, epochs, metrics)

    def _ask(self) -> Segment | None:
        segment = self.searcher.ask()
        if segment is not None:
            self.journal.asked(segment)
        return segment

    def _start(self, segment: Segment) -> None:
        if segment.trial in self._running:
            raise ConfigError(
                f"the searcher gave two segments of trial {segment.trial} at the same time",
                expected="the next segment of a trial after tell() of the one before",
                received=str(segment),
            )
        record = self.journal.trials.get(segment.trial)
        given = {**self.searcher.parameters(segment.trial), **(record.params if record else {})}
        trial = Trial(segment.trial, self.seed, given, self._draws(segment.trial))

        standing = self._standings[segment.trial] = Standing(
            self.goal, self.best_epochs, record, segment.begin,
            self.searcher.copied_after(segment.trial),
        )  # fmt: skip

        def heard(epoch: int, metrics: Metrics) -> None:
            if standing.hear(epoch + 1, metrics):
                self.trainer.keep(segment.trial, standing.needed)
            self._heard.put(TrialEpochEnded(segment.trial, epoch, metrics))

        try:
            training = self.trainer.prepare(trial, segment, heard)
        except Exception as error:
            self._keep(trial, segment)
            self._score(_Ended(segment, None, error))
            return
        self._keep(trial, segment)
        if standing.needed:
            self.trainer.keep(segment.trial, standing.needed)

        def train() -> None:
            try:
                self._heard.put(_Ended(segment, training(), None))
            except Exception as error:
                self._heard.put(_Ended(segment, None, error))

        name = f"sparkdl-trial{segment.trial}"
        self._running[segment.trial] = threading.Thread(target=train, name=name, daemon=True)
        self._running[segment.trial].start()

    def _take(self, timeout_s: float) -> None:
        """Waits for a segment to end, and tells its score, or for one of its epochs."""
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=timeout_s)
            if isinstance(heard, TrialEpochEnded):
                self.tell_sinks(heard)
                return
            self._running.pop(heard.segment.trial).join()
            self._score(heard)

    def _done(self) -> set[int]:
        """The trials that neither train again nor are copied."""
        trials = self.journal.trials.items()
        ended = {n for n, record in trials if n not in self._running and record.metrics}
        return {n for n in ended if self.searcher.is_done(n)}

    def _collect(self, done: Collection[int]) -> None:
        """Deletes the checkpoints that nobody will ask for."""
        if self.keep_best is None:
            return
        found = dispensable(self.journal.trials.values(), self.goal, done, self.keep_best)
        for record in found:
            self.trainer.delete(record.number)
            record.kept = False
        if found:
            self.journal.write()

    def _stop(self, timeout_s: float = 60.0, *, heed: bool = False) -> None:
        """Ends what runs; its trials count as stopped."""
        deadline = time.monotonic() + timeout_s
        for number, thread in self._running.items():
            while thread.is_alive() and time.monotonic() < deadline:
                self.trainer.cancel()  # again: one that comes before the Spark job is forgotten
                thread.join(0.5)
            if thread.is_alive():
                warnings.warn(
                    f"trial {number} has not ended within {timeout_s:g} s of its cancellation; its "
                    "tasks may still hold their cores",
                    RuntimeWarning,
                    stacklevel=2,
                )
        while heed and not self._heard.empty():
            heard = self._heard.get()
            if isinstance(heard, TrialEpochEnded):
                self.tell_sinks(heard)
            elif heard.error is None:
                del self._running[heard.segment.trial]
                self._score(heard)
        for number in self._running:
            record = self.journal.trials[number]
            record.state = "stopped"
            self._tell_ended(record, record.epochs, {})
        self._running.clear()
        self.journal.write()

    def _draws(self, number: int) -> Draw:
        """How a trial's values are drawn, asked at the first: one that goes on has its values."""
        found: list[Draw] = []

        def draw(name: str, space: Space) -> Value:
            if not found:
                before = [r for n, r in sorted(self.journal.trials.items()) if n != number]
                known = [self._experience(record) for record in before]
                found.append(self.sampler.draws(number, self.seed, known))
            return found[0](name, space)

        return draw

    def _experience(self, record: TrialRecord) -> Experience:
        goal = self.goal
        scores = {e: goal.score(m) for e, m in record.metrics.items() if goal.metric in m}
        outcome: Outcome = "paused"
        if record.state == "failed":
            outcome = "failed"
        elif record.epochs >= self.searcher.max_epochs:
            outcome = "complete"
        elif record.state == "running" or not scores:
            outcome = "running"
        return Experience(record.params, record.spaces, scores, outcome)

    def _tell_ended(self, record: TrialRecord, epochs: int, metrics: Mapping[str, float]) -> None:
        state: Literal["waiting", "complete", "failed", "stopped"] = "waiting"
        if record.state in ("failed", "stopped"):
            state = "failed" if record.state == "failed" else "stopped"
        elif epochs >= self.searcher.max_epochs:
            state = "complete"
        shares = importances(self.journal.trials.values(), self.goal.metric)
        ended = TrialEnded(record.number, epochs, state, dict(metrics), record.error, shares)
        self.tell_sinks(ended)

    def _keep(self, trial: Trial, segment: Segment) -> None:
        self.journal.built(trial.number, trial.spaces, trial.params)
        self.searcher.built(trial.number, trial.spaces, trial.params)
        self.journal.write()
        params: dict[str, Json] = {**trial.params}
        began = TrialBegan(trial.number, params, segment.begin, segment.end, segment.parent)
        self.tell_sinks(began)

    def _score(self, ended: _Ended) -> None:
        segment, metrics = ended.segment, ended.metrics or {}
        score = WORST if ended.error else self.goal.score(metrics)
        self.searcher.tell(segment.trial, segment.end, score)
        self.journal.told(segment, score, metrics)
        record = self.journal.trials[segment.trial]
        if score == WORST:
            record.state = "failed"
            record.error = f"{self.goal.metric} is NaN"
            if ended.error:
                told = str(ended.error).partition("\n")[0].rstrip()
                record.error = f"{type(ended.error).__name__}: {told}"
            warnings.warn(f"trial {segment.trial} failed: {record.error}", RuntimeWarning, 2)
        else:
            standing = self._standings.pop(segment.trial)
            needed = standing.end(segment.end, metrics, self.searcher.copied_after(segment.trial))
            record.kept_epoch, record.kept_metrics = standing.epoch, dict(standing.metrics)
            self.trainer.keep(segment.trial, needed)
        self.journal.write()
        self._tell_ended(record, segment.end, metrics)
        if score > WORST:
            self._succeeded = True
            self.on_score(segment.trial, score)
        elif ended.error is not None:
            self._failures.append(ended.error)
            if not isinstance(ended.error, self.catch):
                raise ended.error
            shared = isinstance(ended.error, (ConfigError, DataError, ResourceError))
            if not self._succeeded and (shared or len(self._failures) >= PATIENCE):
                raise self._failures[0]
