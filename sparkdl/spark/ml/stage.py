"""``Stage``: what the pipeline stages share; their Params, with getters and setters."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from pyspark.ml.param import Param, Params

from sparkdl.config import LIMITS_OF_FIT, FitConfig, Limits
from sparkdl.errors import (
    ConfigError,
    ParamTypeError,
    SparkDLError,
    UnknownArgumentError,
    UnknownNameError,
)
from sparkdl.settings.values import (
    ABOVE_ZERO,
    FLAG,
    UserSettings,
    ValueKind,
    bare,
    declared,
    one_of,
    shown,
    whole,
)
from sparkdl.spark.fit.arguments import FitArguments
from sparkdl.spark.inference.output_columns import require_new

Self = TypeVar("Self", bound="Stage")
Cls = TypeVar("Cls", bound=type)


@dataclass(frozen=True)
class ParamSpec:
    """One Param of a stage.

    Args:
        name: In camelCase, as Spark's.
        doc: What it means, for ``explainParams``.
        convert: Gives the value to keep; raises TypeError or ValueError that says what is expected.
        default: None leaves it without a default, where ``optional`` is False.
        optional: None is a value of it, and its default.
        title: The Param in the names of its getter and setter, where it is not its own name with a
            capital letter.
    """

    name: str
    doc: str
    convert: Callable[[Any], Any]
    default: Any = None
    optional: bool = False
    title: str = ""


class Stage(Params):
    """Params that are set by keyword, with errors that say what is expected."""

    SPECS: tuple[ParamSpec, ...] = ()
    PARTS: tuple[str, ...] = ()
    """Names of the keyword arguments that are no Params; each has a method ``set<Name>``."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Arguments that a user may look for in vain -> what to do instead."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        for spec in self.SPECS:
            if spec.default is not None or spec.optional:
                self._setDefault(**{spec.name: spec.default})
        self._prepare()
        self.setParams(**arguments)

    def _prepare(self) -> None:
        """The preparation of a stage between its defaults and its arguments."""

    def setParams(self: Self, **arguments: object) -> Self:
        """Sets Params and parts by keyword, each as its own setter would.

        Raises:
            UnknownArgumentError: A name that the stage does not have.
            ParamTypeError: A value of another type.
        """
        known = [*self.PARTS, *_params_of(type(self))]
        for name in arguments:
            if name not in known:
                raise UnknownArgumentError("argument", name, known, self.REFUSED.get(name, ""))
        for name in known:  # in their order: what a model is made of comes before the model
            if name in arguments:
                getattr(self, f"set{_title(type(self), name)}")(arguments[name])
        return self

    def _set(self: Self, **values: object) -> Self:
        for name, value in values.items():
            if not self.hasParam(name):
                raise UnknownArgumentError("Param", name, [p.name for p in self.params])
            param = self.getParam(name)
            optional = any(spec.name == name and spec.optional for spec in self.SPECS)
            if value is None and not optional:
                self.clear(param)
                continue
            self._paramMap[param] = value if value is None else self._converted(param, value)
        return self

    def set(self, param: Any, value: Any) -> None:
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _converted(self, param: Any, value: Any) -> Any:
        try:
            return param.typeConverter(value)
        except SparkDLError:
            raise
        except (TypeError, ValueError) as error:
            raise ParamTypeError(
                f"Param {param.name!r} of {type(self).__name__} cannot have this value",
                expected=str(error)
                if any(spec.name == param.name for spec in self.SPECS)
                else f"{param.typeConverter.__name__.removeprefix('to').lower()}: {param.doc}",
                received=f"{type(value).__name__} {shown(value)}",
            ) from error

    def require_new(self, names: list[str], schema: Any) -> None:
        """Refuses names of new columns that the data have, or that stand twice."""
        what = f"a column of {type(self).__name__}"
        require_new(names, schema.names, what, "another name, or '' to leave the column out")


def _params_of(cls: type) -> list[str]:
    return [n for n in dir(cls) if isinstance(inspect.getattr_static(cls, n), Param)]


def has_params(*specs: ParamSpec) -> Callable[[Cls], Cls]:
    """A class decorator: adds Params with their getters and setters, and a constructor's signature.

    A getter or setter that the class or a base of it has stays.
    """

    def add(cls: Cls) -> Cls:
        for spec in specs:
            setattr(cls, spec.name, Param(Params._dummy(), spec.name, spec.doc, spec.convert))
        cls.SPECS = (*specs, *cls.SPECS)  # type: ignore[attr-defined]
        names = _params_of(cls)
        for name in names:
            title = _title(cls, name)
            for method in (f"get{title}", f"set{title}"):
                if not hasattr(cls, method):
                    setattr(cls, method, _accessor(name, method, cls.__qualname__))
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in (*cls.PARTS, *sorted(names))  # type: ignore[attr-defined]
        ]
        known = [parameter.name for parameter in parameters]
        example = next((n for n in ("model", "keras_model_config") if n in known), known[0])
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def constructor(self: object, *nameless: object, **arguments: object) -> None:
            if nameless:
                raise ParamTypeError(
                    f"{type(self).__name__} takes its arguments by name",
                    expected=f"{type(self).__name__}({example}=..., ...)",
                    received=f"{shown(nameless[0])} without a name",
                )
            init(self, **arguments)

        constructor.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        cls.__init__ = constructor  # type: ignore[misc]
        return cls

    return add


def _title(cls: Any, name: str) -> str:
    """A Param or a part in the names of its getter and setter."""
    named = next((spec.title for spec in cls.SPECS if spec.name == name), "")
    return named or f"{name[0].upper()}{name[1:]}"


def _accessor(name: str, method: str, owner: str) -> Callable[..., Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    def set(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    accessor: Callable[..., Any] = get if method.startswith("get") else set
    accessor.__doc__ = (
        f"The value of :py:attr:`{name}`, or its default."
        if accessor is get
        else f"Sets :py:attr:`{name}`; returns the stage."
    )
    accessor.__name__, accessor.__qualname__ = method, f"{owner}.{method}"
    return accessor


def text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a string")
    return value


def plain(kinds: tuple[type, ...], expected: str, value: object) -> Any:
    """A value of one of ``kinds`` that JSON can hold."""
    if not isinstance(value, kinds):
        raise TypeError(expected)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(f"{expected}, made of what JSON can hold") from None
    return value


def columns(value: object) -> Any:
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
    default: object = None,
    doc: str = "",
) -> ParamSpec:
    """The Param of a declared setting."""
    setting = declared(cls)[name]
    kind, own = setting.kind, camel(name)
    known = f" One of {', '.join(kind.choices)}." if kind.choices else ""
    return ParamSpec(
        own, f"{setting.sentence.replace('``', '')}{known}{doc}", convert or taking(kind, own),
        setting.default if default is None else default, kind.optional,
    )  # fmt: skip


def taking(kind: ValueKind, name: str = "the Param") -> Callable[[Any], Any]:
    """A converter of values for a Param of this kind; a wrong one is a TypeError, as Spark's."""
    return partial(_of_kind, kind, name)


def _of_kind(kind: ValueKind, name: str, value: object) -> Any:
    value = bare(value)
    if kind.parse is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # grids of NumPy have such
    try:
        return kind.check(name, value)
    except UnknownNameError:
        raise
    except ConfigError as error:
        raise TypeError(error.expected) from error


def class_weights(value: object) -> dict[int, float]:
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


def check_thresholds(thresholds: list[float] | None, num_classes: int) -> tuple[float, ...]:
    """Spark's rules for ``thresholds``; an empty tuple for none.

    Raises:
        ConfigError: Another number of them than classes, a negative one, or two that are 0.
    """
    if thresholds is None:
        return ()
    wrong = len(thresholds) != num_classes or min(thresholds) < 0
    if wrong or sum(t == 0 for t in thresholds) > 1:
        raise ConfigError(
            "thresholds do not fit the classes",
            expected=f"{num_classes} numbers >= 0, one per class, at most one of them 0",
            received=str(thresholds),
        )
    return tuple(thresholds)


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
    ParamSpec("handleInvalid", "what happens to rows that no model can take (nulls): error, skip "
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
        return self._set_columns("featuresCol", "featuresCols", value)

    @property
    def features(self) -> Any:
        """The columns that the model reads: a column, several, or input name -> either."""
        return self._columns_in("featuresCol", "featuresCols")

    def _set_columns(self: C, one: str, several: str, value: object) -> C:
        """Sets a Param of one column, or that of several columns in its place."""
        if isinstance(value, str) or value is None:
            return self._set(**{one: value, several: None})
        return self._set(**{several: value})

    def _columns_in(self, one: str, several: str) -> Any:
        columns = self.getOrDefault(several)
        return self.getOrDefault(one) if columns is None else columns
