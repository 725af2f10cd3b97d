"""Predictors: Keras' own predictions, from models that need no loss and no optimizer."""

from __future__ import annotations

import importlib.util
import zipfile
from io import BytesIO
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.errors import ConfigError, ModelError, ResourceError, UnknownNameError
from sparkdl.learner.cache import cached_predictor
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.prediction.export import export_model
from sparkdl.learner.prediction.model_source import KerasSource, open_model
from sparkdl.learner.prediction.predictor import make_predictor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")


def network(seed: int = 0, last: str = "softmax", units: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((4,), name="given"),
            layers.Dense(8, activation="relu", name="hidden"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(units, activation=last, name="head"),
        ]
    )


def predict(source: Any, x: Any, outputs: Any = None, **options: Any) -> Any:
    names = list(source.signature.outputs) if outputs is None else outputs
    with cached_predictor(source.encode(names, **options)) as predictor:
        return predictor.predict(x if isinstance(x, dict) else {"x": x}, 8)


@pytest.mark.parametrize("rows", [8, 5, 1])
def test_a_model_that_was_never_compiled(rows: int) -> None:
    model = network()
    (values,) = predict(KerasSource(model), X[:rows]).values()
    np.testing.assert_allclose(values, model.predict(X[:rows], verbose=0), atol=1e-6)


class Total(keras.Model):
    """Takes inputs with and without a last dimension of 1."""

    def call(self, x: Any) -> Any:
        return keras.ops.sum(x) + (x if len(x.shape) == 2 else x[:, None])


def test_inputs_of_two_ranks() -> None:
    model = Total()
    predictor = make_predictor(model)
    for x in (X[:8, 0], X[:8, :1], X[8:16, 0]):
        (values,) = predictor.predict({"features": x}, 8).values()
        np.testing.assert_allclose(values, x.sum() + x.reshape(-1, 1), atol=1e-5)


def test_no_optimizer_travels() -> None:
    model = network()
    model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    content = KerasSource(model).encode(["head"]).archive.content
    config = zipfile.ZipFile(BytesIO(content)).read("config.json")
    assert b"adam" not in config.lower()
    bare = KerasSource(network()).encode(["head"]).archive.content
    assert len(content) < 1.1 * len(bare)


def test_a_row_has_the_same_bits_whatever_comes_with_it() -> None:
    """Batches of a stream are cut otherwise than those of a table."""
    for model in (network(), network(units=1, last="sigmoid")):
        source = KerasSource(model)
        (whole,) = predict(source, X[:8]).values()
        for start, stop in ((0, 1), (2, 5), (3, 8), (7, 8)):
            (part,) = predict(source, X[start:stop]).values()
            assert part.tobytes() == whole[start:stop].tobytes()


def test_inputs_are_taken_wherever_they_lie_in_memory() -> None:
    """At the beginning of a cache line or not, read-only, or backwards."""
    predictor = make_predictor(network())
    width = predictor.model.input_shape[1]
    x = np.random.default_rng(0).normal(size=(8, width)).astype("float32")
    (want,) = predictor.predict({"x": x.copy()}, 8).values()
    memory = np.zeros(x.nbytes + 64, np.uint8)
    for start in range(0, 64, 4):
        given = memory[start : start + x.nbytes].view(np.float32).reshape(x.shape)
        given[...] = x
        given.flags.writeable = start % 8 == 0
        (got,) = predictor.predict({"x": given}, 8).values()
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(given, x)
    (got,) = predictor.predict({"x": x[::-1]}, 8).values()
    np.testing.assert_array_equal(got[::-1], want)


def test_texts_that_fill_a_part_of_a_forward_pass() -> None:
    words = layers.TextVectorization(max_tokens=10, output_sequence_length=2)
    words.adapt(["good film", "bad film"])
    model = keras.Sequential(
        [keras.Input((1,), dtype="string"), words, layers.Embedding(10, 2), layers.Flatten()]
    )
    given = np.array([["good film"], ["bad"], ["film film"]], object)
    (values,) = make_predictor(model).predict({"x": given}, 8).values()
    want = model(keras.ops.convert_to_tensor(given), training=False)
    np.testing.assert_allclose(values, want, atol=1e-6)


def test_some_outputs_and_layers() -> None:
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    joined = layers.Concatenate(name="joined")([left, right])
    first = layers.Dense(2, name="first")(joined)
    second = layers.Dense(3, activation="softmax", name="second")(joined)
    model = keras.Model([left, right], [first, second])
    x = {"left": X[:8], "right": X[:8, :2]}
    want = model.predict(list(x.values()), verbose=0)
    source = KerasSource(model)
    assert list(source.signature.outputs) == ["first", "second"]
    got = predict(source, x, ["second"], layers=["joined"])
    assert set(got) == {"second", "layer joined"}
    np.testing.assert_allclose(got["second"], want[1], atol=1e-6)
    np.testing.assert_allclose(got["layer joined"], np.hstack(list(x.values())), atol=1e-6)
    assert source.encode(["second"]).scores == {"second": ClassScores(True, False, 3)}
    with pytest.raises(UnknownNameError, match="did you mean 'second'"):
        source.encode(["second1"])
    with pytest.raises(UnknownNameError, match="did you mean 'joined'"):
        source.encode([], ["join"])


def test_layers_whose_output_is_not_one_tensor_are_refused() -> None:
    given = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    model = keras.Model(given, shared(shared(given)))
    with pytest.raises(ModelError, match=r"(?s)'shared' has several outputs.*2 calls"):
        KerasSource(model).encode([], ["shared"])

    class Own(keras.Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.dense = layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    own = Own()
    with pytest.raises(ModelError, match="no variables yet"):
        KerasSource(own)
    own(X[:2])
    with pytest.raises(ModelError, match=r"(?s)layers of model.*functional"):
        KerasSource(own).encode(["output"], ["dense"])
    (values,) = predict(KerasSource(own), X[:8]).values()
    np.testing.assert_allclose(values, own.predict(X[:8], verbose=0), atol=1e-6)
    with pytest.raises(ModelError, match=r"(?s)keras.Model.*builtins.int"):
        open_model(3)


def test_predictors_are_kept_by_their_weights() -> None:
    first, again, other = (KerasSource(network(seed)) for seed in (1, 1, 2))
    with cached_predictor(first.encode(["head"])) as one:
        with cached_predictor(again.encode(["head"])) as same:
            assert same is one
        with cached_predictor(other.encode(["head"])) as two:  # one is in use: not taken from it
            assert two is not one
            (a,), (b,) = (p.predict({"x": X[:8]}, 8).values() for p in (one, two))
            np.testing.assert_allclose(a, network(1).predict(X[:8], verbose=0), atol=1e-6)
            np.testing.assert_allclose(b, network(2).predict(X[:8], verbose=0), atol=1e-6)
    with cached_predictor(KerasSource(network(3)).encode(["head"])) as idle:
        assert idle in (one, two)
        (c,) = idle.predict({"x": X[:8]}, 8).values()
        np.testing.assert_allclose(c, network(3).predict(X[:8], verbose=0), atol=1e-6)


class Compiled(keras.Model):
    """A class of its own, which travels as it is, with a seed and an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop = layers.Dense(2**19), layers.Dropout(0.5)
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.drop(self.hidden(x)))


@pytest.mark.parametrize("trained", [False, True])
def test_a_kept_predictor_of_a_model_that_is_compiled(trained: bool) -> None:
    """The state of its optimizer does not travel, and a worker's model has none to restore."""
    for seed in (1, 1, 2):  # equal weights, then others
        keras.utils.set_random_seed(seed)
        model = Compiled()
        model(X[:8])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        if trained:
            model.fit(X[:8], X[:8, :1], verbose=0)
        source, optimizer = KerasSource(model), model.optimizer
        size = sum(v.value.numpy().nbytes for v in model.variables)
        assert len(source.encode(list(source.signature.outputs)).archive.content) < 1.2 * size
        assert model.optimizer is optimizer
        assert model.compiled
        (values,) = predict(source, X[:8]).values()
        np.testing.assert_allclose(values, model.predict(X[:8], verbose=0), rtol=1e-4)


@pytest.mark.parametrize(
    ("version", "refused"),
    [("3.10.0", True), ("3.11.2", True), ("3.11.3", False), ("3.12.0", False), ("4.0", False)],
)
def test_hdf5_is_refused_where_keras_runs_its_code_in_safe_mode(
    tmp_path: Any, monkeypatch: Any, version: str, refused: bool
) -> None:
    path = str(tmp_path / "m.h5")
    network().save(path)
    given = open_model(path, safe_mode=False).signature
    monkeypatch.setattr(keras, "__version__", version)
    assert open_model(path, safe_mode=False).signature == given
    if refused:
        with pytest.raises(ModelError, match=rf"(?s)CVE-2025-9905.*3\.11\.3.*Keras {version}"):
            open_model(path)
    else:
        assert open_model(path).signature == given


def test_saved_models(tmp_path: Any) -> None:
    model = network()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    want = model.predict(X[:8], verbose=0)
    model.save(tmp_path / "m.keras")
    model.save(tmp_path / "m.h5")
    model.export(tmp_path / "exported", verbose=False)
    for name in ("m.keras", "m.h5", "exported"):
        source = open_model(str(tmp_path / name), safe_mode=name != "m.h5")  # of this test's own
        x = {next(iter(source.signature.inputs)): X[:5]}
        (values,) = predict(source, x).values()
        np.testing.assert_allclose(values, want[:5], atol=1e-6)
        np.testing.assert_allclose(source.predict(X[:8], 3), want, atol=1e-6)
    (name,) = (source := open_model(str(tmp_path / "m.keras"))).signature.outputs
    assert source.encode([name]).scores == {name: ClassScores(True, True, 3)}  # as the loss says
    with pytest.raises(ConfigError, match=r"(?s)no saved model.*\.keras or \.h5"):
        open_model(str(tmp_path))
    with pytest.raises(ResourceError, match=r"nothing\.keras"):
        open_model(str(tmp_path / "nothing.keras"))
    (tmp_path / "bad.keras").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="no Keras file"):
        open_model(str(tmp_path / "bad.keras"))


def test_an_export_scores_like_the_model(tmp_path: Any) -> None:
    model = network()
    target = f"file://{tmp_path}/exported"
    export_model(model, target, "tf_saved_model")
    (values,) = predict(open_model(target), {"given": X[:8]}).values()
    np.testing.assert_allclose(values, model.predict(X[:8], verbose=0), atol=1e-6)
    with pytest.raises(UnknownNameError, match="did you mean 'onnx'"):
        export_model(model, str(tmp_path / "m.onnx"), "onnxx")
    if importlib.util.find_spec("tf2onnx") is None:
        with pytest.raises(ResourceError, match=r"(?s)needs a package.*pip install .*onnx"):
            export_model(model, str(tmp_path / "m.onnx"), "onnx")


# -- what the numbers mean ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "last", "units", "expected"),
    [
        ("sparse_categorical_crossentropy", "softmax", 3, ClassScores(True, False, 3)),
        (keras.losses.CategoricalCrossentropy(from_logits=True), None, 3,
         ClassScores(True, True, 3)),
        ("binary_crossentropy", "sigmoid", 1, ClassScores(False, False, 1)),
        (keras.losses.BinaryCrossentropy(from_logits=True), None, 1, ClassScores(False, True, 1)),
        (keras.losses.BinaryFocalCrossentropy(), "sigmoid", 4, ClassScores(False, False, 4)),
        (None, "softmax", 3, ClassScores(True, False, 3)),
        (None, "sigmoid", 1, ClassScores(False, False, 1)),
        ("mse", None, 3, None),
        (None, None, 3, None),
    ],
)  # fmt: skip
def test_what_an_output_means(loss: Any, last: Any, units: int, expected: Any) -> None:
    model = network(last=last, units=units)
    if loss is not None:
        model.compile("sgd", loss)
    assert KerasSource(model).encode(["head"]).scores.get("head") == expected


def test_probabilities_and_classes_by_hand() -> None:
    z = np.array([[0.0, np.log(3.0)], [np.log(4.0), 0.0]], np.float32)
    p = np.array([[0.25, 0.75], [0.8, 0.2]])
    logits, given = ClassScores(True, True, 2), ClassScores(True, False, 2)
    np.testing.assert_allclose(logits.probability(z), p, rtol=1e-6)
    np.testing.assert_allclose(given.raw(p), np.log(p))
    assert given.classes(p).tolist() == logits.classes(z).tolist() == [1, 0]
    assert given.classes(p, (0.2, 0.8)).tolist() == [0, 0]  # 1.25 > 0.94; 4 > 0.25
    assert given.classes(p, (0.0, 1.0)).tolist() == [0, 0]
    assert given.classes(np.array([[0.0, 1.0]]), (0.0, 1.0)).tolist() == [1]
    np.testing.assert_allclose(logits.raw(z), np.log(p), rtol=1e-6)
    steep = np.array([[5.0, 60.0], [0.0, 70.0], [-9.0, -50.0]], np.float32)
    raw = logits.raw(steep)  # differences of 55, 70 and -41, whose probabilities round to 1 and 0
    assert raw.dtype == np.float64
    np.testing.assert_allclose(raw[:, 1], [-np.exp(-55.0), -np.exp(-70.0), -41.0], rtol=1e-9)
    np.testing.assert_allclose(ClassScores(False, True, 2).raw(steep), steep)  # each its own
    assert np.isfinite(given.raw(np.array([[0.0, 1.0]], np.float16))).all()
    one = np.array([[0.25], [0.75]])
    binary = ClassScores(False, False, 1)
    np.testing.assert_allclose(binary.probability(one), [[0.75, 0.25], [0.25, 0.75]])
    np.testing.assert_allclose(binary.raw(one), np.log(3) * np.array([[1, -1], [-1, 1]]))
    assert binary.classes(one).tolist() == [0, 1]
    assert binary.classes(np.array([[0.5]])).tolist() == [0]
    unit = ClassScores(False, True, 1)
    np.testing.assert_allclose(unit.probability(np.log(3) * np.array([[-1.0], [1.0]])),
                               [[0.75, 0.25], [0.25, 0.75]])  # fmt: skip
    far = np.array([[-1000.0], [1000.0]], np.float32)
    assert unit.probability(far).tolist() == [[1, 0], [0, 1]]
    assert np.isfinite(binary.raw(np.array([[0.0], [1.0]]))).all()
    assert ClassScores(False, False, 4).num_classes is None


def many_kinds() -> list[Any]:
    keras.utils.set_random_seed(1)
    given, other = keras.Input((6, 4), name="given"), keras.Input((2,), name="other")
    recurrent = layers.LSTM(5)(given)
    attended = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 3)(given, given))
    convolved = layers.Flatten()(layers.BatchNormalization()(layers.Conv1D(7, 3)(given)))
    joined = layers.Dense(9, activation="gelu")(layers.Concatenate()([recurrent, attended]))
    return [
        keras.Model(given, {"a": layers.Softmax()(joined), "b": convolved}),
        keras.Model([given, other], [joined, layers.Identity(name="same")(other)]),
        network(),
    ]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow's graphs")
@pytest.mark.parametrize("number", range(3))
def test_several_passes_in_one_call_have_the_bits_of_single_ones(number: int) -> None:
    """Also after the weights have changed, and with rows of another shape or number."""
    model = many_kinds()[number]
    predictor = make_predictor(model)
    rows = 16
    x = {
        tensor.name: RNG.normal(size=(8 * rows, *tensor.shape[1:])).astype("float32")
        for tensor in model.inputs
    }

    def alone(size: int, i: int) -> Any:
        part = {name: array[i * size : (i + 1) * size] for name, array in x.items()}
        return predictor.predict(part, size)

    assert predictor.passes == 1
    for _ in range(20):
        alone(rows, 0)
    assert predictor.passes == 8
    for size in (rows, 3, rows):
        model.set_weights([1.5 * w for w in model.get_weights()])
        want = [alone(size, i) for i in range(8)]
        got = predictor.predict({name: array[: 8 * size] for name, array in x.items()}, size)
        assert got.keys() == want[0].keys()
        for name, values in got.items():
            np.testing.assert_array_equal(values, np.concatenate([w[name] for w in want]))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow's graphs")
def test_outputs_of_another_shape_in_each_pass_stay_with_single_passes() -> None:
    class Positive(layers.Layer):
        def call(self, x: Any) -> Any:
            import tensorflow as tf

            return tf.boolean_mask(x, x[:, 0] > 0)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    predictor = make_predictor(keras.Sequential([keras.Input((4,), name="x"), Positive()]))
    for _ in range(20):
        predictor.predict({"x": X[:8]}, 8)
    assert predictor.passes == 1
