"""The parts of a step's time on each worker, and the one thing that would help most."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sparkdl.progress.bar import speed
from sparkdl.training.phases import Phase, Usage, too_many_workers

Cause = Literal[
    "slow worker", "uneven rows", "slow reader", "slow transport", "short window", "small batches",
    "too many workers",
]  # fmt: skip
_BUSY: tuple[Phase, ...] = ("read", "compute", "evaluate", "exchange", "wait")
_MARKS = {"read": "▒", "compute": "█", "evaluate": "▓", "exchange": "░", "wait": "·"}
_NAMES = {
    "read": "reading", "compute": "training", "evaluate": "evaluating", "exchange": "exchange",
    "wait": "waiting",
}  # fmt: skip
_WIDTH = 30
LEAST_GAIN = 0.1
"""A cause that costs less of the time than this is not worth an advice."""
UNEVEN = 1.3
"""A worker with this multiple of the median of the rows, or of the time per row, stands out."""
STEP_COST_S = 5e-4
"""What a step costs however few rows it has: Python, dispatch, small kernels. An estimate."""
BATCHES_BETWEEN = 16
"""Batches between two exchanges from which on a longer window is not what helps."""


@dataclass(frozen=True)
class Facts:
    """The facts about a fit that explain where its time goes."""

    usage: Mapping[int, Usage]
    rows: Mapping[int, int]
    epochs: int
    batch_size: int
    window: int
    in_step: bool
    transports: frozenset[str]
    mode: str

    @property
    def trained(self) -> dict[int, Usage]:
        """The usage of the ranks that have rows."""
        return {rank: usage for rank, usage in self.usage.items() if self.rows.get(rank)}


@dataclass(frozen=True)
class RankTimes:
    """A rank's seconds once its start is over.

    Args:
        rows: Rows that it trained in all epochs.
        seconds: Phase -> seconds. In modes whose workers wait for each other, what an exchange took
            longer than on the rank where it was shortest counts as ``wait``.
    """

    rows: int
    seconds: dict[Phase, float]

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())

    @property
    def compute_s_per_row(self) -> float:
        """Seconds of training for a row: no exchange, no wait; reading is a cause of its own."""
        return self.seconds["compute"] / max(1, self.rows)


@dataclass(frozen=True)
class Advice:
    """The largest cost, and the advice."""

    cause: Cause
    gain: float
    text: str


@dataclass(frozen=True)
class Profile:
    """The parts of the time of a fit; ``print`` draws it."""

    ranks: dict[int, RankTimes]
    advice: Advice | None

    def __str__(self) -> str:
        used = [p for p in _BUSY if any(times.seconds[p] > 0 for times in self.ranks.values())]
        key = "  ".join(f"{_MARKS[phase]} {_NAMES[phase]}" for phase in used)
        lines = [f"Where the workers' time went, once started:  {key}"]
        longest = max((times.total_s for times in self.ranks.values()), default=0.0) or 1.0
        for rank, times in self.ranks.items():
            total = times.total_s or 1.0
            shares = "  ".join(f"{_NAMES[p]} {times.seconds[p] / total:.0%}" for p in used)
            lines.append(
                f"rank {rank:>3}  {_bar(times, longest)}  {total:.1f} s  "
                f"{speed(times.rows / total)}  {shares}"
            )
        if self.advice is None:
            lines.append("Nothing stands out: no single change would save a tenth of the time.")
        else:
            lines.append(f"What would help most ({self.advice.cause}): {self.advice.text}")
        return "\n".join(lines)


def profile_of(facts: Facts) -> Profile:
    """The profile of a fit."""
    ranks = _times(facts)
    advised: list[Advice] = []
    if any(times.rows for times in ranks.values()):  # else it stopped within its first epoch
        advised += [*_of_one_worker(facts, ranks), *_of_reading(ranks), *_of_exchange(facts, ranks)]
        advised += [*_of_steps(facts, ranks), *_of_workers(facts)]
    found = [advice for advice in advised if advice.gain >= LEAST_GAIN]
    return Profile(ranks, max(found, key=lambda advice: advice.gain, default=None))


def _times(facts: Facts) -> dict[int, RankTimes]:
    """Splits what an exchange took into the exchange itself and the wait for the others."""
    trained = facts.trained
    exchanges = [usage.seconds["exchange"] for usage in trained.values()]
    shortest = min(exchanges, default=0.0) if facts.in_step else float("inf")
    ranks = {}
    for rank, usage in sorted(trained.items()):
        seconds = {phase: usage.seconds[phase] for phase in _BUSY}
        beyond = max(0.0, seconds["exchange"] - shortest)
        seconds["exchange"] -= beyond
        seconds["wait"] += beyond
        ranks[rank] = RankTimes(facts.rows[rank] * facts.epochs, seconds)
    return ranks


def _share(ranks: dict[int, RankTimes], phase: Phase) -> float:
    total = sum(times.total_s for times in ranks.values())
    return sum(times.seconds[phase] for times in ranks.values()) / total if total else 0.0


def _of_one_worker(facts: Facts, ranks: dict[int, RankTimes]) -> list[Advice]:
    """One worker takes longer than the others: because of its rows, or of its speed."""
    if len(ranks) < 2:
        return []
    work = {rank: times.compute_s_per_row * times.rows for rank, times in ranks.items()}
    last = max(work, key=lambda rank: work[rank])
    others = [rank for rank in ranks if rank != last]
    typical = statistics.median(work[rank] for rank in others)
    longest = max(times.total_s for times in ranks.values())
    gain = (work[last] - typical) / longest if longest else 0.0
    rows = ranks[last].rows / max(1, statistics.median(ranks[rank].rows for rank in others))
    speed = ranks[last].compute_s_per_row / max(
        1e-12, statistics.median(ranks[rank].compute_s_per_row for rank in others)
    )
    if max(rows, speed) < UNEVEN:
        return []
    if rows >= speed:
        text = (
            f"rank {last} has {rows:.1f} times the rows of the others, who wait for it or end long "
            "before it. repartition=True (the default) spreads rows evenly; a frame that is kept "
            "as it is wants df.repartition(num_workers)."
        )
        return [Advice("uneven rows", gain, text)]
    text = (
        f"rank {last} takes {speed:.1f} times as long for a row as the others. Look at what else "
        "runs on its host and at its processors; "
        + (
            "mode='asynchronous' does not wait for it."
            if facts.in_step
            else "with more workers than slots a fast host does more of the work."
        )
    )
    return [Advice("slow worker", gain, text)]


def _of_reading(ranks: dict[int, RankTimes]) -> list[Advice]:
    text = (
        "reading takes that long: what computes the DataFrame (a UDF, a decoder, a far file), or "
        "rows that are spilled to disk. df.cache() before fit computes it once; a larger "
        "memory_budget_mb keeps the rows in memory."
    )
    return [Advice("slow reader", _share(ranks, "read"), text)]


def _of_exchange(facts: Facts, ranks: dict[int, RankTimes]) -> list[Advice]:
    share = _share(ranks, "exchange")
    slow = facts.transports & {"http", "socket"}
    if "http" in slow:
        text = (
            "updates travel over http, the slowest way. parameter_server_mode='auto' takes shared "
            "memory on one host and framed TCP between hosts; compression='fp16' halves the bytes."
        )
        return [Advice("slow transport", share, text)]
    if facts.window == 0 or facts.window >= BATCHES_BETWEEN:
        if not slow:
            return []
        text = (
            f"exchanges over {', '.join(sorted(slow))} take that long though they are rare. "
            "compression='fp16' or 'int8' sends less; workers on the server's host use shared "
            "memory with parameter_server_mode='auto'."
        )
        return [Advice("slow transport", share, text)]
    every = f"every {facts.window} batches" if facts.window > 1 else "at every batch"
    longer = (
        "frequency=16 exchanges less often"
        if facts.mode != "allreduce"
        else "a rule that exchanges less often, rule='local_sgd', or a larger batch_size"
    )
    text = f"the workers exchange {every}: {longer}. The loss may fall a little slower."
    return [Advice("short window", share, text)]


def _of_steps(facts: Facts, ranks: dict[int, RankTimes]) -> list[Advice]:
    """A step of few rows costs as much as one of more."""
    steps = sum(times.rows for times in ranks.values()) / facts.batch_size
    seconds = sum(times.seconds["compute"] for times in ranks.values())
    if not steps or not seconds:
        return []
    step_s = seconds / steps
    gain = min(0.9, STEP_COST_S / step_s) * _share(ranks, "compute")
    text = (
        f"a step of {facts.batch_size} rows takes {step_s * 1e3:.2f} ms, most of it the same for "
        f"more rows. batch_size={facts.batch_size * 4} takes fewer steps (a higher learning rate "
        "often goes with it)."
    )
    return [Advice("small batches", gain, text)]


def _of_workers(facts: Facts) -> list[Advice]:
    """One process would need less time than the workers take with their exchanges."""
    text = too_many_workers(facts.trained)
    # It ends all exchanges, so it gains no less than the advice on one of their causes.
    return [] if text is None else [Advice("too many workers", 1.0, f"{text}.")]


def _bar(times: RankTimes, longest: float) -> str:
    """The phases as strokes; the longest rank's fill the width."""
    bar, drawn, seconds = "", 0, 0.0
    for phase in _BUSY:
        seconds += times.seconds[phase]
        until = round(_WIDTH * seconds / longest)
        bar += _MARKS[phase] * (until - drawn)
        drawn = until
    return bar.ljust(_WIDTH)
