"""What a newcomer does wrong: one error each that says what to write instead. No JVM is needed."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from sparkdl.config import FitConfig
from sparkdl.data import ColumnSpec, DataSpec, decode
from sparkdl.errors import (
    ConfigError,
    DataError,
    ResourceError,
    SparkDLError,
    UnknownArgumentError,
    UnknownNameError,
)
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.network import Network
from sparkdl.settings.values import shown
from sparkdl.spark.fit.arguments import (
    check_callbacks,
    check_keras_arguments,
    refuse_labels_apart,
)
from sparkdl.spark.forms.arrays import arrays_of
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.sources import Columns, Source
from sparkdl.spark.runs import capacity
from sparkdl.spark.runs.feeding import Feeding, check_streaming, fed_frame
from sparkdl.spark.runs.function_stage import run_stage
from sparkdl.spark.runs.launcher import rows_problem
from sparkdl.spark.session import running
from sparkdl.spark.session.frames import is_frame, is_rdd
from sparkdl.spark.session.running import session_of


def text_of(kind: type[SparkDLError], function: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the error that a call raises; all four beats must be there."""
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    assert type(caught.value) is kind
    assert caught.value.what
    assert caught.value.expected
    assert caught.value.received
    assert caught.value.hint
    assert len(str(caught.value)) < 1200
    return str(caught.value)


def test_a_mode_that_is_a_communicator_or_a_transport() -> None:
    text = text_of(UnknownNameError, FitConfig, mode="horovod")
    assert "mode='allreduce', communicator='horovod'" in text
    text = text_of(UnknownNameError, FitConfig, mode="http")
    assert "parameter_server_mode='http'" in text


def test_an_unknown_argument_lists_the_known_ones() -> None:
    @lists_its_arguments
    def make(self: Any, model: Any, mode: str = "asynchronous", *, num_workers: int = 0) -> int:
        return num_workers

    assert make(None, 1, num_workers=3) == 3
    text = text_of(UnknownArgumentError, make, None, 1, num_worker=2)
    assert "'model', 'mode', 'num_workers'" in text
    assert "did you mean 'num_workers'?" in text
    assert "'self'" not in text
    assert issubclass(UnknownArgumentError, TypeError)


@pytest.mark.parametrize("y", [np.zeros((5000, 10)), [0, 1], (1,)])
def test_labels_as_a_second_argument(y: Any) -> None:
    text = text_of(ConfigError, refuse_labels_apart, "fit", "epochs", y)
    assert "fit((x, y)" in text
    assert len(text) < 400
    refuse_labels_apart("fit", "epochs", 5)
    refuse_labels_apart("fit", "epochs", np.int64(5))
    refuse_labels_apart("evaluate", "batch_size", None)


class Model:
    """As ``SparkModel``, without Keras."""

    @lists_its_arguments
    def __init__(self, model: Any, num_workers: int | None = None) -> None:
        self.model, self.num_workers = model, num_workers

    def fit(
        self, data: Any, epochs: int = 1, callbacks: Any = None, features: Any = "features",
        **keras_fit_arguments: Any,
    ) -> None:  # fmt: skip
        """See :meth:`SparkModel.fit`."""
        check_keras_arguments(type(self), keras_fit_arguments)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("y", "label='column'"),
        ("callback", "did you mean 'callbacks'?"),
        ("num_workers", "it is an argument of another call: Model(model, num_workers=...)"),
    ],
)
def test_an_argument_that_fit_does_not_take(name: str, hint: str) -> None:
    text = text_of(UnknownArgumentError, Model(None).fit, None, **{name: 1})
    assert f"unknown argument of fit '{name}'" in text
    for part in ("'epochs'", "'class_weight'"):
        assert part in text
    assert "keras_fit_arguments" not in text
    assert hint in text


def test_an_argument_of_fit_in_the_constructor() -> None:
    text = text_of(UnknownArgumentError, Model, None, features="x")
    assert "it is an argument of another call: fit(data, features=...)" in text


def test_an_object_with_every_attribute_is_shown() -> None:
    class Expression:
        """As a Column of Spark, whose fields are expressions, too."""

        def __getattr__(self, name: str) -> Expression:
            return self

        def __repr__(self) -> str:
            return "Column<'a'>"

    assert shown(Expression()) == "Column<'a'>"


def test_callbacks_that_are_none() -> None:
    class EarlyStopping:
        """As a callback of Keras, which has all methods."""

        def __getattr__(self, name: str) -> Any:
            return print

    check_callbacks(None)
    check_callbacks([EarlyStopping(), None])
    check_callbacks(EarlyStopping())
    assert "callbacks=[EarlyStopping(...)]" in text_of(ConfigError, check_callbacks, EarlyStopping)
    assert "class EarlyStopping" in text_of(ConfigError, check_callbacks, [EarlyStopping])
    assert "LambdaCallback" in text_of(ConfigError, check_callbacks, [print])


# -- columns ------------------------------------------------------------------------------------


def signature(*outputs: str) -> Signature:
    return Signature(
        {"x": TensorSpec("x", (3,), "float32")},
        {name: TensorSpec(name, (1,), "float32") for name in outputs or ("y",)},
        {},
        named_inputs=True,
    )


def schema(**columns: Any) -> T.StructType:
    array = T.ArrayType(T.FloatType())
    columns = {"features": array, "label": T.FloatType(), **columns}
    return T.StructType([T.StructField(name, kind) for name, kind in columns.items()])


@pytest.mark.parametrize("kind", [T.TimestampType(), T.DateType(), T.ArrayType(T.DateType())])
def test_times_are_no_numbers(kind: Any) -> None:
    text = text_of(DataError, make_spec, schema(t=kind), signature(), "t", "label")
    assert "F.unix_timestamp('t')" in text


def test_weights_for_some_outputs() -> None:
    columns = schema(w=T.FloatType())
    labels = {"price": "label", "kind": "label"}
    spec = make_spec(columns, signature("price", "kind"), "features", labels, {"price": "w"})
    assert spec.weights["price"].columns == ("w",)
    assert spec.weights["kind"].columns == ("__sparkdl_ones",)
    with pytest.raises(DataError, match="names other outputs"):
        make_spec(columns, signature("price", "kind"), "features", labels, {"size": "w"})


def test_weights_for_some_outputs_of_arrays() -> None:
    y = {"price": np.zeros(2), "kind": np.ones(2)}
    _, _, weights = arrays_of((np.zeros((2, 3)), y, {"price": np.full(2, 5.0)}))
    assert list(weights) == ["price", "kind"]
    np.testing.assert_array_equal(weights["kind"], [1, 1])
    np.testing.assert_array_equal(weights["price"], [5, 5])


def test_nulls_inside_an_array() -> None:
    spec = DataSpec({"x": ColumnSpec(("c",), (2,), "float32")})
    inside = pa.RecordBatch.from_pydict({"c": pa.array([[1.0, 2.0], [1.0, None]])})
    text = text_of(DataError, decode, inside, spec)
    assert "inside an array" in text
    assert "do not look inside" in text
    assert "F.coalesce" in text
    assert "row 1" in text
    missing = pa.RecordBatch.from_pydict({"c": pa.array([[1.0, 2.0], None])})
    text = text_of(DataError, decode, missing, spec)
    assert "df.dropna() removes" in text
    assert "train" not in text  # predict reads columns, too


def test_several_names_in_any_form_can_be_written_to_a_file() -> None:
    rows = pd.DataFrame({"a": [1.0], "b": [2.0], "y": [0.0]})
    keys = dict.fromkeys("ab").keys()
    for several in (rows.columns[:-1], np.array(["a", "b"]), ("a", "b"), keys):
        columns = Columns(features=several, label={"out": several})
        assert json.loads(json.dumps(columns.features)) == ["a", "b"]
        assert json.loads(json.dumps(columns.label)) == {"out": ["a", "b"]}
    columns = Columns(features={"wide": iter("ab"), "deep": "y"}, label=None)
    assert columns.features == {"wide": ["a", "b"], "deep": "y"}
    assert columns.label is None


@pytest.mark.parametrize("argument", ["features", "label"])
def test_names_without_an_order(argument: str) -> None:
    for names in ({"a", "b"}, frozenset({"a", "b"}), {"wide": {"a", "b"}}):
        text = text_of(DataError, Columns, **{argument: names})
        assert argument in text
        assert "['a', 'b']" in text


# -- data ---------------------------------------------------------------------------------------


class Frame:
    """What is asked of a DataFrame before its columns are."""

    __module__ = "pyspark.sql.fake"

    def __init__(self, *, streaming: bool = False, stopped: bool = False) -> None:
        self.isStreaming = streaming
        scala_context = SimpleNamespace(isStopped=lambda: False)
        java_context = SimpleNamespace(sc=lambda: scala_context)
        context = SimpleNamespace(_jsc=None if stopped else java_context)
        self.sparkSession = SimpleNamespace(sparkContext=context)

    def mapInArrow(self) -> None: ...


def open_source(data: Any, signature: Signature, columns: Columns) -> Source:
    return form_of(data).open(signature, columns)


def test_frames_that_cannot_be_read() -> None:
    text = text_of(DataError, open_source, Frame(streaming=True), signature(), Columns())
    assert "fit_stream" in text
    text = text_of(ResourceError, open_source, Frame(stopped=True), signature(), Columns())
    assert "has been stopped" in text
    assert "getOrCreate" in text
    text = text_of(ResourceError, fed_frame, Frame(stopped=True), None)  # run, inference
    assert "has been stopped" in text
    stopped = Frame(stopped=True).sparkSession
    text = text_of(ResourceError, fed_frame, "rows.parquet", stopped)
    assert "has been stopped" in text
    text = text_of(ResourceError, check_streaming, Frame(stopped=True), Feeding())
    assert "has been stopped" in text
    text = text_of(ResourceError, run_stage, None, 2, stopped, Network())
    assert "has been stopped" in text
    text = text_of(ConfigError, open_source, (Frame(), Frame()), signature(), Columns())
    assert "a tuple of Frame, Frame" in text
    assert "without a tuple" in text


def test_an_expression_of_spark_is_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Expression:
        """As a Column of Spark: it has every attribute."""

        __module__ = "pyspark.sql.fake"

        def __getattr__(self, name: str) -> Expression:
            return self

    assert is_frame(Frame())
    assert not is_frame(Expression())
    assert not is_rdd(Expression())
    monkeypatch.setattr("pyspark.sql.SparkSession.active", lambda: None)
    text = text_of(ResourceError, session_of, Expression())
    assert "no Spark session is running" in text


def test_data_that_cannot_be_fed() -> None:
    text = text_of(ConfigError, fed_frame, np.zeros((2, 3)), None)
    assert "pandas.DataFrame" in text


# -- the cluster --------------------------------------------------------------------------------


def session(master: str, python: str = "python3", **conf: str) -> Any:
    """A session as far as it is asked for its settings."""

    def get(name: str, default: Any = None) -> Any:
        return conf.get(name.replace(".", "_"), default)

    context = SimpleNamespace(
        master=master, pythonExec=python, getConf=lambda: SimpleNamespace(get=get)
    )
    return SimpleNamespace(sparkContext=context)


@pytest.mark.parametrize(
    ("master", "slots", "wanted", "waits"),
    [
        ("local[2]", 2, 8, False),
        ("local[*]", 4, 8, False),
        ("local", 1, 8, False),
        ("local-cluster[2,2,1024]", 4, 8, False),
        ("local-cluster[2,2,1024]", 2, 4, True),
        ("spark://host:7077", 2, 8, True),
    ],
)
def test_slots_that_are_known_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, master: str, slots: int, wanted: int, waits: bool
) -> None:
    monkeypatch.setattr(capacity, "count_slots", lambda spark, profile=None: slots)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert capacity.wait_for_slots(session(master), wanted, 0.3) == slots
    assert bool(slept) == waits


@pytest.mark.parametrize(
    ("master", "settings", "come"),
    [
        ("local[2]", {}, 2),
        ("local-cluster[2,2,1024]", {}, 4),
        ("yarn", {"spark_executor_instances": "8", "started": "1"}, 16),
        ("yarn", {"spark_executor_instances": "2", "started": "2"}, 2),  # all, of a GPU each
        ("yarn", {"spark_executor_instances": "1", "started": "2"}, 2),
        (
            "yarn",
            {"dynamic": "true", "spark_dynamicAllocation_maxExecutors": "3"}
            | {"spark_executor_cores": "4", "spark_task_cpus": "2", "started": "0"},
            6,
        ),
        ("yarn", {"dynamic": "true"}, None),
    ],
)
def test_slots_of_executors_that_are_still_starting_count(
    monkeypatch: pytest.MonkeyPatch, master: str, settings: dict[str, str], come: int | None
) -> None:
    monkeypatch.setattr(capacity, "count_slots", lambda spark, profile=None: 2)
    spark = session(master, **settings)
    spark.conf = SimpleNamespace(get=lambda name, default=None: settings.get("dynamic", default))
    infos = [None] * (1 + int(settings.get("started", "0")))  # of the driver, too
    tracker = SimpleNamespace(getExecutorInfos=lambda: infos)
    spark.sparkContext._jsc = SimpleNamespace(
        sc=lambda: SimpleNamespace(statusTracker=lambda: tracker)
    )
    assert capacity.slots_to_come(spark, 64) == come
    assert capacity.slots_to_come(spark, 2) == 2


def test_a_standalone_master_says_no_number_until_its_executors_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = iter([2, 2, 4, 6])
    monkeypatch.setattr(capacity, "count_slots", lambda spark, profile=None: next(seen, 6))
    spark = session("spark://host:7077")
    spark.conf = SimpleNamespace(get=lambda name, default=None: default)
    assert capacity.slots_to_come(spark, 64) == 6


@pytest.mark.parametrize(
    ("master", "slots", "workers"),
    [
        ("local-cluster[2,2,1024]", [0, 0, 2, 2, 4], 4),  # one executor later than the other
        ("local-cluster[1,4,1024]", [4], 4),
        ("spark://host:7077", [0, 0, 3, 6], 6),
        ("spark://host:7077", [6], 6),
        ("yarn", [6], 6),
        ("local[3]", [3], 3),
    ],
)
def test_the_workers_of_a_session_that_has_just_begun(
    monkeypatch: pytest.MonkeyPatch, master: str, slots: list[int], workers: int
) -> None:
    """Spark says 2 until executors have registered, which standalone masters do not wait for."""
    seen = iter(slots)
    now = [0]

    def count(spark: Any, profile: Any = None) -> int:
        now[0] = next(seen, slots[-1])
        return now[0]

    monkeypatch.setattr(capacity, "count_slots", count)
    spark = session(master)
    spark.conf = SimpleNamespace(get=lambda name, default=None: default)
    context = vars(spark.sparkContext)

    class Context(SimpleNamespace):
        defaultParallelism = property(lambda self: max(now[0], 2) if slots[0] == 0 else slots[-1])

    spark.sparkContext = Context(**context)
    slept: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: (slept.append(s), sleep(s)))
    assert capacity.default_parallelism(spark) == workers
    assert bool(slept) == (slots[0] == 0)
    assert sum(slept) < 5


def test_nobody_waits_for_executors_that_start_with_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "count_slots", lambda spark, profile=None: 0)
    spark = session("spark://host:7077")
    spark.conf = SimpleNamespace(get=lambda name, default=None: "true")
    spark.sparkContext.defaultParallelism = 2
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    capacity.default_parallelism(spark)
    assert not slept


def test_a_local_master_takes_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    for spark, expected in [
        (session("local[2]"), sys.executable),
        (session("local-cluster[2,1,1024]"), sys.executable),
        (session("spark://host:7077"), "python3"),
        (session("local[2]", "/opt/python"), "/opt/python"),
        (session("local[2]", spark_pyspark_python="/opt/python"), "/opt/python"),
        (session("spark://host:7077", spark_pyspark_python="/opt/python"), "/opt/python"),
        (session("local[2]", "/my/python", spark_pyspark_python="/opt/python"), "/my/python"),
    ]:
        before = spark.sparkContext.pythonExec
        with running.this_interpreter(spark.sparkContext) as another:
            assert spark.sparkContext.pythonExec == expected
            assert another == (expected != before)
        assert spark.sparkContext.pythonExec == before
        named = running.interpreter_of(spark.sparkContext)
        assert repr(expected) in named
        assert repr(before) in named  # the user's own functions keep it
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    with running.this_interpreter(session("local[2]").sparkContext) as another:
        assert not another


PYTHON = "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
CAST = "[CAST_INVALID_INPUT] The value 'x' cannot be cast to \"DOUBLE\". SQLSTATE: 22018"


@pytest.mark.parametrize(
    ("text", "received"),
    [
        (f"{CAST}\n== DataFrame ==\n", CAST),
        (f"Job aborted: Task 1 failed 4 times: {CAST}\n\tat org.apache.spark.Task.run", CAST),
        (
            PYTHON + '  File "/home/me/own.py", line 3, in bad\n    raise ValueError("of 20")\n'
            "ValueError: of 20\n\n\tat org.apache.spark.api.python.BasePythonRunner: none",
            "ValueError: of 20",
        ),
        (PYTHON + '  File "/x/sparkdl/spark/executor/stage.py", line 3\nValueError: ours', None),
        ("Python worker exited unexpectedly (crashed)", None),
        ("[UNRESOLVED_COLUMN.WITH_SUGGESTION] no column `x`. SQLSTATE: 42703", None),
    ],
)
def test_rows_that_the_users_own_frame_cannot_compute(text: str, received: str | None) -> None:
    found = rows_problem(RuntimeError(text))
    assert (None if found is None else found.received) == received
    if found is not None:
        assert "noop" in str(found.hint)


def test_the_choice_of_another_thread_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    context = session("local[2]").sparkContext
    taken: list[tuple[bool, str]] = []
    began = threading.Event()

    def other_fit() -> None:
        began.set()
        with running.this_interpreter(context) as another:
            time.sleep(0.2)  # the first thread has ended its own meanwhile
            taken.append((another, context.pythonExec))

    thread = threading.Thread(target=other_fit)
    with running.this_interpreter(context):
        thread.start()
        began.wait(5)
        with running.this_interpreter(context):  # of the same thread: no hang
            time.sleep(0.05)
    thread.join(5)
    assert taken == [(True, sys.executable)]
    assert context.pythonExec == "python3"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ModuleNotFoundError: No module named 'pyarrow'", ["no module 'pyarrow'"]),
        ("[PACKAGE_NOT_INSTALLED] PyArrow >= 15.0.0 must be installed; however, it was not found.",
         ["no module 'PyArrow'"]),
        ('java.io.IOException: Cannot run program "python9": error=2', ["no program 'python9'"]),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", ["version"]),
    ],
)  # fmt: skip
def test_an_interpreter_that_will_not_do_is_named(error: str, words: list[str]) -> None:
    problem = running.interpreter_problem(RuntimeError(error), "'/usr/bin/python3'")
    assert problem is not None
    text = str(problem)
    for word in [*words, "PYSPARK_PYTHON", sys.executable]:
        assert word in text
    if "program" not in text:
        assert "/usr/bin/python3" in text
    assert running.interpreter_problem(RuntimeError("Job aborted"), "python3") is None
