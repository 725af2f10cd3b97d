"""What ``fit`` takes beside epochs: class weights, steps, padding, text, frames of others, and
models with a ``train_step`` of their own; and whose weights validation speaks of."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from keras import layers
from pyspark.sql import functions as F
from spark_models import make_mlp

import sparkdl
from sparkdl import SparkModel, load_spark_model
from sparkdl.errors import ConfigError, DataError
from sparkdl.layers import recompute_segments
from sparkdl.learner.signature import model_signature
from sparkdl.spark.forms import shared_rows, sources
from sparkdl.spark.forms.opening import RowChoice, open_fit_source
from sparkdl.spark.forms.sources import ROLE, Columns

CLASS_WEIGHT = {0: 0.2, 3: 5.0}


def full_batch(mode: str, rows: int, **options: Any) -> SparkModel:
    """Two workers that together take whole batches: the order of the rows does not matter."""
    model = make_mlp(optimizer=keras.optimizers.SGD(0.3, momentum=0.9))
    return SparkModel(model, mode, num_workers=2, batch_size=rows, **options)


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
def test_class_weights_are_those_of_keras(digits_df: Any, digits: Any, mode: str) -> None:
    x, y = digits
    spark_model = full_batch(mode, len(x))
    history = spark_model.fit(
        digits_df, epochs=12, class_weight=CLASS_WEIGHT, validation_data=digits_df, verbose=0
    )
    alone = make_mlp(optimizer=keras.optimizers.SGD(0.3, momentum=0.9))
    known = alone.fit(
        x, y, epochs=12, batch_size=len(x), class_weight=CLASS_WEIGHT, verbose=0,
        validation_data=(x, y), validation_batch_size=len(x),
    )  # fmt: skip
    for mine, other in zip(spark_model.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)
    for name in ("loss", "val_loss"):  # validation rows are not weighed
        np.testing.assert_allclose(history.history[name], known.history[name], rtol=1e-4)


@pytest.mark.parametrize("most_bytes", [32 << 20, 1000])
def test_few_rows_to_validate_on_do_not_move_cached_rows(
    digits_df: Any, digits: Any, monkeypatch: Any, most_bytes: int
) -> None:
    shuffled: list[int] = []
    known = sources.dealt
    monkeypatch.setattr(shared_rows, "HELD_OUT_BYTES", most_bytes)
    monkeypatch.setattr(
        sources, "dealt", lambda frame, n, **k: (shuffled.append(n), known(frame, n, **k))[1]
    )
    held_out = digits_df.where("id % 3 = 0").repartition(3).cache()
    spark_model = full_batch("allreduce", 64)
    history = spark_model.fit(digits_df, epochs=1, validation_data=held_out, verbose=0)
    held_out.unpersist()
    assert shuffled == ([] if most_bytes > 1000 else [2])
    assert sum(spark_model.summary.rank_rows.values()) == len(digits[0])
    found = spark_model.evaluate(digits_df.where("id % 3 = 0"))
    for name, value in found.items():
        assert history.history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-4)


def test_rows_to_validate_on_are_collected_once_from_each_cache_of_spark(
    digits_df: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A file has other rows by then; what no frame has any more is given back by a later fit."""
    collected: list[int] = []
    known, path, spark = (
        shared_rows.map_in_arrow,
        f"{tmp_path}/rows.parquet",
        digits_df.sparkSession,
    )
    monkeypatch.setattr(
        shared_rows, "map_in_arrow", lambda *given: (collected.append(1), known(*given))[1]
    )
    seen = digits_df.withColumn("third", F.col("label") % 3).cache()

    def write(where: str) -> None:
        pq.write_table(pa.Table.from_pandas(seen.where(where).toPandas()), path)
        spark.catalog.refreshByPath(path)

    def fit(held_out: Any, label: str = "label") -> None:
        spark_model = full_batch("allreduce", 64)
        told = spark_model.fit(seen, validation_data=held_out, label=label, verbose=0).history
        found = spark_model.evaluate(held_out, label=label)
        assert told["val_loss"] == [pytest.approx(found["loss"], rel=1e-4)]

    write("id % 3 = 0")
    held_out = spark.read.parquet(path).cache()
    fit(held_out)
    fit(held_out)
    assert len(collected) == 1
    fit(held_out, label="third")
    assert len(collected) == 2
    held_out.unpersist()
    write("id % 2 = 0")
    held_out.cache()
    fit(held_out, label="third")
    assert len(collected) == 3
    content = shared_rows._kept[held_out].rows.content
    held_out.unpersist()
    del held_out
    gc.collect()
    assert content in shared_rows._unused
    other = seen.limit(9).cache()
    fit(other)
    assert not shared_rows._unused
    for frame in (other, seen):
        frame.unpersist()


def test_segments_that_are_recomputed_train_as_the_model(digits_df: Any, digits: Any) -> None:
    x, y = digits
    alone = make_mlp(optimizer=keras.optimizers.SGD(0.3, momentum=0.9))
    before = alone.get_weights()
    model = make_mlp(optimizer=keras.optimizers.SGD(0.3, momentum=0.9))
    spark_model = SparkModel(
        recompute_segments(model, 2), "allreduce", num_workers=2, batch_size=len(x)
    )
    spark_model.fit(digits_df, epochs=3, verbose=0)
    alone.fit(x, y, epochs=3, batch_size=len(x), verbose=0)
    assert np.abs(before[0] - alone.get_weights()[0]).max() > 0.01
    for mine, other in zip(spark_model.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
@pytest.mark.parametrize("stops", [pytest.param(False, marks=pytest.mark.slow), True])
def test_averaged_weights_are_those_of_keras_also_after_a_stop(
    digits_df: Any, digits: Any, mode: str, stops: bool
) -> None:
    x, y = digits

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = stops and epoch == 2

    def make_model() -> Any:
        rate = keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.8)
        return make_mlp(optimizer=rate)

    spark_model = SparkModel(make_model(), mode, num_workers=2, batch_size=len(x))
    spark_model.fit(digits_df, epochs=5, callbacks=[Stop()], verbose=0)
    alone = make_model()
    alone.fit(x, y, epochs=5, batch_size=len(x), callbacks=[Stop()], verbose=0)
    for mine, other in zip(spark_model.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [None, "sgd"])
def test_the_model_that_comes_back_holds_its_constraints(digits_df: Any, rule: Any) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, "relu", kernel_constraint="non_neg"),
            layers.Dense(10, "softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    spark_model = SparkModel(model, "asynchronous", "batch", num_workers=2, rule=rule)
    history = spark_model.fit(digits_df, epochs=2, validation_data=digits_df, verbose=0)
    assert model.get_weights()[0].min() >= 0
    found = spark_model.evaluate(digits_df)
    assert history.history["val_loss"][-1] == pytest.approx(found["loss"], rel=1e-4)


def test_steps_per_epoch_are_batches_of_each_worker(digits_df: Any) -> None:
    model = make_mlp()
    spark_model = SparkModel(model, "synchronous", num_workers=2, batch_size=8)
    history = spark_model.fit(
        digits_df, epochs=3, steps_per_epoch=5, validation_split=0.3, validation_steps=2, verbose=0
    )
    assert int(model.optimizer.iterations.numpy()) == 15
    assert spark_model.summary is not None
    assert spark_model.summary.rows == 2 * 5 * 8
    assert len(history.history["val_loss"]) == 3


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        pytest.param("asynchronous", {"frequency": 3}, marks=pytest.mark.slow),
        ("asynchronous", {"rule": "aeasgd"}),  # whose workers never have the server's weights
        ("hogwild", {}),
    ],
)
def test_validation_is_of_the_model_that_comes_back(
    digits_df: Any, mode: str, options: dict[str, Any]
) -> None:
    model = make_mlp(optimizer=keras.optimizers.SGD(0.3))
    spark_model = SparkModel(model, mode, num_workers=2, **options)
    history = spark_model.fit(digits_df, epochs=3, validation_data=digits_df, verbose=0)
    found = spark_model.evaluate(digits_df)
    assert history.history["val_loss"][-1] == pytest.approx(found["loss"], rel=1e-4)
    assert history.history["val_accuracy"][-1] == pytest.approx(found["accuracy"], abs=1e-3)


# -- a train_step of the model's own -------------------------------------------------------------


class Autoencoder(keras.Model):
    """Reconstructs its input; compiled without a loss, fed without labels."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.code, self.out = layers.Dense(4, activation="relu"), layers.Dense(64)

    def build(self, shape: Any) -> None:
        self.code.build(shape)
        self.out.build((None, 4))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.out(self.code(x))

    def train_step(self, x: Any) -> dict[str, Any]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - x) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def test_step(self, x: Any) -> dict[str, Any]:
        import tensorflow as tf

        return {"loss": tf.reduce_mean((self(x) - x) ** 2)}


@pytest.mark.parametrize("mode", ["asynchronous", "allreduce"])
def test_a_model_without_loss_and_labels(digits_df: Any, digits: Any, mode: str) -> None:
    keras.utils.set_random_seed(0)
    model = Autoencoder()
    model.build((None, 64))
    model.compile(keras.optimizers.Adam(0.01))
    spark_model = SparkModel(model, mode, num_workers=2)
    history = spark_model.fit(digits_df, epochs=3, label=None, validation_data=digits_df, verbose=0)
    losses = history.history["loss"]
    assert losses[0] > losses[-1] > 0
    x = digits[0]
    error = float(np.mean((model.predict(x, verbose=0) - x) ** 2))
    assert history.history["val_loss"][-1] == pytest.approx(error, rel=0.02)  # of batches' means
    with pytest.raises(DataError, match="label=None"):
        SparkModel(make_mlp(), num_workers=2).fit(digits_df, label=None)


# -- sequences and text --------------------------------------------------------------------------


def word_model(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(30, 4, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def sentences() -> list[tuple[list[int], int]]:
    """Words 1 to 29; the label says whether most of them are above 15."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(1, 30, rng.integers(1, 15)).tolist() for _ in range(300)]
    return [(row, int(np.mean(np.array(row) > 15) > 0.5)) for row in rows]


def test_arrays_of_different_length(
    spark: Any, sentences: list[tuple[list[int], int]], tmp_path: Path
) -> None:
    df = spark.createDataFrame(sentences, "words array<int>, label int")
    model = word_model()
    spark_model = SparkModel(model, "synchronous", num_workers=2, pad=0)
    history = spark_model.fit(df, epochs=6, features="words", validation_data=df, verbose=0)
    assert history.history["val_accuracy"][-1] > 0.85

    predicted = [row[0] for row in spark_model.predict(df).select("prediction").collect()]
    longest = max(len(row) for row, _ in sentences)
    x = np.array([row + [0] * (longest - len(row)) for row, _ in sentences])
    y = np.array([label for _, label in sentences])
    known = model.evaluate(x, y, verbose=0, return_dict=True)
    found = spark_model.evaluate(df)
    assert found["loss"] == pytest.approx(known["loss"], rel=1e-4)
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0)[:, 0], atol=1e-5)
    lists = ([row for row, _ in sentences], y.tolist())
    assert spark_model.evaluate(lists)["loss"] == pytest.approx(known["loss"], rel=1e-4)
    path = f"file://{tmp_path}/words.keras"
    spark_model.save(path)
    ordered = df.coalesce(1)
    churn = sparkdl.predict_udf(path, pad=0)
    for scored in (sparkdl.predict(path, ordered, features="words", pad=0),
                   ordered.select(churn("words").alias("prediction"))):  # fmt: skip
        got = [row.prediction for row in scored.collect()]
        np.testing.assert_allclose(got, model.predict(x, verbose=0)[:, 0], atol=1e-5)
    with pytest.raises(ConfigError, match="first dimension is free"):
        sparkdl.predict_udf(make_mlp(), pad=0)
    with pytest.raises(ConfigError, match="pad must say"):
        sparkdl.predict(path, df, features="words", pad="zero")
    assert load_spark_model(path).pad == 0

    with pytest.raises(DataError, match="unequal length"):
        SparkModel(model, num_workers=2).fit(df, features="words", verbose=0)
    with pytest.raises(ConfigError, match="first dimension is free"):
        SparkModel(make_mlp(), num_workers=2, pad=0).fit(df, features="words", verbose=0)


def test_a_mask_as_an_input(spark: Any, sentences: list[tuple[list[int], int]]) -> None:
    """The sum of all numbers that are no padding, though the padding is no 0."""
    x = keras.Input((None,), name="words")
    mask = keras.Input((None,), dtype="bool", name="words_mask")
    kept = keras.ops.sum(x * keras.ops.cast(mask, "float32"), axis=1, keepdims=True)
    model = keras.Model([x, mask], layers.Dense(1, kernel_initializer="ones")(kept))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    df = spark.createDataFrame([(row, float(sum(row))) for row, _ in sentences], ["words", "label"])
    spark_model = SparkModel(model, num_workers=2, pad=-7)
    history = spark_model.fit(df, features="words", verbose=0)
    assert history.history["loss"] == [pytest.approx(0, abs=1e-6)]
    total = sparkdl.predict_udf(model, pad=-7)
    wanted = [float(sum(row)) for row, _ in sentences]
    assert [r[0] for r in df.coalesce(1).select(total("words")).collect()] == pytest.approx(wanted)


def numbers_in(text: str) -> Any:
    return np.array([int(word) for word in text.split()], "int32")


def test_an_output_for_each_position_has_the_length_of_its_row(
    spark: Any, sentences: list[tuple[list[int], int]]
) -> None:
    """A row's prediction is the same whoever its neighbours are: as plain Keras' of it alone."""
    keras.utils.set_random_seed(0)
    words = keras.Input((None,), dtype="int32")
    vectors = layers.Embedding(30, 4, mask_zero=True)(words)
    tags = layers.Dense(2, activation="softmax")(layers.GRU(4, return_sequences=True)(vectors))
    model = keras.Model(words, tags)
    rows = [[*row] for row, _ in sentences[:20]]
    wanted = [model.predict(np.array([row]), verbose=0)[0] for row in rows]
    df = spark.createDataFrame(
        [(i, row, " ".join(map(str, row))) for i, row in enumerate(rows)],
        "id int, words array<int>, text string",
    ).coalesce(1)
    udf = sparkdl.predict_udf(model, pad=0, returns="probability")
    for scored in (
        sparkdl.predict(model, df, features="words", pad=0, batch_size=8),
        df.select("id", udf("words").alias("prediction")),
        sparkdl.predict(model, df, features="text", pad=0, decoder=numbers_in),
    ):
        got = [row.prediction for row in scored.orderBy("id").collect()]
        assert [len(row) for row in got] == [len(row) for row in rows]
        for one, known in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, known, atol=1e-5)


def test_a_decoder_and_padding_and_a_mask(spark: Any) -> None:
    x = keras.Input((None,), name="words")
    mask = keras.Input((None,), dtype="bool", name="words_mask")
    kept = keras.ops.sum(x * keras.ops.cast(mask, "float32"), axis=1, keepdims=True)
    model = keras.Model([x, mask], layers.Dense(1, kernel_initializer="ones")(kept))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    df = spark.createDataFrame([("1 2 3", 6.0), ("4", 4.0), ("5 6", 11.0)], ["words", "label"])
    trained = SparkModel(model, num_workers=2, pad=-7, decoder={"words": numbers_in})
    history = trained.fit(df, features={"words": "words"}, verbose=0)
    assert history.history["loss"] == [pytest.approx(0, abs=1e-6)]


class Towers(keras.Model):
    """Two outputs, one label for both, and a loss of its own."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        a, b = y_pred.values() if isinstance(y_pred, dict) else y_pred
        return keras.ops.mean((keras.ops.sum(a * b, -1) - y) ** 2)


@pytest.mark.parametrize("by_name", [True, False])
def test_one_label_for_the_outputs_of_two_towers(spark: Any, by_name: bool) -> None:
    rng = np.random.default_rng(0)
    x = {"user": rng.integers(0, 8, 64), "item": rng.integers(0, 8, 64)}
    y = rng.random(64).astype("float32")

    def towers() -> Any:
        keras.utils.set_random_seed(0)
        inputs = {name: keras.Input((), dtype="int32", name=name) for name in x}
        made = {name: layers.Embedding(8, 4)(inputs[name]) for name in x}
        model = Towers(inputs, made if by_name else list(made.values()))
        model.compile("sgd")
        return model

    columns = zip(x["user"].tolist(), x["item"].tolist(), y.tolist(), strict=True)
    df = spark.createDataFrame(list(columns), "user int, item int, rating float").coalesce(1)
    plain, spark_model = towers(), SparkModel(towers(), "synchronous", num_workers=1)
    known = plain.fit(x, y, epochs=3, batch_size=64, shuffle=False, verbose=0).history["loss"]
    found = spark_model.fit(
        df, epochs=3, batch_size=64, shuffle=False, verbose=0, label="rating",
        features={"user": "user", "item": "item"},
    )  # fmt: skip
    assert found.history["loss"] == pytest.approx(known, rel=1e-6)
    pairs = zip(plain.get_weights(), spark_model.model.get_weights(), strict=True)
    assert all(np.allclose(a, b, atol=1e-7) for a, b in pairs)


def texts() -> tuple[list[str], list[int]]:
    words = ["good", "great", "fine", "bad", "awful", "poor"]
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 6, rng.integers(1, 6)) for _ in range(240)]
    return [" ".join(words[i] for i in row) for row in drawn], [int(row[0] < 3) for row in drawn]


def text_model(inputs: list[str], whole: bool = False) -> Any:
    """A model of texts: of their first word, or of each text as a whole."""
    keras.utils.set_random_seed(0)
    vectorize: Any = layers.TextVectorization(max_tokens=20, output_sequence_length=1)
    if whole:
        vectorize = layers.StringLookup(max_tokens=20)
    vectorize.adapt(np.array(inputs))
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            vectorize,
            layers.Embedding(20, 4),
            layers.Flatten(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "kind",
    [
        *("pandas", "lists", "Spark"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("polars", "Arrow")),
    ],
)
def test_text_from_frames_of_all_kinds(spark: Any, kind: str) -> None:
    words, labels = texts()
    frame = pd.DataFrame({"text": words, "label": labels})
    data = {
        "pandas": lambda: frame,
        "polars": lambda: polars.from_pandas(frame),
        "Arrow": lambda: pa.table({"text": pa.array(words, pa.large_string()), "label": labels}),
        "lists": lambda: (words, labels),
        "Spark": lambda: spark.createDataFrame(frame),
    }[kind]()
    model = text_model(words, whole=kind == "lists")
    spark_model = SparkModel(model, "synchronous", num_workers=2)
    epochs = 8 if kind == "Spark" else 1
    history = spark_model.fit(data, features="text", epochs=epochs, verbose=0)
    known = spark_model.model.evaluate(
        tf.constant([[text] for text in words]), np.array(labels), verbose=0, return_dict=True
    )
    features = None if kind == "lists" else "text"
    assert spark_model.evaluate(data, features=features) == pytest.approx(known, rel=1e-4)
    if kind == "Spark":
        frame_of_pandas = data.pandas_api()  # rows on the executors, behind the API of pandas
        assert spark_model.evaluate(frame_of_pandas, features="text") == pytest.approx(known)
        assert history.history["accuracy"][-1] == 1.0  # the first word says it all
        predicted = spark_model.predict(data, features="text").select("prediction").collect()
        assert np.mean([(row[0] > 0.5) for row in predicted] == np.array(labels)) == 1.0


def test_another_vocabulary_is_another_model(spark: Any) -> None:
    """Kept learners: two models that differ in nothing but the vocabulary of a layer."""
    words, labels = texts()
    for inputs in (words, ["poor awful", "bad", *words[:3]]):
        model = text_model(inputs)
        spark_model = SparkModel(model, "synchronous", num_workers=2)
        spark_model.fit((words, labels), verbose=0)
        known = model.evaluate(tf.constant([[text] for text in words]), np.array(labels), verbose=0)
        assert spark_model.evaluate((words, labels))["loss"] == pytest.approx(known[0], rel=1e-4)


def test_rows_of_a_group_go_to_one_worker_and_have_one_role(spark: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    frame = spark.createDataFrame(
        [(float(i), float(i), f"q{i % 7}") for i in range(56)], "x double, y double, query string"
    ).repartition(3)
    columns = Columns(["x"], "y", group="query")
    choice = RowChoice(model_signature(model), columns, None, split=0.4, seed=3)
    source = open_fit_source(frame, choice)
    place = F.spark_partition_id().alias("place")
    found: dict[int, set[tuple[int, int]]] = {}
    for row in source.spread(2)[0].select(place, "*").collect():
        found.setdefault(int(row["c0"]) % 7, set()).add((row["place"], row[ROLE]))
    assert {len(places) for places in found.values()} == {1}
    assert {role for places in found.values() for _, role in places} == {0, 1}
    spark_model = SparkModel(model, num_workers=2, batch_size=8)
    history = spark_model.fit(frame, features=["x"], label="y", group="query", verbose=0)
    assert np.isfinite(history.history["loss"][0])
    with pytest.raises(DataError, match="group"):
        spark_model.fit(frame, features=["x"], label="y", group="other", verbose=0)
    with pytest.raises(ConfigError, match="which rows stay together"):
        spark_model.fit((np.ones((4, 1)), np.ones(4)), group="other", verbose=0)
