"""The Spark session of a command, and the data that it reads."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

from sparkdl.errors import ConfigError

_FORMATS = ("parquet", "csv", "json", "orc", "avro", "text")


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


def read_data(spark: Any, given: Namespace) -> Any:
    """The DataFrame that ``--data`` names: a table, or a path in a format that Spark reads."""
    form = given.format
    if form is None:
        ending = os.path.splitext(given.data.rstrip("/"))[1].lstrip(".").lower()
        if ending in _FORMATS:
            form = ending
        elif "/" in given.data or os.path.exists(given.data):
            form = "parquet"
    options = pairs("--option", given.option)
    if form is None:
        return spark.table(given.data)
    if form == "csv":
        options = {"header": "true", "inferSchema": "true", **options}
    return spark.read.format(form).options(**options).load(given.data)


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
