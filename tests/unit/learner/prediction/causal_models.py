"""A causal language model of KerasHub, made without a download."""

from __future__ import annotations

from typing import Any

import keras
import pytest

WORDS = ["the", "cat", "in", "a", "that", "thin", "hat", "it"]


def tiny_gpt2(sampler: Any = "greedy", hidden: int = 16, layers: int = 1) -> Any:
    """A GPT-2 on letters; two of them are equal."""
    hub = pytest.importorskip("keras_hub")
    merges = ["t h", "th e", "Ġ a", "i n"]
    tokens = ["!", *map(chr, range(97, 123)), "Ġ", *(m.replace(" ", "") for m in merges)]
    tokens.append("<|endoftext|>")
    keras.utils.set_random_seed(0)
    tokenizer = hub.models.GPT2Tokenizer({t: i for i, t in enumerate(tokens)}, merges)
    backbone = hub.models.GPT2Backbone(
        len(tokens), layers, 2, hidden, 2 * hidden, max_sequence_length=32
    )
    preprocessor = hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=24)
    task = hub.models.GPT2CausalLM(backbone, preprocessor)
    for variable in task.trainable_variables:
        variable.assign(keras.random.normal(variable.shape, stddev=0.3))
    task.compile(sampler=sampler)
    return task
