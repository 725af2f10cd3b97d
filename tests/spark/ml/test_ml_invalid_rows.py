"""``handleInvalid``: what happens to rows that no model can take."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pyspark.errors import PySparkException

from sparkdl.ml import KerasTransformer


def halves() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[0.5], [0.25]])])
    return model


def test_rows_with_nulls_are_an_error_or_skipped_or_kept(spark: Any) -> None:
    frame = spark.createDataFrame(
        [(1, 2.0, 4.0), (2, None, 4.0), (3, 4.0, 0.0)], "id int, a double, b double"
    )
    transformer = KerasTransformer(model=halves(), inputCol=["a", "b"], outputCol="p")
    with pytest.raises(PySparkException, match="null"):
        transformer.transform(frame).collect()
    rows = transformer.copy().setHandleInvalid("skip").transform(frame).orderBy("id").collect()
    assert [(row.id, row.p) for row in rows] == [(1, 2.0), (3, 2.0)]
    rows = transformer.copy().setHandleInvalid("keep").transform(frame).orderBy("id").collect()
    assert [(row.id, row.p) for row in rows] == [(1, 2.0), (2, None), (3, 2.0)]
    assert transformer.getHandleInvalid() == "error"
