"""What a worker keeps of a model goes by the content of all that it was made from."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest

from sparkdl.data.columns import ColumnSpec, DataSpec
from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import ModelArchive, encode_model
from sparkdl.learner.cache import cached_learner, cached_predictor, forget_learner
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.process import payload
from sparkdl.training.learning import BatchStack

NOTEBOOK = """
import keras
from keras import layers, ops
from types import SimpleNamespace

ALPHA, TABLE, SETTINGS = 1.0, [1.0, 2.0], SimpleNamespace(scale=1.0)

def inner(p): return p * ALPHA
def helper(t, p): return ops.square(t - inner(p))
def by_global(t, p): return ALPHA * ops.square(t - p)
def by_object(t, p): return SETTINGS.scale * ops.square(t - p)
def by_list(t, p): return TABLE[0] * ops.square(t - p)
def by_helpers(t, p): return helper(t, p)
def by_default(t, p, scale=1.0): return scale * ops.square(t - p)
def made(scale):
    def by_closure(t, p): return scale * ops.square(t - p)
    return by_closure

class Base(layers.Layer):
    factor = 1.0

class Scaled(Base):
    def __init__(self, **named):
        super().__init__(**named)
        self.calls = 0

    def call(self, v):
        self.calls = self.calls + 1
        return v * self.factor

class Error(keras.losses.Loss):
    power = 2
    def call(self, t, p): return ops.power(ops.abs(t - p), self.power)

class Slow(keras.optimizers.SGD):
    speed = 1.0
    def update_step(self, g, v, rate): super().update_step(g * self.speed, v, rate)
"""
Namespace = dict[str, Any]


def notebook() -> Namespace:
    """The names of a notebook in which the code above was run."""
    names: Namespace = {"__name__": "__main__"}
    exec(NOTEBOOK, names)
    return names


def model(loss: Any = "mse", layer: Any = None, optimizer: Any = "sgd") -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    made = keras.Model(inputs, keras.layers.Dense(1)(inputs if layer is None else layer(inputs)))
    made.compile(optimizer, loss)
    return made


def sent(archive: ModelArchive) -> ModelArchive:
    """The archive as a worker gets it."""
    received: ModelArchive = pickle.loads(pickle.dumps(archive))
    return received


def redefine(names: Namespace, name: str, code: str) -> None:
    exec(code, names)
    assert name in names


CHANGES = {
    "a global": ("by_global", lambda n: n.update(ALPHA=3.0)),
    "a global of a helper's helper": ("by_helpers", lambda n: n.update(ALPHA=3.0)),
    "a helper": ("by_helpers", lambda n: redefine(n, "helper", "def helper(t, p): return t - p")),
    "an attribute of an object": ("by_object", lambda n: setattr(n["SETTINGS"], "scale", 3.0)),
    "an element of a list": ("by_list", lambda n: n["TABLE"].__setitem__(0, 3.0)),
    "a default": ("by_default", lambda n: setattr(n["by_default"], "__defaults__", (3.0,))),
    "an attribute of a base class": ("Scaled", lambda n: setattr(n["Base"], "factor", 3.0)),
    "an attribute of a layer's class": ("Scaled", lambda n: setattr(n["Scaled"], "factor", 3.0)),
    "an attribute of a loss's class": ("Error", lambda n: setattr(n["Error"], "power", 3)),
    "an attribute of an optimizer's class": ("Slow", lambda n: setattr(n["Slow"], "speed", 3.0)),
}


def of_notebook(names: Namespace, name: str) -> Any:
    """A model that uses a function or class of the notebook, built and compiled anew."""
    if name == "Scaled":
        return model(layer=names[name]())
    if name == "Slow":
        return model(optimizer=names[name](0.1))
    return model(names[name]() if name == "Error" else names[name])


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_code_refers_to_counts(what: str) -> None:
    """The function or class itself stays the same object; plain Keras traces the new value."""
    names = notebook()
    used, change = CHANGES[what]
    before = encode_model(of_notebook(names, used)).key
    assert encode_model(of_notebook(names, used)).key == before
    change(names)
    assert encode_model(of_notebook(names, used)).key != before


def test_closures_count_by_what_they_hold() -> None:
    names = notebook()
    one, same, other = (encode_model(model(names["made"](a))).key for a in (1.0, 1.0, 3.0))
    assert one == same != other


def test_a_module_that_is_not_installed_counts_by_its_content(tmp_path: Path) -> None:
    file, package = tmp_path / "losses_of_mine.py", "losses_of_mine"
    file.write_text("ALPHA = 1.0\ndef loss(t, p): return ALPHA * abs(t - p)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module(package)
        before = encode_model(model(module.loss)).key
        assert encode_model(model(module.loss)).key == before
        module.ALPHA = 3.0
        assert encode_model(model(module.loss)).key != before
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop(package, None)


def test_a_kept_model_stays_the_one_that_was_sent() -> None:
    """One that came later with the same class and another value leaves it as it was, for batches
    of another size, too, for which it is traced again."""
    names = notebook()
    one = sent(encode_model(model(layer=names["Scaled"]())))
    names["Base"].factor = 3.0
    other = sent(encode_model(model(layer=names["Scaled"]())))
    learners = [cached_learner(archive) for archive in (one, other, one)]
    try:
        assert learners[0] is learners[2]
        x = np.ones((2, 3), np.float32)
        mine, its = (np.asarray(learner.model.predict(x, verbose=0)) for learner in learners[:2])
        np.testing.assert_allclose(its, 3 * mine, rtol=1e-6)
        assert names["Base"].factor == 3.0
    finally:
        forget_learner(one)
        forget_learner(other)


def test_attributes_that_a_step_has_set_are_those_of_a_new_model_again() -> None:
    archive = sent(encode_model(model(layer=notebook()["Scaled"]())))
    try:
        learner = cached_learner(archive)
        layer = learner.model.layers[1]
        before = layer.calls
        learner.model.predict(np.ones((2, 3), np.float32), verbose=0)
        assert layer.calls > before
        assert cached_learner(archive) is learner
        assert layer.calls == before
    finally:
        forget_learner(archive)


def test_a_learner_is_kept_for_batches_of_one_form() -> None:
    """Whether a loss has a denominator, and which accuracy is meant, follow from the batches."""
    archive = encode_model(model())
    x, y = ColumnSpec(("x",), (3,)), ColumnSpec(("y",), ())
    plain = DataSpec({"x": x}, {"y": y})
    weighted = DataSpec({"x": x}, {"y": y}, ColumnSpec(("w",), ()))
    one_hot = DataSpec({"x": x}, {"y": ColumnSpec(("y",), (2,))})
    whole = DataSpec({"x": x}, {"y": ColumnSpec(("y",), (), "int32")})
    renamed = DataSpec({"x": ColumnSpec(("z",), (3,))}, {"y": y})
    assert plain.form() == renamed.form()
    assert len({spec.form() for spec in (plain, weighted, one_hot, whole)}) == 4
    first = cached_learner(archive, plain.form())
    try:
        assert cached_learner(archive, renamed.form()) is first
        assert cached_learner(archive, weighted.form()) is not first
    finally:
        forget_learner(archive, plain.form())
        forget_learner(archive, weighted.form())


def test_models_made_anew_by_the_same_code_share_what_is_compiled() -> None:
    """Names that Keras counts on in a session count only where data go by them."""
    x, y = ColumnSpec(("x",), (3,)), ColumnSpec(("y",), ())

    def one(names: tuple[str, str]) -> tuple[Any, DataSpec]:
        made = model()
        return made, DataSpec({made.inputs[0].name: x}, {made.output_names[0]: y})

    def several(names: tuple[str, str]) -> tuple[Any, DataSpec]:
        inputs = [keras.Input((3,), name=name) for name in names]
        made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(inputs)))
        made.compile("sgd", "mse")
        return made, DataSpec(dict.fromkeys(names, x), {made.output_names[0]: y})

    def two_outputs(names: tuple[str, str]) -> tuple[Any, DataSpec]:
        inputs = keras.Input((3,), name="x")
        made = keras.Model(inputs, [keras.layers.Dense(1, name=n)(inputs) for n in ("a", "b")])
        made.compile("sgd", ["mse", None])
        return made, DataSpec({"x": x}, {names[0]: y})

    def key(made: tuple[Any, DataSpec]) -> tuple[str, str]:
        archive = encode_model(made[0])
        return archive.key, made[1].form(archive.named)

    for make in (one, several, two_outputs):
        assert key(make(("a", "b"))) == key(make(("a", "b")))
    assert key(several(("a", "b"))) != key(several(("c", "b")))
    assert key(two_outputs(("a", "b"))) != key(two_outputs(("b", "a")))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="looks at its functions")
def test_a_kept_learner_is_not_compiled_again_for_other_names() -> None:
    one, other = encode_model(model()), encode_model(model())
    x, y = np.ones((1, 2, 3), np.float32), np.ones((1, 2), np.float32)
    learner = cached_learner(one)
    try:
        learner.train(BatchStack({"keras_tensor": x}, {"dense": y}, None, 1, 2))
        assert cached_learner(other) is learner
        with patch.object(learner.model, "train_step", side_effect=AssertionError("traced again")):
            learner.train(BatchStack({"keras_tensor_1": x}, {"dense_1": y}, None, 1, 2))
    finally:
        forget_learner(one)


def test_seeds_of_a_kept_predictor_begin_anew() -> None:
    """A layer that draws when it predicts gives a session's second call what the first gave."""
    inputs = keras.Input((3,))
    noise = keras.layers.Dropout(0.5, seed=3)(inputs, training=True)
    drawing = keras.Model(inputs, noise)
    source = KerasSource(drawing, {})
    archive = source.encode(list(source.signature.outputs))
    x, found = {next(iter(source.signature.inputs)): np.ones((4, 3), np.float32)}, []
    for _ in range(2):
        with cached_predictor(archive) as predictor:
            found.append(next(iter(predictor.predict(x, 4).values())))
    np.testing.assert_array_equal(*found)


class Drawing(keras.layers.Layer):
    """Draws a number when it predicts, and may change a weight."""

    def __init__(self, counts: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.counts, self.seed = counts, keras.random.SeedGenerator(3)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "counts": self.counts}

    def call(self, x: Any) -> Any:
        if self.counts:
            self.count.assign(self.count + 1.0)
        return x + keras.random.uniform((), seed=self.seed) + self.count


@pytest.mark.parametrize("counts", [False, True])
def test_a_kept_predictor_reads_its_file_again_only_for_changed_weights(counts: bool) -> None:
    inputs = keras.Input((3,))
    drawing = keras.Model(inputs, Drawing(counts)(keras.layers.Dense(3)(inputs)))
    source = KerasSource(drawing, {"Drawing": Drawing})
    archive = source.encode(list(source.signature.outputs))
    x, found = {next(iter(source.signature.inputs)): np.ones((4, 3), np.float32)}, []
    load = keras.Model.load_weights
    with patch.object(keras.Model, "load_weights", autospec=True, side_effect=load) as loads:
        for _ in range(3):
            with cached_predictor(archive) as predictor:
                found += [next(iter(predictor.predict(x, 4).values())) for _ in range(2)]
    np.testing.assert_array_equal(found[:2], found[2:4])
    np.testing.assert_array_equal(found[:2], found[4:])
    assert np.abs(found[1] - found[0]).max() > 0
    writes = counts and keras.backend.backend() != "jax"  # there a step returns what it changed
    assert loads.call_count == (2 if writes else 0)


def test_another_version_of_an_installed_package_is_told() -> None:
    archive = sent(encode_model(model(notebook()["by_global"])))
    assert archive.packages["keras"] == keras.__version__
    archive.packages["keras"] = "3.0.1"
    with pytest.raises(ModelError, match=r"keras 3\.0\.1[\s\S]*keras " + keras.__version__):
        archive.code()


def test_loading_code_leaves_the_users_own_classes_as_they_are() -> None:
    names = notebook()
    content = payload.dump(names["Scaled"])
    names["Base"].factor = 3.0
    loaded = payload.load_apart(content)
    assert (loaded.factor, names["Scaled"].factor) == (1.0, 3.0)
    assert loaded is not names["Scaled"]
