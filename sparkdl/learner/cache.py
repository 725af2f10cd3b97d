"""Learners kept in a reused worker process, so that a second fit compiles nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sparkdl.learner import make_learner
from sparkdl.learner.archive import ModelArchive, decode_model, restore_state
from sparkdl.protocols import Learner

_CAPACITY = 2
_kept: OrderedDict[str, tuple[Any, Learner]] = OrderedDict()
"""``ModelArchive.key`` -> a Keras model and its learner; the one used last is last."""


def cached_learner(archive: ModelArchive) -> Learner:
    """A learner with the archive's model, weights and optimizer state.

    A learner kept from a model of equal architecture and compile settings is used again with its
    compiled steps; all of its variables are set anew. Not thread-safe: a worker process runs one
    task at a time.
    """
    kept = _kept.pop(archive.key, None)
    if kept is None:
        model = decode_model(archive)
        kept = model, make_learner(model)
    else:
        model, learner = kept
        restore_state(model, archive)
        model.reset_metrics()
        learner.reload()
    _kept[archive.key] = kept
    while len(_kept) > _CAPACITY:
        _kept.popitem(last=False)
    return kept[1]


def is_kept(archive: ModelArchive) -> bool:
    """Whether :func:`cached_learner` has a compiled model for ``archive``."""
    return archive.key in _kept


def forget_learner(archive: ModelArchive) -> None:
    """Drops a learner whose state cannot be trusted, as its fit ended in an exception."""
    _kept.pop(archive.key, None)
