"""Runs a search: asks the searcher, trains segments side by side, tells the scores."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
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


def run_search(
    searcher: Searcher,
    trainer: TrialTrainer,
    journal: Journal,
    goal: Goal,
    *,
    seed: int,
    max_concurrent: int,
    timeout_s: float | None,
    on_score: Callable[[int, float], None] = lambda trial, score: None,
    sampler: Sampler | None = None,
    tell: Callable[[Event], None] = lambda event: None,
    keep_best: int | None = None,
    best_epochs: bool = False,
    catch: tuple[type[Exception], ...] = (Exception,),
) -> None:
    """Runs to the searcher's end, or until the time is over; the journal has what happened.

    Args:
        timeout_s: The time after which the trainings that run are ended; None for no limit.
        on_score: Called with a trial and its score.
        sampler: Gives new trials their values; None for values by chance.
        tell: Hears of the trials, in the thread that called this.
        keep_best: The best trials that keep their checkpoints; those of others are deleted
            when the search will not go on from them. None for all.
        best_epochs: A trial stands for the model of its best epoch, and not of its last one.
        catch: What a trial may raise and count as failed; anything else ends the search.

    Raises:
        SparkDLError: The first trials failed, or a mistake that all trials share.
    """
    waiting = journal.replay(searcher)
    search = _Search(
        searcher, trainer, journal, goal, seed, on_score, sampler or Drawn(), tell, best_epochs,
        catch,
    )  # fmt: skip
    search.tell_past()
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            while len(search.running) < max_concurrent and time.monotonic() < deadline:
                segment = waiting.pop(0) if waiting else search.ask()
                if segment is None:
                    break
                search.start(segment)
            if not search.running:
                if time.monotonic() < deadline:  # the searcher has no segment, and none will come
                    search.collect(keep_best, set(journal.trials))
                return
            search.take(0.1)
            search.collect(keep_best, search.done() - {s.parent for s in waiting})
            if time.monotonic() > deadline:
                search.stop(heed=True)
                return
    except BaseException:
        search.stop()
        raise


class _Search:
    """The segments that run, each in a thread of its own; used by one thread."""

    def __init__(
        self, searcher: Searcher, trainer: TrialTrainer, journal: Journal, goal: Goal, seed: int,
        on_score: Callable[[int, float], None], sampler: Sampler, tell: Callable[[Event], None],
        best_epochs: bool, catch: tuple[type[Exception], ...],
    ) -> None:  # fmt: skip
        self._searcher, self._trainer, self._journal = searcher, trainer, journal
        self._goal, self._seed, self._on_score = goal, seed, on_score
        self._sampler, self._tell_sinks = sampler, tell
        self._heard: queue.SimpleQueue[_Ended | TrialEpochEnded] = queue.SimpleQueue()
        self._failures: list[Exception] = []
        self._succeeded = any(r.metrics and r.state != "failed" for r in journal.trials.values())
        self._best_epochs, self._catch = best_epochs, catch
        self._standings: dict[int, Standing] = {}
        self.running: dict[int, threading.Thread] = {}

    def tell_past(self) -> None:
        """Tells of the trials that the journal had before."""
        for record in self._journal.trials.values():
            if not record.params and not record.metrics:
                continue
            self._tell_sinks(TrialBegan(record.number, dict(record.params), 0, record.epochs))
            for epochs, metrics in sorted(record.metrics.items()):
                self._tell_ended(record, epochs, metrics)

    def ask(self) -> Segment | None:
        segment = self._searcher.ask()
        if segment is not None:
            self._journal.asked(segment)
        return segment

    def start(self, segment: Segment) -> None:
        if segment.trial in self.running:
            raise ConfigError(
                f"the searcher gave two segments of trial {segment.trial} at the same time",
                expected="the next segment of a trial after tell() of the one before",
                received=str(segment),
            )
        record = self._journal.trials.get(segment.trial)
        given = {**self._searcher.parameters(segment.trial), **(record.params if record else {})}
        trial = Trial(segment.trial, self._seed, given, self._draws(segment.trial))

        standing = self._standings[segment.trial] = Standing(
            self._goal, self._best_epochs, record, segment.begin,
            self._searcher.copied_after(segment.trial),
        )  # fmt: skip

        def heard(epoch: int, metrics: Metrics) -> None:
            if standing.hear(epoch + 1, metrics):
                self._trainer.keep(segment.trial, standing.needed)
            self._heard.put(TrialEpochEnded(segment.trial, epoch, metrics))

        try:
            training = self._trainer.prepare(trial, segment, heard)
        except Exception as error:
            self._keep(trial, segment)
            self._tell(_Ended(segment, None, error))
            return
        self._keep(trial, segment)
        if standing.needed:
            self._trainer.keep(segment.trial, standing.needed)

        def train() -> None:
            try:
                self._heard.put(_Ended(segment, training(), None))
            except Exception as error:
                self._heard.put(_Ended(segment, None, error))

        name = f"sparkdl-trial{segment.trial}"
        self.running[segment.trial] = threading.Thread(target=train, name=name, daemon=True)
        self.running[segment.trial].start()

    def take(self, timeout_s: float) -> None:
        """Waits for a segment to end, and tells its score, or for one of its epochs."""
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=timeout_s)
            if isinstance(heard, TrialEpochEnded):
                self._tell_sinks(heard)
                return
            self.running.pop(heard.segment.trial).join()
            self._tell(heard)

    def done(self) -> set[int]:
        """The trials that neither train again nor are copied."""
        trials = self._journal.trials.items()
        ended = {n for n, record in trials if n not in self.running and record.metrics}
        return {n for n in ended if self._searcher.is_done(n)}

    def collect(self, keep_best: int | None, done: Collection[int]) -> None:
        """Deletes the checkpoints that nobody will ask for."""
        if keep_best is None:
            return
        found = dispensable(self._journal.trials.values(), self._goal, done, keep_best)
        for record in found:
            self._trainer.delete(record.number)
            record.kept = False
        if found:
            self._journal.write()

    def stop(self, timeout_s: float = 60.0, *, heed: bool = False) -> None:
        """Ends what runs; its trials count as stopped."""
        deadline = time.monotonic() + timeout_s
        for number, thread in self.running.items():
            while thread.is_alive() and time.monotonic() < deadline:
                self._trainer.cancel()  # again: one that comes before the Spark job is forgotten
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
                self._tell_sinks(heard)
            elif heard.error is None:
                del self.running[heard.segment.trial]
                self._tell(heard)
        for number in self.running:
            record = self._journal.trials[number]
            record.state = "stopped"
            self._tell_ended(record, record.epochs, {})
        self.running.clear()
        self._journal.write()

    def _draws(self, number: int) -> Draw:
        """How a trial's values are drawn, asked at the first: one that goes on has its values."""
        found: list[Draw] = []

        def draw(name: str, space: Space) -> Value:
            if not found:
                before = [r for n, r in sorted(self._journal.trials.items()) if n != number]
                known = [self._experience(record) for record in before]
                found.append(self._sampler.draws(number, self._seed, known))
            return found[0](name, space)

        return draw

    def _experience(self, record: TrialRecord) -> Experience:
        goal = self._goal
        scores = {e: goal.score(m) for e, m in record.metrics.items() if goal.metric in m}
        outcome: Outcome = "paused"
        if record.state == "failed":
            outcome = "failed"
        elif record.epochs >= self._searcher.max_epochs:
            outcome = "complete"
        elif record.state == "running" or not scores:
            outcome = "running"
        return Experience(record.params, record.spaces, scores, outcome)

    def _tell_ended(self, record: TrialRecord, epochs: int, metrics: Mapping[str, float]) -> None:
        state: Literal["waiting", "complete", "failed", "stopped"] = "waiting"
        if record.state in ("failed", "stopped"):
            state = "failed" if record.state == "failed" else "stopped"
        elif epochs >= self._searcher.max_epochs:
            state = "complete"
        shares = importances(self._journal.trials.values(), self._goal.metric)
        ended = TrialEnded(record.number, epochs, state, dict(metrics), record.error, shares)
        self._tell_sinks(ended)

    def _keep(self, trial: Trial, segment: Segment) -> None:
        self._journal.built(trial.number, trial.spaces, trial.params)
        self._searcher.built(trial.number, trial.spaces, trial.params)
        self._journal.write()
        params: dict[str, Json] = {**trial.params}
        began = TrialBegan(trial.number, params, segment.begin, segment.end, segment.parent)
        self._tell_sinks(began)

    def _tell(self, ended: _Ended) -> None:
        segment, metrics = ended.segment, ended.metrics or {}
        score = WORST if ended.error else self._goal.score(metrics)
        self._searcher.tell(segment.trial, segment.end, score)
        self._journal.told(segment, score, metrics)
        record = self._journal.trials[segment.trial]
        if score == WORST:
            record.state = "failed"
            record.error = f"{self._goal.metric} is NaN"
            if ended.error:
                told = str(ended.error).partition("\n")[0].rstrip()
                record.error = f"{type(ended.error).__name__}: {told}"
            warnings.warn(f"trial {segment.trial} failed: {record.error}", RuntimeWarning, 2)
        else:
            standing = self._standings.pop(segment.trial)
            copied = self._searcher.copied_after(segment.trial)
            needed = standing.end(segment.end, metrics, copied)
            record.kept_epoch, record.kept_metrics = standing.epoch, dict(standing.metrics)
            self._trainer.keep(segment.trial, needed)
        self._journal.write()
        self._tell_ended(record, segment.end, metrics)
        if score > WORST:
            self._succeeded = True
            self._on_score(segment.trial, score)
        elif ended.error is not None:
            self._failures.append(ended.error)
            if not isinstance(ended.error, self._catch):
                raise ended.error
            shared = isinstance(ended.error, (ConfigError, DataError, ResourceError))
            if not self._succeeded and (shared or len(self._failures) >= PATIENCE):
                raise self._failures[0]
