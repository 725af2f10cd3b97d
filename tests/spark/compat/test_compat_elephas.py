"""Programs for Elephas run after a change of their imports: both generations, files, ML stages."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from needed import needs_safe_hdf5
from pyspark.ml import Pipeline, PipelineModel
from sparkdl.compat.elephas.enums.frequency import Frequency
from sparkdl.compat.elephas.enums.modes import Mode
from sparkdl.compat.elephas.ml.adapter import df_to_simple_rdd, from_data_frame, to_data_frame
from sparkdl.compat.elephas.utils import lp_to_simple_rdd, to_labeled_point, to_simple_rdd
from sparkdl.compat.elephas.utils.model_utils import LossModelTypeMapper, ModelType

import sparkdl
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
from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.settings.network import Network

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
    waits_not = AsynchronousSparkModel(
        network(), 2, None, 16, Mode.HOGWILD, Frequency.BATCH, "http", 7000
    )
    assert (waits_not.num_workers, waits_not.batch_size, waits_not.mode) == (2, 16, "hogwild")
    assert (waits_not.frequency, waits_not.parameter_server_mode) == ("batch", "http")
    assert waits_not.port == 7000
    assert AsynchronousSparkModel(network(), 2).mode == "asynchronous"
    assert AsynchronousSparkModel(network(), num_workers=2).mode == "asynchronous"
    with pytest.raises(ConfigError, match="there twice"):
        SparkModel(network(), "hogwild", mode="synchronous")
    for cls in (SparkModel, AsynchronousSparkModel, SparkMLlibModel):
        with pytest.raises(ConfigError, match=f"(?s){cls.__name__} has too many.*received: "):
            cls(network(), "hogwild", *range(8))
        with pytest.raises(ConfigError, match="there twice"):
            cls(network(), 2, num_workers=2)
    with pytest.raises(ConfigError, match="did you mean 'frequency'"):
        SparkModel(network(), frequenzy="epoch")


@pytest.mark.parametrize("cls", [SparkModel, SparkMLlibModel])
def test_models_of_the_newer_generation_wait_for_all_workers(cls: Any) -> None:
    for made in (cls(network()), cls(network(), 2), cls(network(), num_workers=2, batch_size=8)):
        assert made.mode == "synchronous"
    for made in (cls(network(), frequency="epoch", num_workers=2), cls(network(), port=7000)):
        assert made.mode == "asynchronous"  # what only the older generation has
    assert cls(network(), 2, mode="hogwild").mode == "hogwild"


@pytest.mark.parametrize("ending", [pytest.param("h5", marks=needs_safe_hdf5), "keras"])
@pytest.mark.parametrize("cls", [SparkModel, SparkMLlibModel, AsynchronousSparkModel])
def test_files_keep_the_class_and_its_settings(cls: Any, ending: str, tmp_path: Path) -> None:
    made = cls(network(), 2, None, 16, parameter_server_mode="http")
    path = f"{tmp_path}/m.{ending}"
    made.save(path, to_hadoop=True)
    loaded = load_spark_model(path, from_hadoop=True)
    assert type(loaded) is cls
    assert loaded.get_config() == made.get_config()
    for one, other in zip(loaded.model.get_weights(), made.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    changed = load_spark_model(f"file://{path}", num_workers=3)
    assert (type(changed), changed.num_workers) == (cls, 3)
    for model in (loaded.model, made.model):  # Keras alone cannot train the loaded one
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    for one, other in zip(loaded.model.get_weights(), made.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    if ending == "keras":
        assert sparkdl.load_spark_model(path).mode == made.mode
        whole = cls(network(), 2, compression="fp16", seed=5)
        whole.save(path, overwrite=True)
        assert load_spark_model(path).get_config() == whole.get_config()


@needs_safe_hdf5
def test_an_hdf5_file_does_not_say_where_the_driver_listens(tmp_path: Path) -> None:
    path = f"{tmp_path}/m.h5"
    made = SparkModel(network(), 2, None, 16, port=7000, network=Network(server_address="10.0.0.1"))
    made.save(path)
    with h5py.File(path, mode="a") as file:
        saved = json.loads(file.attrs["distributed_config"])
        assert saved["config"] == {
            "mode": "synchronous", "frequency": "auto", "parameter_server_mode": "auto",
            "num_workers": 2, "batch_size": 16,
        }  # fmt: skip
        saved["config"] |= {  # as an attacker would
            "port": 7100, "network": {"server_bind": "0.0.0.0", "server_address": "elsewhere"},
            "server_address": "elsewhere", "encrypt": False, "custom_objects": {"Dense": None},
        }  # fmt: skip
        file.attrs["distributed_config"] = json.dumps(saved)
    loaded = load_spark_model(path).get_config()
    mine = SparkModel(network(), 2, None, 16).get_config()
    assert loaded["network"] == mine["network"] == asdict(Network())
    assert (loaded["num_workers"], loaded["batch_size"]) == (2, 16)


class _Interrupted:
    """A weight at which Ctrl-C comes."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


def test_a_stages_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Before, an interrupt left a torn file in place of the one that was there."""
    path, model = f"{tmp_path}/t.h5", network()
    stage = ElephasTransformer(keras_model_config=model.to_json(), weights=model.get_weights())
    stage.save(path)
    torn = ElephasTransformer(
        keras_model_config=model.to_json(), weights=[np.ones(3), _Interrupted()]
    )
    with pytest.raises(KeyboardInterrupt):
        torn.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["t.h5"]
    for one, other in zip(load_ml_transformer(path).weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    stage.save(f"file:{tmp_path}/other.h5")
    assert len(load_ml_transformer(f"file:{tmp_path}/other.h5").weights) == 2
    whole = (tmp_path / "t.h5").read_bytes()
    for damaged in (b"no file of HDF5", whole[: len(whole) // 2], b""):
        (tmp_path / "damaged.h5").write_bytes(damaged)
        with pytest.raises(ModelError, match="damaged"):
            load_ml_transformer(f"{tmp_path}/damaged.h5")
        with pytest.raises(ModelError, match="damaged"):
            load_spark_model(f"{tmp_path}/damaged.h5")
    with pytest.raises(ResourceError, match="cannot be read"):
        load_ml_transformer(f"{tmp_path}/nothing.h5")


def test_a_model_and_a_pipeline_in_short(spark: Any, tmp_path: Path) -> None:
    """fit, predict, evaluate, save and load of both, with the workers that one fit started."""
    rdd = to_simple_rdd(spark.sparkContext, X, Y)
    spark_model = SparkModel(network(), num_workers=2)
    spark_model.fit(rdd, epochs=2, batch_size=8, verbose=0)
    assert len(spark_model.training_histories[0].history["loss"]) == 2
    outputs = spark_model.master_network.predict(X, verbose=0)
    np.testing.assert_allclose(spark_model.predict(X), outputs, atol=1e-6)
    want = spark_model.master_network.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(spark_model.evaluate(X, Y), want, rtol=1e-4)
    spark_model.save(f"{tmp_path}/m.keras")
    loaded = load_spark_model(f"{tmp_path}/m.keras")
    np.testing.assert_allclose(loaded.master_network.predict(X, verbose=0), outputs, atol=1e-6)

    frame = to_data_frame(spark.sparkContext, X, Y, categorical=True)
    made = estimator(network(), "categorical_crossentropy").set_params(epochs=2)
    fitted = Pipeline(stages=[made]).fit(frame)
    fitted.write().overwrite().save(f"{tmp_path}/fitted")
    transformer = PipelineModel.load(f"{tmp_path}/fitted").stages[0]
    scored = np.array([row.prediction for row in transformer.transform(frame).collect()])
    model = fitted.stages[0].get_model()
    model.set_weights(fitted.stages[0].weights)
    np.testing.assert_allclose(scored, model.predict(X, verbose=0), atol=1e-6)


@pytest.mark.slow
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
        loaded = load_spark_model(path, safe_mode=False)  # of this test's own, on any Keras
        assert (loaded.mode, loaded.frequency, loaded.num_workers) == ("synchronous", "epoch", 2)
        np.testing.assert_allclose(loaded.predict(X), outputs, atol=1e-6)
    assert isinstance(SparkModel(network(1)).evaluate(X, X[:, :1]), float)  # the loss alone


@needs_safe_hdf5
@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_params_of_labels_that_the_model_contradicts(spark: Any) -> None:
    frame = spark.createDataFrame([([1.0, 2.0, 3.0], 1.0)], "features array<double>, label double")
    with pytest.raises(ConfigError, match=r"(?s)expected: nb_classes=3.*received: nb_classes=4"):
        estimator(network(), "categorical_crossentropy").set_nb_classes(4).fit(frame)
    made = estimator(network(), "mse")
    with pytest.raises(ConfigError, match=r"(?s)no classes.*received: categorical=False"):
        made.fit(frame)


def test_losses_and_what_they_predict() -> None:
    mapper = LossModelTypeMapper()
    assert mapper.get_model_type("mse") == ModelType.REGRESSION
    assert mapper.get_model_type("own") is None
    mapper.register_loss("own", ModelType.CLASSIFICATION)
    assert LossModelTypeMapper().get_model_type("own") == ModelType.CLASSIFICATION
