"""A model as the driver sends it to those who only predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.signature import Signature


@dataclass(frozen=True)
class PredictorArchive:
    """The parts of a predictor, and the driver's facts about it.

    Args:
        archive: The model.
        form: ``'keras'``, or ``'saved_model'`` for a program that TensorFlow exported.
        digest: Digest of the architecture and the weights: equal models have equal digests.
        signature: The model's inputs; the outputs that are computed, and after them those of
            layers, called ``'layer <name>'``.
        scores: Output name -> which classes its numbers are about, where that is known.
        positions: Output -> the input of whose positions it has one value each.
    """

    archive: ModelArchive
    form: Literal["keras", "saved_model"]
    digest: str
    signature: Signature
    scores: Mapping[str, ClassScores] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)
