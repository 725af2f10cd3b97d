"""Tasks of KerasHub travel as they are, and train, evaluate and predict as plain Keras does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras_hub", reason="pip install sparkdl[hub]")

import keras
from hub_tasks import TASKS, texts

from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.checks.compile_parts import require_loadable


def _trained_once(name: str) -> Any:
    """A task that plain Keras has used: its preprocessor has made its layers, and its optimizer
    has a state."""
    keras.utils.set_random_seed(1)
    model = TASKS[name]()
    rows, labels = texts(4)
    if name == "images":
        model.predict(np.ones((2, 9, 9, 3), "float32"), verbose=0)
    elif name != "head on a backbone":
        model.fit(np.array(rows), labels if name == "classifier" else None, verbose=0)
    return model


@pytest.mark.parametrize("name", TASKS)
def test_a_task_travels(name: str) -> None:
    """A worker's task has the same variables, values, flags, and what ``compile`` was given."""
    model = _trained_once(name)
    require_loadable(model)
    archive = encode_model(model)
    copy = decode_model(archive)
    assert type(copy) is type(model)
    for mine, its in zip(model.variables, copy.variables, strict=True):
        assert (mine.shape, mine.dtype, mine.trainable) == (its.shape, its.dtype, its.trainable)
        np.testing.assert_array_equal(keras.ops.equal(mine.value, its.value), True)
    for mine, its in zip(model.optimizer.variables, copy.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.equal(mine.value, its.value), True)
    frozen = [[part._trainable for part in m._flatten_layers()] for m in (model, copy)]
    if name == "images":
        assert frozen[0].count(False) == frozen[1].count(False)
    if "lora" in name:
        assert type(copy.sampler) is type(model.sampler)
    assert model.jit_compile == copy.jit_compile
    assert encode_model(model).key == archive.key


def test_a_task_that_only_predicts_has_its_sampler_and_no_optimizer() -> None:
    model = _trained_once("causal")
    copy = decode_model(encode_model(model), compiled=False)
    assert type(copy.sampler) is type(model.sampler)
    assert copy.optimizer is None
