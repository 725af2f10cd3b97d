"""The Params of the stages, in tables: how training goes, which columns are read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sparkdl.config import LIMITS_OF_FIT, FitConfig, Limits
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.settings.values import (
    ABOVE_ZERO,
    FLAG,
    UserSettings,
    ValueKind,
    bare,
    declared,
    one_of,
    whole,
)
from sparkdl.spark.fit.arguments import FitArguments
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError("a string")
    return value


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


def camel(name: str) -> str:
    """``batch_size`` -> ``batchSize``."""
    first, *others = name.split("_")
    return first + "".join(each.capitalize() for each in others)


def param(
    cls: type[UserSettings],
    name: str,
    convert: Callable[[Any], Any] | None = None,
    default: Any = None,
    doc: str = "",
) -> ParamSpec:
    """The Param of a declared setting."""
    setting = declared(cls)[name]
    kind, own = setting.kind, camel(name)
    known = f" One of {', '.join(kind.choices)}." if kind.choices else ""
    return ParamSpec(
        own,
        f"{setting.sentence.replace('``', '')}{known}{doc}",
        convert or taking(kind, own),
        setting.default if default is None else default,
        kind.optional,
    )


def taking(kind: ValueKind, name: str = "the Param") -> Callable[[Any], Any]:
    """A converter of values for a Param of this kind; a wrong one is a TypeError, as Spark's."""
    return partial(_of_kind, kind, name)


def _of_kind(kind: ValueKind, name: str, value: Any) -> Any:
    value = bare(value)
    if kind.parse is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # grids of NumPy have such
    try:
        return kind.check(name, value)
    except UnknownNameError:
        raise
    except ConfigError as error:
        raise TypeError(error.expected) from error


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


_RULE = partial(plain, (str, dict), "a name, or a dict {'name': ..., option: value}")

MODEL_PARAMS = (
    *(param(FitConfig, name) for name in (
        "mode", "frequency", "parameter_server_mode", "num_workers", "batch_size", "communicator",
        "repartition", "resources", "on_nan",
    )),
    param(FitConfig, "rule", _RULE), param(FitConfig, "compression", _RULE),
)  # fmt: skip
"""Arguments of :class:`sparkdl.SparkModel`, in camelCase."""

LIMITS_PARAMS = tuple(param(Limits, name) for name in LIMITS_OF_FIT)
"""Fields of :class:`sparkdl.Limits`, in camelCase."""

FIT_PARAMS = (
    *(param(FitArguments, name) for name in (
        "epochs", "validation_split", "shuffle", "checkpoint_dir", "resume", "check_data",
        "steps_per_epoch", "validation_steps",
    )),
    param(FitArguments, "verbose", default=0),
    param(FitArguments, "class_weight", class_weights, doc=" Without weightCol."),
)  # fmt: skip
"""Arguments of :meth:`sparkdl.SparkModel.fit`, in camelCase."""

BUILD_PARAMS = (
    ParamSpec("learningRate", "the optimizer's; None: the one that it was made with",
              taking(ABOVE_ZERO), optional=True),
    ParamSpec("builderArgs", "keyword arguments of modelBuilder, to be varied in a grid",
              partial(plain, (dict,), "a dict of keyword arguments"), optional=True),
)  # fmt: skip
"""What a fit changes in the model before it trains it."""

FEATURE_PARAMS = (
    ParamSpec("featuresCols", "in place of featuresCol: several numeric columns, or the model's "
              "input name -> column or columns", columns, optional=True),
)  # fmt: skip

SCORING_PARAMS = (
    ParamSpec("inferenceBatchSize", "rows per forward pass", taking(whole(1)), 256),
    ParamSpec("handleInvalid", "what becomes of rows that no model can take (nulls): error, skip "
              "(left out) or keep (with nulls as predictions)",
              taking(one_of(("error", "skip", "keep")), "handleInvalid"), "error"),
    param(FitConfig, "pad"), param(FitConfig, "use_gpu"),
)  # fmt: skip

LOGITS_PARAM = ParamSpec(
    "fromLogits", "whether the model gives logits instead of probabilities; None: as its loss says",
    taking(FLAG), optional=True,
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
        """The columns that the model reads: a column, several, or input name -> either."""
        several = self.getOrDefault("featuresCols")
        return self.getOrDefault("featuresCol") if several is None else several
