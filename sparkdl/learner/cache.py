"""Learners and predictors kept in a reused worker process, so that nothing is compiled twice."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import ModelArchive, decode_model, restore_state
from sparkdl.learner.archives.unsaved_settings import BesideFile
from sparkdl.learner.prediction.predictor import make_predictor
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.training.learning import Predictor

if TYPE_CHECKING:
    from sparkdl.learner.steps.keras_learner import KerasLearner

_CAPACITY = 2
_kept: OrderedDict[str, tuple[Any, KerasLearner]] = OrderedDict()
"""``ModelArchive.key`` -> a Keras model and its learner; the one used last is last."""


@dataclass
class _KeptPredictor:
    """A predictor, what it predicts with, and how many use it now."""

    key: str
    digest: str
    model: Any
    predictor: Predictor
    users: int = 0


_predictors: OrderedDict[str, _KeptPredictor] = OrderedDict()
"""Digest of a model with its weights -> its predictor; the one used last is last."""


def cached_learner(archive: ModelArchive) -> KerasLearner:
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


@contextlib.contextmanager
def keras_settings(archive: ModelArchive) -> Iterator[None]:
    """Within, this process has the settings of Keras that the archive's model was made with.

    To be left only when what the model compiles has been called: Keras asks for some of them there.
    """
    if not archive.beside:
        yield
        return
    with BesideFile.from_bytes(archive.beside).settings.globals.set():
        yield


def is_kept(archive: ModelArchive) -> bool:
    """Whether :func:`cached_learner` has a compiled model for ``archive``."""
    return archive.key in _kept


def forget_learner(archive: ModelArchive) -> None:
    """Drops a learner whose state cannot be trusted, as its fit ended in an exception."""
    _kept.pop(archive.key, None)


@contextlib.contextmanager
def cached_predictor(wanted: PredictorArchive) -> Iterator[Predictor]:
    """Within, a predictor with the archive's weights. Not thread-safe.

    One that was kept with the same weights is used as it is, also by several at once (functions in
    one query share a worker process). One of equal architecture that nobody uses gets the new
    weights and keeps its compiled call.
    """
    kept = _predictors.pop(wanted.digest, None) or _with_new_weights(wanted) or _opened(wanted)
    _predictors[wanted.digest] = kept
    kept.users += 1
    try:
        yield kept.predictor
    finally:
        kept.users -= 1
        idle = [digest for digest, other in _predictors.items() if not other.users]
        for digest in idle[:-_CAPACITY]:
            del _predictors[digest]


def _opened(wanted: PredictorArchive) -> _KeptPredictor:
    """A new predictor."""
    model = None
    if wanted.form == "saved_model":
        from sparkdl.learner.prediction.saved_model import SavedModelPredictor

        predictor: Predictor = SavedModelPredictor(wanted.archive.content)
    else:
        model = decode_model(wanted.archive, compiled=False)
        predictor = make_predictor(model)
    return _KeptPredictor(wanted.archive.key, wanted.digest, model, predictor)


def _with_new_weights(wanted: PredictorArchive) -> _KeptPredictor | None:
    """An idle predictor of equal architecture with the new weights; None: there is none."""
    for digest, kept in _predictors.items():
        if kept.key == wanted.archive.key and not kept.users:
            del _predictors[digest]
            restore_state(kept.model, wanted.archive)
            kept.predictor.reload()
            kept.digest = wanted.digest
            return kept
    return None
