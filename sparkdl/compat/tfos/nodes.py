"""A user's function on every node of a cluster, through ``sparkdl.run``."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkdl.compat.tfos.TFNode import FedRows, TFNodeContext

MapFunction = Callable[[Any, TFNodeContext], object]


def call_node(map_fun: MapFunction, tf_args: Any, default_fs: str) -> list[Any]:
    """Calls the function on a node that is not fed."""
    return _call(map_fun, tf_args, TFNodeContext(None, default_fs))


def call_fed_node(rows: FedRows, map_fun: MapFunction, tf_args: Any, default_fs: str) -> list[Any]:
    """Calls the function on a node that is fed; what it gave to ``batch_results``."""
    return _call(map_fun, tf_args, TFNodeContext(rows, default_fs))


def _call(map_fun: MapFunction, tf_args: Any, context: TFNodeContext) -> list[Any]:
    if isinstance(tf_args, list):  # for absl and argparse; the process ends with the function
        sys.argv = tf_args
    map_fun(tf_args, context)
    return context.results


def pickled(elements: Iterable[Any]) -> Iterator[tuple[bytearray]]:
    """Elements of an RDD as rows of a DataFrame with one binary column."""
    for element in elements:
        yield (bytearray(pickle.dumps(element, protocol=5)),)
