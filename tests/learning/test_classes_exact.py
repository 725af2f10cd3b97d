"""Classes outside of the model are plain Keras with a ``Dense``, in one process and spread."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, split, spread_over_ranks

from sparkdl.errors import ConfigError, ModelError
from sparkdl.layers import CosFace, Margin, ShardedClassifier, to_plain_model
from sparkdl.tables.classes import Softmax
from sparkdl.tables.rules import RowStart

CLASSES, DIM, BATCH = 53, 6, 8
BACKEND = keras.backend.backend()
o = keras.optimizers
SCALE = 8.0
START = {"name": "normal", "stddev": 0.5}


def make_sgd() -> Any:
    return o.SGD(0.02, momentum=0.8, weight_decay=0.01)


@keras.saving.register_keras_serializable(package="tests")
class Cosines(keras.layers.Layer):
    """Logits of a softmax over normalized features and centers, in Keras."""

    def __init__(self, own_minus: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.own_minus = own_minus

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], CLASSES), name="kernel")

    def call(self, features: Any) -> Any:
        kernel = keras.ops.normalize(self.kernel, axis=0)
        return keras.ops.matmul(keras.ops.normalize(features), kernel)


def loss_of_cosines(minus: float) -> Any:
    def loss(labels: Any, cosines: Any) -> Any:
        labels = keras.ops.cast(keras.ops.reshape(labels, (-1,)), "int32")
        own = keras.ops.one_hot(labels, CLASSES)
        logits = SCALE * (cosines - minus * own)
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)

    return loss


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, rows)
    means = rng.normal(size=(CLASSES, 5))
    return (means[y] + 0.1 * rng.normal(size=(rows, 5))).astype("float32"), y.astype("int32")


def build(make_output: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(3)
    x = keras.Input((5,))
    features = keras.layers.Dense(DIM, "tanh")(keras.layers.Dense(7, "tanh")(x))
    return x, make_output(features)


def sharded(margin: Margin | None, own: Any = None, **settings: Any) -> Any:
    own = make_sgd() if own is None and BACKEND == "jax" else own
    layer = ShardedClassifier(
        CLASSES,
        margin=margin,
        table="faces",
        seed=5,
        optimizer=own,
        chunk=16,
        initializer=START,
        **settings,
    )
    model = keras.Model(*build(layer))
    model.compile(make_sgd(), layer.loss, metrics=[layer.accuracy])
    return model


def plain(margin: Margin | None) -> Any:
    """The same model with Keras' layers, and the same start of every center."""
    keras_layer = keras.layers.Dense(CLASSES, use_bias=False) if margin is None else Cosines()
    model = keras.Model(*build(keras_layer))
    start = RowStart("faces", DIM, START, 5)
    model.layers[-1].set_weights([start.rows(np.arange(CLASSES)).T])
    loss = (
        keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if margin is None
        else loss_of_cosines(margin.m3)
    )
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile(make_sgd(), loss, metrics=[accuracy])
    return model


MARGINS = {"none": None, "cosine": CosFace(0.3, SCALE)}


def compare(model: Any, centers: np.ndarray, expected: Any, atol: float) -> None:
    *others, kernel = expected.get_weights()
    np.testing.assert_allclose(centers, kernel.T, atol=atol, rtol=0)
    found = [w for w in model.get_weights() if w.shape]
    assert len(found) == len(others)
    for value, wanted in zip(found, others, strict=True):
        np.testing.assert_allclose(value, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("margin", MARGINS)
def test_one_process_trains_as_with_a_dense(margin: str) -> None:
    model, expected = sharded(MARGINS[margin]), plain(MARGINS[margin])
    x, y = data(100)
    weights = np.random.default_rng(1).uniform(0.5, 2, 100)
    for _ in range(2):  # once compiled, twice trained
        found, wanted = (
            m.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, sample_weight=weights)
            for m in (model, expected)
        )
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(found.history[name], wanted.history[name], rtol=1e-5)
    compare(model, model.layers[-1].centers(np.arange(CLASSES)), expected, 1e-5)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(
        expected.evaluate(x, y, verbose=0), rel=1e-5
    )
    classes, scores = model.layers[-1].top_classes(model.predict(x, verbose=0), k=4)
    logits = expected.predict(x, verbose=0)
    np.testing.assert_array_equal(classes, np.argsort(-logits, axis=1)[:, :4])
    np.testing.assert_allclose(scores, -np.sort(-logits, axis=1)[:, :4], atol=1e-5)


SIZES = {"1 worker": [100], "2 workers": [70, 30], "2 workers, one empty": [0, 100]}
if BACKEND != "tensorflow":
    # In one process two ranks that wait in TensorFlow's graphs take both of its threads.
    SIZES["3 workers, one empty"] = [40, 0, 60]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("margin", MARGINS)
def test_ranks_train_as_one_process(margin: str, sizes: str, tmp_path: Any) -> None:
    parts = split(*data(100), SIZES[sizes])
    models = [sharded(MARGINS[margin]) for _ in parts]
    steps, _ = spread_over_ranks(models, parts, str(tmp_path), epochs=8, validation=data(21))
    expected = plain(MARGINS[margin])
    batches = global_batches(parts, BATCH)
    for _ in range(8):  # 100 steps and more of one worker
        for x, y in batches:
            expected.train_on_batch(x, y)
    compare(models[0], centers_of(steps), expected, 1e-5)


def centers_of(steps: list[Any]) -> np.ndarray:
    exported = [each.stores["faces"].export() for each in steps]
    ids = np.concatenate([rows.ids for rows in exported])
    assert sorted(ids.tolist()) == list(range(CLASSES))  # each class has one owner
    centers = np.empty((CLASSES, DIM), np.float32)
    centers[ids] = np.concatenate([rows.values for rows in exported])
    return centers


def test_another_number_of_ranks_goes_on_from_the_parts(tmp_path: Any) -> None:
    parts = split(*data(96), [48, 48])
    first = [sharded(None, own=o.SGD(0.2)) for _ in parts]
    before, state = spread_over_ranks(first, parts, str(tmp_path), epochs=1)
    one = [sharded(None, own=o.SGD(0.0))]
    whole = split(*data(96), [96])
    after, _ = spread_over_ranks(one, whole, str(tmp_path), epochs=2, first_epoch=1, state=state)
    np.testing.assert_array_equal(centers_of(after), centers_of(before))


def test_a_sample_has_all_classes_of_the_batch(tmp_path: Any) -> None:
    """Only sampled centers move: those of labels always, of others a share."""
    model = sharded(None, own=o.SGD(1.0), sample=0.25)
    layer = model.layers[-1]
    before = layer.centers(np.arange(CLASSES)).copy()
    x, y = data(6)
    model.fit(x, y, batch_size=6, verbose=0)
    moved = np.flatnonzero((layer.centers(np.arange(CLASSES)) != before).any(1))
    assert set(y.tolist()) <= set(moved.tolist())
    assert len(moved) == int(0.25 * CLASSES)
    assert np.isfinite(model.evaluate(x, y, verbose=0)).all()


@pytest.mark.parametrize("margin", MARGINS)
def test_a_plain_model_has_the_classes_as_a_dense(margin: str) -> None:
    model = sharded(MARGINS[margin])
    x, y = data(60)
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    plain_model = to_plain_model(model)
    classes, scores = model.layers[-1].top_classes(model.predict(x, verbose=0), k=3)
    logits = plain_model.predict(x, verbose=0)
    np.testing.assert_array_equal(classes, np.argsort(-logits, axis=1)[:, :3])
    scale = 1 if MARGINS[margin] is None else SCALE
    np.testing.assert_allclose(scores * scale, -np.sort(-logits, axis=1)[:, :3], atol=1e-5)
    found = plain_model.evaluate(x, y, verbose=0, return_dict=True)
    told = model.evaluate(x, y, verbose=0, return_dict=True)
    assert found["accuracy"] == pytest.approx(told["accuracy"])
    assert "sparkdl" not in plain_model.to_json()


def test_a_saved_model_has_its_centers(tmp_path: Any) -> None:
    model = sharded(CosFace(0.2, SCALE))
    x, y = data(40)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[-1].margin == CosFace(0.2, SCALE)
    for each in (model, loaded):
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        loaded.layers[-1].centers(np.arange(CLASSES)),
        model.layers[-1].centers(np.arange(CLASSES)),
        atol=1e-6,
    )


class Recorder:
    """A place of centers that remembers the labels it is asked about."""

    def measure(
        self, table: str, classes: Any, features: np.ndarray, labels: np.ndarray, *, training: bool
    ) -> tuple[Softmax, int]:
        self.labels = labels
        zeros = np.zeros(len(labels))
        return Softmax(zeros, zeros, zeros.astype(np.float32)), 0


def test_labels_stay_whole_numbers() -> None:
    """As float32, 16777217 would be 16777216."""
    layer = ShardedClassifier(2**24 + 4, table="many", seed=1, optimizer=o.SGD(1.0))
    layer.serve_from(Recorder())  # type: ignore[arg-type]
    x = keras.Input((2,))
    model = keras.Model(x, layer(x))
    model.compile("sgd", layer.loss)
    model.evaluate(np.ones((1, 2), "float32"), np.array([2**24 + 1], "int32"), verbose=0)
    assert layer.service.labels.tolist() == [2**24 + 1]


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", None])
def test_features_are_no_scores_of_classes(loss: Any) -> None:
    layer = ShardedClassifier(CLASSES, optimizer="sgd")
    x = keras.Input((2,))
    model = keras.Model(x, layer(x))
    model.compile("sgd", loss or layer.loss, metrics=None if loss else ["accuracy"])
    with pytest.raises(ModelError, match="no scores of classes"):
        model.fit(np.ones((4, 2)), np.zeros(4, "int32"), verbose=0)


def test_of_several_outputs_each_has_its_own_loss_and_metrics() -> None:
    layer = ShardedClassifier(CLASSES, optimizer="sgd", name="faces")
    x = keras.Input((2,))
    model = keras.Model(x, [layer(x), keras.layers.Dense(3, name="other")(x)])
    losses = [layer.loss, keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    labels = [np.zeros(4, "int32"), np.zeros(4, "int32")]
    model.compile("sgd", losses, metrics=[[layer.accuracy], ["accuracy"]])
    history = model.fit(np.ones((4, 2)), labels, verbose=0).history
    assert history["loss"][0] == pytest.approx(
        history["faces_loss"][0] + history["other_loss"][0], rel=1e-5
    )
    for wrong in ([["accuracy"], None], {"faces": ["accuracy"]}):
        model.compile("sgd", losses, metrics=wrong)
        with pytest.raises(ModelError, match="no scores of classes"):
            model.fit(np.ones((4, 2)), labels, verbose=0)
    model.compile("sgd", losses[::-1])
    with pytest.raises(ModelError, match="no scores of classes"):
        model.fit(np.ones((4, 2)), labels, verbose=0)


@pytest.mark.parametrize("labels", [[CLASSES], [-1]])
def test_a_label_is_a_class(labels: list[int]) -> None:
    model = sharded(None)
    with pytest.raises(Exception, match=f"0 to {CLASSES - 1}"):
        model.fit(np.ones((1, 5), "float32"), np.array(labels), verbose=0)


def test_what_is_no_classifier_is_refused() -> None:
    with pytest.raises(ConfigError, match="share of the classes"):
        ShardedClassifier(10, sample=0.0)
    with pytest.raises(ConfigError, match="ArcFace"):
        ShardedClassifier(10, margin=0.5)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="one vector of features"):
        ShardedClassifier(10)(keras.Input((3, 4)))
    with pytest.raises(ModelError, match="no classifier"):
        ShardedClassifier(10, table="never called").loss(np.zeros(1), np.zeros((1, 3)))
    layer = ShardedClassifier(10)
    layer.build((None, 2))
    with pytest.raises(ModelError, match="scaled loss"):
        layer.table_spec(o.LossScaleOptimizer(o.SGD(0.1)))
