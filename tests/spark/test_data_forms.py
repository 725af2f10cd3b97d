"""Every form of data, held to plain Keras: same weights after a fit, same numbers from evaluate.

In synchronous mode with a batch that holds all rows, two workers take exactly the step that one
process takes. So if a column reached a wrong input, a label was cut off or a row was lost, the
weights differ.
"""

from __future__ import annotations

import struct
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError

N = 45


def arrays(*shape: int, seed: int = 0, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype("float32")


def classes(count: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(9).integers(0, count, n)


def frame(spark: Any, rows: list[Any], schema: Any) -> Any:
    """A DataFrame of two uneven partitions; cached: else a second Python worker for each task
    makes the rows, and in turn imports the framework."""
    rdd = spark.sparkContext.parallelize(rows[:30], 1).union(
        spark.sparkContext.parallelize(rows[30:], 1)
    )
    made = spark.createDataFrame(rdd, schema).cache()
    made.count()
    return made


def compiled(model: Any, loss: Any = "mse", **options: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return model


def dense(inputs: int | tuple[int, ...], outputs: int = 1, *, loss: Any = "mse",
          activation: Any = None, front: Any = (), dtype: str = "float32",
          **options: Any) -> Any:  # fmt: skip
    keras.utils.set_random_seed(1)
    shape = (inputs,) if isinstance(inputs, int) else inputs
    head = layers.Dense(outputs, activation=activation)
    return compiled(keras.Sequential([keras.Input(shape, dtype=dtype), *front, head]), loss,
                    **options)  # fmt: skip


def check(build: Any, data: Any, x: Any, y: Any, weight: Any = None, *, fit: bool = False,
          decoder: Any = None, **columns: Any) -> SparkModel:  # fmt: skip
    """Holds evaluate, and with ``fit`` the trained weights, to Keras' own on the same rows."""
    expected, mine = build(), build()
    mine.set_weights(expected.get_weights())
    options = {"batch_size": N, "verbose": 0}
    spark_model = SparkModel(mine, mode="synchronous", num_workers=2, decoder=decoder)
    if fit:
        expected.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, **options)
        parts = data if isinstance(data, tuple) and weight is None else (data,)  # Keras' own call
        history = spark_model.fit(*parts, epochs=2, **options, **columns).history
        for a, b in zip(expected.get_weights(), mine.get_weights(), strict=True):
            np.testing.assert_allclose(b, a, atol=2e-5)
        assert len(history["loss"]) == 2
    want = expected.evaluate(x, y, sample_weight=weight, return_dict=True, **options)
    # An output's loss is the mean over batches, as in Keras: batches of one row are cut alike.
    several = len(getattr(mine, "outputs", None) or ()) > 1
    got = spark_model.evaluate(data, batch_size=1 if several else 16, **columns)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    return spark_model


# -- features -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["double", "float", "int", "dense", "sparse"])
def test_one_column(spark: Any, kind: str) -> None:
    from pyspark.ml.linalg import Vectors

    x, y = arrays(6), arrays(1, seed=1)
    if kind == "int":
        x = np.round(x * 3)
    x[np.abs(x) < 0.5] = 0
    make: Any = {
        "dense": lambda row: Vectors.dense(row),
        "sparse": lambda row: Vectors.sparse(6, [(i, v) for i, v in enumerate(row) if v]),
        "int": lambda row: [int(v) for v in row],
    }.get(kind, list)
    rows = [(make(x[i].tolist()), float(y[i, 0])) for i in range(N)]
    schema = ["features", "label"] if kind in ("dense", "sparse") else (
        f"features array<{kind}>, label double"
    )  # fmt: skip
    check(lambda: dense(6), frame(spark, rows, schema), x, y, fit=kind == "sparse")


def test_dense_and_sparse_vectors_in_one_column(spark: Any) -> None:
    from pyspark.ml.linalg import Vectors

    x, y = arrays(3), arrays(1, seed=1)
    x[::2, 1] = 0
    rows = []
    for i in range(N):
        a, b, c = x[i].tolist()
        vector = Vectors.dense([a, b, c]) if i % 2 else Vectors.sparse(3, {0: a, 2: c})
        rows.append((vector, float(y[i, 0])))
    check(lambda: dense(3), frame(spark, rows, ["features", "label"]), x, y)


def test_several_numeric_columns_of_odd_names_and_types(spark: Any) -> None:
    x, y = np.round(arrays(4) * 5), arrays(1, seed=1)
    rows = [
        (float(a), int(b), bool(c > 0), int(d), float(t))
        for (a, b, c, d), (t,) in zip(x, y, strict=True)
    ]
    x = x.copy()
    x[:, 2] = x[:, 2] > 0
    df = frame(
        spark,
        rows,
        "`my.feature` double, `with space` int, flag boolean, `ti``ck` bigint, `la.bel` float",
    )
    check(lambda: dense(4), df, x, y, features=["my.feature", "with space", "flag", "ti`ck"],
          label="la.bel")  # fmt: skip


def test_assembled_vectors(spark: Any) -> None:
    from pyspark.ml.feature import VectorAssembler

    x, y = arrays(2), arrays(1, seed=1)
    df = frame(
        spark,
        [(*x[i].tolist(), float(y[i, 0])) for i in range(N)],
        "a double, b double, label double",
    )
    df = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(df)
    check(lambda: dense(2), df, x, y)


@pytest.mark.parametrize("nested", [True, False])
def test_pixels_as_nested_or_flat_arrays_for_a_convolution(spark: Any, nested: bool) -> None:
    x, y = arrays(8, 8, 1), classes(3)

    def build() -> Any:
        front = [layers.Conv2D(2, 3, activation="relu"), layers.Flatten()]
        return dense((8, 8, 1), 3, loss="sparse_categorical_crossentropy", activation="softmax",
                     front=front, metrics=["accuracy"])  # fmt: skip

    rows = [((x[i] if nested else x[i].ravel()).tolist(), int(y[i])) for i in range(N)]
    kind = "array<array<array<float>>>" if nested else "array<float>"
    check(build, frame(spark, rows, f"features {kind}, label int"), x, y)


@pytest.mark.parametrize("free", [False, True])
def test_sequences_for_an_lstm(spark: Any, free: bool) -> None:
    x, y = arrays(5, 3), arrays(1, seed=1)
    df = frame(
        spark,
        [(x[i].tolist(), float(y[i, 0])) for i in range(N)],
        "features array<array<double>>, label float",
    )
    check(lambda: dense((None if free else 5, 3), front=[layers.LSTM(4)]), df, x, y)


def test_tokens_for_an_embedding(spark: Any) -> None:
    x = np.random.default_rng(0).integers(0, 11, (N, 4))
    y = classes(2)

    def build() -> Any:
        front = [layers.Embedding(11, 3), layers.GlobalAveragePooling1D()]
        return dense(4, 1, loss="binary_crossentropy", activation="sigmoid", front=front,
                     dtype="int32", metrics=["accuracy"])  # fmt: skip

    df = frame(
        spark, [(x[i].tolist(), int(y[i])) for i in range(N)], "features array<int>, label int"
    )
    check(build, df, x, y.astype("float32"))


IMAGE = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"


def test_image_structs_arrive_as_red_green_blue(spark: Any) -> None:
    x = np.random.default_rng(0).integers(0, 255, (N, 4, 5, 3)).astype("uint8")
    y = arrays(1, seed=1)
    rows = [
        (("here", 4, 5, 3, 16, bytearray(x[i, :, :, ::-1].tobytes())), float(y[i, 0]))
        for i in range(N)
    ]
    df = frame(spark, rows, f"image {IMAGE}, label double")

    def build() -> Any:
        return dense((4, 5, 3), front=[layers.Rescaling(1 / 255), layers.Flatten()])

    check(build, df, x.astype("float32"), y, features="image")


def unpack(value: bytes) -> np.ndarray:
    """A decoder in a module that no executor can import."""
    return np.array(unpack_helper(value), "float32")


def unpack_helper(value: bytes) -> tuple[float, ...]:
    return struct.unpack("<3f", value[2:])


def test_binary_columns_pass_a_decoder(spark: Any) -> None:
    x, y = arrays(3), arrays(1, seed=1)
    rows = [(bytearray(b"##" + struct.pack("<3f", *x[i])), float(y[i, 0])) for i in range(N)]
    df = frame(spark, rows, "features binary, label double")
    model = check(lambda: dense(3), df, x, y, decoder=unpack)
    predicted = [r.prediction for r in model.predict(df).collect()]
    np.testing.assert_allclose(predicted, model.model.predict(x, verbose=0)[:, 0], atol=1e-5)


def test_binary_columns_without_a_decoder_are_raw_numbers(spark: Any) -> None:
    x, y = arrays(2, 3), arrays(1, seed=1)
    df = frame(
        spark,
        [(bytearray(x[i].tobytes()), float(y[i, 0])) for i in range(N)],
        "features binary, label double",
    )
    check(lambda: dense((2, 3), front=[layers.Flatten()]), df, x, y)


def two_inputs(outputs: int = 1) -> Any:
    keras.utils.set_random_seed(1)
    wide, deep = keras.Input((7,), name="wide"), keras.Input((2, 2), name="deep")
    joined = layers.Concatenate()([layers.Dense(2)(wide), layers.Flatten()(deep)])
    if outputs == 1:
        return compiled(keras.Model([wide, deep], layers.Dense(1)(joined)))
    price = layers.Dense(1, name="price")(joined)
    kind = layers.Dense(3, activation="softmax", name="kind")(joined)
    return compiled(
        keras.Model({"wide": wide, "deep": deep}, {"price": price, "kind": kind}),
        {"price": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"price": 0.5, "kind": 2.0},
        metrics={"kind": ["accuracy"], "price": ["mae"]},
    )


def test_two_inputs_of_unequal_width(spark: Any) -> None:
    wide, deep, y = arrays(7), arrays(2, 2, seed=2), arrays(1, seed=1)
    rows = [(deep[i].ravel().tolist(), *wide[i].tolist(), float(y[i, 0])) for i in range(N)]
    names = [f"w{i}" for i in range(7)]
    schema = "d array<double>, " + ", ".join(f"{n} double" for n in names) + ", label double"
    check(two_inputs, frame(spark, rows, schema), [wide, deep], y,
          features={"deep": "d", "wide": names})  # fmt: skip


def test_two_outputs_with_two_losses_and_weights_for_each(spark: Any) -> None:
    wide, deep = arrays(7), arrays(2, 2, seed=2)
    price, kind = arrays(1, seed=1), classes(3)
    w = np.abs(arrays(2, seed=5))
    rows = [
        (wide[i].tolist(), deep[i].tolist(), float(price[i, 0]), int(kind[i]), *w[i].tolist())
        for i in range(N)
    ]
    df = frame(
        spark, rows, "wide array<float>, deep array<array<float>>, price double, kind int, "
        "w1 double, w2 double",
    )  # fmt: skip
    columns = {
        "features": {"wide": "wide", "deep": "deep"}, "label": {"price": "price", "kind": "kind"}
    }  # fmt: skip
    x, y = {"wide": wide, "deep": deep}, {"price": price, "kind": kind}
    model = check(lambda: two_inputs(2), df, x, y, **columns)
    predicted = model.predict(df, features=columns["features"]).collect()
    want = model.model.predict(x, verbose=0)
    np.testing.assert_allclose([r.prediction_price for r in predicted], want["price"][:, 0],
                               atol=1e-5)  # fmt: skip
    np.testing.assert_allclose([r.prediction_kind for r in predicted], want["kind"], atol=1e-5)
    check(lambda: two_inputs(2), df, x, y, {"price": w[:, 0], "kind": w[:, 1]},
          fit=True, sample_weight={"price": "w1", "kind": "w2"}, **columns)  # fmt: skip


def test_an_autoencoder_has_one_column_for_both(spark: Any) -> None:
    x = arrays(4)
    df = frame(spark, [(row.tolist(),) for row in x], "features array<float>")
    check(lambda: dense(4, 4, front=[layers.Dense(2)]), df, x, x, label="features")


# -- labels and weights -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int", "double"])
def test_class_labels_for_a_sparse_loss(spark: Any, kind: str) -> None:
    x, y = arrays(4), classes(3)
    rows = [(x[i].tolist(), (int if kind == "int" else float)(y[i])) for i in range(N)]
    df = frame(spark, rows, f"features array<float>, label {kind}")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="renamed")
    check(lambda: dense(4, 3, loss=loss, metrics=["accuracy"]), df, x, y)


@pytest.mark.parametrize("kind", ["int", "array<int>"])
def test_class_labels_for_a_one_hot_loss(spark: Any, kind: str) -> None:
    x, y = arrays(4), classes(3)
    hot = np.eye(3, dtype="float32")[y]
    label = [int(v) for v in y] if kind == "int" else [[int(v) for v in row] for row in hot]
    df = frame(
        spark, [(x[i].tolist(), label[i]) for i in range(N)], f"features array<float>, label {kind}"
    )

    def build() -> Any:
        return dense(4, 3, loss="categorical_crossentropy", activation="softmax",
                     metrics=["accuracy"])  # fmt: skip

    check(build, df, x, hot, fit=True)


def test_several_label_columns(spark: Any) -> None:
    x, y = arrays(4), arrays(2, seed=1)
    df = frame(
        spark,
        [(x[i].tolist(), *y[i].tolist()) for i in range(N)],
        "features array<float>, a double, b double",
    )
    check(lambda: dense(4, 2), df, x, y, label=["a", "b"])


def test_labels_per_time_step(spark: Any) -> None:
    x = arrays(5, 2)
    y = np.random.default_rng(3).integers(0, 3, (N, 5))
    df = frame(
        spark,
        [(x[i].tolist(), y[i].tolist()) for i in range(N)],
        "features array<array<float>>, label array<int>",
    )
    check(lambda: dense((5, 2), 3, loss="sparse_categorical_crossentropy", activation="softmax"),
          df, x, y)  # fmt: skip


def as_given(y_true: Any, y_pred: Any) -> Any:
    """A loss of the user's own that takes class numbers, as Keras would hand them over."""
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def test_class_labels_reach_a_loss_of_the_users_own_as_they_are(spark: Any) -> None:
    x, y = arrays(4), classes(3)
    df = frame(
        spark, [(x[i].tolist(), int(y[i])) for i in range(N)], "features array<float>, label int"
    )
    check(lambda: dense(4, 3, loss=as_given, activation="softmax"), df, x, y)


def test_sample_weights(spark: Any) -> None:
    x, y = arrays(4), arrays(1, seed=1)
    weight = (np.arange(N) % 3).astype("float32")
    y[weight == 0] = 1e4
    df = frame(
        spark,
        [(x[i].tolist(), float(y[i, 0]), float(weight[i])) for i in range(N)],
        "features array<float>, label double, w float",
    )
    check(lambda: dense(4, weighted_metrics=["mae"]), df, x, y, weight, fit=True, sample_weight="w")


@pytest.mark.parametrize(
    "weights",
    [{"price": "w"}, *(pytest.param(name, marks=pytest.mark.slow) for name in ("w", "f0"))],
)
def test_sample_weights_are_not_for_validation_data(spark: Any, weights: Any) -> None:
    """As in Keras; also for one output of two, and where the weight is a feature, too."""
    x, w = np.abs(arrays(2)), np.abs(arrays(seed=4))
    y = {"price": arrays(1, seed=1), "kind": arrays(1, seed=2)}

    def build() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((2,))
        outputs = {name: layers.Dense(1, name=name)(inputs) for name in y}
        return compiled(keras.Model(inputs, outputs), weighted_metrics={"price": "mae"})

    rows = [
        (*x[i].tolist(), float(y["price"][i, 0]), float(y["kind"][i, 0]), float(w[i]))
        for i in range(N)
    ]
    df = frame(spark, rows, "f0 double, f1 double, price double, kind double, w double")
    given = x[:, 0] if weights == "f0" else w
    both = {"price": given, "kind": np.ones(N) if isinstance(weights, dict) else given}
    expected, mine = build(), build()
    options = {"epochs": 2, "batch_size": N, "verbose": 0}
    want = expected.fit(x, y, sample_weight=both, validation_data=(x, y), **options).history
    spark_model = SparkModel(mine, mode="synchronous", num_workers=2)
    columns = {"features": ["f0", "f1"], "label": {"price": "price", "kind": "kind"}}
    held_out = df if weights == "f0" else df.drop("w")
    got = spark_model.fit(
        df, validation_data=held_out, sample_weight=weights, **columns, **options
    ).history
    for name in ("loss", "val_loss", "val_price_mae"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4)
    # the columns are those of the fit
    again = spark_model.evaluate(held_out, batch_size=16)
    assert again["loss"] == pytest.approx(expected.evaluate(x, y, verbose=0, return_dict=True)
                                          ["loss"], rel=1e-4)  # fmt: skip
    if weights == {"price": "w"}:
        weighed = spark_model.evaluate(df, sample_weight=weights)
        one = spark_model.evaluate((x, y, {"price": w}))
        assert weighed["loss"] == pytest.approx(one["loss"], rel=1e-4)


# -- RDDs and NumPy -----------------------------------------------------------------------------


def test_an_rdd_of_pairs(spark: Any) -> None:
    x, y = arrays(2, 3), arrays(1, seed=1)
    pairs = [(x[i], float(y[i, 0])) for i in range(N)]
    rdd = spark.sparkContext.parallelize(pairs, 3)
    check(lambda: dense((2, 3), front=[layers.Flatten()]), rdd, x, y)


def test_an_rdd_of_labeled_points_with_classes(spark: Any) -> None:
    from pyspark.mllib.linalg import Vectors
    from pyspark.mllib.regression import LabeledPoint

    x, y = arrays(4), classes(3)
    x[:, 2] = 0
    points = [
        LabeledPoint(int(y[i]), Vectors.sparse(4, {k: float(x[i, k]) for k in (0, 1, 3)}))
        for i in range(N)
    ]
    rdd = spark.sparkContext.parallelize(points, 2)

    def build(loss: str = "sparse_categorical_crossentropy") -> Any:
        return dense(4, 3, loss=loss, activation="softmax", metrics=["accuracy"])

    check(build, rdd, x, y, fit=True)
    check(lambda: build("categorical_crossentropy"), rdd, x, np.eye(3, dtype="float32")[y])


def test_an_rdd_for_several_inputs_and_outputs(spark: Any) -> None:
    wide, deep = arrays(7), arrays(2, 2, seed=2)
    price, kind = arrays(1, seed=1), classes(3)
    pairs = [
        ({"wide": wide[i], "deep": deep[i]}, {"price": price[i], "kind": int(kind[i])})
        for i in range(N)
    ]
    rdd = spark.sparkContext.parallelize(pairs, 2)
    check(lambda: two_inputs(2), rdd, {"wide": wide, "deep": deep}, {"price": price, "kind": kind})


@pytest.mark.parametrize("weighted", [False, True])
def test_numpy_arrays(spark: Any, weighted: bool) -> None:
    x, y = arrays(2, 3), classes(4)
    w = np.abs(arrays(seed=4)) if weighted else None
    data = (x.astype("float64"), y) if w is None else (x.astype("float64"), y, w)
    check(lambda: dense((2, 3), 4, loss="sparse_categorical_crossentropy", activation="softmax",
                        front=[layers.Flatten()]), data, x, y, w, fit=weighted)  # fmt: skip


def test_numpy_arrays_for_several_inputs(spark: Any) -> None:
    wide, deep = arrays(7), arrays(2, 2, seed=2)
    y = {"price": arrays(1, seed=1), "kind": classes(3)}
    x = {"wide": wide, "deep": deep}
    check(lambda: two_inputs(2), (x, y), x, y, fit=True)


def of_three_classes(loss: str = "sparse_categorical_crossentropy") -> SparkModel:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", loss)
    return SparkModel(model, "synchronous", num_workers=1, batch_size=8)


def test_arrays_to_validate_on_beside_other_forms(spark: Any) -> None:
    x = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")
    y = np.arange(24) % 3
    frame = pd.DataFrame({"pixels": list(x.tolist()), "digit": y})
    columns = {"features": "pixels", "label": "digit"}
    losses = [
        of_three_classes().fit((x, y), validation_data=(x, y[:, None]), verbose=0),
        of_three_classes().fit(frame, validation_data=(x, y), verbose=0, **columns),
    ]
    for history in losses:
        assert np.isfinite(history.history["val_loss"]).all()
    with pytest.raises(ConfigError, match=r"(?s)another form.*a DataFrame"):
        of_three_classes().fit((x, y), validation_data=spark.createDataFrame(frame), **columns)
    one_hot = of_three_classes("categorical_crossentropy")
    with pytest.raises(DataError, match=r"(?s)as class numbers.*to_categorical"):
        one_hot.fit((x, y), validation_data=(x, np.eye(3)[y]))
    with pytest.raises(DataError, match="argmax"):
        of_three_classes().fit((x, np.eye(3)[y]))
    with pytest.raises(DataError, match="no rows to validate on"):
        of_three_classes().fit((x, y), validation_data=(x[:0], y[:0]), verbose=0)


def test_lists_of_the_arrays_of_several_inputs_and_outputs_as_keras_takes_them() -> None:
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    both = keras.layers.Concatenate()([left, right])
    outputs = [keras.layers.Dense(1, name="price")(both), keras.layers.Dense(2, name="size")(both)]
    model = keras.Model([left, right], outputs)
    model.compile("sgd", ["mse", "mse"])
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(24, n)).astype("float32") for n in (4, 2)]
    y = [rng.normal(size=(24, n)).astype("float32") for n in (1, 2)]
    spark_model = SparkModel(model, "synchronous", num_workers=1, batch_size=24)
    known = model.evaluate(x, y, verbose=0, return_dict=True)
    assert spark_model.evaluate((x, y)) == pytest.approx(known, rel=1e-5)
    history = spark_model.fit((x, y), validation_data=(x, y), verbose=0)
    assert history.history["price_loss"][0] == pytest.approx(known["price_loss"], rel=1e-5)
    assert "val_size_loss" in history.history


def test_validation_data_must_be_stored_alike(spark: Any) -> None:
    x, y = np.random.default_rng(0).integers(0, 9, (N, 3)), arrays(seed=1)
    model = dense(3)
    spark_model = SparkModel(model, num_workers=1)
    data = (x.astype("float32"), y)
    history = spark_model.fit(data, validation_data=(x.astype("float32"), y), verbose=0)
    want = model.evaluate(x.astype("float32"), y, verbose=0)
    assert history.history["val_loss"][0] == pytest.approx(want, rel=1e-4)
    with pytest.raises(DataError, match=r"(?s)validation_data.*uint8"):
        spark_model.fit(data, validation_data=(x.astype("uint8"), y), verbose=0)


# -- rows ---------------------------------------------------------------------------------------


def test_every_row_counts_however_they_lie_in_partitions(spark: Any) -> None:
    """Empty partitions, one smaller than a batch, one not divisible by it."""
    x, y = arrays(3), arrays(1, seed=1)
    rows = [(i, x[i].tolist(), float(y[i, 0])) for i in range(N)]
    df = frame(spark, rows, "id int, features array<float>, label double")
    cut = df.rdd.map(lambda r: (0 if r.id < 2 else 2 if r.id < 40 else 3, r))
    uneven = cut.partitionBy(4, lambda k: k).values().toDF(df.schema)
    assert uneven.rdd.glom().map(len).collect() == [2, 0, 38, 5]
    expected, mine = dense(3), dense(3)
    expected.fit(x, y, batch_size=N, epochs=1, verbose=0)
    model = SparkModel(mine, mode="synchronous", repartition=False)
    model.fit(uneven, batch_size=N, verbose=0)
    np.testing.assert_allclose(mine.get_weights()[0], expected.get_weights()[0], atol=1e-5)

    class Rows(keras.metrics.Metric):
        def __init__(self, name: str = "rows", **options: Any) -> None:
            super().__init__(name=name, **options)
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

        def result(self) -> Any:
            return self.total

    counting = SparkModel(dense(3, metrics=[Rows()]), batch_size=4, repartition=False)
    history = counting.fit(uneven, epochs=3, verbose=0)
    assert history.history["rows"] == [N, N, N]
    assert counting.evaluate(uneven)["rows"] == N


# -- models -------------------------------------------------------------------------------------


class Doubling(layers.Layer):
    """A layer of the user's own, in a module that is not installed on the executors."""

    def __init__(self, factor: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        return shift(inputs) * self.factor

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


def shift(inputs: Any) -> Any:
    return inputs + 0.1


class Bare(keras.Model):
    """A subclassed model whose constructor takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(8, activation=bend)
        self.drop = layers.Dropout(0.1)
        self.second = layers.Dense(3, activation="softmax")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.second(self.drop(self.first(inputs), training=training))


def bend(x: Any) -> Any:
    return keras.ops.relu(x) * 1.5


class Penalty(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred) * 2.0


class Hits(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        right = keras.ops.equal(
            keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32"),
            keras.ops.cast(keras.ops.argmax(y_pred, -1), "int32"),
        )
        return super().update_state(keras.ops.cast(right, "float32"), sample_weight)


class Pair(keras.Model):
    """A subclassed model that takes a list of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers.Dense(8), layers.Dense(8)
        self.out = layers.Dense(3, activation="softmax")

    def call(self, inputs: Any) -> Any:
        return self.out(self.left(inputs[0]) + self.right(inputs[1]))


def classifier(name: str) -> Any:
    keras.utils.set_random_seed(3)
    loss: Any = "sparse_categorical_crossentropy"
    metrics: list[Any] = ["accuracy"]
    end = layers.Dense(3, activation="softmax")
    if name == "subclassed":
        model: Any = Bare()
        model.build((None, 12))
    elif name == "subclassed list":
        model = Pair()
        model([np.zeros((1, 4), "float32"), np.zeros((1, 8), "float32")])
    elif name == "custom":
        model = keras.Sequential([keras.Input((12,)), Doubling(1.5), layers.Dense(8), end])
        loss, metrics = Penalty(), [Hits(name="hits")]
    elif name == "convolution":
        model = keras.Sequential([
            keras.Input((4, 3, 1)), layers.Conv2D(4, 2, activation="relu"),
            layers.BatchNormalization(), layers.MaxPooling2D(2), layers.Flatten(),
            layers.Dropout(0.1), end,
        ])  # fmt: skip
    elif name == "lstm":
        model = keras.Sequential([keras.Input((4, 3)), layers.LSTM(8), end])
    elif name == "embedding":
        model = keras.Sequential([
            keras.Input((12,)), layers.Embedding(4, 4), layers.Flatten(), end,
        ])  # fmt: skip
    else:
        left, right = keras.Input((4,), name="left"), keras.Input((8,), name="right")
        both = layers.Concatenate()([layers.Dense(4)(left), layers.Dense(4)(right)])
        model = keras.Model([left, right], end(both))
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=metrics)
    return model


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("subclassed", "asynchronous"), ("two inputs", "asynchronous"), ("custom", "synchronous"),
        *(  # tests/parity draws such models, without a JVM
            pytest.param(name, mode, marks=pytest.mark.slow)
            for name, mode in (
                ("subclassed list", "asynchronous"), ("custom", "asynchronous"),
                ("convolution", "asynchronous"), ("lstm", "asynchronous"),
                ("embedding", "asynchronous"), ("subclassed", "hogwild"),
            )
        ),
    ],
)  # fmt: skip
def test_models_of_every_kind_train(spark: Any, name: str, mode: str) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    x = np.clip(rng.integers(0, 2, (300, 12)) + (np.arange(12) % 3 == y[:, None]) * 2, 0, 3)
    rows = [(x[i].tolist(), x[i, :4].tolist(), x[i, 4:].tolist(), int(y[i])) for i in range(300)]
    df = frame(spark, rows, "features array<int>, a array<int>, b array<int>, label int")
    features: Any = "features"
    if name == "two inputs":
        features = {"right": "b", "left": "a"}
    elif name == "subclassed list":
        features = {"input_0": "a", "input_1": "b"}
    model = classifier(name)
    spark_model = SparkModel(model, mode=mode, num_workers=2, batch_size=16)
    history = spark_model.fit(df, epochs=4, verbose=0, features=features).history
    assert history["loss"][-1] < 0.85 * history["loss"][0], history
    predicted = spark_model.predict(df, features=features).select("prediction").collect()
    given: Any = x.astype("float32")
    if name in ("two inputs", "subclassed list"):
        given = [given[:, :4], given[:, 4:]]
    elif name in ("convolution", "lstm"):
        given = given.reshape(-1, *model.input_shape[1:])
    want = model.predict(given, verbose=0)
    np.testing.assert_allclose([r.prediction for r in predicted], want, atol=1e-4)


def test_a_frame_with_one_name_twice_is_refused(spark: Any) -> None:
    df = frame(spark, [([1.0], 1.0)], "features array<float>, label double")
    twice = df.select("features", "label", "label")
    with pytest.raises(DataError, match=r"(?s)'label'.*2 columns"):
        SparkModel(dense(1)).fit(twice, verbose=0)
