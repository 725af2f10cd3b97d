"""Which Spark and which Java this process would start, known without a session."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pyspark


def spark_version() -> str:
    """PySpark's version, and that of the Spark in ``SPARK_HOME`` where it is another one.

    >>> spark_version()  # doctest: +SKIP
    '4.3.0'
    """
    own = str(pyspark.__version__)
    home = os.environ.get("SPARK_HOME", "")
    try:
        with open(os.path.join(home, "RELEASE")) as file:
            found = re.match(r"Spark (\S+)", file.readline())
    except OSError:
        return own
    other = found[1] if found else own
    return own if other == own else f"{own}, in SPARK_HOME {other}"


def java_version(timeout_s: float = 30.0) -> str | None:
    """The version of the Java that Spark would start; None where there is none.

    Args:
        timeout_s: For Java's answer.
    """
    home = os.environ.get("JAVA_HOME", "")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if not java:
        return None
    try:
        ran = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {java} -version: {error}"
    lines = [line for line in ran.stderr.splitlines() if "version" in line]
    found = re.search(r'version "([^"]+)"', lines[0]) if lines else None
    return found[1] if found else None
