"""A model as the driver sends it to those who only predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.signature import Signature


@dataclass(frozen=True)
class Generation:
    """How a causal language model writes texts on.

    Args:
        max_length: Tokens of a prompt and its text together.
        batch_size: Rows of each call of the model.
        stop_token_ids: Tokens that end a text; None: it goes on up to ``max_length``.
        strip_prompt: Whether texts are without their prompts.
        seed: Of the rows' draws, together with the prompts.
        skips: Whether a prompt that leaves no room has no text; else it is an error.
        sampler: Class and configuration of KerasHub's sampler, pickled.
        jit_compile, run_eagerly: As for ``keras.Model.compile``.
    """

    max_length: int
    batch_size: int
    stop_token_ids: tuple[int, ...] | None
    strip_prompt: bool
    seed: int
    skips: bool
    sampler: bytes
    jit_compile: bool
    run_eagerly: bool


@dataclass(frozen=True)
class PredictorArchive:
    """The parts of a predictor, and the driver's facts about it.

    Args:
        form: ``'keras'``, ``'saved_model'`` for a program that TensorFlow exported, or
            ``'causal_lm'`` for what writes texts on.
        digest: Digest of the architecture and the weights: equal models have equal digests.
        signature: The model's inputs; the outputs that are computed, and after them those of
            layers, called ``'layer <name>'``.
        scores: Output name -> which classes its numbers are about, where that is known.
        positions: Output -> the input of whose positions it has one value each.
        generation: Of a ``'causal_lm'``.
    """

    archive: ModelArchive
    form: Literal["keras", "saved_model", "causal_lm"]
    digest: str
    signature: Signature
    scores: Mapping[str, ClassScores] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)
    generation: Generation | None = None
