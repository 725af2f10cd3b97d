"""Arguments that are not of their kind: one error before anything happens, or taken as meant."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest

import sparkdl
from sparkdl import Limits, Network, SparkModel, tune
from sparkdl.compat.elephas.hyperparam import HyperParamModel, Template
from sparkdl.compat.elephas.spark_model import _given
from sparkdl.config import FitConfig
from sparkdl.errors import (
    ConfigError,
    ModelError,
    SparkDLError,
    UnknownNameError,
    UnpicklableError,
)
from sparkdl.files.model_file import read_model
from sparkdl.launch.function import check_roles
from sparkdl.ml import KerasClassifier
from sparkdl.process import payload
from sparkdl.settings.values import (
    require_flag,
    require_int,
    require_objects,
    require_path,
    require_seconds,
    shown,
)
from sparkdl.spark.fit.arguments import FitArguments, check_callbacks, check_share, verbosity
from sparkdl.spark.forms.arrays import unknown_data
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.inference.predict import PredictionChoice
from sparkdl.spark.runs.feeding import Feeding, feed_settings
from sparkdl.spark.runs.function_stage import dump_function
from sparkdl.spark.session.frames import require_frame
from sparkdl.spark.session.running import require_running

pytestmark = pytest.mark.keras

# -- NumPy's numbers, and paths ------------------------------------------------------------------


def test_numpy_numbers_become_plain_ones() -> None:
    config = FitConfig(
        num_workers=np.int64(2), batch_size=np.int32(8), frequency=np.int16(4), seed=np.uint8(3),
        repartition=np.bool_(False),
        limits=Limits(start_timeout_s=np.float32(5), memory_budget_mb=np.int64(64)),
        pad=np.float64(0), resources={"gpu": np.int64(1)},
    )  # fmt: skip
    assert json.loads(json.dumps(config.to_dict())) == {
        **FitConfig().to_dict(), "num_workers": 2, "batch_size": 8, "frequency": 4, "seed": 3,
        "repartition": False, "pad": 0.0,
        "limits": {
            **FitConfig().to_dict()["limits"], "start_timeout_s": 5.0, "memory_budget_mb": 64,
        },
        "resources": {"gpu": 1},
    }  # fmt: skip
    arguments = FitArguments(
        epochs=np.int64(5), batch_size=np.int64(4), steps_per_epoch=np.int32(2),
        initial_epoch=np.int8(1), validation_split=np.float32(0.25), shuffle=np.bool_(True),
        verbose=np.int64(1), checkpoint_dir=pathlib.Path("/tmp/c"),
    )  # fmt: skip
    kinds = {name: type(value) for name, value in vars(arguments).items()}
    assert kinds["epochs"] is kinds["batch_size"] is kinds["steps_per_epoch"] is int
    assert (kinds["validation_split"], kinds["shuffle"]) == (float, bool)
    assert arguments.checkpoint_dir == "/tmp/c"
    limits = Limits(memory_budget_mb=np.int64(1), stall_timeout_s=5.0)  # type: ignore[arg-type]
    feed = feed_settings(3, np.int64(2), np.bool_(True), Feeding(seed=np.int64(7)), limits, "drop")
    assert feed is not None
    assert (type(feed.epochs), type(feed.seed), feed.memory_budget_bytes) == (int, int, 1 << 20)
    assert verbosity(np.int64(2)) == 2


def test_paths_of_pathlib() -> None:
    assert form_of(pathlib.Path("/data/rows.parquet")).data == "/data/rows.parquet"
    assert require_path("path", pathlib.Path("a") / "b") == "a/b"
    assert "a path of Parquet" in str(unknown_data(3))


# -- refused -------------------------------------------------------------------------------------


class OnlyEpochEnd:
    def on_epoch_end(self, epoch: int, logs: Any) -> None: ...


class Scale: ...


def two(a: int, b: int) -> int:
    return a + b


IDENTITY = lambda x: x  # noqa: E731
WRONG: list[tuple[str, Any, dict[str, Any] | tuple[Any, ...], type[SparkDLError], list[str]]] = [
    ("seed of a JVM", FitConfig, {"seed": 2**70}, ConfigError, ["seed", str(2**63 - 1)]),
    ("np float", FitConfig, {"batch_size": np.float64(2.5)}, ConfigError, [repr(np.float64(2.5))]),
    ("np bool", FitConfig, {"batch_size": np.bool_(True)}, ConfigError, ["batch_size"]),
    ("bind", Network, {"server_bind": 5}, ConfigError, ["server_bind", "10.0.0.7", "5"]),
    ("address", Network, {"server_address": ["a"]}, ConfigError, ["server_address", "['a']"]),
    ("worker bind", Network, {"worker_bind": 5}, ConfigError,
     ["worker_bind", "5"]),
    ("repartition", FitConfig, {"repartition": "False"}, ConfigError, ["repartition", "'False'"]),
    ("mode", FitConfig, {"mode": np.zeros(2)}, UnknownNameError, ["mode"]),
    ("frequency", FitConfig, {"frequency": np.zeros(2)}, UnknownNameError, ["frequency"]),
    ("shuffle", FitArguments, {"shuffle": "yes"}, ConfigError, ["shuffle", "'yes'"]),
    ("check_data", FitArguments, {"check_data": "yes"}, ConfigError, ["check_data", "'yes'"]),
    ("resume", FitArguments, {"resume": "no"}, ConfigError, ["resume", "'no'"]),
    ("checkpoint_dir", FitArguments, {"checkpoint_dir": 3}, ConfigError, ["checkpoint_dir", "3"]),
    ("empty path", FitArguments, {"checkpoint_dir": ""}, ConfigError, ["checkpoint_dir", "''"]),
    ("verbose", FitArguments, {"verbose": np.zeros(2)}, ConfigError, ["verbose"]),
    ("share", check_share, ("validation_split", True), ConfigError, ["validation_split"]),
    ("flag", require_flag, ("shuffle", 1), ConfigError, ["shuffle", "True or False"]),
    ("int", require_int, ("epochs", "5", 1), ConfigError, ["epochs", "'5'"]),
    ("seconds", require_seconds, ("timeout_s", "a"), ConfigError, ["timeout_s", "'a'"]),
    ("path", require_path, ("path", None), ConfigError, ["path", "None"]),
    ("objects", require_objects, ([Scale],), ConfigError, ["custom_objects={'Scale': Scale}"]),
    ("object", require_objects, (Scale,), ConfigError, ["name -> class"]),
    ("callback", check_callbacks, ([OnlyEpochEnd()],), ConfigError,
     ["no callback", "keras.callbacks.Callback", "no on_epoch_begin"]),
    ("column", PredictionChoice, {"output_column": None}, ConfigError, ["output_column", "None"]),
    ("outputs", PredictionChoice, {"outputs": 3}, ConfigError, ["outputs", "3"]),
    ("session", require_running, ("local",), ConfigError, ["SparkSession", "'local'"]),
    ("doctor", sparkdl.doctor, ("x",), ConfigError, ["SparkSession", "'x'"]),
    ("roles", check_roles, ("ps", None), ConfigError, ["roles", "'worker': 2", "'ps'"]),
    ("roles of run", sparkdl.run, {"fn": two, "roles": "ps"}, ConfigError, ["roles", "'ps'"]),
    ("servers", sparkdl.run, {"fn": two, "roles": {"worker": 1, "ps": 1}, "ps_on_driver": "no"},
     ConfigError, ["ps_on_driver", "'no'"]),
    ("resume", tune.search, {"build": two, "data": 1, "resume": "no"}, ConfigError,
     ["resume", "'no'"]),
    ("run's flag", sparkdl.run, {"fn": two, "data": 1, "shuffle": "yes"}, ConfigError,
     ["shuffle", "'yes'"]),
    ("run's folder", Feeding, {"checkpoint_dir": 3}, ConfigError, ["checkpoint_dir", "3"]),
    ("run's trigger", Feeding, {"trigger": "now"}, ConfigError, ["availableNow", "'now'"]),
    ("too few", dump_function, (two, (1,), {}), ConfigError, ["two(a", "missing", "'b'"]),
    ("too many", dump_function, (two, (1, 2), {}, "its feed before args"), ConfigError,
     ["two(a", "too many", "its feed before args"]),
    ("run's call", sparkdl.run, (two, (1,)), ConfigError, ["two(a", "missing"]),
    ("pandas", require_frame, ("KerasClassifier.fit", pd.DataFrame({"a": [1]})), ConfigError,
     ["KerasClassifier.fit", "spark.createDataFrame", "DataFrame"]),
    ("pair", require_frame, ("KerasClassifier.fit", ([1], [2])), ConfigError, ["tuple"]),
    ("nothing", require_frame, ("transform", None), ConfigError, ["None"]),
    ("no frame to write", sparkdl.write_tfrecords, (pd.DataFrame({"a": [1]}), "p"), ConfigError,
     ["write_tfrecords", "spark.createDataFrame"]),
    ("swapped", sparkdl.write_tfrecords, ("path", 3), ConfigError, ["write_tfrecords", "'path'"]),
    ("metric", tune.search, {"build": two, "data": 1, "metric": None}, ConfigError, ["metric"]),
    ("searcher", tune.search, {"build": two, "data": 1, "searcher": "asha"}, ConfigError,
     ["tune.Asha(...)", "'asha'"]),
    ("a class", tune.search, {"build": two, "data": 1, "searcher": tune.Hyperband}, ConfigError,
     ["searcher=tune.Hyperband(...)"]),
    ("timeout", tune.search, {"build": two, "data": 1, "timeout_s": "a"}, ConfigError,
     ["timeout_s", "'a'"]),
    ("settings", tune.search, {"build": two, "data": 1, "settings": [1]}, ConfigError,
     ["settings", "[1]"]),
    ("folder", tune.search, {"build": two, "data": 1, "checkpoint_dir": 3}, ConfigError,
     ["checkpoint_dir", "3"]),
    ("lambda", Template, (IDENTITY,), ConfigError, ["a function with def", "lambda x"]),
    ("data of a search", HyperParamModel(None).minimize, (two, 3, 1), ConfigError, ["a function"]),
    ("a model by place", KerasClassifier, (3,), ConfigError, ["KerasClassifier", "model=..."]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given", "kind", "words"),
    [row[1:] for row in WRONG],
    ids=[row[0] for row in WRONG],
)
def test_values_of_the_wrong_kind(
    function: Any, given: Any, kind: type[SparkDLError], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        function(**given) if isinstance(given, dict) else function(*given)
    assert caught.value.what
    assert caught.value.expected
    assert caught.value.received
    for word in words:
        assert word in str(caught.value)


def test_none_is_no_callback_and_no_error() -> None:
    class Callback(OnlyEpochEnd):
        def __getattr__(self, name: str) -> Any:
            return print

    one = Callback()
    assert check_callbacks([one, None]) == [one]
    assert check_callbacks(None) == []
    assert check_callbacks(one) == [one]


def test_arrays_after_the_model_of_elephas() -> None:
    x = np.zeros((4, 3))
    assert _given("SparkModel", (x,), {}) == {"mode": "synchronous", "num_workers": x}


def test_numbers_of_numpy_are_shown_as_they_are() -> None:
    assert shown(np.int64(5)) == repr(np.int64(5))  # with NumPy 2 the type, too
    assert shown(np.zeros((2, 3))) == "ndarray of shape (2, 3)"


def test_a_model_file_in_keras_older_format(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "old.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(ModelError, match="HDF5") as caught:
        read_model(str(path))
    assert f"SparkModel(keras.models.load_model({str(path)!r}))" in caught.value.hint


def test_a_session_is_known_by_what_it_has() -> None:
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=bool)))
    require_running(SimpleNamespace(sparkContext=context))
    with pytest.raises(ConfigError, match="spark must be the session"):
        require_running(context)


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy, copy.copy, "closure"])
def test_a_spark_model_is_neither_pickled_nor_copied(send: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    spark_model = SparkModel(model)

    def scores(rows: Any) -> Any:
        return spark_model.predict(rows)

    with pytest.raises(UnpicklableError, match=r"(?s)driver.*load_spark_model") as info:
        payload.dump(scores) if send == "closure" else send(spark_model)
    assert isinstance(info.value, TypeError)
    assert isinstance(pickle.loads(pickle.dumps(info.value)), UnpicklableError)
