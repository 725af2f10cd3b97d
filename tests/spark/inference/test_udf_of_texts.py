"""Functions of SQL on strings: decoders, ``FeatureSpace`` and preprocessors as ``predict`` takes
them, beside plain Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

import sparkdl
from sparkdl.errors import ConfigError, DataError

tf = pytest.importorskip("tensorflow")
N = 12
ROWS = {
    "city": np.array(["rome", "oslo", "lima"] * 4),
    "kind": np.arange(N) % 5,
    "age": np.linspace(1, 60, N).astype("float32"),
    "words": np.array(["a dog", "the cat", "the dog runs", "a"] * 3),
}
FEATURES = ("city", "kind", "age")


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    import pandas as pd

    frame = spark.createDataFrame(pd.DataFrame({k: v.tolist() for k, v in ROWS.items()}))
    frame = frame.coalesce(1).cache()
    frame.createOrReplaceTempView("people")
    return frame


def column(frame: Any) -> np.ndarray:
    return np.array([np.ravel(row[0]) for row in frame.collect()])


def require_equal(df: Any, wanted: np.ndarray, *columns: Any) -> None:
    """Each column has the wanted values; all of them come in one query."""
    made = df.select(*(c.alias(f"p{i}") for i, c in enumerate(columns))).collect()
    for values in zip(*made, strict=True):
        found = np.array([np.ravel(value) for value in values])
        np.testing.assert_allclose(found, wanted.reshape(found.shape), atol=1e-6)


def feature_space(names: tuple[str, ...], mode: str) -> Any:
    kinds = keras.utils.FeatureSpace
    every = {
        "city": kinds.string_categorical(), "kind": kinds.integer_categorical(),
        "age": kinds.float_discretized(num_bins=3),
    }  # fmt: skip
    crosses = [kinds.cross(("city", "kind"), 8)] if len(names) > 1 else None
    space = kinds({name: every[name] for name in names}, crosses=crosses, output_mode=mode)
    space.adapt(tf.data.Dataset.from_tensor_slices({n: ROWS[n] for n in names}).batch(4))
    return space


def scores(space: Any) -> Any:
    keras.utils.set_random_seed(1)
    made = space.get_encoded_features()
    joined = layers.Concatenate()([made[n] for n in sorted(made)]) if isinstance(made, dict) else (
        made
    )  # fmt: skip
    return keras.Model(made, layers.Dense(3, activation="softmax")(joined))


@pytest.mark.oldest
def test_a_feature_space(spark: Any, df: Any, tmp_path: Path) -> None:
    space = feature_space(FEATURES, "dict")
    model = scores(space)
    wanted = model.predict(space({name: ROWS[name] for name in FEATURES}), verbose=0)
    function = sparkdl.register_udf(spark, "scored", scores(space), batch_size=5, decoder=space)
    by_name = "scored(named_struct('age', age, 'kind', kind, 'city', city))"
    texts = ["scored(city, kind, age)", by_name]
    named = function(age="age", city=F.col("city"), kind="kind")
    require_equal(df, wanted, function(*FEATURES), named, *map(F.expr, texts))
    most = sparkdl.predict_udf(scores(space), decoder={"features": space}, returns="class")
    assert column(df.select(most(*FEATURES))).ravel().tolist() == wanted.argmax(1).tolist()
    with pytest.raises(AnalysisException, match=r"cannot be input 'city'.*text.*DOUBLE|double"):
        df.select(function("age", "kind", "city"))
    path = str(tmp_path / "model.keras")
    scores(space).save(path)  # without what comes before it
    predicted = sparkdl.predict(path, df, decoder=space).select("prediction")
    np.testing.assert_allclose(column(predicted), wanted, atol=1e-6)


def test_a_feature_space_of_one_column(df: Any) -> None:
    space = feature_space(("city",), "concat")
    wanted = scores(space).predict(space({"city": ROWS["city"]}), verbose=0)
    function = sparkdl.predict_udf(scores(space), decoder=space, handle_invalid="keep")
    require_equal(df, wanted, function("city"), function(city="city"))
    hole = F.when(F.col("age") < 5, F.col("city"))
    made = [row[0] for row in df.select(function(hole)).collect()]
    assert [value is None for value in made] == [age >= 5 for age in ROWS["age"]]


def test_layers_and_functions_before_a_model(spark: Any, df: Any) -> None:
    cities = layers.StringLookup(vocabulary=["rome", "oslo"])
    words = layers.TextVectorization(vocabulary=["a", "dog", "the"], output_sequence_length=3)
    keras.utils.set_random_seed(1)
    inputs = {
        "words": keras.Input((3,), name="words"), "age": keras.Input((), name="age"),
        "city": keras.Input((), name="city", dtype="int64"),
        "kind": keras.Input((), name="kind", dtype="int32"),
    }  # fmt: skip
    parts = [
        layers.Flatten()(layers.Embedding(13, 2)(inputs[n])) for n in ("words", "city", "kind")
    ]
    joined = layers.Concatenate()([*parts, keras.ops.expand_dims(inputs["age"], -1) / 60])
    model = keras.Model(inputs, layers.Dense(2)(joined))
    decoder = {"words": words, "city": cities, "kind": lambda text: np.int32(len(text))}
    encoded = {
        "words": words(ROWS["words"]), "city": cities(ROWS["city"]), "age": ROWS["age"],
        "kind": np.array([len(text) for text in ROWS["words"]], "int32"),
    }  # fmt: skip
    wanted = model.predict(encoded, verbose=0)
    named = {"words": "words", "age": "age", "city": "city", "kind": "words"}
    predicted = sparkdl.predict(model, df, features=named, decoder=decoder).select("prediction")
    np.testing.assert_allclose(column(predicted), wanted, atol=1e-6)
    function = sparkdl.register_udf(spark, "joined", model, batch_size=5, decoder=decoder)
    text = "joined(named_struct('words', words, 'age', age, 'city', city, 'kind', words))"
    calls = [function("words", "age", "city", "words"), function(**named), F.expr(text)]
    require_equal(df, wanted, *calls)
    with pytest.raises(AnalysisException, match=r"cannot be input 'words'.*text"):
        df.select(function("age", "age", "city", "words"))
    with pytest.raises(DataError, match=r"unknown input.*\n?.*\['age', 'city', 'kind', 'words'"):
        sparkdl.predict_udf(model, decoder={"town": cities})
    with pytest.raises(DataError, match="a decoder must be a function"):
        sparkdl.predict_udf(model, decoder={"city": "city"})
    keras.utils.set_random_seed(1)
    single = keras.Sequential([keras.Input((3,)), layers.Embedding(9, 2), layers.Flatten()])
    wanted = single.predict(words(ROWS["words"]), verbose=0)
    for given in (words, {"features": words, "label": cities}):
        require_equal(df, wanted, sparkdl.predict_udf(single, decoder=given)("words"))


def test_preprocessors_of_tasks(spark: Any, df: Any) -> None:
    pytest.importorskip("keras_hub", reason="pip install sparkdl[hub]")
    from hub_tasks import TASKS

    texts, others = (list(map(str, ROWS[name])) for name in ("words", "city"))
    task = TASKS["classifier"]()
    function = sparkdl.register_udf(spark, "told", task, batch_size=5)
    wanted = task.predict(texts, verbose=0)
    require_equal(df, wanted, function("words"), function(features="words"), F.expr("told(words)"))
    wanted = task.predict((np.array(texts), np.array(others)), verbose=0)
    require_equal(df, wanted, function("words", "city"), F.expr("told(words, city)"))
    translator = TASKS["translator"]()
    given = {"encoder_text": np.array(texts), "decoder_text": np.array(others)}
    wanted = translator.predict(given, verbose=0)
    function = sparkdl.register_udf(spark, "translated", translator)
    sql = "translated(named_struct('decoder_text', city, 'encoder_text', words))"
    named = function(encoder_text="words", decoder_text="city")
    require_equal(df, wanted, named, F.expr(sql))


def test_a_saved_model_has_no_feature_space(tmp_path: Path) -> None:
    space = feature_space(("city",), "concat")
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(ConfigError, match="FeatureSpace"):
        sparkdl.predict_udf(str(tmp_path), decoder=space)
