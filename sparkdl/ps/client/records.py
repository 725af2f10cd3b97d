"""What a worker says with a commit, and what it is told when it joins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What a commit says beside its payload.

    Args:
        epoch: Epoch the worker is in, from 0.
        batch: Batches of that epoch done, those of this commit included.
        batches: Batches in this commit.
        rows: Rows in this commit: its weight where rows are averaged; 0 contributes nothing.
        learning_rate: The worker's now, for rules that ask for it.
        meta: Telemetry: ``{"epoch", "metrics": [floats], "rows", ...}``.
    """

    epoch: int
    batch: int
    batches: int
    rows: int
    learning_rate: float = math.nan
    meta: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Welcome:
    """The answer to HELLO: where this rank goes on.

    Args:
        done: This rank's work was finished by another attempt; there is nothing to do.
        epoch: Epoch to continue in.
        batch: Batches of that epoch that are committed already.
        source: Where the weights come from: ``'center'`` (pull), ``'state'`` (get_state: a live
            rank's weights and optimizer), ``'snapshot'`` (pull: the last snapshot).
        steps_per_epoch: Most batches per epoch of any rank; agreed among all in blocking rules.
        num_workers: Workers of the run.
        clock: Commits or rounds applied so far.
        worker_clock: Commits of this rank so far.
        rows: Rows this rank has committed so far.
        lease_s: Silence after which the server gives this worker up.
        blocking: Whether the rule waits for all workers.
        texts: Rank -> the ``text`` that it gave with its HELLO.
    """

    done: bool
    epoch: int
    batch: int
    source: str
    steps_per_epoch: int
    num_workers: int
    clock: int
    worker_clock: int
    rows: int
    lease_s: float
    blocking: bool = False
    texts: Mapping[int, str] = field(default_factory=dict)
