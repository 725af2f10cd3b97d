"""DataFrames and TFRecord files."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from sparkdl.spark.tfrecord.functions import read_tfrecords, write_tfrecords

loadedDF: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""DataFrames that :func:`loadTFRecords` made, and where from."""


def isLoadedDF(df: Any) -> bool:
    """Whether a DataFrame was made by :func:`loadTFRecords` and nothing was done to it since."""
    return df in loadedDF


def saveAsTFRecords(df: Any, output_dir: str) -> None:
    """Writes a DataFrame as TFRecord files of Examples.

    Args:
        df: The rows.
        output_dir: A folder that holds no files.

    Raises:
        ResourceError: It holds some.
    """
    write_tfrecords(df, output_dir)


def loadTFRecords(sc: Any, input_dir: str, binary_features: Sequence[str] = ()) -> Any:
    """TFRecord files of Examples as a DataFrame.

    Integers become ``bigint``, floats ``float`` (``double`` in TensorFlowOnSpark), bytes
    ``string``, or ``binary`` for those in ``binary_features``; several values an array.

    Args:
        sc: The SparkContext.
        input_dir: The folder.
        binary_features: Names of features with bytes that are no text.
    """
    from pyspark.sql import SparkSession

    df = read_tfrecords(SparkSession(sc), input_dir, binary_features=binary_features)
    loadedDF[df] = input_dir
    return df
