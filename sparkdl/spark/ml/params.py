"""The Params of the stages, in tables: how training goes, which columns are read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from sparkdl.config import (
    COMMUNICATORS,
    MODES,
    ON_NAN,
    TRANSPORTS,
    FitConfig,
    check_pad,
    check_resources,
    check_use_gpu,
    parse_frequency,
)
from sparkdl.spark.fit.arguments import check_share, verbosity
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params
from sparkdl.values import bare, require_name

_DEFAULTS = FitConfig()


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError("a string")
    return value


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError("True or False")
    return bool(value)


def whole(least: int, value: Any) -> int:
    """A whole number of at least ``least``."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or value != int(value) or value < least:
        raise TypeError(f"a whole number >= {least}")
    return int(value)


def above_zero(value: Any) -> float:
    """A number above 0."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise TypeError("a number above 0")
    return float(value)


def plain(kinds: tuple[type, ...], expected: str, value: Any) -> Any:
    """A value of one of ``kinds`` that JSON can hold."""
    if not isinstance(value, kinds):
        raise TypeError(expected)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(f"{expected}, made of what JSON can hold") from None
    return value


def columns(value: Any) -> Any:
    """Several columns, or input (output) name -> a column or several."""
    if isinstance(value, dict):
        names = [n for v in value.values() for n in ([v] if isinstance(v, str) else v)]
        if value and all(isinstance(n, str) for n in (*value, *names)):
            return {k: v if isinstance(v, str) else list(v) for k, v in value.items()}
    elif isinstance(value, (list, tuple)) and value and all(isinstance(n, str) for n in value):
        return list(value)
    raise TypeError("names of columns: a list, or a dict name -> column (or a list of columns)")


def _named(kind: str, known: Iterable[str]) -> Callable[[Any], Any]:
    return partial(_require, kind, tuple(known))


def _require(kind: str, known: tuple[str, ...], value: Any) -> str:
    return require_name(kind, value, known)


def class_weights(value: Any) -> dict[int, float]:
    """Class -> weight; files have the classes as strings."""
    expected = "a dict: class number -> weight, e.g. {0: 1.0, 1: 5.0}"
    if not isinstance(value, dict) or not value:
        raise TypeError(expected)
    weights = {}
    for number, weight in value.items():
        if not str(number).isdecimal() or isinstance(weight, (bool, str)):
            raise TypeError(expected)
        weights[int(number)] = float(weight)
    if not all(0 <= weight < math.inf for weight in weights.values()):
        raise TypeError(f"{expected}, no weight below 0")
    return weights


def _checked(check: Callable[[Any], None], value: Any) -> Any:
    """A number, or a dict of numbers, that the settings of ``SparkModel`` take."""
    if isinstance(value, Mapping):
        value = {name: bare(number) for name, number in value.items()}
    else:
        value = bare(value)
    check(value)
    return value


_WHOLE_1, _WHOLE_0 = partial(whole, 1), partial(whole, 0)
_RULE = partial(plain, (str, dict), "a name, or a dict {'name': ..., option: value}")

MODEL_PARAMS = (
    ParamSpec("mode", "how workers train together: asynchronous, hogwild, synchronous or "
              "allreduce", _named("mode", MODES), _DEFAULTS.mode),
    ParamSpec("frequency", "'auto', 'batch', 'epoch', or batches between two exchanges",
              parse_frequency, _DEFAULTS.frequency),
    ParamSpec("parameterServerMode", "the way to the parameter server: auto, shm, socket or http",
              _named("parameterServerMode", TRANSPORTS), _DEFAULTS.parameter_server_mode),
    ParamSpec("numWorkers", "workers; None: as many as there are task slots", _WHOLE_1,
              optional=True),
    ParamSpec("batchSize", "rows per step and worker", _WHOLE_1, _DEFAULTS.batch_size),
    ParamSpec("rule", "how an exchange changes the weights: a name, or a dict of a name and "
              "options; None: the mode's default", _RULE, optional=True),
    ParamSpec("communicator", "what mode allreduce goes through: auto, horovod or builtin",
              _named("communicator", COMMUNICATORS), _DEFAULTS.communicator),
    ParamSpec("compression", "the codec of what travels: a name, or a dict of a name and options; "
              "None: float32", _RULE, optional=True),
    ParamSpec("repartition", "spread the rows over the workers; False: the partitions as they are",
              flag, _DEFAULTS.repartition),
    ParamSpec("memoryBudgetMb", "a partition larger than this is spilled to disk, in MiB",
              _WHOLE_1, _DEFAULTS.memory_budget_mb),
    ParamSpec("startTimeoutS", "wait for all workers of a synchronous run to start, in seconds",
              above_zero, _DEFAULTS.start_timeout_s),
    ParamSpec("workerTimeoutS", "a worker that was silent for longer counts as dead, in seconds",
              above_zero, _DEFAULTS.worker_timeout_s),
    ParamSpec("maxRestarts", "how often a lost stage of mode allreduce begins again; None: 3",
              _WHOLE_0, optional=True),
    ParamSpec("resources", "what each task of the training stage asks of its executor: resource -> "
              "amount, such as {'cpus': 4, 'gpu': 1}; None: the application's settings",
              partial(_checked, check_resources), optional=True),
    ParamSpec("onNan", "what becomes of an update that is not finite: raise, skip or ignore",
              _named("onNan", ON_NAN), _DEFAULTS.on_nan),
)  # fmt: skip
"""Arguments of :class:`sparkdl.SparkModel`, in camelCase."""

FIT_PARAMS = (
    ParamSpec("epochs", "passes over the rows", _WHOLE_1, 1),
    ParamSpec("verbose", "0 prints nothing, 1 a progress bar, 2 a line per epoch; or 'auto'",
              verbosity, 0),
    ParamSpec("validationSplit", "share of the rows held out for validation", partial(
              check_share, "validationSplit"), 0.0),
    ParamSpec("shuffle", "new row order in each epoch", flag, True),
    ParamSpec("checkpointDir", "folder for a checkpoint after each epoch; None: none", text,
              optional=True),
    ParamSpec("resume", "go on from the last checkpoint in checkpointDir", flag, False),
    ParamSpec("checkData", "refuse NaN and infinity before training", flag, False),
    ParamSpec("classWeight", "what the rows of each class weigh: class number -> weight; without "
              "weightCol", class_weights, optional=True),
    ParamSpec("stepsPerEpoch", "batches of each worker in an epoch, which goes on where the one "
              "before ended; None: all rows, once", _WHOLE_1, optional=True),
    ParamSpec("validationSteps", "batches of each worker to validate on, at most; None: all",
              _WHOLE_1, optional=True),
)  # fmt: skip
"""Arguments of :meth:`sparkdl.SparkModel.fit`, in camelCase."""

BUILD_PARAMS = (
    ParamSpec("learningRate", "the optimizer's; None: the one that it was made with", above_zero,
              optional=True),
    ParamSpec("builderArgs", "keyword arguments of modelBuilder, to be varied in a grid",
              partial(plain, (dict,), "a dict of keyword arguments"), optional=True),
)  # fmt: skip
"""What a fit changes in the model before it trains it."""

FEATURE_PARAMS = (
    ParamSpec("featuresCols", "in place of featuresCol: several numeric columns, or the model's "
              "input name -> column or columns", columns, optional=True),
)  # fmt: skip

SCORING_PARAMS = (
    ParamSpec("inferenceBatchSize", "rows per forward pass", _WHOLE_1, 256),
    ParamSpec("handleInvalid", "what becomes of rows that no model can take (nulls): error, skip "
              "(left out) or keep (with nulls as predictions)",
              _named("handleInvalid", ("error", "skip", "keep")), "error"),
    ParamSpec("pad", "for arrays of different length: a number, or input name -> number, that each "
              "batch is padded with to its longest row; None: no such arrays",
              partial(_checked, check_pad), optional=True),
    ParamSpec("useGpu", "'auto': the GPUs that Spark gives to a task; True: fail without; False: "
              "none", check_use_gpu, "auto"),
)  # fmt: skip

LOGITS_PARAM = ParamSpec(
    "fromLogits", "whether the model gives logits instead of probabilities; None: as its loss says",
    flag, optional=True,
)  # fmt: skip


def snake(name: str) -> str:
    """``batchSize`` -> ``batch_size``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name)


C = TypeVar("C", bound="ColumnsStage")


@has_params(*FEATURE_PARAMS, *SCORING_PARAMS)
class ColumnsStage(Stage):
    """A stage with a column of features, or several, or columns for each input of the model."""

    def setFeaturesCol(self: C, value: Any) -> C:
        """Sets :py:attr:`featuresCol`, or with a list or dict :py:attr:`featuresCols`."""
        if isinstance(value, str) or value is None:
            return self._set(featuresCol=value, featuresCols=None)
        return self._set(featuresCols=value)

    @property
    def features(self) -> Any:
        """What the model reads: a column, several, or input name -> either."""
        several = self.getOrDefault("featuresCols")
        return self.getOrDefault("featuresCol") if several is None else several
