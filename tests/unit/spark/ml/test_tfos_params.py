"""TensorFlowOnSpark's ``Namespace``, ``TFParams`` and classes of one Param each."""

from __future__ import annotations

import argparse
import pickle
from typing import Any

import pytest

from sparkdl.compat.tfos.pipeline import (
    HasBatchSize,
    HasSteps,
    Namespace,
    TFEstimator,
    TFModel,
    TFParams,
    TFTypeConverters,
)
from sparkdl.errors import ConfigError, ParamTypeError


class Own(TFParams, HasBatchSize, HasSteps):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args


@pytest.mark.parametrize("given", [{"a": 1}, argparse.Namespace(a=1), Namespace({"a": 1})], ids=str)
def test_a_namespace_of_a_dict_or_another(given: Any) -> None:
    made = Namespace(given)
    assert made.a == 1
    assert "a" in made
    assert "b" not in made
    assert list(made) == ["a"]
    assert made == pickle.loads(pickle.dumps(made)) == Namespace(given)


def test_a_namespace_of_arguments_of_a_command() -> None:
    made = Namespace(["--steps", "7"])
    assert made.argv == list(made) == ["--steps", "7"]
    with pytest.raises(ConfigError, match="a dict, a Namespace or a list"):
        Namespace(3)


def test_arguments_and_params_of_an_own_stage() -> None:
    stage = Own(Namespace({"a": 1, "steps": 5})).setBatchSize(10)
    assert stage.merge_args_params() == Namespace({"a": 1, "batch_size": 10, "steps": 5})
    merged = stage.setSteps(100).merge_args_params()
    assert merged == Namespace({"a": 1, "batch_size": 10, "steps": 100})
    assert stage.getBatchSize() == 10
    with pytest.raises(ParamTypeError, match="a whole number >= 1"):
        stage.setSteps(0)


def test_the_stages_have_the_params_of_their_classes() -> None:
    estimator = TFEstimator(print, {"b": 2}).setClusterSize(3).setTFRecordDir("t")
    assert isinstance(estimator, (HasBatchSize, TFParams))
    merged = vars(estimator.merge_args_params())
    assert (merged["b"], merged["cluster_size"], merged["tfrecord_dir"]) == (2, 3, "t")
    assert (merged["steps"], merged["model_dir"], merged["master_node"]) == (1000, None, "chief")
    model = TFModel().setOutputMapping({"y": "out"})
    assert model.getTagSet() == "serve"
    assert model.merge_args_params().output_mapping == {"y": "out"}


def test_the_converter_of_mappings() -> None:
    assert TFTypeConverters.toDict({"a": "b"}) == {"a": "b"}
    with pytest.raises(TypeError, match="a dict"):
        TFTypeConverters.toDict([("a", "b")])
