"""sparkdl: Keras 3 models trained on the data where it already is, in Spark.

::

    from sparkdl import SparkModel

    spark_model = SparkModel(model, mode='asynchronous')
    history = spark_model.fit(df, epochs=5, batch_size=64)

Importing this package loads neither pyspark nor keras; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.errors import SparkDLError as SparkDLError
    from sparkdl.spark.spark_model import SparkModel as SparkModel
    from sparkdl.spark.spark_model import load_spark_model as load_spark_model

__version__ = "0.1.0"

_HOMES = {
    "SparkModel": "sparkdl.spark.spark_model",
    "load_spark_model": "sparkdl.spark.spark_model",
    "SparkDLError": "sparkdl.errors",
}

__all__ = ["SparkDLError", "SparkModel", "load_spark_model"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sparkdl' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
