"""Commands about a model: train, predict, evaluate, inspect, estimate."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from sparkdl.cli.parser import MODEL_SETTINGS, given_settings
from sparkdl.cli.session import columns, read_data, session_of_path, spark_session
from sparkdl.config import LIMITS_OF_FIT, FitConfig, Limits, arguments_from_file
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files.storage import exists
from sparkdl.settings.network import Network
from sparkdl.tracking.page.dashboard import open_page


def train(given: Namespace) -> int:
    """``sparkdl train``: the counterpart of ``SparkModel(...).fit(...)`` and ``.save``."""
    import numpy as np

    from sparkdl.files.model_file import check_path  # before hours of training, not after

    settings = _settings(given)
    with spark_session(given) as spark:  # which knows what is meant by a path
        check_path(given.output, overwrite=True)
        spark_model = _spark_model(given, settings)
        began = time.monotonic()
        chosen = {"features": columns(given.features), "label": columns(given.label),
                  "sample_weight": columns(given.sample_weight)}  # fmt: skip
        history = spark_model.fit(
            read_data(spark, given), epochs=given.epochs, verbose=0 if given.json else "auto",
            validation_split=given.validation_split, checkpoint_dir=given.checkpoint_dir,
            resume=given.resume,
            **{name: value for name, value in chosen.items() if value is not None},
        )  # fmt: skip
        spark_model.save(given.output)
    result = {
        "output": given.output,
        "history": {name: np.asarray(v).tolist() for name, v in history.history.items()},
        "seconds": round(time.monotonic() - began, 2),
    }
    print(json.dumps(result) if given.json else f"saved {given.output}")
    return 0


def predict(given: Namespace) -> int:
    """``sparkdl predict``: the counterpart of ``sparkdl.predict`` and ``SparkModel.predict``."""
    chosen = {"batch_size": given.batch_size, "features": columns(given.features)}
    with spark_session(given) as spark:
        # said before the model is loaded; Spark would say it later
        if given.output and not given.overwrite and exists(given.output):
            raise ConfigError(
                "--output exists", expected="a new path", received=repr(given.output),
                hint="--overwrite replaces what is there",
            )  # fmt: skip
        predictions = _predict_of(given)(
            read_data(spark, given), output_column=given.output_column,
            **{name: value for name, value in chosen.items() if value is not None},
        )  # fmt: skip
        if given.output:
            writer = predictions.write.format(given.output_format)
            writer.mode("overwrite" if given.overwrite else "error").save(given.output)
            print(json.dumps({"output": given.output}) if given.json else f"wrote {given.output}")
        elif given.json:
            texts = predictions.selectExpr("to_json(struct(*)) as text").limit(given.limit)
            print(json.dumps({"rows": [json.loads(row.text) for row in texts.collect()]}))
        else:
            predictions.show(given.limit, truncate=80)
    return 0


def evaluate(given: Namespace) -> int:
    """``sparkdl evaluate``: the counterpart of ``SparkModel.evaluate``."""
    with spark_session(given) as spark:
        results = _spark_model(given, {}).evaluate(
            read_data(spark, given), batch_size=given.batch_size,
            features=columns(given.features), label=columns(given.label),
            sample_weight=columns(given.sample_weight),
        )  # fmt: skip
    if given.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name}: {value}")
    return 0


def inspect(given: Namespace) -> int:
    """``sparkdl inspect``: inputs, outputs, layers, and what of the model travels."""
    import sparkdl

    with _session_of_model(given):
        described = sparkdl.describe(_spark_model(given, {}))
    print(json.dumps(described.to_dict()) if given.json else described)
    return 0


def estimate(given: Namespace) -> int:
    """``sparkdl estimate``: bytes and seconds of one exchange, calculated and not measured."""
    import sparkdl

    if given.num_workers < 1 or not given.gbit > 0 or given.latency_ms < 0:
        raise ConfigError(
            "there is nothing to estimate",
            expected="--num-workers of at least 1, --gbit above 0, --latency-ms of 0 or more",
            received=f"{given.num_workers}, {given.gbit}, {given.latency_ms}",
        )
    with _session_of_model(given):
        described = sparkdl.describe(_spark_model(given, {}))
    size_bytes = described.exchange_bytes
    result = exchange_costs(size_bytes, given.num_workers, given.gbit, given.latency_ms)
    result["optimizer_bytes"] = described.optimizer_bytes
    if given.json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        shown = f"{value:.6f}" if "seconds" in name else f"{value:,.0f}"
        print(f"{name.replace('_', ' '):<34} {shown}")
    return 0


def exchange_costs(
    size_bytes: int, workers: int, gbit: float, latency_ms: float
) -> dict[str, float]:
    """The time of one exchange of all workers on a network, where nothing overlaps it.

    With a server on one machine everything passes that machine's link, both ways at once:
    ``seconds = workers * size / rate + 2 * latency``. In a ring each worker sends
    ``2 (p - 1) / p * size`` in ``2 (p - 1)`` messages.

    Args:
        size_bytes: Bytes of the weights that are exchanged, in float32.
        workers: p.
        gbit: Gigabits per second of each machine's network, each way.
        latency_ms: Milliseconds of one message.
    """
    rate, latency_s = gbit * 1e9 / 8, latency_ms / 1e3
    ring = 2 * (workers - 1) / workers * size_bytes
    return {
        "exchange_bytes": size_bytes,
        "server_bytes_per_worker": 2 * size_bytes,
        "server_seconds_one_worker": 2 * size_bytes / rate + 2 * latency_s,
        "server_seconds_all_workers": workers * size_bytes / rate + 2 * latency_s,
        "allreduce_bytes_per_worker": int(ring),
        "allreduce_seconds": ring / rate + 2 * (workers - 1) * latency_s,
    }


def _settings(given: Namespace) -> dict[str, Any]:
    """The given arguments of ``SparkModel``; the model's file or the defaults say the others."""
    settings = given_settings(given, FitConfig, MODEL_SETTINGS)
    network = given_settings(given, Network)
    limits = given_settings(given, Limits, LIMITS_OF_FIT)
    if network:
        settings["network"] = Network(**network)
    if limits:
        settings["limits"] = Limits(**limits)
    return settings


def _is_function(text: str) -> bool:
    """Whether MODEL is ``module:function`` and no path.

    >>> _is_function('models.py:make'), _is_function('hdfs:///m.h5'), _is_function('file:/m.keras')
    (True, False, False)
    """
    place, _, name = text.rpartition(":")
    return bool(place) and name.isidentifier()


def _session_of_model(given: Namespace) -> AbstractContextManager[None]:
    """A session, where the path of MODEL may be one of Spark's."""
    return nullcontext() if _is_function(given.model) else session_of_path(given, given.model)


def _spark_model(given: Namespace, settings: dict[str, Any]) -> Any:
    """The SparkModel of MODEL: from a file, or around what a function returns."""
    import sparkdl

    if _is_function(given.model):
        return sparkdl.SparkModel(_model_function(given.model)(), **settings)
    if "limits" in settings:  # those that were not given are the file's
        from sparkdl.files.model_file import read_model

        saved = arguments_from_file(read_model(given.model).settings, given.model)["limits"]
        limits = given_settings(given, Limits, LIMITS_OF_FIT)
        settings = {**settings, "limits": replace(saved, **limits)}
    return sparkdl.load_spark_model(given.model, safe_mode=not given.unsafe, **settings)


def _predict_of(given: Namespace) -> Callable[..., Any]:
    """``predict`` of MODEL, compiled or not; what ``SparkModel.save`` wrote knows its columns."""
    import sparkdl
    from sparkdl.files.model_file import read_model

    if _is_function(given.model):
        return partial(sparkdl.predict, _model_function(given.model)())
    if given.model.endswith(".keras") and read_model(given.model).settings:
        predict_saved: Callable[..., Any] = _spark_model(given, {}).predict
        return predict_saved
    return partial(sparkdl.predict, given.model, safe_mode=not given.unsafe)


def _model_function(text: str) -> Any:
    """The function that ``module:function`` or ``file.py:function`` names."""
    place, _, name = text.rpartition(":")
    try:
        if place.endswith(".py"):
            module = _load_file(place)
        else:
            sys.path.insert(0, os.getcwd())
            try:
                module = importlib.import_module(place)
            finally:
                sys.path.remove(os.getcwd())
        function = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(
            "there is no such model",
            expected="a path that ends in .keras, module:function or file.py:function",
            received=f"{text!r} ({type(error).__name__}: {error})",
        ) from error
    return function


def _load_file(path: str) -> Any:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled by value
    spec.loader.exec_module(module)
    return module


def dashboard(given: Namespace) -> int:
    """Serves the page of past runs until it is interrupted.

    Raises:
        ResourceError: The folder is not there, or the port not free.
    """
    with session_of_path(given, given.runs):  # which knows what is meant by a path
        if not exists(given.runs):
            raise ResourceError(
                f"there are no runs at {given.runs!r}",
                expected="a folder that sparkdl.tracking.JsonLines wrote, or one of its files",
                received="nothing",
                hint="spark_model.fit(..., sinks=[sparkdl.tracking.JsonLines('runs')])",
            )
        with open_page(given.port, given.host, given.runs) as page:
            url = page.url
            link = json.dumps({"url": url}) if given.json else f"sparkdl: the page is at {url}"
            print(link, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    return 0
