"""sparkdl: Keras 3 models trained on the data where it already is, in Spark.

::

    from sparkdl import SparkModel

    spark_model = SparkModel(model, mode='asynchronous')
    history = spark_model.fit(df, epochs=5, batch_size=64)

Importing this package loads neither pyspark nor keras; the first use of a name does. A later import
of TensorFlow holds back what it writes about itself (:mod:`sparkdl.process.start_lines`). The
modules ``layers``, ``ml``, ``sparse``, ``mllib``, ``mlflow``, ``tune``, ``program``, ``tracking``,
``compat`` and ``testing``, and Databricks' module paths, are names of it, too:
``sparkdl.mlflow.autolog()``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparkdl.process.start_lines import hold_start_lines

if TYPE_CHECKING:
    from sparkdl import compat as compat
    from sparkdl import errors as errors
    from sparkdl import layers as layers
    from sparkdl import ml as ml
    from sparkdl import mlflow as mlflow
    from sparkdl import mllib as mllib
    from sparkdl import program as program
    from sparkdl import sparse as sparse
    from sparkdl import testing as testing
    from sparkdl import tracking as tracking
    from sparkdl import tune as tune
    from sparkdl.collective.current import current as communicator  # noqa: F401  (in _HOMES)
    from sparkdl.config import Limits as Limits
    from sparkdl.diagnosis.examination import doctor as doctor
    from sparkdl.diagnosis.examination import environment as environment
    from sparkdl.errors import SparkDLError as SparkDLError
    from sparkdl.images.deep_image import DeepImageFeaturizer as DeepImageFeaturizer
    from sparkdl.images.deep_image import DeepImagePredictor as DeepImagePredictor
    from sparkdl.images.image_file import KerasImageFileEstimator as KerasImageFileEstimator
    from sparkdl.images.image_file import KerasImageFileTransformer as KerasImageFileTransformer
    from sparkdl.images.image_file import registerKerasImageUDF as registerKerasImageUDF
    from sparkdl.learner.description import describe as describe
    from sparkdl.learner.distributed.callbacks import BroadcastCallback as BroadcastCallback
    from sparkdl.learner.distributed.callbacks import LogCallback as LogCallback
    from sparkdl.learner.distributed.callbacks import MetricAverageCallback as MetricAverageCallback
    from sparkdl.learner.distributed.optimizer import DistributedOptimizer as DistributedOptimizer
    from sparkdl.process.log_lines import log_to_driver as log_to_driver
    from sparkdl.settings.network import Network as Network
    from sparkdl.spark.generate import generate as generate
    from sparkdl.spark.inferring import inference as inference
    from sparkdl.spark.predict import predict as predict
    from sparkdl.spark.predict import predict_udf as predict_udf
    from sparkdl.spark.predict import register_udf as register_udf
    from sparkdl.spark.run import HorovodRunner as HorovodRunner
    from sparkdl.spark.run import run as run
    from sparkdl.spark.runs.feeding import Feeding as Feeding
    from sparkdl.spark.spark_model import SparkModel as SparkModel
    from sparkdl.spark.spark_model import load_spark_model as load_spark_model
    from sparkdl.spark.tfrecord.functions import read_tfrecords as read_tfrecords
    from sparkdl.spark.tfrecord.functions import register_tfrecord as register_tfrecord
    from sparkdl.spark.tfrecord.functions import write_tfrecords as write_tfrecords
    from sparkdl.tracking.page.dashboard import dashboard as dashboard

__version__ = "0.1.0"

_HOMES = {
    "SparkModel": "sparkdl.spark.spark_model",
    "Network": "sparkdl.settings.network",
    "Limits": "sparkdl.config",
    "Feeding": "sparkdl.spark.runs.feeding",
    "load_spark_model": "sparkdl.spark.spark_model",
    "DeepImageFeaturizer": "sparkdl.images.deep_image",
    "DeepImagePredictor": "sparkdl.images.deep_image",
    "KerasImageFileEstimator": "sparkdl.images.image_file",
    "KerasImageFileTransformer": "sparkdl.images.image_file",
    "registerKerasImageUDF": "sparkdl.images.image_file",
    "predict": "sparkdl.spark.predict",
    "generate": "sparkdl.spark.generate",
    "predict_udf": "sparkdl.spark.predict",
    "register_udf": "sparkdl.spark.predict",
    "run": "sparkdl.spark.run",
    "inference": "sparkdl.spark.inferring",
    "read_tfrecords": "sparkdl.spark.tfrecord.functions",
    "write_tfrecords": "sparkdl.spark.tfrecord.functions",
    "register_tfrecord": "sparkdl.spark.tfrecord.functions",
    "dashboard": "sparkdl.tracking.page.dashboard",
    "HorovodRunner": "sparkdl.spark.run",
    "describe": "sparkdl.learner.description",
    "doctor": "sparkdl.diagnosis.examination",
    "environment": "sparkdl.diagnosis.examination",
    "communicator": "sparkdl.collective.current:current",
    "log_to_driver": "sparkdl.process.log_lines",
    "DistributedOptimizer": "sparkdl.learner.distributed.optimizer",
    "BroadcastCallback": "sparkdl.learner.distributed.callbacks",
    "MetricAverageCallback": "sparkdl.learner.distributed.callbacks",
    "LogCallback": "sparkdl.learner.distributed.callbacks",
    "SparkDLError": "sparkdl.errors",
}

_MODULES = (
    "compat", "errors", "estimators", "horovod", "layers", "ml", "mlflow", "mllib", "program",
    "sparse", "testing", "tracking", "transformers", "tune", "udf",
)  # fmt: skip
"""Modules for users: attributes that are imported at their first use."""

__all__ = [*_HOMES]


def _part(name: str, home: str) -> Any:
    module, _, attribute = home.partition(":")
    return getattr(importlib.import_module(module), attribute or name)


_DISTKERAS = "sparkdl.compat.distkeras"
_TFOS_COMPAT = ("disable_auto_shard", "export_saved_model", "is_gpu_available")
_ELEPHAS = "sparkdl.compat.elephas.adapters"
_RDD_UTILS = (
    "encode_label", "from_labeled_point", "lp_to_simple_rdd", "to_labeled_point", "to_simple_rdd",
)  # fmt: skip
_MATRICES = ("from_matrix", "from_vector", "to_matrix", "to_vector")
_DATA_FRAMES = ("df_to_simple_rdd", "from_data_frame", "to_data_frame")
_MODEL_TYPES = ("LossModelTypeMapper", "ModelType")

_PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sparkdl.horovod": ("sparkdl", ("log_to_driver",)),
    "sparkdl.horovod.runner_base": ("sparkdl", ("HorovodRunner",)),
    "sparkdl.horovod.tensorflow": ("sparkdl", ()),
    "sparkdl.horovod.tensorflow.keras": ("sparkdl", ("LogCallback",)),
    "sparkdl.transformers": ("sparkdl", ()),
    "sparkdl.transformers.keras_image": ("sparkdl", ("KerasImageFileTransformer",)),
    "sparkdl.transformers.named_image": ("sparkdl", ("DeepImageFeaturizer", "DeepImagePredictor")),
    "sparkdl.estimators": ("sparkdl", ()),
    "sparkdl.estimators.keras_image_file_estimator": ("sparkdl", ("KerasImageFileEstimator",)),
    "sparkdl.udf": ("sparkdl", ()),
    "sparkdl.udf.keras_image_model": ("sparkdl", ("registerKerasImageUDF",)),
    "sparkdl.compat.distkeras.evaluators": (
        f"{_DISTKERAS}.transformers",
        ("AccuracyEvaluator", "Evaluator"),
    ),
    "sparkdl.compat.distkeras.predictors": (
        f"{_DISTKERAS}.trainers",
        ("ModelPredictor", "Predictor"),
    ),
    "sparkdl.compat.tfos.compat": ("sparkdl.compat.tfos.gpu_info", _TFOS_COMPAT),
    "sparkdl.compat.elephas.enums": (_ELEPHAS, ()),
    "sparkdl.compat.elephas.enums.frequency": (_ELEPHAS, ("Frequency",)),
    "sparkdl.compat.elephas.enums.modes": (_ELEPHAS, ("Mode",)),
    "sparkdl.compat.elephas.ml": (_ELEPHAS, _DATA_FRAMES),
    "sparkdl.compat.elephas.ml.adapter": (_ELEPHAS, _DATA_FRAMES),
    "sparkdl.compat.elephas.mllib": ("sparkdl.mllib", _MATRICES),
    "sparkdl.compat.elephas.mllib.adapter": ("sparkdl.mllib", _MATRICES),
    "sparkdl.compat.elephas.utils": (_ELEPHAS, (*_RDD_UTILS, *_MODEL_TYPES)),
    "sparkdl.compat.elephas.utils.model_utils": (_ELEPHAS, _MODEL_TYPES),
    "sparkdl.compat.elephas.utils.rdd_utils": (_ELEPHAS, _RDD_UTILS),
}
"""Module paths of other libraries: where their names are here, and the names."""


class _Paths(Loader):
    """Finds and makes the modules of ``_PATHS``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATHS:
            return None
        holds_others = any(other.startswith(f"{fullname}.") for other in _PATHS)
        return ModuleSpec(fullname, self, is_package=holds_others)

    def exec_module(self, module: ModuleType) -> None:
        home, names = _PATHS[module.__name__]
        module.__doc__ = f"Another library's module path of what {home} has."
        found = importlib.import_module(home)
        vars(module).update({name: getattr(found, name) for name in names}, __all__=[*names])


hold_start_lines()
sys.meta_path.insert(0, _Paths())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"sparkdl.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sparkdl' has no attribute {name!r}")
    return _part(name, home)


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return sorted([*own, *_HOMES, *_MODULES])
