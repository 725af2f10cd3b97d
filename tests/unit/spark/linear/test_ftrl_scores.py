"""Scores of a linear model, without a JVM."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import DenseVector, SparseVector

from sparkdl.errors import ConfigError, ModelError, ParamTypeError, UnknownArgumentError
from sparkdl.launch.task import RankContext
from sparkdl.linear.rank_task import LinearModel, LinearScores
from sparkdl.linear.sparse_rows import SparseVectors
from sparkdl.sparse import FTRLClassificationModel, FTRLClassifier

SMALL = LinearModel(10, np.array([0, 3]), np.array([2.0, -1.0]), 0.5)
LARGE = LinearModel(2**31 - 1, np.array([3, 2**31 - 2]), np.array([-1.0, 4.0]), 0.0)


def vectors() -> pa.Array:
    kind = pa.struct(
        [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())),
         ("values", pa.list_(pa.float64()))]
    )  # fmt: skip
    rows = [
        {"type": 0, "size": 2**31 - 1, "indices": [0, 3, 2**31 - 2], "values": [1.0, 2.0, 3.0]},
        {"type": 1, "size": None, "indices": None, "values": [0.0, 0.0, 0.0, 1.0]},
        {"type": 0, "size": 4, "indices": [], "values": []},
    ]
    return pa.array(rows, kind)


@pytest.mark.parametrize(("model", "margins"), [(SMALL, [0.5, -0.5, 0.5]), (LARGE, [10, -1, 0])])
def test_indices_without_a_weight_count_nothing(model: LinearModel, margins: list[float]) -> None:
    assert model.margins(SparseVectors.from_arrow(vectors())).tolist() == margins


def test_a_task_gives_the_columns_that_are_wanted() -> None:
    batch = pa.RecordBatch.from_pydict({"c0": pa.array([7, 8, 9]), "c1": vectors()})
    task = LinearScores(SMALL, 0.6, ("probability", "prediction"), 2, 1)
    [found] = task.run(RankContext(0), iter([batch]))
    assert found.schema.names == ["c0", "c1", "c2", "c3"]
    p = 1 / (1 + np.exp(-0.5))
    values = [row["values"] for row in found.column(2).to_pylist()]
    np.testing.assert_allclose(values, [[1 - p, p], [p, 1 - p], [1 - p, p]])
    assert found.column(3).to_pylist() == [1.0, 0.0, 1.0]  # 0.622 and 0.378
    task = LinearScores(SMALL, 0.7, ("rawPrediction", "prediction"))
    [found] = task.run(RankContext(0), iter([pa.RecordBatch.from_pydict({"c0": vectors()})]))
    rows = found.column(0).to_pylist()
    assert rows[1]["c0"] == {"type": 1, "size": None, "indices": None, "values": [0.5, -0.5]}
    assert [row["c1"] for row in rows] == [0.0, 0.0, 0.0]


def test_a_model_scores_single_rows() -> None:
    model = FTRLClassificationModel()._with(SMALL, (0.7,))
    assert model.predictRaw(SparseVector(10, {0: 1.0, 3: 1.0})) == DenseVector([-1.5, 1.5])
    assert model.predict([0.0, 0.0, 0.0, 1.0]) == 0.0
    assert model.predictProbability(SparseVector(4, {}))[1] == pytest.approx(0.6224593)
    assert model.coefficients == SparseVector(10, {0: 2.0, 3: -1.0})
    assert (model.numFeatures, model.numClasses, model.nnz) == (10, 2, 2)
    assert (model.intercept, model.lossHistory) == (0.5, [0.7])
    model.setThreshold(0.63)
    assert model.predict(SparseVector(4, {})) == 0.0
    model.setThresholds([0.5, 0.1])  # which is a threshold of 1/6
    assert model.predict([0.0, 0.0, 0.0, 1.0]) == 1.0
    model.setThresholds([0.0, 0.0])
    with pytest.raises(ConfigError, match="thresholds"):
        model.predict([1.0])
    with pytest.raises(ModelError, match="has no model"):
        FTRLClassificationModel().coefficients  # noqa: B018


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0.0}, {"lambda1": -1.0}, {"batchSize": 0}, {"maxIter": 1.5}, {"numWorkers": 0},
     {"threshold": 1.5}, {"fitIntercept": "yes"}, {"beta": float("inf")}],
)  # fmt: skip
def test_values_that_cannot_be_used_are_refused(wrong: dict[str, object]) -> None:
    [name] = wrong
    with pytest.raises(ParamTypeError, match=name) as caught:
        FTRLClassifier(**wrong)
    assert caught.value.expected
    assert "ftrl" not in str(caught.value)


def test_names_that_are_sought_in_vain_have_a_hint() -> None:
    with pytest.raises(UnknownArgumentError, match="maxIter"):
        FTRLClassifier(epochs=3)
    given = FTRLClassifier(maxIter=3.0, numWorkers=None, lambda1=1, weightCol="w")
    assert given.getMaxIter() == 3
    assert given.getLambda1() == 1.0
    assert given.getNumWorkers() is None
    assert given.getBatchSize() == 10_000
    assert (given.getAlpha(), given.getBeta(), given.getLambda2()) == (0.1, 1.0, 0.0)


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, sparkdl.sparse\n"
        "print([n for n in ('keras', 'tensorflow', 'jax', 'torch') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
