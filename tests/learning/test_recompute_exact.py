"""A model in segments trains as the model does, and keeps what lies between them alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import whole_fit
from small_fits import CLASSES, X, parts

from sparkdl.errors import ConfigError, ModelError
from sparkdl.layers import (
    RecomputedSegment,
    ServedEmbedding,
    ShardedClassifier,
    recompute_segments,
    to_plain_model,
)
from sparkdl.layers.recompute import inlined, spans_of
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.signature import model_signature

layers = keras.layers
BACKEND = keras.backend.backend()


def block(x: Any, number: int, wide: int = 24, own_loss: Any = None) -> Any:
    """Has all that must not happen twice, and losses of its own."""
    inner = layers.Dense(wide, "gelu", activity_regularizer=own_loss)(x)
    inner = layers.Dropout(0.3, seed=number)(layers.BatchNormalization()(inner))
    inner = layers.Dense(x.shape[-1], kernel_regularizer="l2")(inner)
    return layers.LayerNormalization()(layers.Add()([x, inner]))


def deep(blocks: int = 2, optimizer: Any = None, **compiled: Any) -> Any:
    keras.utils.set_random_seed(3)
    given = keras.Input((X.shape[1],))
    x = given
    # Keras itself cannot add such losses of float16 to others.
    own_loss = "l2" if keras.config.dtype_policy().name == "float32" else None
    for number in range(blocks):
        x = block(x, number, own_loss=own_loss)
    model = keras.Model(given, layers.Dense(3, "softmax")(x))
    model.compile(
        optimizer or keras.optimizers.SGD(0.05, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **compiled,
    )
    return model


def segments_of(model: Any) -> list[RecomputedSegment]:
    return [layer for layer in model.layers if isinstance(layer, RecomputedSegment)]


def same(model: Any, expected: Any, atol: float) -> None:
    found = model.get_weights()
    for value, wanted in zip(found, expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=atol, rtol=0)


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"], indirect=True)
@pytest.mark.parametrize("jit", [False, True])
def test_steps_are_those_of_the_model(jit: bool, policy: str) -> None:
    if jit != (BACKEND == "jax") and BACKEND != "tensorflow":
        pytest.skip("PyTorch compiles with a C++ compiler, for a minute; JAX is always compiled")
    if policy == "mixed_float16" and BACKEND == "tensorflow" and jit:
        pytest.skip("Keras does not compile scaled losses on TensorFlow")
    expected = deep(jit_compile=jit)
    model = recompute_segments(deep(jit_compile=jit), 2)
    assert len(segments_of(model)) == 2
    exact = policy == "float32"
    for trained in (model, expected):
        trained.fit(X[:8], CLASSES[:8], batch_size=8, shuffle=False, verbose=0)
    same(model, expected, 1e-6 if exact else 2e-3)
    told, wanted = (
        m.fit(X, CLASSES, batch_size=8, epochs=3, shuffle=False, verbose=0).history
        for m in (model, expected)
    )
    for name, values in wanted.items():
        np.testing.assert_allclose(told[name], values, rtol=1e-5 if exact else 2e-2)
    same(model, expected, 1e-5 if exact else 2e-2)


@pytest.mark.parametrize("mode", whole_fit.MODES)
def test_a_fit_is_that_of_the_model(mode: str) -> None:
    rows = parts(CLASSES, 1 if mode == "asynchronous" else 2)
    expected, model = deep(), recompute_segments(deep())
    before = model.get_weights()
    for trained in (expected, model):
        whole_fit.fit(trained, rows, mode)
    assert max(np.abs(a - b).max() for a, b in zip(before, model.get_weights(), strict=True)) > 0.01
    same(model, expected, 1e-6)


def test_what_the_model_has_outside_of_its_configuration_is_kept() -> None:
    class Measuring(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mean = keras.metrics.Mean("measured")

        def call(self, inputs: Any) -> Any:
            if BACKEND != "jax":  # where Keras cannot train a layer that has a metric
                self.mean.update_state(inputs)
            return inputs

    def network() -> Any:
        keras.utils.set_random_seed(6)
        given = keras.Input((X.shape[1],))
        hidden = layers.Dense(6, "tanh", name="decays_not")(Measuring()(given))
        hidden = layers.Dense(6, "tanh", trainable=False)(hidden)
        hidden = layers.BatchNormalization(trainable=False)(layers.Dense(6, "tanh")(hidden))
        model = keras.Model(given, layers.Dense(3, "softmax")(hidden))
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["decays_not"])
        model.compile(optimizer, "sparse_categorical_crossentropy")
        model.optimizer.learning_rate = 0.01
        return model

    expected, model = network(), recompute_segments(network(), 3)
    told, wanted = (
        m.fit(X, CLASSES, epochs=2, shuffle=False, verbose=0).history for m in (model, expected)
    )
    assert told.keys() == wanted.keys()
    np.testing.assert_allclose(told["measured"], wanted["measured"], rtol=1e-5)
    same(model, expected, 1e-6)
    assert model.optimizer.weight_decay == 0.5
    frozen = model.non_trainable_variables
    assert len(frozen) == len(expected.non_trainable_variables)


def test_saved_and_sent_models_keep_their_segments(tmp_path: Path) -> None:
    model = recompute_segments(deep(4), 3)
    model.fit(X, CLASSES, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    sent = decode_model(encode_model(model))
    for copy in (loaded, sent):
        assert [s.name for s in segments_of(copy)] == ["segment_1", "segment_2", "segment_3"]
        same(copy, model, 0)
    for copy in (sent, model):  # Keras' files do not have the state of random generators
        copy.fit(X, CLASSES, batch_size=8, shuffle=False, verbose=0)
    same(sent, model, 1e-6)


def test_a_plain_model_has_the_layers_themselves() -> None:
    model = deep(4)
    cut = recompute_segments(model)
    plain = to_plain_model(cut)
    assert [type(layer) for layer in plain.layers] == [type(layer) for layer in model.layers]
    assert plain.loss == model.loss
    np.testing.assert_array_equal(plain.predict(X, verbose=0), cut.predict(X, verbose=0))
    keras.models.clone_model(plain)


def test_tables_and_classes_stay_outside() -> None:
    def network(embed: Any, cut: bool) -> Any:
        keras.utils.set_random_seed(2)
        given = keras.Input((2,), dtype="int32")
        x = layers.Flatten()(embed(given))
        for _ in range(4):
            x = layers.Add()([x, layers.Dense(6, "tanh")(x)])
        model = keras.Model(given, ShardedClassifier(5, table="c", seed=1, optimizer=sgd())(x))
        model = recompute_segments(model, 2) if cut else model
        head = model.layers[-1]
        model.compile(sgd(), head.loss)
        return model

    def sgd() -> Any:
        return keras.optimizers.SGD(0.1)

    x = np.arange(32, dtype="int32").reshape(16, 2) % 7
    y = np.arange(16, dtype="int32") % 5
    tables = []
    for cut in (False, True):
        layer = ServedEmbedding(3, table="w", seed=4, optimizer=sgd())
        model = network(layer, cut)
        assert len(segments_of(model)) == 2 * cut
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        tables.append((layer.rows(np.arange(7)), model.layers[-1].centers(np.arange(5))))
    for found, expected in zip(*tables, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def kept_bytes(model: Any, x: np.ndarray) -> int:
    """Bytes that the gradients need of the forward pass."""
    if BACKEND == "torch":
        import torch

        kept: dict[int, int] = {}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = model(x, training=True)
        del held
        return sum(kept.values())
    import jax

    trained = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]

    def loss(trained: Any, x: Any) -> Any:
        return (model.stateless_call(trained, state, x, training=True)[0] ** 2).sum()

    compiled = jax.jit(jax.grad(loss)).lower(trained, x).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="counts nothing; benchmarks/recompute.py does")
def test_what_lies_inside_of_segments_is_not_kept() -> None:
    keras.utils.set_random_seed(3)
    given = keras.Input((16,))
    x = given
    for number in range(9):
        x = block(x, number, wide=64)
    model = keras.Model(given, x)
    rows = np.ones((512, 16), np.float32)
    whole = kept_bytes(model, rows)
    assert kept_bytes(recompute_segments(model, 3), rows) < 0.55 * whole


def test_equal_blocks_are_cut_evenly() -> None:
    given = keras.Input((4,), name="x")
    x = given
    for number in range(6):
        inner = layers.Dense(8, name=f"in{number}")(x)
        x = layers.Add(name=f"out{number}")([x, layers.Dense(4, name=f"mid{number}")(inner)])
    model = keras.Model(given, x)
    spans = spans_of(model, 3)
    found = [[tensor._keras_history[0].name for tensor in span.outputs] for span in spans]
    assert found == [["out1"], ["out3"], ["out5"]]


def test_a_model_is_cut_not_between_calls_of_one_layer() -> None:
    given = keras.Input((4,))
    shared = layers.Dense(4)
    between = layers.Dense(4)(shared(given))
    after = layers.Dense(2)(layers.Dense(4)(shared(between)))
    spans = spans_of(keras.Model(given, after), 9)
    assert len(spans) == 2  # up to the second call of the shared one, and what follows
    with pytest.raises(ModelError, match="can be cut nowhere"):
        spans_of(keras.Model(given, shared(layers.Dense(4)(shared(given)))), 2)


def test_inputs_and_outputs_of_the_model_may_pass_a_cut() -> None:
    x, gate = keras.Input((4,), name="x"), keras.Input((4,), name="gate")
    first = layers.Dense(4, "tanh")(layers.Multiply()([x, gate]))
    early = layers.Dense(1)(first)
    second = layers.Dense(4, "tanh")(layers.Multiply()([first, gate]))
    model = keras.Model({"x": x, "gate": gate}, {"early": early, "late": layers.Dense(1)(second)})
    cut = recompute_segments(model, 3)
    assert len(segments_of(cut)) == 3
    rows = {"x": np.ones((2, 4)), "gate": np.full((2, 4), 2.0)}
    for name, wanted in model.predict(rows, verbose=0).items():
        np.testing.assert_array_equal(cut.predict(rows, verbose=0)[name], wanted)


@pytest.mark.parametrize("tags", [False, True], ids=["pooled", "a mask for the loss"])
def test_masks_pass_between_segments(tags: bool) -> None:
    class Unchanged(layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs  # the very tensor, and so its mask, though Keras says it is destroyed

    def network() -> Any:
        keras.utils.set_random_seed(4)
        given = keras.Input((5,), dtype="int32")
        x = layers.Embedding(9, 4, mask_zero=True)(given)
        for _ in range(3):
            x = Unchanged()(layers.Dense(4, "tanh")(layers.Dense(8, "tanh")(x)))
            x = layers.SimpleRNN(4, return_sequences=True)(x)
        x = layers.Dense(4)(x if tags else layers.GlobalAveragePooling1D()(x))
        model = keras.Model(given, layers.Dense(1)(x))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    ids = np.array([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0], [5, 6, 7, 8, 1], [2, 2, 0, 0, 0]], "int32")
    expected, model = network(), recompute_segments(network(), 3)
    assert len(segments_of(model)) == 3
    labels = np.ones((4, 5, 1) if tags else (4, 1))
    told, wanted = (
        m.fit(ids, labels, epochs=3, shuffle=False, verbose=0).history for m in (model, expected)
    )
    np.testing.assert_allclose(told["loss"], wanted["loss"], rtol=1e-5)
    same(model, expected, 1e-6)


def test_what_cannot_be_cut_is_refused() -> None:
    class Own(keras.Model):
        pass

    with pytest.raises(ModelError, match="cannot be cut into segments"):
        recompute_segments(Own())
    with pytest.raises(ConfigError, match="segments"):
        recompute_segments(deep(), 1)
    with keras.RematScope(mode="full"):
        model = deep()
    with pytest.raises(ModelError, match="is recomputed by itself"):
        recompute_segments(model)


def test_outputs_keep_their_names_by_which_losses_and_labels_go() -> None:
    given = keras.Input((5, 4))
    x = layers.GlobalAveragePooling1D()(layers.TimeDistributed(layers.Dense(6, "relu"))(given))
    heads = [layers.Dense(1, "tanh", name="signs")(x), layers.Dense(3, name="bits")(x)]
    model = keras.Model(given, heads)
    losses = {"signs": "squared_hinge", "bits": keras.losses.BinaryCrossentropy(from_logits=True)}
    model.compile("sgd", losses, metrics={"bits": ["binary_accuracy"]})
    cut = recompute_segments(model, 2)
    assert cut.output_names == ["signs", "bits"]
    assert list(model_signature(cut).outputs) == ["signs", "bits"]
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 5, 4)).astype("float32")
    labels = [np.sign(rng.normal(size=(8, 1))), (rng.random((8, 3)) > 0.5).astype("float32")]
    wanted = model.evaluate(rows, labels, verbose=0, return_dict=True)
    assert cut.evaluate(rows, labels, verbose=0, return_dict=True) == pytest.approx(
        wanted, rel=1e-5
    )
    loaded = keras.models.clone_model(cut)
    assert loaded.output_names == ["signs", "bits"]
    plain = inlined(cut)
    assert plain.output_names == ["signs", "bits"]
    assert len(plain.layers) == len(model.layers)
