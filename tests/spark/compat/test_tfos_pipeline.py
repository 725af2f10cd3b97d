"""TensorFlowOnSpark's stages of pipelines: a function trains, a SavedModel scores."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline

from sparkdl.compat.tfos import compat
from sparkdl.compat.tfos.pipeline import TFEstimator, TFModel
from sparkdl.errors import ConfigError, ParamTypeError


def solve(args: Namespace, ctx: Any) -> None:
    """Finds 3 a - 2 b + 1 by least squares in this node's rows; the chief exports it."""
    import keras

    feed = ctx.get_data_feed(input_mapping=args.input_mapping)
    rows: list[tuple[float, ...]] = []
    batches = 0
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        rows += zip(batch["first"], batch["second"], batch["target"], strict=True)
        batches += 1
    found = np.array(rows)
    x = np.column_stack([found[:, :2], np.ones(len(found))])
    weights = np.linalg.lstsq(x, found[:, 2], rcond=None)[0]
    a, b = keras.Input((1,), name="first"), keras.Input((1,), name="second")
    out = keras.layers.Dense(1, name="value")(keras.layers.Concatenate()([a, b]))
    model = keras.Model({"first": a, "second": b}, {"value": out})
    model.layers[-1].set_weights([weights[:2, None], weights[2:]])
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    Path(args.folder, f"{ctx.job_name}-{ctx.task_index}").write_text(f"{len(rows)} {batches}")


def make_frame(spark: Any, rows: int) -> Any:
    values = [
        (i, float(i % 7), float(i % 5), 3.0 * (i % 7) - 2.0 * (i % 5) + 1) for i in range(rows)
    ]
    rows_in_order = spark.sparkContext.parallelize(values, 2)  # a repartitioned frame has none
    return spark.createDataFrame(rows_in_order, "id long, a double, b double, y double")


def test_a_function_trains_in_a_pipeline_and_its_saved_model_scores(
    spark: Any, tmp_path: Path
) -> None:
    frame = make_frame(spark, 80)
    estimator = (
        TFEstimator(solve, Namespace(folder=str(tmp_path), steps=7))
        .setInputMapping({"a": "first", "b": "second", "y": "target"})
        .setClusterSize(2)
        .setEpochs(2)
        .setBatchSize(16)
        .setExportDir(str(tmp_path / "exported"))
    )
    assert estimator.merge_args_params().steps == 7, "an argument, where no Param was set"
    assert estimator.getEpochs() == 2
    model = Pipeline(stages=[estimator]).fit(frame).stages[0]
    told = {name: (tmp_path / name).read_text().split() for name in ("chief-0", "worker-0")}
    assert sum(int(rows) for rows, _ in told.values()) == 2 * 80
    assert all(batches == told["chief-0"][1] for _, batches in told.values())

    assert isinstance(model, TFModel)
    assert model.getExportDir() == str(tmp_path / "exported")
    model.setInputMapping({"a": "first", "b": "second"}).setOutputMapping({"value": "found"})
    scored = model.transform(frame)
    assert scored.columns == ["found"]
    expected = [row.y for row in frame.collect()]
    np.testing.assert_allclose(
        [np.ravel(r.found)[0] for r in scored.collect()], expected, atol=1e-4
    )


def test_what_is_refused_before_a_job(spark: Any) -> None:
    frame = make_frame(spark, 4)
    with pytest.raises(ConfigError, match="no columns \\['z'\\]"):
        TFEstimator(solve).setInputMapping({"z": "first"}).fit(frame)
    with pytest.raises(ConfigError, match="setInputMapping"):
        TFEstimator(solve).fit(frame)
    with pytest.raises(ConfigError, match="driver_ps_nodes"):
        TFEstimator(solve).setInputMapping({"a": "x"}).setDriverPSNodes(True).fit(frame)
    with pytest.raises(ParamTypeError, match="whole number >= 1"):
        TFEstimator(solve).setClusterSize(0)
    with pytest.raises(ConfigError, match="setExportDir"):
        TFModel().setInputMapping({"a": "x"}).setOutputMapping({"y": "z"}).transform(frame)
    with pytest.raises(ConfigError, match="signature_def_key 'other'"):
        TFModel({"export_dir": "/m"}).setInputMapping({"a": "x"}).setOutputMapping(
            {"y": "z"}
        ).setSignatureDefKey("other").transform(frame)
