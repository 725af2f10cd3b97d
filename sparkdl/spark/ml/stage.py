"""``Stage``: what the pipeline stages share: Params as keyword arguments, getters and setters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pyspark.ml.param import Param, Params

from sparkdl.errors import ParamTypeError, SparkDLError, UnknownArgumentError
from sparkdl.settings.values import shown

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

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        for spec in self.SPECS:
            if spec.default is not None or spec.optional:
                self._setDefault(**{spec.name: spec.default})
        self._prepare()
        self.setParams(**arguments)

    def _prepare(self) -> None:
        """The preparation of a stage between its defaults and its arguments."""

    def setParams(self: Self, **arguments: Any) -> Self:
        """Sets Params and parts by keyword, each as its own setter would.

        Raises:
            UnknownArgumentError: A name that the stage does not have.
            ParamTypeError: A value of another type.
        """
        known = self._argument_names()
        for name in arguments:
            if name not in known and name in self.REFUSED:
                raise UnknownArgumentError("argument", name, known, self.REFUSED[name])
            if name not in known:
                raise UnknownArgumentError("argument", name, known)
        for name in known:  # in their order: what a model is made of comes before the model
            if name in arguments:
                getattr(self, f"set{_title(type(self), name)}")(arguments[name])
        return self

    @classmethod
    def _argument_names(cls) -> list[str]:
        inherited = (n for n in dir(cls) if isinstance(inspect.getattr_static(cls, n), Param))
        return [*cls.PARTS, *inherited]

    # -- Params: the same as Spark's, but an error has its four beats -----------------------------

    def _set(self: Self, **values: Any) -> Self:
        for name, value in values.items():
            if not self.hasParam(name):
                raise UnknownArgumentError("Param", name, [p.name for p in self.params])
            param = self.getParam(name)
            if value is None and not self._is_optional(name):
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
                if self._is_ours(param.name)
                else f"{param.typeConverter.__name__.removeprefix('to').lower()}: {param.doc}",
                received=f"{type(value).__name__} {shown(value)}",
            ) from error

    @classmethod
    def _is_ours(cls, name: str) -> bool:
        return any(spec.name == name for spec in cls.SPECS)

    @classmethod
    def _is_optional(cls, name: str) -> bool:
        return any(spec.name == name and spec.optional for spec in cls.SPECS)


def has_params(*specs: ParamSpec) -> Callable[[Cls], Cls]:
    """A class decorator: adds Params with their getters and setters, and a constructor's signature.

    A getter or setter that the class or a base of it has stays.
    """

    def add(cls: Cls) -> Cls:
        for spec in specs:
            setattr(cls, spec.name, Param(Params._dummy(), spec.name, spec.doc, spec.convert))
        cls.SPECS = (*specs, *cls.SPECS)  # type: ignore[attr-defined]
        names = [n for n in dir(cls) if isinstance(inspect.getattr_static(cls, n), Param)]
        for name in names:
            title = _title(cls, name)
            for method, body in ((f"get{title}", _get), (f"set{title}", _set)):
                if not hasattr(cls, method):
                    setattr(cls, method, _accessor(body, name, method, cls.__qualname__))
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in (*cls.PARTS, *sorted(names))  # type: ignore[attr-defined]
        ]
        known = [parameter.name for parameter in parameters]
        example = next((n for n in ("model", "keras_model_config") if n in known), known[0])
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def constructor(self: Any, *nameless: Any, **arguments: Any) -> None:
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


def _get(self: Any, name: str) -> Any:
    return self.getOrDefault(name)


def _set(self: Any, name: str, value: Any) -> Any:
    return self._set(**{name: value})


def _accessor(body: Callable[..., Any], name: str, method: str, owner: str) -> Callable[..., Any]:
    if body is _get:

        def accessor(self: Any) -> Any:
            return body(self, name)

        accessor.__doc__ = f"The value of :py:attr:`{name}`, or its default."
    else:

        def accessor(self: Any, value: Any) -> Any:  # type: ignore[misc]
            return body(self, name, value)

        accessor.__doc__ = f"Sets :py:attr:`{name}`; returns the stage."
    accessor.__name__, accessor.__qualname__ = method, f"{owner}.{method}"
    return accessor
