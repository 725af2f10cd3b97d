"""Which Spark or Keras a test needs; the reason is what docs/clusters.md says of older ones."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from sparkdl.spark.session.versions import spark_version


def needs_spark(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skips a test where PySpark is older."""
    old = spark_version() < (major, minor)
    return pytest.mark.skipif(old, reason=f"needs Spark {major}.{minor}: {reason}")


def _keras_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version("keras"))[:3])


needs_safe_hdf5 = pytest.mark.skipif(
    _keras_version() < (3, 11, 3),
    reason="Keras before 3.11.3 runs code of .h5 files in safe mode (CVE-2025-9905): refused",
)
