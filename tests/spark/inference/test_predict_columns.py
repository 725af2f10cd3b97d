"""predict: outputs, probabilities, classes and layers in one pass; uncompiled and saved models."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from needed import needs_spark

import sparkdl
from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError, ModelError, UnknownNameError

N = 30


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 4)).astype("float32")


@pytest.fixture(scope="module")
def df(spark: Any, x: np.ndarray) -> Any:
    rows = [(i, x[i].tolist()) for i in range(N)]
    return spark.createDataFrame(rows, "id int, features array<float>").repartition(3).cache()


def classifier(last: str | None = "softmax", units: int = 3) -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="relu", name="embed"),
            layers.Dense(units, activation=last, name="head"),
        ]
    )


def column(rows: list[Any], name: str) -> np.ndarray:
    return np.array([r[name] for r in sorted(rows, key=lambda r: r["id"])])


def test_four_columns_in_one_pass(df: Any, x: np.ndarray) -> None:
    model = classifier(None)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    scored = SparkModel(model, batch_size=4).predict(
        df, probability_column="p", class_column="c", layers={"embed": "e"}, dtype="float64"
    )
    assert scored.columns == ["id", "features", "prediction", "p", "c", "e"]
    assert [f.dataType.simpleString() for f in scored.schema.fields[2:]] == [
        "array<double>", "array<double>", "int", "array<double>",
    ]  # fmt: skip
    rows = scored.collect()
    z = model.predict(x, verbose=0).astype("float64")
    e = np.exp(z - z.max(1, keepdims=True))
    np.testing.assert_allclose(column(rows, "prediction"), z, atol=1e-6)
    np.testing.assert_allclose(column(rows, "p"), e / e.sum(1, keepdims=True), atol=1e-6)
    assert column(rows, "c").tolist() == z.argmax(1).tolist()
    hidden = keras.Model(model.inputs, model.get_layer("embed").output)
    np.testing.assert_allclose(column(rows, "e"), hidden.predict(x, verbose=0), atol=1e-6)


def test_one_sigmoid_is_two_classes_and_layers_alone(df: Any, x: np.ndarray) -> None:
    model = classifier("sigmoid", 1)
    p = model.predict(x, verbose=0)[:, 0]
    rows = sparkdl.predict(
        model, df, outputs=[], probability_column="p", class_column="c", batch_size=8
    ).collect()
    assert rows[0].__fields__ == ["id", "features", "p", "c"]
    np.testing.assert_allclose(column(rows, "p"), np.stack([1 - p, p], 1), atol=1e-6)
    assert column(rows, "c").tolist() == (p > 0.5).tolist()
    only = sparkdl.predict(model, df, outputs=[], layers={"embed": "e"})
    assert only.columns == ["id", "features", "e"]
    assert column(only.collect(), "e").shape == (N, 5)


def test_several_outputs(df: Any, x: np.ndarray) -> None:
    given = keras.Input((4,), name="given")
    price = layers.Dense(1, name="price")(given)
    kind = layers.Dense(3, activation="softmax", name="kind")(given)
    model = keras.Model(given, {"price": price, "kind": kind})
    want = model.predict(x, verbose=0)
    scored = sparkdl.predict(
        model, df, outputs={"price": "how much"}, class_column={"kind": "which"}
    )
    assert scored.columns == ["id", "features", "how much", "which"]
    rows = scored.collect()
    np.testing.assert_allclose(column(rows, "how much"), want["price"][:, 0], atol=1e-6)
    assert column(rows, "which").tolist() == want["kind"].argmax(1).tolist()
    assert sparkdl.predict(model, df, outputs=["kind"]).columns[2:] == ["prediction_kind"]


def test_what_cannot_be_asked(df: Any, x: np.ndarray) -> None:
    mlp, plain = classifier(), classifier(None)
    with pytest.raises(ConfigError, match=r"(?s)class_column: output 'head'.*from_logits"):
        sparkdl.predict(plain, df, class_column="c")
    with pytest.raises(ConfigError, match="several classes"):
        sparkdl.predict(classifier("sigmoid", 3), df, class_column="c")
    with pytest.raises(UnknownNameError, match="did you mean 'embed'"):
        sparkdl.predict(mlp, df, layers={"embeds": "e"})
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        sparkdl.predict(mlp, df, outputs=["heads"])
    with pytest.raises(UnknownNameError, match="float64"):
        sparkdl.predict(mlp, df, dtype="double")
    with pytest.raises(UnknownNameError, match="skip"):
        sparkdl.predict(mlp, df, handle_invalid="drop")
    with pytest.raises(DataError, match="already have a column 'id'"):
        sparkdl.predict(mlp, df, layers={"embed": "id"})
    with pytest.raises(ConfigError, match="asked for no column"):
        sparkdl.predict(mlp, df, outputs=[])
    with pytest.raises(ConfigError, match="only a DataFrame"):
        sparkdl.predict(mlp, x, class_column="c")
    with pytest.raises(ConfigError, match="layers must say"):
        sparkdl.predict(mlp, df, layers=["embed"])
    with pytest.raises(ModelError, match="path of a saved one"):
        sparkdl.predict({}, df)


def test_saved_models_of_every_form(df: Any, x: np.ndarray, tmp_path: Any) -> None:
    model = classifier()
    want = model.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    model.save(tmp_path / "m.h5")
    model.export(tmp_path / "exported", verbose=False)
    for name in ("m.keras", "m.h5", "exported"):
        path = f"file://{tmp_path}/{name}" if name == "m.keras" else str(tmp_path / name)
        given = {"safe_mode": name != "m.h5"}  # this test's own file, on any version of Keras
        rows = sparkdl.predict(path, df, batch_size=4, **given).collect()
        np.testing.assert_allclose(column(rows, "prediction"), want, atol=1e-6)
        for arrays in (x, [x], x.tolist()):
            np.testing.assert_allclose(sparkdl.predict(path, arrays, **given), want, atol=1e-6)


@needs_spark(4, 1, "in mapInArrow the model runs for whoever counts rows, too")
def test_the_model_runs_once_per_row_and_only_for_who_asks(spark: Any, tmp_path: Path) -> None:
    """Spark would filter by a second run of the model, and move a limit behind it."""
    frame = spark.createDataFrame([(i, bytearray([i])) for i in range(N)], "id int, photo binary")
    frame = frame.repartition(2).cache()
    log = tmp_path / "decoded"

    def decoder(content: bytes) -> np.ndarray:
        with open(log, "a") as file:
            file.write("row\n")
        return np.full(4, content[0], np.float32)

    model = classifier()
    scored = sparkdl.predict(
        model, frame, features="photo", decoder=decoder, class_column="c", probability_column="p"
    )
    some = scored.where("p[0] > -1 and c >= 0").select("id", "c", "p").collect()
    assert len(some) == N
    assert log.read_text().count("row") == N
    assert scored.count() == N
    assert scored.where("id < 3").select("id").count() == 3
    assert log.read_text().count("row") == N
    few = sparkdl.predict(model, frame.limit(5), features="photo", decoder=decoder)
    assert len(few.collect()) == 5
    assert log.read_text().count("row") == N + 5


def test_a_table_of_many_columns(spark: Any) -> None:
    names = [f"n.{i}" for i in range(300)]
    x = np.random.default_rng(0).normal(size=(4, 300)).astype("float32")
    frame = spark.createDataFrame(x.tolist(), names)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((300,)), layers.Dense(1)])
    got = sparkdl.predict(model, frame, features=names).select("prediction").collect()
    np.testing.assert_allclose(
        [r.prediction for r in got], model.predict(x, verbose=0)[:, 0], rtol=1e-5
    )


@pytest.mark.parametrize("handle_invalid", ["keep", "skip"])
def test_predict_without_functions_on_arrow_arrays(
    spark: Any, monkeypatch: pytest.MonkeyPatch, handle_invalid: str
) -> None:
    """PySpark 4.0 has none: the same rows come back, vectors as they were."""
    from pyspark.ml.linalg import Vectors

    given = [Vectors.dense([i, 1, 2, 3]) if i % 4 else None for i in range(N)]
    frame = spark.createDataFrame([*enumerate(given)], ["id", "features"]).repartition(2).cache()
    made = []
    for _ in range(2):
        scored = sparkdl.predict(
            classifier(), frame, handle_invalid=handle_invalid, class_column="c", batch_size=8
        )
        made.append(scored.orderBy("id").collect())
        monkeypatch.setattr("sparkdl.spark.inference.function.has_arrow_functions", lambda: False)
    assert made[0] == made[1]
    assert len(made[0]) == (N if handle_invalid == "keep" else N - 8)
    assert [r.features for r in made[0] if r.c is not None] == [v for v in given if v]


def test_invalid_rows(spark: Any) -> None:
    values = [[1.0] * 4, None, [2.0] * 4, [1.0, None, 1.0, 1.0], [3.0] * 4]
    frame = spark.createDataFrame([*enumerate(values)], "id int, features array<float>").coalesce(1)
    nothing = frame.where("features is null")
    model = classifier("sigmoid", 1)
    want = model.predict(np.array([[k] * 4 for k in (1, 2, 3)], "float32"), verbose=0)[:, 0]
    with pytest.raises(Exception, match=r"(?s)DataError.*row 1 of the partition.*no nulls"):
        sparkdl.predict(model, frame).collect()
    skipped = sparkdl.predict(model, frame, handle_invalid="skip", class_column="c").collect()
    assert [r.id for r in skipped] == [0, 2, 4]
    np.testing.assert_allclose([r.prediction for r in skipped], want, atol=1e-6)
    kept = sparkdl.predict(
        model, frame, handle_invalid="keep", class_column="c", layers={"embed": "e"}
    ).collect()
    assert [r.id for r in kept] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose([kept[i].prediction for i in (0, 2, 4)], want, atol=1e-6)
    for i in (1, 3):
        assert (kept[i].prediction, kept[i].c, kept[i].e) == (None, None, None)
    assert sparkdl.predict(model, nothing, handle_invalid="skip").collect() == []
    (row,) = sparkdl.predict(model, nothing, handle_invalid="keep", layers={"embed": "e"}).collect()
    assert (row.id, row.prediction, row.e) == (1, None, None)


def test_values_that_a_decoder_refuses(spark: Any) -> None:
    def decode(content: bytes) -> np.ndarray:
        return np.frombuffer(content, "float32")  # raises on 3 bytes

    content = [bytearray(np.full(4, k, "float32").tobytes()) for k in (1, 2)]
    rows = [(0, content[0]), (1, bytearray(b"bad")), (2, content[1])]
    frame = spark.createDataFrame(rows, "id int, content binary").coalesce(1)
    options = {"features": "content", "decoder": decode}
    with pytest.raises(Exception, match="decoder 'decode' failed"):
        sparkdl.predict(classifier(), frame, **options).collect()
    skipped = sparkdl.predict(classifier(), frame, handle_invalid="skip", **options).collect()
    assert [r.id for r in skipped] == [0, 2]
    kept = sparkdl.predict(classifier(), frame, handle_invalid="keep", **options).collect()
    assert [r.prediction is None for r in kept] == [False, True, False]


def test_a_warning_where_workers_share_a_gpu(spark: Any, df: Any, x: np.ndarray) -> None:
    """However predictions are asked for, and with the user's own line."""
    from sparkdl.ml import KerasTransformer

    model, rdd = classifier(), spark.sparkContext.parallelize(list(x), 2)
    stage = KerasTransformer(model=model, outputCol="p")
    conf = spark._jsparkSession.sessionState().conf()
    conf.setConfString("spark.task.resource.gpu.amount", "0.5")
    try:
        for ask in (
            lambda: sparkdl.predict(model, df),
            lambda: sparkdl.predict(model, rdd),
            lambda: stage.transform(df),
            lambda: sparkdl.predict_udf(model),
            lambda: sparkdl.register_udf(spark, "shared", model),
        ):
            with pytest.warns(RuntimeWarning, match="2 workers share each GPU") as told:
                ask()
            assert [w.filename for w in told if w.category is RuntimeWarning] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            sparkdl.predict(model, df, use_gpu=False)
            sparkdl.predict_udf(model, use_gpu=False)
    finally:
        conf.unsetConf("spark.task.resource.gpu.amount")


def test_a_model_is_loaded_once_per_worker(spark: Any, df: Any, tmp_path: Path) -> None:
    """A second predict with the same weights finds the model in the worker: it need not be read."""
    folder = str(tmp_path)

    class Noted(layers.Layer):
        """Leaves a file, named after the process, whenever one is made."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            import os
            import tempfile

            tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=folder)

        def call(self, x: Any) -> Any:
            return x

    model = keras.Sequential([keras.Input((4,)), Noted(), layers.Dense(2)])
    first = sparkdl.predict(model, df, batch_size=8).collect()
    second = sparkdl.predict(model, df, batch_size=8).collect()
    assert first == second
    made = Counter(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert made.pop(str(os.getpid()))  # the user's own
    assert set(made.values()) == {1}
