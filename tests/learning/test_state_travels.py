"""What the driver has is what trains: all state of a model travels, in every mode, both ways.

Each model is trained by plain Keras and as a fit; all variables of model and optimizer are equal.
"""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import whole_fit
from small_fits import CLASSES, X, as_keras, parts
from whole_fit import MODES, values

from sparkdl.errors import ModelError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.learner.archives import archive, rebuilt
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.archives.unsaved_settings import GlobalSettings
from sparkdl.learner.cache import cached_learner, keras_settings
from sparkdl.learner.state.optimizer_state import take_averages
from sparkdl.spark.fit.trained_model import TrainedModel

layers = keras.layers


def compiled(stack: list[Any], optimizer: Any = None) -> Any:
    model = keras.Sequential([keras.Input((6,)), *stack])
    compile_again(model, optimizer)
    return model


def compile_again(model: Any, optimizer: Any = None) -> None:
    model.compile(optimizer or keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")


def dense() -> list[Any]:
    return [layers.Dense(5, "relu"), layers.Dense(3, "softmax")]


def frozen_variable() -> Any:
    model = compiled(dense())
    model.layers[0].kernel.trainable = False
    compile_again(model)
    return model


def lora() -> Any:
    model = compiled(dense())
    for layer in model.layers:
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(np.full(layer.lora_kernel_b.shape, 0.25))
    compile_again(model, keras.optimizers.SGD(0.1))
    return model


def decay_exclusions() -> Any:
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return compiled(dense(), optimizer)


def exclusions_by_variable() -> Any:
    model = compiled(dense())
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    compile_again(model, optimizer)
    return model


class Counting(layers.Layer):
    """Scales by a number of steps that no gradient reaches."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign(self.steps + 1)
        return x * (1 + keras.ops.cast(self.steps, "float32") / 10)


def counter() -> Any:
    return compiled([Counting(), *dense()])


class Following(keras.Model):
    """Keeps a frozen copy of its layer that follows it, as momentum encoders do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.online = layers.Dense(3, "softmax", name="online")
        self.target = layers.Dense(3, "softmax", name="target")
        self.target.trainable = False

    def build(self, shape: Any) -> None:
        self.online.build(shape)
        self.target.build(shape)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return (self.online(x) + self.target(x)) / 2

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        if keras.backend.backend() == "tensorflow":
            for mine, its in zip(self.target.variables, self.online.variables, strict=True):
                mine.assign(0.9 * mine + 0.1 * its)
        return super().compute_loss(*given, **named)


def following() -> Any:
    model = Following()
    model.build((None, 6))
    compile_again(model)
    return model


def mixed_policy() -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled([layers.Dense(5, "relu"), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    finally:
        keras.config.set_dtype_policy(before)
    return model


def policy_without_scaling() -> Any:
    model = mixed_policy()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)  # Adam makes much of half a bit
    model.compile(optimizer, model.loss, auto_scale_loss=False)
    return model


def changed_optimizer() -> Any:
    model = compiled(dense(), "adam")
    model.optimizer.clipnorm = 0.05
    model.optimizer.learning_rate = 0.05
    return model


def other_regularizer() -> Any:
    model = compiled([layers.Dense(5, "relu", kernel_regularizer="l2"), layers.Dense(3, "softmax")])
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.5)
    return model


class Scaled(layers.Layer):
    """Has a number that no configuration has."""

    factor = 1.0

    def call(self, x: Any) -> Any:
        return x * self.factor


def attribute() -> Any:
    model = compiled([Scaled(), *dense()])
    model.layers[0].factor = 3.0
    return model


MODELS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        frozen_variable, lora, decay_exclusions, exclusions_by_variable, counter, following,
        mixed_policy, policy_without_scaling, changed_optimizer, other_regularizer,
        attribute,
    )
}  # fmt: skip
HALF = ("mixed_policy", "policy_without_scaling")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_all_variables_are_those_of_keras(name: str, mode: str) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(1)  # which the layers' initial values come from
        return MODELS[name]()

    as_keras(make, CLASSES, mode, 2e-2 if name in HALF else 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_float64_is_as_exact_as_in_keras(mode: str) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(1)
        stack = [layers.Dense(5, "tanh", dtype="float64"), layers.Dense(3, dtype="float64")]
        model = keras.Sequential([keras.Input((6,), dtype="float64"), *stack])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    plain, model = make(), make()
    whole_fit.fit(model, parts(X[:, :3], 2), mode)
    for expected, found in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize("mode", ["allreduce"])
def test_averages_that_became_the_weights_stay_with_the_optimizer(mode: str) -> None:
    """On JAX both were one array, which Keras frees when the model predicts."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), "mse")
    x, y = np.ones((12, 3), "float32"), np.ones((12, 2), "float32")
    whole_fit.fit(model, [(x[:8], y[:8]), (x[8:], y[8:])], mode, batch_size=2)
    take_averages(model)
    model.predict(x, verbose=0)
    averages = [np.asarray(v.numpy()) for v in model.optimizer.variables[2:]]
    for average, weight in zip(averages, model.get_weights(), strict=True):
        np.testing.assert_array_equal(average, weight)


@pytest.mark.parametrize("sizes", [(24, 8), (16, 0)])
def test_a_worker_with_fewer_batches_counts_as_the_others_in_allreduce(sizes: Any) -> None:
    model, epochs = counter(), 2
    before = int(model.layers[0].steps.numpy())
    rows = [(X[:size], CLASSES[:size]) for size in sizes]
    trained = whole_fit.fit(model, rows, "allreduce", batch_size=8, epochs=epochs)
    wanted = before + epochs * sizes[0] // 8
    assert int(model.layers[0].steps.numpy()) == wanted
    if keras.backend.backend() != "jax":  # whose learner has the values, and not its model
        assert [int(m.layers[0].steps.numpy()) for m in trained] == [wanted, wanted]


def test_a_second_fit_goes_on() -> None:
    keras.utils.set_random_seed(1)
    plain = counter()
    keras.utils.set_random_seed(1)
    model = counter()
    rows = parts(CLASSES, 2)
    for _ in range(2):
        whole_fit.fit_plainly(plain, rows)
        whole_fit.fit(model, rows, "allreduce")
    assert int(model.layers[0].steps.numpy()) == int(plain.layers[0].steps.numpy()) == 8
    for expected, found in zip(values(plain), values(model), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_what_a_layer_recomputes_is_carried() -> None:
    with keras.RematScope(mode="larger_than", output_size_threshold=7):
        stack = dense()
    copy = decode_model(encode_model(compiled(stack)))
    assert [layer._remat_mode for layer in copy.layers] == [stack[0]._remat_mode] * 2
    assert copy._remat_mode is None


def test_nothing_is_carried_of_a_model_whose_configuration_says_all() -> None:
    model = compiled([layers.Dropout(0.5, seed=1), layers.BatchNormalization(), *dense()])
    first = encode_model(model)
    whole_fit.fit(model, parts(CLASSES, 2), "allreduce")
    model.predict(X, verbose=0)
    assert encode_model(model).open_beside().settings.attributes == {}
    assert encode_model(model).key == first.key


def test_loading_a_model_to_compare_it_changes_nothing_here() -> None:
    model = compiled(dense())
    name, numbers = keras.layers.Dense(1).name, random.getstate()
    encode_model(model)
    assert random.getstate() == numbers
    assert keras.layers.Dense(1).name == f"dense_{int(name.rpartition('_')[2]) + 1}"


class Unsaved(layers.Layer):
    """Is given a function that its configuration does not have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.function: Any = keras.ops.tanh

    def call(self, x: Any) -> Any:
        return self.function(x)


def test_a_function_that_no_configuration_has_is_refused() -> None:
    model = compiled([Unsaved(name="mine"), *dense()])
    model.layers[0].function = lambda x: x * 2
    with pytest.raises(ModelError, match="another one on the workers") as caught:
        encode_model(model)
    assert "'function' of layer 'mine'" in str(caught.value)
    assert "get_config" in caught.value.hint


@pytest.mark.parametrize("make", [lora, counter, frozen_variable])
def test_a_checkpoint_brings_all_of_it_back(make: Callable[[], Any], tmp_path: Path) -> None:
    checkpoints = Checkpoints.at(str(tmp_path / "kept"))
    assert checkpoints is not None
    model = make()
    whole_fit.fit(model, parts(CLASSES, 2), "allreduce")
    before = values(model)
    TrainedModel(model).save(checkpoints, 1)
    whole_fit.fit(model, parts(CLASSES, 2), "allreduce")
    assert TrainedModel(model).restore(checkpoints) == 1
    for expected, found in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_kept_learner_gets_all_of_it_anew() -> None:
    """The adapters are 0 at first, where the file that adds them to the kernel loses nothing."""
    model = compiled(dense())
    model.layers[0].enable_lora(2)
    compile_again(model, keras.optimizers.SGD(0.1))
    cached_learner(encode_model(model))
    whole_fit.fit(model, parts(CLASSES, 2), "allreduce")
    again = cached_learner(encode_model(model))
    again.sync_model()
    for expected, found in zip(values(model), values(again.model), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("make", [lora, attribute, mixed_policy, decay_exclusions])
def test_a_large_model_is_compared_without_values(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    without_values = archive._without_values
    monkeypatch.setattr(rebuilt, "LARGE_BYTES", 0)
    monkeypatch.setattr(
        archive, "_without_values", lambda *given: made.append(without_values(*given)) or made[0]
    )
    monkeypatch.setattr(rebuilt, "_known", OrderedDict())
    model = make()
    copy = decode_model(encode_model(model))
    assert made[0].variables[0]._value is None
    for expected, found in zip(values(model), values(copy), strict=True):
        np.testing.assert_array_equal(found, expected)
    if make is attribute:
        assert copy.layers[0].factor == 3.0


def test_settings_of_keras_reach_the_worker_and_end_with_the_task() -> None:
    before = GlobalSettings.now()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.config.set_epsilon(1e-5)
    try:
        first = encode_model(compiled(dense()))
    finally:
        keras.config.set_floatx(before.floatx)
        keras.config.set_dtype_policy("float32")
        keras.config.set_epsilon(before.epsilon)
    with keras_settings(first):
        assert (keras.config.floatx(), keras.config.epsilon()) == ("float64", 1e-5)
        assert decode_model(first).variables[0].dtype == "float64"
        gone = weakref.ref(first)
        del first
        assert gone() is None  # a model's file and values: not held while it trains
    assert GlobalSettings.now() == before
