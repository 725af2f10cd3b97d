"""Image stages go into files and pipelines, and come back with all that they have."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression

from sparkdl import (
    DeepImageFeaturizer,
    DeepImagePredictor,
    KerasImageFileEstimator,
    KerasImageFileTransformer,
)
from sparkdl.errors import ConfigError, ModelError
from sparkdl.images import image_file
from sparkdl.ml import trusted
from sparkdl.settings.network import Network

Image = pytest.importorskip("PIL.Image")
SIDE = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Eight PNG files; every other one is reddish."""
    where: Path = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i in range(8):
        pixels = rng.integers(0, 120, (SIDE, SIDE, 3)).astype("uint8")
        pixels[..., 0] += 130 * (i % 2)
        Image.fromarray(pixels).save(where / f"{i}.png")
    return where


@pytest.fixture(scope="module")
def images(spark: Any, folder: Path) -> Any:
    from pyspark.sql import functions as F

    frame = spark.read.format("image").load(str(folder)).orderBy("image.origin").coalesce(1)
    number = F.regexp_extract("image.origin", r"(\d)\.png", 1).cast("int")
    return frame.withColumn("label", (number % 2).cast("double")).cache()


@pytest.fixture(scope="module")
def paths(spark: Any, folder: Path) -> Any:
    rows = [(str(folder / f"{i}.png"), i % 2) for i in range(8)]
    return spark.createDataFrame(rows, "path string, label int").coalesce(1)


def cnn() -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(2, activation="softmax"),
        ]
    )


def column(frame: Any, name: str) -> list[Any]:
    return [row[name] for row in frame.select(name).collect()]


def load(path: str) -> np.ndarray:
    return np.asarray(Image.open(path), "float32")


def test_a_featurizer_before_a_classifier_of_sparks(images: Any, tmp_path: Path) -> None:
    featurizer = DeepImageFeaturizer(
        inputCol="image", outputCol="features", model=cnn(), layer="pool", modelName="Xception",
        scaleHint="SCALE_FAST",
    )  # fmt: skip
    pipeline = Pipeline(stages=[featurizer, LogisticRegression(maxIter=20)])
    pipeline.save(f"{tmp_path}/pipeline")
    fitted = Pipeline.load(f"{tmp_path}/pipeline").fit(images)
    fitted.write().overwrite().save(f"{tmp_path}/fitted")
    fitted.write().overwrite().save(f"{tmp_path}/fitted")
    loaded = PipelineModel.load(f"{tmp_path}/fitted")
    stage = loaded.stages[0]
    assert type(stage).__module__ == "sparkdl"
    assert stage.uid == featurizer.uid
    assert stage.extractParamMap().values()
    assert (stage.getModelName(), stage._layer) == ("Xception", "pool")
    assert stage.getOrDefault("scaleHint") == "SCALE_FAST"
    assert column(loaded.transform(images), "features") == column(
        featurizer.transform(images), "features"
    )
    assert column(loaded.transform(images), "prediction") == column(images, "label")


def test_names_of_classes_are_kept_and_functions_only_if_trusted(
    images: Any, tmp_path: Path
) -> None:
    predictor = DeepImagePredictor(
        inputCol="image", outputCol="p", model=cnn(), decodePredictions=True, topK=1,
        labels=["cat", "dog"],
    )  # fmt: skip
    predictor.save(f"{tmp_path}/p")
    loaded = DeepImagePredictor.load(f"{tmp_path}/p")
    assert column(loaded.transform(images), "p") == column(predictor.transform(images), "p")
    inverted = DeepImagePredictor(
        inputCol="image", outputCol="p", model=cnn(), preprocess=lambda rgb: 255 - rgb
    )
    inverted.save(f"{tmp_path}/i")
    with pytest.raises(ConfigError, match="code of preprocess"):
        DeepImagePredictor.load(f"{tmp_path}/i")
    again = DeepImagePredictor.read().trusted().load(f"{tmp_path}/i")
    assert column(again.transform(images), "p") == column(inverted.transform(images), "p")
    with pytest.raises(ConfigError, match="is not a saved DeepImageFeaturizer"):
        DeepImageFeaturizer.load(f"{tmp_path}/i")


def test_a_stage_of_files_takes_its_model_file_along(paths: Any, tmp_path: Path) -> None:
    model_file = tmp_path / "m.keras"
    cnn().save(model_file)
    stage = KerasImageFileTransformer(
        inputCol="path", outputCol="p", modelFile=str(model_file), imageLoader=load
    )
    want = column(stage.transform(paths), "p")
    PipelineModel([stage]).save(f"{tmp_path}/s")
    model_file.unlink()
    with pytest.raises(ConfigError, match=r"(?s)code of imageLoader.*sparkdl.ml.trusted"):
        PipelineModel.load(f"{tmp_path}/s")
    with trusted():
        loaded = PipelineModel.load(f"{tmp_path}/s")
    assert column(loaded.transform(paths), "p") == want
    there = KerasImageFileTransformer(
        inputCol="path", outputCol="p", modelFile="folder", imageLoader=load
    )
    with pytest.raises(ModelError, match="'folder' cannot be saved"):
        there.save(f"{tmp_path}/t")


def test_a_model_file_that_would_fill_the_memory_is_not_unpacked(
    paths: Any, tmp_path: Path
) -> None:
    """Before, ``fit`` and ``save`` unpacked whatever it declared."""
    file = tmp_path / "m.keras"
    cnn().save(file)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("assets/vocabulary.txt", bytes(300 << 20))
    options = {"inputCol": "path", "outputCol": "p", "modelFile": str(file), "imageLoader": load}
    estimator = KerasImageFileEstimator(
        labelCol="label", kerasLoss="sparse_categorical_crossentropy", **options
    )
    for act in (
        lambda: estimator.fit(paths),
        lambda: estimator.save(f"{tmp_path}/e"),
        lambda: KerasImageFileTransformer(**options).transform(paths),
    ):
        with pytest.raises(ModelError, match=r"(?s)m\.keras.*would fill the memory"):
            act()


def test_an_estimator_with_objects(paths: Any, tmp_path: Path) -> None:
    estimator = KerasImageFileEstimator(
        inputCol="path", outputCol="p", labelCol="label", model=cnn(), imageLoader=load,
        kerasOptimizer=keras.optimizers.Adam(0.05),
        kerasLoss=keras.losses.SparseCategoricalCrossentropy(),
        kerasFitParams={"epochs": 20, "batch_size": 4},
        sparkModelParams={"num_workers": 1, "mode": "allreduce"},
    )  # fmt: skip
    estimator.save(f"{tmp_path}/e")
    assert estimator.isSet("kerasOptimizer")
    loaded = KerasImageFileEstimator.read().trusted().load(f"{tmp_path}/e")
    assert loaded.getOrDefault("kerasFitParams") == {"epochs": 20, "batch_size": 4}
    fitted = loaded.fit(paths)
    predicted = [int(v.toArray().argmax()) for v in column(fitted.transform(paths), "p")]
    assert predicted == column(paths, "label")
    one, other = (stage.fit(paths).transform(paths) for stage in (estimator, loaded))
    assert column(one, "p") == column(other, "p")
    fitted.save(f"{tmp_path}/f")
    again = KerasImageFileTransformer.read().trusted().load(f"{tmp_path}/f")
    assert column(again.transform(paths), "p") == column(fitted.transform(paths), "p")


def test_where_the_driver_listens_is_never_for_a_file_to_say(
    paths: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {
        "port": 7000, "network": {"server_address": "elsewhere", "encrypt": False},
    }  # fmt: skip
    own = {"num_workers": 1, "mode": "synchronous"}
    estimator = KerasImageFileEstimator(
        inputCol="path", outputCol="p", labelCol="label", model=cnn(), imageLoader=load,
        kerasLoss="sparse_categorical_crossentropy", sparkModelParams={
            "port": 7000, "network": Network(server_address="elsewhere", encrypt=False), **own,
        },
    )  # fmt: skip
    estimator.save(f"{tmp_path}/e")
    (file,) = (tmp_path / "e" / "metadata").glob("part-*")
    told = json.loads(file.read_text())
    assert told["sparkdl"]["parts"]["sparkModelParams"] == own
    told["sparkdl"]["parts"]["sparkModelParams"] |= network  # as an attacker would
    del told["sparkdl"]["code"]
    file.write_text(json.dumps(told))
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
    for loaded in (
        KerasImageFileEstimator.load(f"{tmp_path}/e"),
        KerasImageFileEstimator.read().trusted().load(f"{tmp_path}/e"),
    ):
        made: list[dict[str, Any]] = []

        def hear(model: Any, made: list[Any] = made, **settings: Any) -> Any:
            made.append(settings)
            raise LookupError

        monkeypatch.setattr(image_file, "SparkModel", hear)
        with pytest.raises(LookupError):
            loaded.fit(paths)
        assert made == [{"decoder": None, **own}]
    assert set(estimator._sparkModelParams) == {*network, *own}  # its own are as they were
