"""save and load: the same model, settings and optimizer; checkpoints to go on from."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers
from spark_models import make_mlp

import sparkdl
from sparkdl import Limits, Network, SparkModel, load_spark_model
from sparkdl.errors import ConfigError, DataError, ModelError, ResourceError, SparkDLError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.files.model_file import settings_of, with_parts
from sparkdl.files.run_state import RunState
from sparkdl.learner.archives.archive import load_state, model_bytes
from sparkdl.spark import model_inference

N = 40
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = (X[:, :1] - X[:, 1:2]).astype("float32")


def dense(outputs: int = 1) -> Any:
    """Momentum, so that a lost optimizer state shows in the weights."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(outputs)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def plain(epochs: int) -> Any:
    model = dense()
    model.fit(X, Y, batch_size=N, epochs=epochs, verbose=0)
    return model


def same(a: Any, b: Any, atol: float = 1e-5) -> None:
    for one, other in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def test_what_was_never_called_here_is_exported(tmp_path: Path) -> None:
    """As after a fit, which calls the model on executors alone."""
    spark_model = SparkModel(dense())
    spark_model.export(f"{tmp_path}/served")
    got = sparkdl.predict(f"{tmp_path}/served", X)
    np.testing.assert_allclose(got, spark_model.model.predict(X, verbose=0), atol=1e-6)


class Scaled(layers.Layer):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor

    def get_config(self) -> dict[str, Any]:
        return {"factor": self.factor}


class Bare(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.out = Scaled(3.0), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.scaled(inputs))


@pytest.fixture
def frame(spark: Any) -> Any:
    rows = [(X[i].tolist(), float(Y[i, 0])) for i in range(N)]
    return spark.createDataFrame(rows, "features array<float>, label double")


@pytest.mark.parametrize("form", ["path", "text", "file", "memory"])
def test_settings_weights_and_overwriting(tmp_path: Path, form: str) -> None:
    path: Any = {
        "path": tmp_path / "new" / "model.keras",
        "text": f"{tmp_path}/new/model.keras",
        "file": f"file://{tmp_path}/new/model.keras",
        "memory": f"memory://{tmp_path.name}/new/model.keras",
    }[form]
    first = SparkModel(
        dense(), "synchronous", frequency=3, parameter_server_mode="socket", num_workers=3,
        batch_size=5, port=(7000, 7010), seed=4, repartition=False,
        limits=Limits(memory_budget_mb=7, start_timeout_s=11, worker_timeout_s=12.5),
        network=Network(server_bind="127.0.0.1", encrypt=True),
    )  # fmt: skip
    first.model.layers[-1].set_weights([np.ones((3, 1)), np.ones(1)])
    first.save(path)
    loaded = load_spark_model(path)
    assert loaded.get_config() == {**first.get_config(), "network": asdict(Network())}
    own = load_spark_model(path, network=first.network)
    assert own.get_config() == first.get_config()
    same(loaded.model, first.model)
    assert loaded.model.compiled
    with pytest.raises(ResourceError, match="exists"):
        first.save(path, overwrite=False)
    first.model.layers[-1].set_weights([np.zeros((3, 1)), np.zeros(1)])
    first.save(path)
    same(load_spark_model(path).model, first.model)
    if form != "memory":
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["model.keras"]
        same(keras.models.load_model(tmp_path / "new" / "model.keras"), first.model)


MODES = ("synchronous", "asynchronous", "hogwild", "allreduce")


@pytest.mark.parametrize("frequency", ["auto", "epoch", 4])
def test_another_mode_has_its_own_rule(tmp_path: Path, frequency: Any) -> None:
    path = f"{tmp_path}/model.keras"
    modes = MODES[:-1] if frequency == "epoch" else MODES
    for mode in modes:
        made = SparkModel(dense(), mode, frequency)
        made.save(path)
        assert load_spark_model(path).rule.config() == made.rule.config()
        for other in modes:
            loaded = load_spark_model(path, mode=other)
            assert loaded.mode == other
            assert loaded.rule.name == SparkModel(dense(), other, frequency).rule.name
    SparkModel(dense(), "asynchronous", rule="aeasgd").save(path)
    with pytest.raises(ConfigError, match="aeasgd"):
        load_spark_model(path, mode="allreduce")
    assert load_spark_model(path, mode="allreduce", rule="diloco").rule.name == "diloco"


def test_the_columns_of_the_last_fit_are_in_the_file(frame: Any, tmp_path: Path) -> None:
    renamed = frame.withColumnsRenamed({"features": "pixels", "label": "digit"})
    first = SparkModel(dense(), "synchronous", num_workers=1)
    first.fit(renamed, features="pixels", label="digit", verbose=0)
    loss = first.evaluate(renamed)["loss"]
    first.save(f"{tmp_path}/model.keras")
    loaded = load_spark_model(f"{tmp_path}/model.keras")
    assert loaded.evaluate(renamed)["loss"] == pytest.approx(loss)
    assert loaded.predict(renamed).columns == ["pixels", "digit", "prediction"]
    with pytest.raises(DataError, match="'features'"):  # fit asks for them, as before
        loaded.fit(renamed, verbose=0)
    assert loaded.predict(frame, features="features").columns[-1] == "prediction"


class WithoutLabels(keras.Model):
    """Its loss is of its inputs alone, as an autoencoder's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.out = layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.out.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        outputs = self.out(inputs)
        self.add_loss(keras.ops.mean((outputs - inputs) ** 2))
        return outputs


@pytest.mark.parametrize("form", ["without a label", "an index of pandas"])
def test_the_columns_of_every_fit_are_in_the_file(frame: Any, tmp_path: Path, form: str) -> None:
    path = f"{tmp_path}/model.keras"
    if form == "without a label":
        model = WithoutLabels()
        model.compile("sgd")
        model.build((None, 3))
        first = SparkModel(model, "synchronous", num_workers=1)
        first.fit(frame, label=None, verbose=0)
        rows = frame
    else:
        rows = pd.DataFrame({**{name: X[:, i] for i, name in enumerate("abc")}, "y": Y[:, 0]})
        first = SparkModel(dense(), "synchronous", num_workers=1)
        first.fit(rows, features=rows.columns[:-1], label="y", verbose=0)
    first.save(path)
    loaded = load_spark_model(path, custom_objects={"WithoutLabels": WithoutLabels})
    assert loaded.evaluate(rows) == pytest.approx(first.evaluate(rows))


def test_a_class_that_is_missing_is_named_in_few_words(tmp_path: Path) -> None:
    model = keras.Sequential(
        [keras.Input((3,)), *[layers.Dense(3) for _ in range(30)], Scaled(2.0)]
    )
    model.compile("sgd", "mse")
    SparkModel(model).save(f"{tmp_path}/model.keras")
    with pytest.raises(ModelError, match="the class 'Scaled'") as caught:
        load_spark_model(f"{tmp_path}/model.keras")
    assert "custom_objects={'MyLayer': MyLayer}" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("frequency", "arguments"),
    [
        ("auto", {"compression": "bf16"}),
        (4, {"rule": "mean"}),
        ("auto", {"rule": "diloco"}),  # a rule of this name works through a server, too
        ("epoch", {"rule": "easgd", "communicator": "builtin", "limits": Limits(max_restarts=1)}),
        ("auto", {"rule": "powersgd", "seed": 3}),
    ],
)
def test_settings_of_all_reduce(tmp_path: Path, frequency: Any, arguments: dict[str, Any]) -> None:
    path = f"{tmp_path}/model.keras"
    first = SparkModel(dense(), "allreduce", frequency, **arguments)
    first.save(path)
    loaded = load_spark_model(path)
    assert loaded.get_config() == first.get_config()
    assert type(loaded.rule) is type(first.rule)


def test_a_file_does_not_say_where_the_server_is(tmp_path: Path) -> None:
    """Or whoever wrote it could lead the workers, with token and weights, to his own machine."""
    content = with_parts(
        model_bytes(dense()),
        settings={
            "mode": "synchronous", "batch_size": 7, "port": [8000, 8001],
            "network": {"server_address": "evil.example.org", "encrypt": False},
        },
    )  # fmt: skip
    (tmp_path / "model.keras").write_bytes(content)
    loaded = load_spark_model(f"{tmp_path}/model.keras")
    assert (loaded.mode, loaded.batch_size) == ("synchronous", 7)
    assert (loaded.port, loaded.network) == (0, Network())


def test_wrong_paths_are_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> bytes:
        raise AssertionError("the model must not be saved before the path is known to be good")

    monkeypatch.setattr(model_inference, "model_bytes", never)
    model = SparkModel(dense())
    with pytest.raises(ConfigError, match=r"(?s)'\.keras'.*model\.h5"):
        model.save(f"{tmp_path}/model.h5")
    (tmp_path / "a file").write_text("")
    (tmp_path / "folder.keras").mkdir()
    for path in (
        f"{tmp_path}/a file/model.keras", f"{tmp_path}/folder.keras", "/proc/nowhere/m.keras",
        "nosuchsystem://host/m.keras",
    ):  # fmt: skip
        with pytest.raises(ResourceError):
            model.save(path)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be read"):
        load_spark_model(f"{tmp_path}/missing.keras")
    (tmp_path / "text.keras").write_text("no model")
    with pytest.raises(ModelError, match="no Keras file"):
        load_spark_model(f"{tmp_path}/text.keras")
    uncompiled = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    uncompiled.save(tmp_path / "plain.keras")
    with pytest.raises(ModelError, match="not compiled"):
        load_spark_model(f"{tmp_path}/plain.keras")
    model = keras.Sequential([keras.Input((2,)), layers.Lambda(lambda x: x * 2), layers.Dense(1)])
    model.compile("sgd", "mse")
    path = f"{tmp_path}/lambda.keras"
    SparkModel(model).save(path)
    with pytest.raises(ModelError, match="safe_mode=False"):
        load_spark_model(path)
    assert load_spark_model(path, safe_mode=False).model.compiled
    content = with_parts((tmp_path / "plain.keras").read_bytes(), settings={"later": 1})
    (tmp_path / "later.keras").write_bytes(content)
    with pytest.raises(ModelError, match=r"(?s)another version.*later"):
        load_spark_model(f"{tmp_path}/later.keras")


@pytest.mark.parametrize(
    "changed",
    [
        *({"rule": rule} for rule in ("x", {"no": 1}, [1], -1, True, {"name": 1}, {"name": []})),
        {"rule": {"name": "optimizer", "config": {"no": 1}}},
        {"rule": {"name": "downpour", "damping": "x"}},
        {"rule": {"name": "downpour", "no": 1}},
        *({"mode": mode} for mode in (None, 1, ["x"], {"no": 1}, "x")),
        *({name: {"no": [1]}} for name in ("frequency", "num_workers", "batch_size", "columns",
                                           "compression", "seed", "on_nan", "use_gpu")),
    ],
    ids=str,
)  # fmt: skip
def test_malformed_settings_are_one_clear_error(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = str(tmp_path / "m.keras")
    make_mlp().save(path)
    plain = Path(path).read_bytes()
    SparkModel(make_mlp(), mode="asynchronous").save(path, overwrite=True)
    settings = settings_of(Path(path).read_bytes())
    Path(path).write_bytes(with_parts(plain, settings={**settings, **changed}))
    with pytest.raises(SparkDLError):
        load_spark_model(path)


def test_any_compiled_keras_file_loads(tmp_path: Path) -> None:
    model = dense()
    model.save(tmp_path / "model.keras")
    loaded = load_spark_model(str(tmp_path / "model.keras"))
    assert loaded.mode == "asynchronous"
    same(loaded.model, model)


def test_custom_objects(spark: Any, frame: Any, tmp_path: Path) -> None:
    model = Bare()
    model(X[:1])
    model.compile("adam", "mse")
    path = f"{tmp_path}/model.keras"
    SparkModel(model).save(path)
    loaded = load_spark_model(path, {"Bare": Bare, "Scaled": Scaled})
    same(loaded.model, model)
    assert loaded.model.scaled.factor == 3.0
    got = [r.prediction for r in loaded.predict(frame.coalesce(1)).collect()]
    np.testing.assert_allclose(got, model.predict(X, verbose=0)[:, 0], atol=1e-5)


def test_a_loaded_model_goes_on_where_it_was(spark: Any, frame: Any, tmp_path: Path) -> None:
    options = {"batch_size": N, "verbose": 0}
    first = SparkModel(dense(), "synchronous", num_workers=1)
    first.fit(frame, epochs=2, **options)
    path = f"{tmp_path}/model.keras"
    first.save(path)
    loaded = load_spark_model(path)
    assert int(loaded.model.optimizer.iterations) == 2
    loaded.fit(frame, epochs=1, **options)
    assert int(loaded.model.optimizer.iterations) == 3
    same(loaded.model, plain(3))
    first.fit(frame, epochs=1, **options)
    same(first.model, loaded.model)


@pytest.mark.parametrize("form", ["local", "memory"])
def test_checkpoints(spark: Any, frame: Any, tmp_path: Path, form: str) -> None:
    folder = str(tmp_path / "c") if form == "local" else f"memory://{tmp_path.name}/c"
    options = {"batch_size": N, "verbose": 0, "checkpoint_dir": folder}
    SparkModel(dense(), "synchronous", num_workers=1).fit(frame, epochs=3, **options)
    if form == "local":
        names = sorted(p.name for p in (tmp_path / "c").iterdir())
        assert names[0] == "checkpoint.json"
        assert names[-1] == "epoch-00003.keras"
        assert len(names) <= 3
        index = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
        assert (index["epoch"], index["file"]) == (3, "epoch-00003.keras")
        with zipfile.ZipFile(tmp_path / "c" / "epoch-00003.keras") as archive:
            assert "model.weights.h5" in archive.namelist()
    fresh = SparkModel(dense(), "synchronous", num_workers=1)
    history = fresh.fit(frame, epochs=4, resume=True, **options)
    assert history.epoch == [3]
    same(fresh.model, plain(4))
    again = SparkModel(dense(), "synchronous", num_workers=1)
    assert again.fit(frame, epochs=4, resume=True, **options).epoch == []
    same(again.model, plain(4))
    with pytest.raises(ConfigError, match="of another model"):
        SparkModel(dense(2)).fit(frame, epochs=9, resume=True, label="features", **options)
    adam = dense()
    adam.compile("adam", "mse")
    with pytest.raises(ConfigError, match=r"(?s)another optimizer.*checkpoint.*received: Adam"):
        SparkModel(adam).fit(frame, epochs=9, resume=True, **options)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints.at(str(tmp_path))
    assert checkpoints is not None
    model = dense()
    for epoch in (1, 2, 5, 6, 6):  # epochs that end together are saved once
        checkpoints.save(model_bytes(model), RunState(epoch, rule=b"momentum %d" % epoch))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint.json", "epoch-00005.keras", "epoch-00006.keras"]
    restored = checkpoints.restore()
    assert restored is not None
    assert (restored.state.epoch, restored.state.rule) == (6, b"momentum 6")
    load_state(model, restored.model_file, str(tmp_path))
    same(keras.models.load_model(tmp_path / "epoch-00006.keras"), model)
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(ConfigError, match="no index of checkpoints"):
        checkpoints.restore()


def test_resume_without_a_checkpoint_begins_at_the_start(
    spark: Any, frame: Any, tmp_path: Path
) -> None:
    model = SparkModel(dense(), "synchronous", num_workers=1)
    history = model.fit(
        frame, batch_size=N, epochs=1, verbose=0, checkpoint_dir=str(tmp_path), resume=True
    )
    assert history.epoch == [0]
    same(model.model, plain(1))
