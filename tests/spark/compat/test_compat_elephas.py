"""Programs for Elephas run after a change of their imports: both generations, files, ML stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel

from sparkdl.compat.elephas.enums.frequency import Frequency
from sparkdl.compat.elephas.enums.modes import Mode
from sparkdl.compat.elephas.ml.adapter import df_to_simple_rdd, from_data_frame, to_data_frame
from sparkdl.compat.elephas.ml_model import (
    ElephasEstimator,
    ElephasTransformer,
    load_ml_estimator,
    load_ml_transformer,
)
from sparkdl.compat.elephas.spark_model import (
    AsynchronousSparkModel,
    SparkMLlibModel,
    SparkModel,
    load_spark_model,
)
from sparkdl.compat.elephas.utils import lp_to_simple_rdd, to_labeled_point, to_simple_rdd
from sparkdl.compat.elephas.utils.model_utils import LossModelTypeMapper, ModelType
from sparkdl.errors import ConfigError, ModelError, ResourceError

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(80, 3)).astype("float32")
Y = np.eye(3)[X.argmax(1)]


def network(classes: int = 3) -> Any:
    keras.utils.set_random_seed(0)
    last = keras.layers.Dense(classes, activation="softmax" if classes > 1 else None)
    model = keras.Sequential([keras.Input((3,)), last])
    loss = "categorical_crossentropy" if classes > 1 else "mse"
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["acc"] if classes > 1 else None)
    return model


def test_both_generations_of_the_signature() -> None:
    older = SparkModel(network(), "hogwild", "batch", "http", 2, None, 16, 7000)
    assert (older.mode, older.frequency, older.num_workers, older.batch_size, older.port) == (
        "hogwild", "batch", 2, 16, 7000,
    )  # fmt: skip
    newer = SparkModel(network(), 2, None, 16)
    assert (newer.mode, newer.num_workers, newer.batch_size) == ("synchronous", 2, 16)
    by_name = SparkModel(network(), frequency=Frequency.EPOCH, mode=Mode.ASYNCHRONOUS)
    assert (by_name.mode, by_name.frequency) == ("asynchronous", "epoch")
    assert AsynchronousSparkModel(network(), Mode.HOGWILD, num_workers=2).mode == "hogwild"
    with pytest.raises(ConfigError, match="there twice"):
        SparkModel(network(), "hogwild", mode="synchronous")
    with pytest.raises(ConfigError, match="did you mean 'frequency'"):
        SparkModel(network(), frequenzy="epoch")


def test_train_evaluate_predict_save_load(spark: Any, tmp_path: Path) -> None:
    rdd = to_simple_rdd(spark.sparkContext, X, Y)
    spark_model = SparkModel(network(), frequency="epoch", mode="synchronous", num_workers=2)
    assert spark_model.training_histories == []
    spark_model.fit(rdd, epochs=15, batch_size=8, verbose=0, validation_split=0.1)
    assert len(spark_model.training_histories) == 1
    want = spark_model.master_network.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(spark_model.evaluate(X, Y), want, rtol=1e-4)
    predictions = spark_model.predict(spark.sparkContext.parallelize(list(X), 3))
    outputs = spark_model.master_network.predict(X, verbose=0)
    assert isinstance(predictions, list)
    np.testing.assert_allclose(predictions, outputs, atol=1e-6)
    for name in ("model.h5", "model.keras"):
        path = str(tmp_path / name)
        spark_model.save(path)
        with pytest.raises(ResourceError, match="exists"):
            spark_model.save(path)
        spark_model.save(path, overwrite=True)
        loaded = load_spark_model(path)
        assert (loaded.mode, loaded.frequency, loaded.num_workers) == ("synchronous", "epoch", 2)
        np.testing.assert_allclose(loaded.predict(X), outputs, atol=1e-6)
    assert isinstance(SparkModel(network(1)).evaluate(X, X[:, :1]), float)  # the loss alone


def test_labeled_points(spark: Any, tmp_path: Path) -> None:
    points = to_labeled_point(spark.sparkContext, X, Y, categorical=True)
    model = SparkMLlibModel(network(), frequency="epoch", mode="synchronous", num_workers=2)
    model.fit(points, epochs=2, batch_size=16, verbose=0, validation_split=0.1, categorical=True,
              nb_classes=3)  # fmt: skip
    model.save(f"{tmp_path}/m.h5")
    assert isinstance(load_spark_model(f"{tmp_path}/m.h5"), SparkMLlibModel)
    x, y = lp_to_simple_rdd(points, categorical=True).first()
    np.testing.assert_allclose(x, X[0], atol=1e-6)
    np.testing.assert_array_equal(y, Y[0])


def estimator(model: Any, loss: str) -> ElephasEstimator:
    made = ElephasEstimator()
    made.set_keras_model_config(model.to_json())
    made.set_optimizer_config(keras.optimizers.serialize(keras.optimizers.Adam(0.05)))
    made.set_mode("synchronous")
    made.set_loss(loss)
    made.set_metrics(["mae"])
    made.set_epochs(12)
    made.set_batch_size(8)
    made.set_num_workers(2)
    made.set_validation_split(0.1)
    made.set_categorical_labels(loss != "mse")
    made.set_nb_classes(3)
    return made


def test_a_classifier_in_a_pipeline(spark: Any, tmp_path: Path) -> None:
    frame = to_data_frame(spark.sparkContext, X, Y, categorical=True)
    back = from_data_frame(frame, categorical=True, nb_classes=3)
    np.testing.assert_allclose(back[0], X, atol=1e-6)
    np.testing.assert_array_equal(back[1], Y)
    assert df_to_simple_rdd(frame).count() == len(X)
    model = network()
    pipeline = Pipeline(stages=[estimator(model, "categorical_crossentropy")])
    pipeline.save(f"{tmp_path}/pipeline")
    fitted = Pipeline.load(f"{tmp_path}/pipeline").fit(frame)
    scored = fitted.transform(frame).persist()  # else the next task has two workers with models
    rows = scored.collect()
    assert all(len(row.prediction) == 3 for row in rows)
    right = [int(np.argmax(row.prediction)) == row.label for row in rows]
    assert np.mean(right) > 0.8
    fitted.write().overwrite().save(f"{tmp_path}/fitted")
    again = PipelineModel.load(f"{tmp_path}/fitted")
    transformer = again.stages[0]
    assert transformer.model_type == ModelType.CLASSIFICATION
    assert len(transformer.history[0]["loss"]) == 12
    transformer.set_params(inference_batch_size=7, outputCol="again")
    both = transformer.transform(scored).select("prediction", "again").collect()
    scored.unpersist()
    np.testing.assert_allclose([r.again for r in both], [r.prediction for r in both], atol=1e-6)
    transformer.save(f"{tmp_path}/t.h5")
    loaded = load_ml_transformer(f"{tmp_path}/t.h5")
    assert loaded.getOutputCol() == "again"
    # as JSON: Keras' own reader makes lists of the tuples in a configuration
    assert json.dumps(loaded.get_model().get_config()) == json.dumps(model.get_config())
    got = loaded.transform(frame).select("again").collect()
    np.testing.assert_allclose([r.again for r in got], [r.again for r in both], atol=1e-6)
    with pytest.raises(ModelError, match="holds no ElephasEstimator"):
        load_ml_estimator(f"{tmp_path}/t.h5")


def test_a_regressor_with_columns_and_objects_of_its_own(spark: Any, tmp_path: Path) -> None:
    def twice(x: Any) -> Any:
        return 2 * x

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation=twice)])
    frame = to_data_frame(spark.sparkContext, X, X[:, 0]).toDF("scaled", "truth")
    made = estimator(model, "mse").set_custom_objects({"twice": twice})
    with pytest.deprecated_call():
        made.setFeaturesCol("scaled")
    made.set_params(labelCol="truth", outputCol="output")
    fitted = made.fit(frame)
    assert dict(fitted.transform(frame).dtypes)["output"] == "double"
    made.save(f"{tmp_path}/e.h5")
    loaded = load_ml_estimator(f"{tmp_path}/e.h5")
    assert loaded.get_config() == made.get_config()
    bare = ElephasTransformer(weights=model.get_weights(), model_type=ModelType.REGRESSION,
                              custom_objects={"twice": twice})  # fmt: skip
    bare.set_keras_model_config(model.to_json())
    with pytest.raises(ModelError, match="of another model"):
        bare.set_weights(model.get_weights()[:1]).transform(frame)
    with pytest.raises(ConfigError, match="has no model"):
        ElephasTransformer().transform(frame)


def test_losses_and_what_they_predict() -> None:
    mapper = LossModelTypeMapper()
    assert mapper.get_model_type("mse") == ModelType.REGRESSION
    assert mapper.get_model_type("own") is None
    mapper.register_loss("own", ModelType.CLASSIFICATION)
    assert LossModelTypeMapper().get_model_type("own") == ModelType.CLASSIFICATION
