"""The Spark session of a command, and the data that it reads."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.files.storage import SCHEME

_FORMATS = {
    "parquet": "parquet", "pq": "parquet", "csv": "csv", "json": "json", "jsonl": "json",
    "ndjson": "json", "orc": "orc", "avro": "avro", "text": "text", "txt": "text",
    "arrow": "arrow", "feather": "arrow", "tfrecord": "tfrecord", "tfrecords": "tfrecord",
}  # fmt: skip
"""Ending of a path -> format."""
_COMPRESSED = ("gz", "bz2", "zst", "lz4", "snappy", "deflate", "zlib")
_NEVER_SPARKS = ("file", "http", "https", "ftp")
_CLUSTERS_VARIABLES = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "HADOOP_CONF_DIR")
"""Set under ``spark-submit``; for a Connect server; where Spark knows a cluster's file system."""


@contextlib.contextmanager
def spark_session(given: Namespace) -> Iterator[Any]:
    """The session for a command; one that this command has made is stopped at the end."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    builder = SparkSession.builder.appName("sparkdl")
    if given.remote:
        builder = builder.remote(given.remote)
    elif given.master:
        builder = builder.master(given.master)
    for name, value in pairs("--conf", given.conf).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        if running is None:
            spark.stop()


@contextlib.contextmanager
def session_of_path(given: Namespace, path: str) -> Iterator[None]:
    """A session while a path is looked at that may be one of Spark's; else none is started.

    A path without a scheme is one of this machine, as for Spark without a cluster. Under
    ``spark-submit``, with ``HADOOP_CONF_DIR``, and with options that say which Spark, it is what
    Spark says, as for the commands that always have a session.
    """
    scheme = SCHEME.match(path)
    named = scheme is not None and scheme[1].lower() not in _NEVER_SPARKS
    asked = given.master or given.remote or given.conf
    cluster = any(os.environ.get(name) for name in _CLUSTERS_VARIABLES)
    if named or (scheme is None and (asked or cluster)):
        with spark_session(given):
            yield
    else:
        yield


def format_of(path: str) -> str | None:
    """The format that the ending of a path tells; None for another or none.

    >>> format_of('/data/*.csv.gz'), format_of('rows.tfrecord/'), format_of('db.table')
    ('csv', 'tfrecord', None)
    """
    _, *endings = os.path.basename(path.rstrip("/*")).lower().split(".")
    while endings and endings[-1] in _COMPRESSED:
        endings.pop()
    return _FORMATS.get(endings[-1]) if endings else None


def read_data(spark: Any, given: Namespace) -> Any:
    """The data that ``--data`` names: a DataFrame, or the path of files.

    A path's ending, or its files, tell the format; a name without a path is a table.

    Raises:
        ConfigError: Options for files that Spark does not read.
    """
    form = given.format or format_of(given.data)
    options = pairs("--option", given.option)
    if form is None and "/" not in given.data and not os.path.exists(given.data):
        return spark.table(given.data)
    if form == "arrow" and options:
        raise ConfigError(
            "Arrow files are read without Spark's reader", expected="no --option",
            received=", ".join(options),
        )  # fmt: skip
    own = form in ("arrow", "tfrecord") or (not given.format and form in ("parquet", None))
    if own and not options:
        return given.data
    if form == "tfrecord":
        import sparkdl

        sparkdl.register_tfrecord(spark)
    if form == "csv":
        options = {"header": "true", "inferSchema": "true", **options}
    return spark.read.format(form or "parquet").options(**options).load(given.data)


def columns(text: str | None) -> Any:
    """A column's name, or a list of several; None where none was named."""
    if text is None:
        return None
    names = text.split(",")
    return names if len(names) > 1 else names[0]


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dict.

    Raises:
        ConfigError: One has no ``=``.

    >>> pairs('--conf', ['spark.task.cpus=2'])
    {'spark.task.cpus': '2'}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option} takes NAME=VALUE", expected="e.g. spark.task.cpus=2",
                              received=repr(text))  # fmt: skip
        found[name] = value
    return found
