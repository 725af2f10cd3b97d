"""Learners and predictors kept in a reused worker process, so that nothing is compiled twice."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import ModelArchive, decode_model, restore_state
from sparkdl.learner.archives.unsaved_settings import OwnAttributes
from sparkdl.learner.prediction.generation import TextGenerator
from sparkdl.learner.prediction.predictor import make_predictor
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.prediction.shared_weights import (
    SharedWeights,
    frozen_weights,
    shared_weights,
    sparing_memory,
)  # fmt: skip
from sparkdl.learner.state.carried_state import ValuesBefore
from sparkdl.training.learning import Predictor

if TYPE_CHECKING:
    from sparkdl.learner.steps.keras_learner import KerasLearner

_CAPACITY = 2
Key = tuple[str, str]
"""``ModelArchive.key``, and ``DataSpec.form`` of the batches that the steps were compiled for."""


@dataclass
class _Shares:
    """Something whose large weights lie in a file that processes of an executor share."""

    shared: SharedWeights | None = field(default=None, kw_only=True)

    def share(self, variables: list[Any], digest: str | None = None) -> None:
        """Lets variables lie where those of other processes do."""
        former, self.shared = self.shared, shared_weights(variables, digest)
        if former is not None:  # left last, as the file may be the same one
            former.close()

    def close(self) -> None:
        """Leaves the file."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


@dataclass
class _KeptLearner(_Shares):
    """A learner, and what code of the user's may have changed of its model since it was made."""

    learner: KerasLearner
    own: OwnAttributes


_kept: OrderedDict[Key, _KeptLearner] = OrderedDict()
"""The learner that was used last is last."""


@dataclass
class _KeptPredictor(_Shares):
    """A predictor, what it predicts with, and how many use it now."""

    key: str
    digest: str
    model: Any
    predictor: Predictor
    own: OwnAttributes | None
    """None for a program that was exported."""
    before: ValuesBefore | None = None
    """None where to predict changes nothing: no seeds go on, and no code is the user's own."""
    users: int = 0


_predictors: OrderedDict[str, _KeptPredictor] = OrderedDict()
"""Digest of a model with its weights -> its predictor; the one used last is last."""


def cached_learner(archive: ModelArchive, form: str = "") -> KerasLearner:
    """A learner with the archive's model, weights and optimizer state.

    A learner kept from a model of equal key and batches of equal form is used again with its
    compiled steps; all of its variables and plain attributes are set anew. Not thread-safe: a
    worker process runs one task at a time.

    Args:
        form: Form of the batches, see :attr:`sparkdl.data.columns.DataSpec.form`: metrics, and what
            tracing finds out about the loss, depend on it.
    """
    kept = _kept.pop((archive.key, form), None)
    if kept is None:
        with sparing_memory():
            model = decode_model(archive)
        own = OwnAttributes.of(model)
        kept = _KeptLearner(make_learner(model), own)
        kept.share(frozen_weights(model))
    else:
        model = kept.learner.model
        kept.own.give_back(model)
        with sparing_memory():
            restore_state(model, archive)
        kept.share(frozen_weights(model))
        model.reset_metrics()
        kept.learner.reload()
    _kept[archive.key, form] = kept
    while len(_kept) > _CAPACITY:
        _kept.popitem(last=False)[1].close()
    return kept.learner


@contextlib.contextmanager
def keras_settings(archive: ModelArchive) -> Iterator[None]:
    """Within, this process has the settings of Keras that the archive's model was made with.

    To be left only when what the model compiles has been called: Keras asks for some of them there.
    """
    beside = archive.open_beside()
    del archive  # a model's size once or twice, which nobody wants while the model trains
    with contextlib.nullcontext() if beside is None else beside.settings.globals.set():
        yield


def is_kept(archive: ModelArchive, form: str = "") -> bool:
    """Whether :func:`cached_learner` has a compiled model for ``archive`` and ``form``."""
    return (archive.key, form) in _kept


def forget_learner(archive: ModelArchive, form: str = "") -> None:
    """Drops a learner whose state cannot be trusted, as its fit ended in an exception."""
    kept = _kept.pop((archive.key, form), None)
    if kept is not None:
        kept.close()


@contextlib.contextmanager
def cached_predictor(wanted: PredictorArchive) -> Iterator[Predictor]:
    """Within, a predictor with the archive's weights. Not thread-safe.

    One that was kept with the same weights is used by several at once (functions in one query share
    a worker process). One of equal key that nobody uses gets the weights, the seeds and the
    attributes of the archive, and keeps its compiled call.
    """
    kept = _predictors.pop(wanted.digest, None)
    if kept is None:
        kept = _with_new_weights(wanted) or _opened(wanted)
    elif not kept.users and kept.before is not None:
        _renew(kept, None if kept.before.give_back() else wanted)
    _predictors[wanted.digest] = kept
    kept.users += 1
    try:
        yield kept.predictor
    finally:
        kept.users -= 1
        idle = [digest for digest, other in _predictors.items() if not other.users]
        for digest in idle[:-_CAPACITY]:
            _predictors.pop(digest).close()


def _opened(wanted: PredictorArchive) -> _KeptPredictor:
    key, digest = wanted.archive.key, wanted.digest
    if wanted.form == "saved_model":
        from sparkdl.learner.prediction.saved_model import SavedModelPredictor

        return _KeptPredictor(key, digest, None, SavedModelPredictor(wanted.archive.content), None)
    with sparing_memory():
        model = decode_model(wanted.archive, compiled=False)
    shared = shared_weights(model.weights, digest)
    if wanted.generation is not None:
        writer = TextGenerator(model, wanted.generation)
        return _KeptPredictor(key, digest, None, writer, None, shared=shared)
    own = OwnAttributes.of(model)
    changes = bool(own) or len(model.variables) > len(model.weights)
    before = ValuesBefore(model) if changes else None
    return _KeptPredictor(key, digest, model, make_predictor(model), own, before, shared=shared)


def _with_new_weights(wanted: PredictorArchive) -> _KeptPredictor | None:
    for digest, kept in _predictors.items():
        if kept.key == wanted.archive.key and kept.own is not None and not kept.users:
            del _predictors[digest]
            _renew(kept, wanted)
            return kept
    return None


def _renew(kept: _KeptPredictor, wanted: PredictorArchive | None) -> None:
    """Gives an idle predictor the state of an equal model; None: its variables have it."""
    assert kept.own is not None
    kept.own.give_back(kept.model)
    if wanted is not None:
        with sparing_memory():
            restore_state(kept.model, wanted.archive)
        kept.digest = wanted.digest
        kept.share(kept.model.weights, kept.digest)
        if kept.before is not None:
            kept.before = ValuesBefore(kept.model)
    kept.predictor.reload()
