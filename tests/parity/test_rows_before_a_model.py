"""What is done to rows before a model gets them: layers that take texts, groups that stay whole."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from local_spark import LocalSession, LocalSparkModel, Workers, without_spark

from sparkdl.data.batches import grouped

TEXTS = np.array(["a dog", "the cat", "a cat", "the dog runs", "a", "runs", "dog", "the the"] * 2)
KINDS = np.array(["no", "yes", "no", "yes", "no", "no", "no", "yes"] * 2)
BATCH = 4


def classifier() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((3,)), layers.Embedding(9, 3), layers.Flatten(), layers.Dense(2),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def words() -> Any:
    return layers.TextVectorization(vocabulary=["a", "dog", "the"], output_sequence_length=3)


def kinds() -> Any:
    return layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)


def numbers(layer: Any, texts: Any) -> Any:
    return ops.convert_to_numpy(layer(texts))


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
def test_texts_and_labels_of_texts_train_as_their_numbers_in_keras(
    mode: str, workers: Workers
) -> None:
    x, y = numbers(words(), TEXTS), numbers(kinds(), KINDS)
    referee = classifier()
    order = np.concatenate([[*range(s, s + 4), *range(8 + s, 12 + s)] for s in (0, 4)])
    wanted = referee.fit(
        x[order], y[order], batch_size=2 * BATCH, epochs=2, shuffle=False, verbose=0
    )
    session = LocalSession(workers, [8, 8], [])
    spark_model = LocalSparkModel.of(session)(
        classifier(), mode=mode, num_workers=2, batch_size=BATCH, frequency="batch",
        decoder={"features": words(), "label": kinds()},
    )  # fmt: skip
    found = spark_model.fit((TEXTS, KINDS), epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(spark_model.model.get_weights(), referee.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)
    assert found.history["loss"] == pytest.approx(wanted.history["loss"], abs=1e-5)
    with without_spark(session):
        told = spark_model.evaluate((TEXTS, KINDS))
    assert told == pytest.approx(referee.evaluate(x, y, verbose=0, return_dict=True), abs=1e-5)
    predicted = spark_model.predict(TEXTS)
    np.testing.assert_allclose(predicted, referee.predict(x, verbose=0), atol=1e-5)


class PairsOfAQuery(keras.losses.Loss):
    """``sum_j max(0, 1 - s_i + s_j)`` over the rows j of i's query with a smaller label."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        query, label, score = y_true[:, 0], y_true[:, 1], y_pred[:, 0]
        same = ops.cast(query[:, None] == query[None], "float32")
        better = ops.cast(label[:, None] > label[None], "float32")
        return ops.sum(same * better * ops.relu(1 - score[:, None] + score[None]), -1)


def ranker() -> Any:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), PairsOfAQuery())
    return model


@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_a_query_train_as_in_keras_on_the_same_batches(
    count: int, workers: Workers
) -> None:
    """Groups of 1 to 5 rows, which lie apart."""
    random = np.random.default_rng(0)
    share = 24 // count
    queries = np.concatenate([10 * w + random.integers(0, 6, share) for w in range(count)])
    x = random.normal(size=(24, 3)).astype("float32")
    y = np.stack([queries, random.integers(0, 3, 24)], 1).astype("float32")
    parts = [
        [share * w + rows for rows in grouped(queries[share * w :][:share], 6, None)]
        for w in range(count)
    ]
    referee = ranker()
    for _ in range(2):
        for step in range(max(map(len, parts))):
            rows = np.concatenate([part[step] for part in parts if step < len(part)])
            referee.train_on_batch(x[rows], y[rows])
    session = LocalSession(workers, [share] * count, [])
    spark_model = LocalSparkModel.of(session)(
        ranker(), mode="synchronous", num_workers=count, batch_size=6, frequency="batch"
    )
    spark_model.fit((x, y), epochs=2, shuffle=False, verbose=0, group=queries)
    for mine, its in zip(spark_model.model.get_weights(), referee.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)


PEOPLE = {
    "city": np.array(["rome", "oslo", "rome", "lima"] * 4),
    "kind": np.arange(16) % 3,
    "age": np.linspace(1, 60, 16).astype("float32"),
    "income": np.random.default_rng(4).normal(size=16).astype("float32"),
}
BOUGHT = (np.arange(16) % 5 > 2).astype("float32")


def people_space(mode: str) -> Any:
    """Strings, integers, floats and a cross as numbers, as Keras' guide has it."""
    tf = pytest.importorskip("tensorflow")
    kinds = keras.utils.FeatureSpace
    space = kinds(
        {
            "city": kinds.string_categorical(), "kind": kinds.integer_categorical(),
            "age": kinds.float_discretized(num_bins=3), "income": kinds.float_normalized(),
        },
        crosses=[kinds.cross(("city", "kind"), 8)],
        output_mode=mode,
    )  # fmt: skip
    space.adapt(tf.data.Dataset.from_tensor_slices(PEOPLE).batch(8))
    return space


def people_model(space: Any, raw: bool = False) -> Any:
    keras.utils.set_random_seed(1)
    made = space.get_encoded_features()
    joined = (
        layers.Concatenate()([made[n] for n in sorted(made)]) if isinstance(made, dict) else made
    )
    outputs = layers.Dense(1, "sigmoid")(layers.Dense(4, "tanh")(joined))
    model = keras.Model(space.get_inputs() if raw else made, outputs)
    model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("way", ["concat", "dict", "raw"])
def test_a_feature_space_before_a_model_or_in_it(way: str, workers: Workers) -> None:
    if way == "raw" and keras.backend.backend() != "tensorflow":
        pytest.skip("has tensors of text on TensorFlow only")
    space = people_space("dict" if way == "dict" else "concat")
    if way == "raw":  # as tensors: Keras' fit takes no arrays of text
        encoded = keras.tree.map_structure(ops.convert_to_tensor, PEOPLE)
    else:
        encoded = space(PEOPLE)
    referee, model = (people_model(space, way == "raw") for _ in range(2))
    order = np.concatenate([[*range(s, s + 4), *range(8 + s, 12 + s)] for s in (0, 4)])
    sorted_rows = keras.tree.map_structure(lambda array: ops.take(array, order, 0), encoded)
    wanted = referee.fit(
        sorted_rows, BOUGHT[order], batch_size=2 * BATCH, epochs=2, shuffle=False, verbose=0
    )
    session = LocalSession(workers, [8, 8], [])
    spark_model = LocalSparkModel.of(session)(
        model, mode="synchronous", num_workers=2, batch_size=BATCH, frequency="batch",
        decoder=None if way == "raw" else space,
    )  # fmt: skip
    found = spark_model.fit((PEOPLE, BOUGHT), epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.get_weights(), referee.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)
    assert found.history["loss"] == pytest.approx(wanted.history["loss"], abs=1e-5)
    with without_spark(session):
        told = spark_model.evaluate((PEOPLE, BOUGHT))
    wanted = referee.evaluate(encoded, BOUGHT, verbose=0, return_dict=True)
    assert told == pytest.approx(wanted, abs=1e-5)
    predicted = spark_model.predict(PEOPLE)
    np.testing.assert_allclose(predicted, referee.predict(encoded, verbose=0), atol=1e-5)


def list_ranker(loss: str, length: int | None = None) -> Any:
    """Scores of rows, or of lists of ``length`` rows."""
    keras_rs = pytest.importorskip("keras_rs", reason="pip install sparkdl[hub]")
    keras.utils.set_random_seed(2)
    shape = () if length is None else (length,)
    model = keras.Sequential([
        keras.Input((*shape, 3)), layers.Dense(4, "tanh"), layers.Dense(1), layers.Reshape(shape),
    ])  # fmt: skip
    metrics = [keras_rs.metrics.NDCG(name="ndcg"), keras_rs.metrics.MeanReciprocalRank(name="mrr")]
    model.compile(keras.optimizers.SGD(0.1), getattr(keras_rs.losses, loss)(), metrics=metrics)
    return model


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("loss", ["PairwiseHingeLoss", "ListMLELoss"])
def test_a_batch_is_the_list_of_a_query(loss: str, count: int, mode: str, workers: Workers) -> None:
    """With ``batch_size=1`` each query is a batch: losses and metrics of KerasRS see its list."""
    random = np.random.default_rng(0)
    share, length = 24 // count, 8 // count
    queries = np.concatenate([10 * w + np.repeat([0, 1, 2], length) for w in range(count)])
    x = random.normal(size=(24, 3)).astype("float32")
    y = random.integers(0, 3, 24).astype("float32")
    lists = [part.reshape(3 * count, length, *part.shape[1:]) for part in (x, y)]
    referee = list_ranker(loss, length)
    for _ in range(2):
        for step in range(3):
            referee.train_on_batch(*(part[step::3] for part in lists))
    session = LocalSession(workers, [share] * count, [])
    spark_model = LocalSparkModel.of(session)(
        list_ranker(loss), mode=mode, num_workers=count, batch_size=1, frequency="batch"
    )
    spark_model.fit((x, y), epochs=2, shuffle=False, verbose=0, group=queries)
    for mine, its in zip(spark_model.model.get_weights(), referee.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)
    with without_spark(session):
        found = spark_model.evaluate((x, y), batch_size=1, group=queries)
    assert found == pytest.approx(
        referee.evaluate(*lists, batch_size=1, verbose=0, return_dict=True), abs=1e-5
    )
