"""Learners kept in a reused worker process, so that a second fit compiles nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sparkdl.learner import make_learner
from sparkdl.learner.archive import ModelArchive, decode_model, restore_state

_CAPACITY = 2
_learners: OrderedDict[str, Any] = OrderedDict()


def cached_learner(archive: ModelArchive) -> Any:
    """A learner with the archive's model, weights and optimizer state.

    One for an equal architecture and equal compile settings is used again with its compiled
    steps; all of its variables are set anew. Not thread-safe: a worker process runs one task.
    """
    learner = _learners.pop(archive.key, None)
    if learner is None:
        learner = make_learner(decode_model(archive))
    else:
        restore_state(learner.model, archive)
        learner.model.reset_metrics()
        learner.reload()
    _learners[archive.key] = learner
    while len(_learners) > _CAPACITY:
        _learners.popitem(last=False)
    return learner


def is_kept(archive: ModelArchive) -> bool:
    """Whether :func:`cached_learner` has a compiled model for ``archive``."""
    return archive.key in _learners


def forget_learner(archive: ModelArchive) -> None:
    """Drops a learner whose state cannot be trusted (its fit ended in an exception)."""
    _learners.pop(archive.key, None)
