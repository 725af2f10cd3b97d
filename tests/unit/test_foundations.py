"""errors, weights and the package's face: small things that all others stand on."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import sparkdl
from sparkdl import errors
from sparkdl.errors import (
    AuthenticationError,
    ConfigError,
    NoParamError,
    ReadOnlyError,
    SparkDLError,
    TransportError,
    UnknownNameError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.weights import Layout

SECRETS = ("token", "secret", "password", "private_key")


def test_importing_the_package_is_fast_and_loads_no_framework() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import sparkdl; "
        "took = time.perf_counter() - t; dir(sparkdl); "
        "bad = {'keras', 'pyspark', 'tensorflow', 'flask', 'pyarrow'} & set(sys.modules); "
        "assert not bad, bad; print(took)"
    )
    took = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             check=True).stdout)
        for _ in range(3)
    )  # fmt: skip
    assert took < 0.3


def test_modules_for_users_are_attributes_that_load_at_their_first_use() -> None:
    code = (
        "import sys, sparkdl; names = dir(sparkdl); "
        "own = {name for name in sys.modules if name.startswith('sparkdl.')}; "
        "assert own == {'sparkdl.process', 'sparkdl.process.start_lines'}, own; "
        "sparkdl.mlflow.autolog, sparkdl.tracking.JsonLines, sparkdl.program.Program; "
        "assert sparkdl.tune.Asha and sparkdl.errors.SparkDLError; "
        "bad = {'keras', 'pyspark', 'tensorflow'} & set(sys.modules); assert not bad, bad; "
        "assert dir(sparkdl) == names; print(*names)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {
        "compat",
        "errors",
        "estimators",
        "horovod",
        "layers",
        "transformers",
        "udf",
        "ml",
        "mllib",
        "mlflow",
        "program",
        "sparse",
        "testing",
        "tracking",
        "tune",
    }
    names = {name for name in ran.stdout.split() if not name.startswith("__")}
    assert names == {*modules, "tune", *sparkdl.__all__}  # no imports of the package's own


@pytest.mark.keras
def test_databricks_module_paths() -> None:
    from sparkdl.estimators.keras_image_file_estimator import KerasImageFileEstimator
    from sparkdl.horovod.runner_base import HorovodRunner
    from sparkdl.horovod.tensorflow.keras import LogCallback
    from sparkdl.transformers.keras_image import KerasImageFileTransformer
    from sparkdl.transformers.named_image import DeepImageFeaturizer, DeepImagePredictor
    from sparkdl.udf.keras_image_model import registerKerasImageUDF

    assert sparkdl.horovod.log_to_driver is sparkdl.log_to_driver
    for thing in (
        DeepImageFeaturizer, DeepImagePredictor, HorovodRunner, KerasImageFileEstimator,
        KerasImageFileTransformer, LogCallback, registerKerasImageUDF,
    ):  # fmt: skip
        assert getattr(sparkdl, thing.__name__) is thing


@pytest.mark.keras
@pytest.mark.parametrize("path", sorted(sparkdl._PATHS))
def test_another_librarys_module_path_has_the_names_of_its_home(path: str) -> None:
    """Also through ``from ... import *``, and after a trip through pickle, as a worker meets it."""
    home, names = sparkdl._PATHS[path]
    module = importlib.import_module(path)
    found: dict[str, object] = {}
    exec(f"from {path} import *", found)
    for name in names:
        assert found[name] is getattr(importlib.import_module(home), name)
    assert cloudpickle.loads(cloudpickle.dumps(lambda: module.__name__))() == path
    assert module.__spec__ is not None
    assert module.__spec__.origin is None, "a file has that path, too"


@pytest.mark.keras
def test_the_public_face_is_what_the_design_names() -> None:
    import sparkdl

    named = {"HorovodRunner", "SparkDLError", "SparkModel", "load_spark_model", "run"}
    within_run = {
        "BroadcastCallback", "DistributedOptimizer", "LogCallback", "MetricAverageCallback",
        "communicator", "log_to_driver",
    }  # fmt: skip
    predicting = {
        "DeepImageFeaturizer", "DeepImagePredictor", "KerasImageFileEstimator",
        "KerasImageFileTransformer", "generate", "inference", "predict", "predict_udf",
        "registerKerasImageUDF", "register_udf",
    }  # fmt: skip
    looking = {"dashboard", "describe", "doctor", "environment"}
    records = {"read_tfrecords", "register_tfrecord", "write_tfrecords"}
    settings = {"Feeding", "Limits", "Network"}
    assert set(sparkdl.__all__) == named | settings | within_run | predicting | looking | records
    assert all(getattr(sparkdl, name) for name in sparkdl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'SparkModle'"):
        _ = sparkdl.SparkModle


ALL_ERRORS = [
    ConfigError("what", expected="e", received="r", hint="h"),
    UnknownNameError("mode", "asynchron", ["asynchronous", "hogwild"]),
    AuthenticationError("no token"),
    ReadOnlyError("mode", expected="e"),
    NoParamError("model", received="r"),
    TransportError("gone"),
    WaitTimeoutError("late", received="ranks 1, 2"),
    WorkerError(3, "ValueError: bad", "Traceback ...", hint="look"),
]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling_with_all_their_beats(error: SparkDLError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_errors_subclass_the_fitting_built_in() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(TransportError, ConnectionError)
    assert issubclass(WaitTimeoutError, TimeoutError)
    assert issubclass(AuthenticationError, PermissionError)
    assert issubclass(ReadOnlyError, AttributeError)
    assert issubclass(NoParamError, AttributeError)
    public = [v for v in vars(errors).values() if isinstance(v, type) and v is not errors.Cause]
    assert all(issubclass(v, SparkDLError) for v in public if v.__module__ == errors.__name__)


def test_an_unknown_name_lists_the_known_ones_and_guesses() -> None:
    text = str(UnknownNameError("mode", "asynchronus", ["asynchronous", "hogwild"]))
    assert "'hogwild'" in text
    assert "did you mean 'asynchronous'?" in text


def test_a_worker_error_ends_with_the_traceback() -> None:
    assert str(WorkerError(1, "ValueError: x", "Traceback\n  line")).endswith("Traceback\n  line")


def test_layout_offsets_views_and_shards() -> None:
    layout = Layout.of(
        [("w", (2, 3), "float32"), ("b", (), "float32")], [("mean", (3,), "float32")]
    )
    assert (layout.size, layout.trained_size, layout.size_bytes) == (10, 7, 40)
    flat = layout.flatten([np.arange(6).reshape(2, 3), 6.0, [7, 8, 9]])
    np.testing.assert_array_equal(flat, np.arange(10))
    views = layout.views(flat)
    views[0][1, 2] = -1
    assert flat[5] == -1  # views, not copies
    assert [s.stop - s.start for s in layout.shards(3)] == [3, 3, 4]
    with pytest.raises(ConfigError, match="does not fit the layout"):
        layout.check(np.zeros(9, np.float32))
    with pytest.raises(ConfigError, match="'w'"):
        layout.flatten([np.zeros((3, 2)), 0.0, np.zeros(3)])


def test_layouts_match_by_shape_not_by_name() -> None:
    one = Layout.of([("dense/kernel", (2, 3), "float32")])
    assert one.matches(Layout.of([("dense_1/kernel", (2, 3), "float32")]))
    assert not one.matches(Layout.of([("dense/kernel", (3, 2), "float32")]))
    assert not one.matches(Layout.of([], [("dense/kernel", (2, 3), "float32")]))


def test_no_two_classes_share_a_name() -> None:
    """``compat`` may repeat its peers' names, as that is what it is for, and no others."""
    of_peers = {"AEASGD", "DynSGD", "EAMSGD", "Experimental", "Predictor", "SparkMLlibModel"}
    of_peers |= {"SparkModel"}
    package = Path(errors.__file__).parent
    places: dict[str, list[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if "compat" not in path.parts or node.name not in of_peers:
                places.setdefault(node.name, []).append(str(path.relative_to(package)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_text_of_an_object_shows_a_secret() -> None:
    """Tasks, strategies and endpoints land in logs: their fields with a token have no repr."""
    found = 0
    for path in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for kind in ast.walk(ast.parse(path.read_text())):
            if not isinstance(kind, ast.ClassDef) or not kind.decorator_list:
                continue
            for line in kind.body:
                if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) in SECRETS:
                    found += 1
                    given = "" if line.value is None else ast.unparse(line.value)
                    assert "repr=False" in given, f"{path}:{line.lineno} {kind.name}"
    assert found >= 8


@pytest.mark.parametrize(
    ("name", "meant"),
    [("worker", "num_workers"), ("workers", "num_workers"), ("size", "batch_size"),
     ("worker_p", "worker_port"), ("modes", "mode"), ("checkpoint", "checkpoint_dir")],
)  # fmt: skip
def test_the_name_that_was_meant(name: str, meant: str) -> None:
    known = ["mode", "worker_timeout_s", "worker_port", "num_workers", "batch_size",
             "checkpoint_dir"]  # fmt: skip
    assert errors.closest(name, known) == meant
