"""Image stages and functions under Databricks' names, with models of one's own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl import (
    DeepImageFeaturizer,
    DeepImagePredictor,
    KerasImageFileEstimator,
    KerasImageFileTransformer,
    registerKerasImageUDF,
)
from sparkdl.errors import ConfigError, ModelError, UnknownNameError

Image = pytest.importorskip("PIL.Image")
SIDE = 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: Any) -> tuple[Path, np.ndarray, np.ndarray]:
    """Twelve PNG files, half of them reddish; their pixels and labels."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    labels = np.arange(12) % 2
    pixels = rng.integers(0, 120, (12, SIDE, SIDE, 3)).astype("uint8")
    pixels[labels == 1, ..., 0] += 130
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i:02d}.png")
    return folder, pixels, labels


def cnn(size: int = SIDE, classes: int = 2) -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((size, size, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="leaky_relu"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(classes, activation="softmax"),
        ]
    )


def images(spark: Any, folder: Path) -> Any:
    return spark.read.format("image").load(str(folder)).orderBy("image.origin").coalesce(1)


def load(path: str) -> np.ndarray:
    return np.asarray(Image.open(path), "float32")


def test_features_and_classes(spark: Any, pictures: Any) -> None:
    folder, pixels, _ = pictures
    model = cnn(classes=3)
    want = model.predict(pixels.astype("float32"), verbose=0)
    frame = images(spark, folder)
    pooled = keras.Model(model.inputs, model.get_layer("pool").output)
    stage = DeepImageFeaturizer(inputCol="image", outputCol="f", model=model, layer="pool")
    rows = stage.transform(frame).collect()
    np.testing.assert_allclose(
        [r.f.toArray() for r in rows], pooled.predict(pixels.astype("float32"), verbose=0),
        atol=1e-5,
    )  # fmt: skip
    named = DeepImagePredictor(
        inputCol="image", outputCol="p", model=model, decodePredictions=True, topK=2,
        labels=["cat", "dog", "fish"],
    )  # fmt: skip
    for row, expected in zip(named.transform(frame).collect(), want, strict=True):
        best = np.argsort(-expected)[:2]
        assert [p["description"] for p in row.p] == [["cat", "dog", "fish"][k] for k in best]
        np.testing.assert_allclose([p["probability"] for p in row.p], expected[best], atol=1e-5)


def test_images_are_resized_and_preprocessed_as_the_application_wants(
    spark: Any, pictures: Any
) -> None:
    folder, pixels, _ = pictures
    size = SIDE // 2
    flat = keras.Sequential([keras.Input((size, size, 3)), layers.Flatten()])
    stage = DeepImageFeaturizer(inputCol="image", outputCol="f", model=flat, modelName="Xception")
    (row,) = stage.transform(images(spark, folder).limit(1)).collect()
    small = np.asarray(Image.fromarray(pixels[0]).resize((size, size), Image.Resampling.BOX))
    want = keras.applications.xception.preprocess_input(small.astype("float32")[None])
    np.testing.assert_allclose(row.f.toArray(), want.ravel(), atol=1e-5)
    resnet = DeepImagePredictor(inputCol="image", outputCol="f", model=flat, modelName="ResNet50")
    (row,) = resnet.transform(images(spark, folder).limit(1)).collect()
    want = keras.applications.resnet50.preprocess_input(small.astype("float32")[None].copy())
    np.testing.assert_allclose(row.f.toArray(), want.ravel(), atol=1e-4)


def test_validators_make_one_model_at_a_time(
    spark: Any, pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.tuning import TrainValidationSplit

    folder, _, labels = pictures
    rows = [(str(folder / f"{i:02d}.png"), int(labels[i])) for i in range(12)]
    frame = spark.createDataFrame(rows, "path string, label int").coalesce(1)
    estimator = KerasImageFileEstimator(
        inputCol="path", outputCol="p", labelCol="label", model=cnn(), imageLoader=load,
        kerasLoss="sparse_categorical_crossentropy", sparkModelParams={"num_workers": 1},
    )  # fmt: skip
    loading, most, plain = threading.Semaphore(1), [0], keras.models.load_model

    def load_model(*arguments: Any, **options: Any) -> Any:
        alone = loading.acquire(blocking=False)
        most[0] = max(most[0], 1 if alone else 2)
        time.sleep(0.5)
        try:
            return plain(*arguments, **options)
        finally:
            if alone:
                loading.release()

    monkeypatch.setattr(keras.models, "load_model", load_model)
    maps = [{estimator.kerasFitParams: {"epochs": n}} for n in (1, 2)]
    evaluator = BinaryClassificationEvaluator(rawPredictionCol="p")
    tuned = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator, parallelism=2, seed=3
    ).fit(frame)
    assert len(tuned.validationMetrics) == 2
    assert most == [1]


def test_files_are_scored_and_trained_on(spark: Any, pictures: Any, tmp_path: Path) -> None:
    folder, pixels, labels = pictures
    rows = [(str(folder / f"{i:02d}.png"), int(labels[i])) for i in range(12)]
    frame = spark.createDataFrame(rows, "path string, label int").coalesce(1)
    model = cnn()
    model.save(tmp_path / "cnn.keras")
    stage = KerasImageFileTransformer(
        inputCol="path", outputCol="p", modelFile=str(tmp_path / "cnn.keras"), imageLoader=load
    )
    want = model.predict(pixels.astype("float32"), verbose=0)
    got = [r.p.toArray() for r in stage.transform(frame).collect()]
    np.testing.assert_allclose(got, want, atol=1e-5)
    estimator = KerasImageFileEstimator(
        inputCol="path", outputCol="p", labelCol="label", model=model, imageLoader=load,
        kerasOptimizer=keras.optimizers.Adam(0.02), kerasLoss="sparse_categorical_crossentropy",
        kerasFitParams={"epochs": 30, "batch_size": 6},
        sparkModelParams={"num_workers": 1},
    )  # fmt: skip
    fitted = estimator.fit(frame)
    predicted = [r.p.toArray().argmax() for r in fitted.transform(frame).collect()]
    assert np.mean(np.array(predicted) == labels) >= 0.9
    np.testing.assert_array_equal(model.predict(pixels.astype("float32"), verbose=0), want)


def test_a_sql_function_over_images(spark: Any, pictures: Any) -> None:
    folder, pixels, _ = pictures
    model = cnn()
    want = model.predict(pixels.astype("float32"), verbose=0)
    images(spark, folder).createOrReplaceTempView("pictures")
    registerKerasImageUDF("classes", model)
    rows = spark.sql("SELECT classes(image) AS p FROM pictures").collect()
    np.testing.assert_allclose([r.p for r in rows], want, atol=1e-5)
    registerKerasImageUDF("classes", model, lambda rgb: rgb[::-1].astype("float32"))
    rows = spark.sql("SELECT classes(image) AS p FROM pictures").collect()
    upside_down = model.predict(pixels[:, ::-1].astype("float32"), verbose=0)
    np.testing.assert_allclose([r.p for r in rows], upside_down, atol=1e-5)


def test_what_is_refused(spark: Any) -> None:
    with pytest.raises(ConfigError, match="modelName"):
        DeepImageFeaturizer(inputCol="image", outputCol="f")
    with pytest.raises(UnknownNameError, match="did you mean 'ResNet50'"):
        DeepImageFeaturizer(inputCol="image", outputCol="f", modelName="ResNet")
    with pytest.raises(UnknownNameError, match="SCALE_FAST"):
        DeepImageFeaturizer(inputCol="i", outputCol="f", modelName="VGG16", scaleHint="FAST")
    with pytest.raises(ConfigError, match="imageLoader"):
        KerasImageFileTransformer(inputCol="path", outputCol="p", model=cnn())
    with pytest.raises(ConfigError, match="kerasLoss"):
        KerasImageFileEstimator(inputCol="path", outputCol="p", model=cnn(), imageLoader=load)
    with pytest.raises(UnknownNameError, match="outputMode"):
        KerasImageFileTransformer(inputCol="p", outputCol="o", model=cnn(), imageLoader=load,
                                  outputMode="text")  # fmt: skip
    free = keras.Sequential([keras.Input((None, None, 3)), layers.GlobalAveragePooling2D()])
    with pytest.raises(ModelError, match="fixed shape"):
        registerKerasImageUDF("f", free, spark=spark)
