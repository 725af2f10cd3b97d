"""Wrong arguments and wrong data: one clear error of the right class, before a job if possible."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from faulty import forked_workers
from keras import layers
from sparkdl.compat.distkeras.evaluators import AccuracyEvaluator

import sparkdl
from sparkdl import Limits, Network, SparkModel
from sparkdl.compat.distkeras.trainers import SingleTrainer
from sparkdl.compat.distkeras.transformers import (
    BinaryLabelTransformer,
    DenseTransformer,
    MinMaxTransformer,
    OneHotTransformer,
    StandardTransformer,
)
from sparkdl.compat.elephas.ml_model import ElephasEstimator
from sparkdl.config import FitConfig
from sparkdl.errors import (
    ConfigError,
    DataError,
    ModelError,
    ParamTypeError,
    ReadOnlyError,
    ResourceError,
    SparkDLError,
    UnknownArgumentError,
    UnknownNameError,
)
from sparkdl.learner.signature import model_signature
from sparkdl.ml import KerasClassifier, KerasTransformer
from sparkdl.spark.fit import plan as module
from sparkdl.spark.forms.rdds import pair_encoder


def dense(inputs: int = 3, outputs: int = 1, loss: Any = "mse", build: bool = True) -> Any:
    keras.utils.set_random_seed(1)
    front = [keras.Input((inputs,))] if build else []
    model = keras.Sequential([*front, layers.Dense(outputs, activation="softmax")])
    model.compile("sgd", loss)
    return model


def two() -> Any:
    a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    both = layers.Concatenate()([a, b])
    model = keras.Model([a, b], [layers.Dense(1, name="p")(both), layers.Dense(1, name="q")(both)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    from pyspark.ml.feature import VectorAssembler

    df = spark.createDataFrame(
        [([1.0, 2.0, 3.0], 1.0, 2.0, "x", {"k": 1}, bytearray(b"1")) for _ in range(4)],
        "features array<double>, label double, `more.of` double, text string, map map<string,int>, "
        "raw binary",
    )
    df = df.selectExpr("*", "label as a", "struct(label) as record", "array(text) as words",
                       "null as nothing")  # fmt: skip
    return VectorAssembler(inputCols=["label", "a"], outputCol="vector").transform(df)


@contextlib.contextmanager
def refused(
    spark: Any, kind: type[SparkDLError], *words: str, jobs: bool = False
) -> Iterator[None]:
    """Expects an error of exactly that class, with four beats' worth of words, and no Spark job."""
    scheduler = None if spark is None else spark.sparkContext._jsc.sc().dagScheduler()
    before = 0 if scheduler is None else scheduler.numTotalJobs()
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    text = str(caught.value)
    assert caught.value.what, text
    assert caught.value.expected or caught.value.hint, text
    assert caught.value.received or kind is ResourceError, text
    for word in words:
        assert word in text, text
    if not jobs and scheduler is not None:
        assert scheduler.numTotalJobs() == before, "a job ran"


# -- the constructor ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (UnknownNameError, {"mode": "hogwyld"}, ["'hogwyld'", "did you mean 'hogwild'?"]),
        (UnknownNameError, {"mode": None}, ["'hogwild'"]),
        (UnknownNameError, {"rule": "downpur"}, ["did you mean 'downpour'?"]),
        (UnknownNameError, {"parameter_server_mode": "tcp"}, ["'socket'", "'http'"]),
        (UnknownNameError, {"frequency": "batches"}, ["did you mean 'batch'?"]),
        (UnknownNameError, {"mode": "allreduce", "communicator": "mpi"}, ["'horovod'"]),
        (ConfigError, {"frequency": 0}, ["frequency", "0"]),
        (ConfigError, {"num_workers": 0}, ["num_workers", ">= 1"]),
        (ConfigError, {"num_workers": 2.0}, ["num_workers", "2.0"]),
        (ConfigError, {"batch_size": -1}, ["batch_size", "-1"]),
        (ConfigError, {"batch_size": True}, ["batch_size", "True"]),
        (ConfigError, {"port": 70000}, ["port", "70000"]),
        (ConfigError, {"port": "9-5"}, ["port"]),
        (ConfigError, {"use_gpu": "yes"}, ["use_gpu", "'yes'"]),
        (ConfigError, {"limits": {"memory_budget_mb": 1}}, ["limits=Limits(memory_budget_mb=1)"]),
        (ConfigError, {"seed": -1}, ["seed"]),
        (UnknownNameError, {"compression": "zip"}, ["codec", "'fp16'"]),
        (UnknownArgumentError, {"start_timeout_s": 5}, ["limits=Limits(start_timeout_s=...)"]),
        (UnknownArgumentError, {"server_bind": "::"}, ["network=Network(server_bind=...)"]),
        (ConfigError, {"port": 5000, "network": Network(5001)}, ["named twice"]),
        (ConfigError, {"limits": Limits(stall_timeout_s=None)}, ["stall_timeout_s has no effect"]),
        (ConfigError, {"rule": "bsp"}, ["'bsp'", "mode='synchronous'"]),
        (ConfigError, {"mode": "synchronous", "rule": "downpour"}, ["'downpour'"]),
        (ConfigError, {"mode": "hogwild", "rule": "adag"}, ["'adag'", "lock"]),
        (UnknownNameError, {"on_nan": "drop"}, ["'skip'"]),
        (
            ConfigError,
            {"mode": "allreduce", "rule": "local_sgd", "on_nan": "skip"},
            ["'local_sgd' needs every worker's update", "on_nan='skip'"],
        ),
        (ConfigError, {"rule": "ensemble", "on_nan": "skip"}, ["'ensemble' needs every worker's"]),
        (
            ConfigError,
            {"mode": "allreduce", "communicator": "horovod", "on_nan": "skip"},
            ["Horovod", "communicator='builtin'"],
        ),
    ],
)
def test_arguments(kind: Any, arguments: dict[str, Any], words: list[str]) -> None:
    with refused(None, kind, *words):
        SparkModel(dense(), **arguments)


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [
        ("asynchronous", "mode", "allreduce"),
        ("asynchronous", "frequency", "batch"),
        ("asynchronous", "rule", "dynsgd"),
        ("synchronous", "num_workers", 8),
        ("synchronous", "batch_size", 64),
        ("allreduce", "communicator", "builtin"),
        ("allreduce", "limits", Limits(max_restarts=0)),
        ("hogwild", "port", 7000),
        ("hogwild", "custom_objects", {}),
    ],
)
def test_attributes_are_read_only(mode: str, name: str, value: Any) -> None:
    """A setting changed after the choice of rule and window would be saved, but not trained by."""
    model = SparkModel(dense(), mode)
    before = model.get_config()
    with refused(None, ReadOnlyError, f"{name} of a SparkModel", repr(value), "SparkModel(spark"):
        setattr(model, name, value)
    assert isinstance(ReadOnlyError(""), (AttributeError, ConfigError))
    assert model.get_config() == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "num_worker",
            ["no attribute 'num_worker'", "SparkModel(spark_model.model, ..., num_workers=3)"],
        ),
        ("learning_rate", ["no attribute 'learning_rate'", "batch_size"]),
        ("model", ["model of a SparkModel cannot be changed", "SparkModel(model, ...)"]),
        ("history", ["history of a SparkModel cannot be changed"]),
    ],
)
def test_no_attribute_is_added(name: str, words: list[str]) -> None:
    model = SparkModel(dense())
    with refused(None, ReadOnlyError, *words):
        setattr(model, name, 3)

    class Own(SparkModel):
        """A class of the user's, whose attributes are his own business."""

    own = Own(dense())
    if not hasattr(SparkModel, name):
        setattr(own, name, 3)
        assert getattr(own, name) == 3


@pytest.mark.parametrize(
    "name", [n for n in inspect.signature(SparkModel).parameters if n != "model"]
)
def test_every_argument_is_a_read_only_attribute(name: str) -> None:
    model = SparkModel(dense())
    with pytest.raises(ReadOnlyError, match=f"{name} of a SparkModel"):
        setattr(model, name, getattr(model, name))


def test_a_dict_that_changes_later_changes_no_setting() -> None:
    pad, resources = {"x": 0.0}, {"cpus": 2.0}
    model = SparkModel(dense(), pad=pad, resources=resources)
    pad["x"], resources["gpu"] = 1.0, 1.0
    model.pad["x"] = 2.0
    assert (model.pad, model.resources) == ({"x": 0.0}, {"cpus": 2.0})
    assert (model.get_config()["pad"], model.get_config()["resources"]) == ({"x": 0.0}, {"cpus": 2})


def test_attributes_show_what_was_asked_and_chosen() -> None:
    model = SparkModel(dense(), "allreduce", 4, num_workers=3, batch_size=5, seed=7)
    assert (model.mode, model.frequency, model.num_workers) == ("allreduce", 4, 3)
    assert (model.batch_size, model.seed, model.limits.max_restarts) == (5, 7, 3)
    assert (model.rule.name, model.communicator, model.port) == ("mean", "auto", 0)
    assert model.get_config()["rule"]["name"] == "mean"


def test_every_setting_is_an_argument_of_the_model() -> None:
    arguments = inspect.signature(SparkModel).parameters
    for field in dataclasses.fields(FitConfig):
        assert arguments[field.name].default == field.default, field.name
    assert set(arguments) - {f.name for f in dataclasses.fields(FitConfig)} == {
        "model", "custom_objects", "decoder", "port",
    }  # fmt: skip


def test_models() -> None:
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    with refused(None, ModelError, "not compiled", "model.compile"):
        SparkModel(plain)
    with refused(None, ModelError, "no variables yet", "keras.Input"):
        SparkModel(dense(build=False))
    with refused(None, ModelError, "compiled keras.Model", "builtins.str"):
        SparkModel("model")
    with pytest.raises(TypeError, match="num_worker"):
        SparkModel(dense(), num_worker=2)
    plain.compile("sgd")
    with refused(None, ModelError, "has no loss", "model.compile"):
        SparkModel(plain)
    for last in (layers.ActivityRegularization(0.1), layers.Dense(1, kernel_regularizer="l2")):
        own = keras.Sequential([keras.Input((3,)), last])
        own.add(layers.Dense(1))
        own.compile("sgd")
        SparkModel(own)
    with refused(None, UnknownArgumentError, "did you mean 'num_workers'?", "'frequency'"):
        SparkModel(dense(), num_worker=2)
    with refused(None, UnknownArgumentError, "another call: fit(data, features=...)"):
        SparkModel(dense(), features="x")
    with refused(None, UnknownArgumentError, "another call: SparkModel(model, num_workers=...)"):
        SparkModel(dense()).fit([], num_workers=2)
    with refused(None, UnknownNameError, "mode='allreduce', communicator='horovod'"):
        SparkModel(dense(), mode="horovod")


def test_one_fit_at_a_time() -> None:
    model = SparkModel(dense())
    begun, done, errors = threading.Event(), threading.Event(), []

    class Data:
        @property
        def __class__(self) -> Any:  # asked for first, in the first fit
            begun.set()
            done.wait(20)
            return int

    def fit() -> None:
        try:
            model.fit(Data())
        except ConfigError as error:
            errors.append(error)

    first = threading.Thread(target=fit)
    first.start()
    assert begun.wait(20)
    with refused(None, ConfigError, "another call of fit", "clone_model"):
        model.fit((np.zeros((4, 3)), np.zeros(4)))
    done.set()
    first.join(20)
    assert "kind of data" in str(errors[0])
    with refused(None, ConfigError, "kind of data"):  # the first has let go of the model
        model.fit(3)


def test_what_a_newcomer_writes(spark: Any, frame: Any) -> None:
    from pyspark.sql import functions as F

    model = SparkModel(dense())
    with refused(spark, ConfigError, "callbacks=[EarlyStopping(...)]"):
        model.fit(frame, callbacks=[keras.callbacks.EarlyStopping], verbose=0)
    for features in (F.col("features"), [F.col("a"), F.col("label")]):
        with refused(spark, DataError, "an expression of Spark", "features='name'"):
            model.fit(frame, features=features, verbose=0)
    with refused(spark, DataError, "an expression of Spark", "sample_weight='name'"):
        model.fit(frame, sample_weight=F.col("a"), verbose=0)
    with refused(spark, DataError, "an expression of Spark", "label='name'"):
        model.fit(frame, label=F.col("label"), verbose=0)
    with refused(spark, DataError, "an expression of Spark", "validation_data='name'"):
        model.fit(frame, validation_data=F.col("held"), verbose=0)
    for call in (model.evaluate, model.predict):
        with refused(spark, DataError, "an expression of Spark", "features='name'"):
            call(frame, features=F.col("features"))
    for call in (model.fit, model.evaluate):
        with refused(spark, ConfigError, "this kind of data", "Column", "df.select"):
            call(F.col("features"))
    with refused(spark, ConfigError, "this kind of data", "Column"):
        model.predict(F.col("features"))
    with refused(spark, ConfigError, "validation_data", "without a tuple"):
        model.fit(frame, validation_data=(frame, frame), verbose=0)
    with refused(spark, DataError, "no column of booleans: 'a'", "a column of type"):
        model.fit(frame, validation_data="a", verbose=0)
    with refused(spark, DataError, "no column of booleans: 'held'", "no such column"):
        model.fit(frame, validation_data="held", verbose=0)
    with refused(spark, ConfigError, "rows to validate on", "validation_split=0.1"):
        model.fit(frame, validation_data="a", validation_split=0.1, verbose=0)
    with refused(spark, DataError, "stream", "fit_stream"):
        model.fit(spark.readStream.format("rate").load(), features="value", verbose=0)
    times = frame.selectExpr("features", "current_timestamp() as t")
    with refused(spark, DataError, "F.unix_timestamp('t')"):
        model.fit(times, label="t", verbose=0)


def test_a_model_without_a_loss_is_not_evaluated(spark: Any, frame: Any) -> None:
    class OwnStep(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            raise NotImplementedError

    model = OwnStep([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd")
    with refused(spark, ModelError, "cannot be evaluated", "test_step"):
        SparkModel(model).evaluate(frame)


# -- fit, before a job --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (UnknownArgumentError, {"validation_freq": 5}, ["'validation_freq'", "after each epoch"]),
        (ConfigError, {"class_weight": {"a": 1.0}}, ["class_weight", "class number -> weight"]),
        (UnknownArgumentError, {"y": 1}, ["'y'", "label='column'"]),
        (UnknownArgumentError, {"epoch": 5}, ["'epoch'"]),
        (ConfigError, {"profile": "yes"}, ["profile", "'yes'"]),
        (ConfigError, {"timeline": 3}, ["timeline", "3"]),
        (ConfigError, {"checkpoint_dir": ""}, ["checkpoint_dir", "''"]),
        (ConfigError, {"epochs": 0}, ["epochs", ">= 1"]),
        (ConfigError, {"batch_size": 0}, ["batch_size", "0"]),
        (ConfigError, {"validation_split": 1.0}, ["validation_split", "1.0"]),
        (ConfigError, {"validation_split": "0.2"}, ["validation_split", "'0.2'"]),
        (ConfigError, {"verbose": "loud"}, ["verbose", "'loud'"]),
        (ConfigError, {"initial_epoch": -1}, ["initial_epoch"]),
        (ConfigError, {"resume": True}, ["checkpoint_dir"]),
        (DataError, {"features": "feature"}, ["'feature'", "did you mean 'features'?"]),
        (DataError, {"label": "zzz"}, ["'zzz'", "label='your column'"]),
        (DataError, {"sample_weight": "w"}, ["'w'", "sample_weight"]),
        (DataError, {"features": "text"}, ["'text'", "string", "StringIndexer"]),
        (DataError, {"label": "text"}, ["'text'", "label", "StringIndexer"]),
        (DataError, {"sample_weight": "text"}, ["'text'", "sample_weight"]),
        (DataError, {"features": "words"}, ["'words'", "array<string>"]),
        (DataError, {"features": "map"}, ["'map'", "map<string,int>"]),
        (DataError, {"features": "record"}, ["'record'", "struct"]),
        (DataError, {"features": "nothing"}, ["'nothing'", "void"]),
        (DataError, {"features": ["label", "more.of"]}, ["3 values per row", "'more.of'"]),
        (DataError, {"features": "label"}, ["3 values per row"]),
        (DataError, {"features": ["label", "a", "text"]}, ["'text'", "numeric"]),
        (DataError, {"features": []}, ["names no column"]),
        (DataError, {"features": 7}, ["features", "int"]),
        (DataError, {"features": [1, 2, 3]}, ["must name columns"]),
        (DataError, {"features": "vector"}, ["'vector'", "3 values", "a vector of 2"]),
        (DataError, {"label": {"a": "label", "b": "a"}}, ["outputs", "'b'"]),
        (DataError, {"label": ["label", "a"]}, ["label columns", "output"]),
    ],
)
def test_fit_arguments(
    spark: Any, frame: Any, kind: Any, arguments: dict[str, Any], words: list[str]
) -> None:
    model = SparkModel(dense())
    with refused(spark, kind, *words):
        model.fit(frame, **{"verbose": 0, **arguments})


def test_several_inputs_and_outputs_must_be_named(spark: Any, frame: Any) -> None:
    model = SparkModel(two())
    inputs, outputs = {"a": "features", "b": "a"}, {"p": "label", "q": "a"}
    with refused(spark, DataError, "2 inputs", "'a': column"):
        model.fit(frame, verbose=0)
    with refused(spark, DataError, "2 outputs", "'q': column"):
        model.fit(frame, features=inputs, verbose=0)
    with refused(spark, DataError, "other inputs", "['a', 'c']"):
        model.fit(frame, features={"a": "features", "c": "a"}, label=outputs, verbose=0)
    with refused(spark, DataError, "other outputs", "['p']"):
        model.fit(frame, features=inputs, label={"p": "label"}, verbose=0)
    with refused(spark, DataError, "sample_weight names other outputs", "['p', 'q']"):
        model.fit(frame, features=inputs, label=outputs, sample_weight={"r": "a"}, verbose=0)
    with refused(spark, DataError, "a decoder for an unknown input", "['c']"):
        SparkModel(two(), decoder={"c": len}).fit(
            frame, features=inputs, label=outputs, verbose=0
        )  # fmt: skip
    with refused(spark, DataError, "decoder must be a function"):
        SparkModel(dense(), decoder="jpeg").fit(frame, features="raw", verbose=0)


def test_kinds_of_data(spark: Any, frame: Any) -> None:
    model = SparkModel(dense())
    with refused(spark, ConfigError, "this kind of data", "generator"):
        model.fit((row for row in ()), verbose=0)
    with refused(spark, ConfigError, "this kind of data", "int"):
        model.evaluate(3)
    for call in (model.fit, model.evaluate, model.predict):
        with refused(spark, ResourceError, "no files", "/nowhere/x.parquet"):
            call("/nowhere/x.parquet")
    with refused(spark, ConfigError, "cannot be seen what the files", "spark.read"):
        model.fit(str(Path(__file__).parent / "scripts"))
    with refused(spark, DataError, "no column of booleans", "'held'"):
        model.fit(frame, validation_data="held")
    x, y = np.zeros((4, 3)), np.zeros(4)
    with refused(spark, DataError, "unequal length", "3 rows"):
        model.fit((x, y[:3]), verbose=0)
    with refused(spark, DataError, "shape (3,)"):
        model.fit((x[:, :2], y), verbose=0)
    with refused(spark, DataError, "no array of numbers"):
        model.fit((x, np.array(["a"] * 4)), verbose=0)
    with refused(spark, ConfigError, "validation_data", "arrays, as the data", "a DataFrame"):
        model.fit((x, y), validation_data=frame.select("features", "label"), verbose=0)
    with refused(spark, DataError, "other types"):
        held_out = frame.selectExpr("array(features) as features", "label")
        model.fit(frame, validation_data=held_out, verbose=0)
    free = keras.Sequential([keras.Input((None, 3)), layers.LSTM(1)])
    free.compile("sgd", "mse")
    rdd = spark.sparkContext.parallelize([(x[:1], 1.0)], 1)
    with refused(spark, DataError, "fixed", "keras.Input"):
        SparkModel(free).fit(rdd, verbose=0)


def test_places(spark: Any, frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with refused(spark, ResourceError, "cannot be written", "file/c"):
        SparkModel(dense()).fit(frame, checkpoint_dir=f"{tmp_path}/file/c", verbose=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for transport in ("socket", "http"):
            model = SparkModel(dense(), parameter_server_mode=transport, port=port)
            with refused(spark, ResourceError, str(port)):
                model.fit(frame, verbose=0)
    wait = module.wait_for_slots
    monkeypatch.setattr(module, "wait_for_slots", lambda s, n, *_: wait(s, n, 0.1))
    with refused(spark, ResourceError, "99 task slots", "4", "mode='asynchronous'"):
        SparkModel(dense(), mode="synchronous", num_workers=99).fit(frame, verbose=0)


# -- estimators, other libraries' names, and functions ------------------------------------------


def classifier(**arguments: Any) -> Any:
    return KerasClassifier(
        model=dense(3, 2, "sparse_categorical_crossentropy"), verbose=0, **arguments
    )


def elephas(**arguments: Any) -> Any:
    config = dense().to_json()
    return ElephasEstimator(keras_model_config=config, loss="mse", categorical=False, **arguments)


def test_estimators_take_frames(spark: Any, frame: Any) -> None:
    local = pd.DataFrame({"a": [1.0]})
    spark.range(1).count()
    for call, data, words in [
        (classifier().fit, local, ["KerasClassifier.fit", "spark.createDataFrame"]),
        (classifier().fit, (np.zeros((2, 3)), np.zeros(2)), ["fit((x, y))"]),
        (classifier().fit, None, ["received: None"]),
        (classifier().fit, "/data/x.parquet", ["spark.read.parquet('/data/x.parquet')"]),
        (KerasTransformer(model=dense()).transform, local, ["KerasTransformer.transform"]),
        (KerasTransformer(model=dense()).transform, None, ["received: None"]),
        (elephas(optimizer_config="sgd").fit, frame.rdd, ["ElephasEstimator.fit", "RDD"]),
        (DenseTransformer("a", "b").transform, local, ["DenseTransformer"]),
    ]:
        with refused(spark, ConfigError, "takes a DataFrame of Spark", *words):
            call(data)
    with refused(spark, ParamTypeError, "KerasClassifier(model=..., ...)"):
        KerasClassifier(dense())


def test_what_keras_cannot_compile(spark: Any, frame: Any) -> None:
    named = "model 'sequential"
    for call, words in [
        (elephas(optimizer_config="sgdd").fit, ["optimizer='sgdd'", named]),
        (SingleTrainer(dense(), "adamm", "mse").train, ["optimizer='adamm'", named]),
        (SingleTrainer(dense(), "sgd", "mse", metrics="accuracy").train, ["metrics=['accuracy']"]),
        (classifier(optimizer="adamm", loss="mse").fit, ["optimizer='adamm'"]),
        (elephas(optimizer_config={"class_name": "No", "config": {}}).fit, ["'No'"]),
    ]:
        with refused(spark, ModelError, *words):
            call(frame)


def test_columns_that_dist_keras_does_not_find(spark: Any, frame: Any) -> None:
    for stage, words in [
        (OneHotTransformer(3, "labels", "o"), ["'labels' (input_col)", "did you mean 'label'?"]),
        (MinMaxTransformer(0, 1, 0, 1, "zzz", "o"), ["input_col='your column'"]),
        (MinMaxTransformer(0, 1, 0, 1, "zzz", "o", is_vector=False), ["'zzz'"]),
        (StandardTransformer(["label", "zzz"]), ["'zzz' (columns)"]),
        (DenseTransformer("zzz", "o"), ["'zzz' (input_col)"]),
        (BinaryLabelTransformer("zzz", "o", "x"), ["'zzz' (input_column)"]),
    ]:
        with refused(spark, DataError, *words):
            stage.transform(frame)
    with refused(spark, DataError, "'prediction' (prediction_col)"):
        AccuracyEvaluator().evaluate(frame)


def test_functions_that_cannot_be_called(spark: Any, frame: Any) -> None:
    def train(feed: Any, rate: float) -> None: ...

    for call, words in [
        (lambda: sparkdl.run(train, (1, 2, 3)), ["train(feed", "too many positional"]),
        (lambda: sparkdl.run(train, data=frame), ["'rate'", "its feed before args"]),
        (lambda: sparkdl.run(train, (1,), {"rates": 1}), ["'rate'"]),
        (lambda: sparkdl.inference(train, frame, "y int"), ["'rate'", "the batches"]),
        (lambda: sparkdl.run(train, (1, 2), spark=spark.sparkContext), ["must be the session"]),
    ]:
        with refused(spark, ConfigError, *words):
            call()


def test_where_a_model_is_written(tmp_path: Path) -> None:
    model = SparkModel(dense())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    for call, words in [
        (lambda: model.export(None), ["path must say", "None"]),  # type: ignore[arg-type]
        (lambda: model.save(3), ["path must say", "3"]),  # type: ignore[arg-type]
        (lambda: sparkdl.load_spark_model(dense()), ["path must say", "Sequential"]),
        (lambda: model.export(f"file:{tmp_path}/mine"), ["a folder of its own", "notes.txt"]),
        (lambda: model.export(f"file:{tmp_path}/mine/notes.txt"), ["a file"]),
        (lambda: SparkModel(dense(), custom_objects=[len]), ["{'len': len}"]),  # type: ignore[arg-type]
    ]:
        with refused(None, ConfigError, *words):
            call()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    for _ in range(2):  # an earlier export is replaced
        model.export(f"file:{tmp_path}/served")
    model.save(tmp_path / "model.keras")
    assert sparkdl.load_spark_model(tmp_path / "model.keras").mode == "asynchronous"


def test_numbers_of_numpy_and_paths(spark: Any, frame: Any, tmp_path: Path) -> None:
    frame.select("features", "label").write.parquet(f"file:{tmp_path}/rows.parquet")
    rows = tmp_path / "rows.parquet"
    model = SparkModel(dense(), num_workers=np.int64(1), batch_size=np.int32(2))
    callbacks = [keras.callbacks.History(), None]
    folder = tmp_path / "checkpoints"
    history = model.fit(
        rows, epochs=np.int64(2), batch_size=np.int64(2), steps_per_epoch=np.int32(1),
        verbose=np.int64(0), callbacks=callbacks, checkpoint_dir=folder,
    )  # fmt: skip
    assert len(history.history["loss"]) == 2
    assert (folder / "checkpoint.json").exists()
    many = frame.crossJoin(spark.range(16))  # of few, Spark's draw may hold none out
    split = model.fit(many, validation_split=np.float32(0.5), shuffle=np.bool_(True), verbose=0)
    assert "loss" in split.history
    assert model.predict(rows, batch_size=np.int64(2)).count() == 4
    assert sparkdl.predict(model.model, rows).count() == 4
    assert model.evaluate(rows)["loss"] >= 0
    counted = sparkdl.run(
        lambda feed: sum(len(b["label"]) for b in feed.batches(3)), data=rows,
        num_workers=np.int64(1),
    )  # fmt: skip
    assert counted == [4]


# -- found in the data --------------------------------------------------------------------------


def rows(*, features: Any = None, label: Any = 1.0, weight: Any = 1.0) -> list[Any]:
    """Rows of which the last is as given."""
    good = ([1.0, 2.0, 3.0], 1.0, 1.0)
    return [*[good] * 30, (good[0] if features is None else features, label, weight)]


@pytest.mark.parametrize(
    ("bad", "words", "model"),
    [
        ({"features": [1.0, 2.0]}, ["'features'", "shape (3,)", "2"], {}),
        ({"features": [1.0, None, 2.0]}, ["'features'", "nulls", "dropna"], {}),
        ({"label": None}, ["'label'", "nulls"], {}),
        ({"weight": None}, ["'w'", "nulls"], {}),
        ({"features": [1.0, float("nan"), 2.0]}, ["'features'", "nan"], {}),
        ({"label": 4.0}, ["'label'", "integers from 0 to 3", "4.0"],
         {"outputs": 4, "loss": "sparse_categorical_crossentropy"}),
        ({"label": -1.0}, ["'label'", "integers from 0 to 3", "-1.0"],
         {"outputs": 4, "loss": "categorical_crossentropy"}),
        ({"label": 0.5}, ["'label'", "integers from 0 to 3", "0.5"],
         {"outputs": 4, "loss": "sparse_categorical_crossentropy"}),
    ],
)  # fmt: skip
def test_wrong_rows(spark: Any, bad: Any, words: list[str], model: dict[str, Any]) -> None:
    df = spark.createDataFrame(rows(**bad), "features array<double>, label double, w double")
    spark_model = SparkModel(dense(**model), num_workers=2)
    before = time.monotonic()
    with refused(spark, DataError, *words, jobs=True):
        if "nan" in words:
            spark_model.fit(df, sample_weight="w", check_data=True, verbose=0)
        else:  # reads rows as fit does, in half the time
            spark_model.evaluate(df.coalesce(1), sample_weight="w")
    assert time.monotonic() - before < 60


def test_wrong_rows_in_a_synchronous_fit(spark: Any) -> None:
    """The workers that read their rows well do not wait for the one that did not."""
    df = spark.createDataFrame(
        rows(features=[1.0]), "features array<double>, label double, w float"
    )
    with refused(spark, DataError, "'features'", "shape (3,)", jobs=True):
        SparkModel(dense(), mode="synchronous", num_workers=2).fit(df, verbose=0)


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_no_rows(spark: Any, mode: str) -> None:
    df = spark.createDataFrame([], "features array<double>, label double")
    model = dense()
    before = model.get_weights()
    with refused(spark, DataError, "no rows to train on", "0 rows", jobs=True):
        SparkModel(model, mode=mode, num_workers=2).fit(df, verbose=0)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


def test_wrong_elements_of_an_rdd(spark: Any) -> None:
    x = np.zeros(3)
    cases: list[tuple[Any, list[str]]] = [
        ((x, 1.0, 2.0), ["no example", "a pair (x, y)", "tuple"]),
        ((np.zeros(2), 1.0), ["row 1", "shape (3,)", "shape (2,)"]),
        ((x, None), ["row 1", "label", "None"]),
        ((x, 1.5), ["row 1", "whole numbers", "1.5"]),
    ]
    model = SparkModel(dense(3, 4, "sparse_categorical_crossentropy"), num_workers=1)
    signature = model_signature(model.model)
    for bad, words in cases:
        encoded = list(pair_encoder(signature)([(x, 1), bad, (x, 2)]))
        assert len(encoded) == 2
        assert encoded[0][-1] is None
        assert all(word in encoded[1][-1] for word in words), encoded[1]
    rdd = spark.sparkContext.parallelize([(x, 1), cases[1][0]], 1)
    with refused(spark, DataError, *cases[1][1], jobs=True):
        model.evaluate(rdd)
    rdd = spark.sparkContext.parallelize([(x, 1), (x, 4)], 1)
    with refused(spark, DataError, "integers from 0 to 3", "4", jobs=True):
        model.fit(rdd, verbose=0)


def test_workers_outlive_data_that_do_not_fit(spark: Any) -> None:
    """Spark ends a worker that leaves input unread; the next fit imported the framework again."""
    good = "array(1.0F, 2.0F, 3.0F) as features", "1.0 as label"
    model = SparkModel(dense(), num_workers=1)
    bad = spark.range(45_000).selectExpr("if(id < 1, null, array(1.0F, 2.0F, 3.0F)) as features",
                                         good[1])  # fmt: skip
    for call in (model.fit, model.evaluate):
        for _ in range(3):
            model.fit(spark.range(64).selectExpr(*good), verbose=0)
            began, before = time.monotonic(), {process.pid for process in forked_workers()}
            assert before
            with refused(spark, DataError, "1 nulls", "dropna", jobs=True):
                call(bad, verbose=0)
            time.sleep(0.5)
            if time.monotonic() - began < 50:  # Spark ends a worker that was idle for a minute
                break
        assert before <= {process.pid for process in forked_workers()}


def test_labels_that_a_binary_cross_entropy_does_not_take(spark: Any) -> None:
    df = spark.createDataFrame(
        [([1.0, 2.0, 3.0], 1), ([0.0, 0.0, 1.0], -1)], "features array<float>, label int"
    )
    model = SparkModel(dense(loss="binary_crossentropy"), num_workers=1)
    with refused(spark, DataError, "'label'", "from 0 to 1", "-1", "(y + 1) / 2", jobs=True):
        model.fit(df, verbose=0)
