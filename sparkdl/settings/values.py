"""Values and settings that a user gives: checked, made Python's own, and shown in errors.

A field of a :class:`UserSettings` that :func:`setting` makes declares a setting once: its name,
kind, bounds and default. Its sentence is the entry of that name under ``Args:`` in the class's
docstring. The checks, the files of models, the options of the command line and the Params of
``pyspark.ml`` are made from these declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from sparkdl.errors import ConfigError, UnknownNameError

T = TypeVar("T")
S = TypeVar("S", bound="UserSettings")
_KIND, _CHECK = "kind", "check"
_SHOWN_CHARS = 200


def shown(value: Any) -> str:
    """A value for an error message: its ``repr``, or its kind and shape where that is long."""
    kind = type(value)  # a Column of Spark has every attribute, its class has not
    if hasattr(kind, "dtype") and hasattr(kind, "shape") and value.shape != ():
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return (
        text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({type(value).__name__})"
    )


def bare(value: Any) -> Any:
    """A number, flag or text of NumPy as Python's own; anything else as it is."""
    kind = type(value)  # a Column of Spark has every attribute, its class has not
    is_one = hasattr(kind, "dtype") and hasattr(kind, "item") and value.shape == ()
    return value.item() if is_one else value


def bare_numbers(value: object) -> Any:
    """A number, or a copy of a dict of numbers, without NumPy's."""
    if isinstance(value, Mapping):
        return {name: bare(number) for name, number in value.items()}
    return bare(value)


def is_number(value: object) -> bool:
    """Whether it is a real number, NumPy's too; True and False are none."""
    value = bare(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    """Whether it is a real number, and neither NaN nor infinite."""
    return is_number(value) and math.isfinite(value)


def require_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """``value`` as an int if it is a whole number, NumPy's too, of at least ``least``.

    Raises:
        ConfigError: It is not, or above ``most``.
    """
    number = bare(value)
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number < least or (most is not None and number > most):
        limit = "" if most is None else f" and at most {most}"
        raise ConfigError(
            f"{name} must be a whole number of at least {least}{limit}",
            expected=f"a whole number >= {least}" + (f" and <= {most}" if most else ""),
            received=shown(value),
        )
    return int(number)


def _require_kind(ok: bool, name: str, kind: str, value: object, expected: str = "") -> None:
    if not ok:
        raise ConfigError(
            f"{name} must be {kind}", expected=expected or kind, received=shown(value)
        )


def require_above_zero(name: str, value: Any) -> float:
    """``value`` as a float if it is a number above 0, NumPy's too; raises ConfigError."""
    _require_kind(is_number(value) and value > 0, name, "a number above 0", value)
    return float(value)


def require_seconds(name: str, value: Any) -> float:
    """``value`` as a plain number if it is one above 0, NumPy's too; raises ConfigError."""
    _require_kind(is_number(value) and value > 0, name, "a time above 0", value, "seconds > 0")
    seconds: float = bare(value)
    return seconds


def require_flag(name: str, value: object) -> bool:
    """``value`` as a bool if it is True or False, NumPy's too; raises ConfigError."""
    flag = bare(value)
    _require_kind(isinstance(flag, bool), name, "True or False", value)
    return bool(flag)


def require_path(name: str, value: object, hint: str = "") -> str:
    """``value`` as a text if it is a path or URI, also a ``pathlib`` one; raises ConfigError."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(
            f"{name} must say where a file or folder is",
            expected="a path or URI: a text that is not empty, or of pathlib",
            received=shown(value),
            hint=hint,
        )  # fmt: skip
    return path


def require_objects(custom_objects: Any) -> dict[str, Any]:
    """A copy of custom objects, which are empty for None; raises ConfigError."""
    if custom_objects is None:
        return {}
    named = isinstance(custom_objects, Mapping)
    if not named or not all(isinstance(name, str) for name in custom_objects):
        nameless = custom_objects if isinstance(custom_objects, (list, tuple)) else ()
        names = [getattr(thing, "__name__", "") for thing in nameless]
        raise ConfigError(
            "custom_objects must say what a model's file calls classes and functions",
            expected="a dict: name -> class or function",
            received=shown(custom_objects),
            hint="custom_objects={" + ", ".join(f"{n!r}: {n}" for n in names) + "}"
            if names and all(names)
            else "custom_objects={'MyLayer': MyLayer}",
        )
    return dict(custom_objects)


def require_name(kind: str, value: object, known: Iterable[str], hint: str = "") -> str:
    """Returns ``value`` if it is one of ``known``; raises UnknownNameError."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise UnknownNameError(kind, value, names, hint)
    return str(value)


def require(
    ok: bool, owner: str, option: str, expected: str, received: object, hint: str = ""
) -> None:
    """Raises ConfigError unless an option of a rule, a codec, an optimizer or a searcher is ``ok``.

    Args:
        ok: Whether the value is allowed.
        owner: Name of what has the option, as the user writes it, e.g. ``'diloco'``.
        expected: The values that are allowed, in words.
    """
    if not ok:
        raise ConfigError(
            f"{owner!r} cannot take this value for its option {option!r}", expected=expected,
            received=f"{option}={received!r}", hint=hint,
        )  # fmt: skip


def require_positive(owner: str, option: str, value: Any, *, or_none: bool = False) -> None:
    """Raises ConfigError unless ``value`` is a finite number above 0 (or None, if that may be)."""
    ok = (is_finite_number(value) and value > 0) or (or_none and value is None)
    require(ok, owner, option, "a number above 0" + ", or None" * or_none, value)


def require_bool(owner: str, option: str, value: object) -> None:
    """Raises ConfigError unless ``value`` is True or False."""
    require(isinstance(bare(value), bool), owner, option, "True or False", value)


def require_not_negative(owner: str, option: str, value: Any, *, or_none: bool = False) -> None:
    """Raises ConfigError unless ``value`` is a finite number, 0 or above (or None)."""
    ok = (is_finite_number(value) and value >= 0) or (or_none and value is None)
    require(ok, owner, option, "a number, 0 or above" + ", or None" * or_none, value)


def require_fraction(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``0 <= value < 1``."""
    require(is_finite_number(value) and 0 <= value < 1, owner, option, "a number in [0, 1)", value)


def require_share(owner: str, option: str, value: Any) -> None:
    """Raises ConfigError unless ``0 < value <= 1``."""
    require(is_finite_number(value) and 0 < value <= 1, owner, option, "a number in (0, 1]", value)


def require_whole(
    owner: str, option: str, value: Any, least: int | None = None, *, or_none: bool = False
) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least ``least`` (or None)."""
    number = bare(value)
    ok = isinstance(number, int) and not isinstance(number, bool)
    ok = (ok and (least is None or value >= least)) or (or_none and value is None)
    expected = "a whole number" if least is None else f"a whole number from {least}"
    require(ok, owner, option, expected + ", or None" * or_none, value)


def require_one_of(owner: str, option: str, value: object, known: tuple[Any, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``known``."""
    require(value in known, owner, option, " or ".join(map(repr, known)), value)


Check = Callable[[str, str, Any], None]
"""Refuses a value of an option, given the name of what has it, the option and the value."""
POSITIVE_OR_NONE: Check = partial(require_positive, or_none=True)


def whole_from(least: int, *, or_none: bool = False) -> Check:
    """Refuses what is no whole number of at least ``least`` (or None)."""
    return partial(require_whole, least=least, or_none=or_none)


def one_word_of(*known: str) -> Check:
    """Refuses what is none of a few words."""
    return partial(require_one_of, known=known)


def option(default: T, check: Check) -> T:
    """A field of :class:`Options` with the check of its values; for type checkers its default."""
    made: T = field(default=default, metadata={_CHECK: check})
    return made


class Options:
    """Base of rules, codecs and optimizers: frozen dataclasses; making one checks its options.

    Class attributes:
        name: The word a user writes, e.g. ``rule='dynsgd'``, ``compression='fp16'``.

    Raises:
        ConfigError: A value that the check of its :func:`option` refuses.
    """

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            if _CHECK in each.metadata:
                each.metadata[_CHECK](self.name, each.name, getattr(self, each.name))

    def config(self) -> dict[str, Any]:
        """The constructor arguments, as values that JSON can hold."""
        return {name: bare(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class ValueKind:
    """The values that a setting takes.

    Args:
        check: Name and value -> the value as Python's own; raises ConfigError.
        parse: A text of the command line -> the value.
        choices: All values, where these are a few names.
        optional: Whether None is a value, too.
    """

    check: Callable[[str, Any], Any]
    parse: Callable[[str], Any] = str
    choices: Collection[str] = ()
    optional: bool = False


@dataclass(frozen=True)
class Declaration:
    """A declaration."""

    name: str
    kind: ValueKind
    default: Any
    sentence: str


def setting(default: T, kind: ValueKind) -> T:
    """A field of a :class:`UserSettings`; for type checkers its default."""
    made: T = field(default=default, metadata={_KIND: kind})
    return made


class UserSettings:
    """A frozen dataclass whose fields are declarations; making one checks all of them.

    Raises:
        ConfigError: A value that is not of its kind.
    """

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            kind: ValueKind = each.metadata[_KIND]
            value = getattr(self, each.name)
            if value is not None or not kind.optional:
                object.__setattr__(self, each.name, kind.check(each.name, value))

    def changed(self) -> list[str]:
        """The names of those that differ from their defaults."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return [each.name for each in fields if getattr(self, each.name) != each.default]


def declared(cls: type[UserSettings]) -> dict[str, Declaration]:
    """The declarations of a class, by name, in their order."""
    _, _, arguments = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")
    told = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    sentences = {name: " ".join(text.split()) for name, text in told}
    return {
        each.name: Declaration(
            each.name, each.metadata[_KIND], each.default, sentences.get(each.name, "")
        )
        for each in dataclasses.fields(cls)  # type: ignore[arg-type]
    }


def refuse_changed(given: UserSettings, call: str, used: tuple[str, ...]) -> None:
    """Refuses settings that a call has no use for.

    Args:
        used: The names of those that it uses.

    Raises:
        ConfigError: Another one differs from its default.
    """
    for name in given.changed():
        if name not in used:
            owner = type(given).__name__
            raise ConfigError(
                f"{name} has no effect in {call}",
                expected=f"{owner} with {', '.join(used)} for {call}",
                received=f"{owner}({name}={shown(getattr(given, name))})",
            )


def whole(least: int, most: int | None = None) -> ValueKind:
    """Whole numbers from ``least`` to ``most``."""
    return ValueKind(partial(require_int, least=least, most=most), int)


def one_of(names: Collection[str], hint: Callable[[Any], str] | None = None) -> ValueKind:
    """A few names; ``hint`` says what a wrong one may have been meant for."""

    def check(name: str, value: object) -> str:
        return require_name(name, value, names, "" if hint is None else hint(value))

    return ValueKind(check, choices=names)


def instance(cls: type[S]) -> ValueKind:
    """Settings in an object of their own."""
    return ValueKind(partial(require_instance, cls=cls))


def checked(check: Callable[[Any], Any], parse: Callable[[str], Any] = str) -> ValueKind:
    """Values that a function of the value alone checks and returns."""
    return ValueKind(lambda _, value: check(value), parse)


def or_none(kind: ValueKind) -> ValueKind:
    """The same, or None."""
    return dataclasses.replace(kind, optional=True)


def number_or_text(text: str) -> int | str:
    """A text of the command line as a number where it is one."""
    return int(text) if text.isdigit() else text


def flag_or_text(text: str) -> bool | str:
    """A text of the command line as True or False where it says so."""
    return {"true": True, "false": False}.get(text.lower(), text)


SECONDS = ValueKind(require_seconds, float)
ABOVE_ZERO = ValueKind(require_above_zero, float)
FLAG = ValueKind(require_flag)
PATH = ValueKind(require_path)


def require_instance(name: str, value: object, cls: type[S]) -> S:
    """Returns settings that are an object of ``cls``; raises ConfigError."""
    if isinstance(value, cls):
        return value
    given = value.items() if isinstance(value, Mapping) else ()
    call = f"{cls.__name__}({', '.join(f'{key}={each!r}' for key, each in given)})"
    raise ConfigError(
        f"{name} must be a sparkdl.{cls.__name__}",
        expected=f"{name}={cls.__name__}(...) with any of {', '.join(declared(cls))}",
        received=shown(value), hint=f"from sparkdl import {cls.__name__}; {name}={call}",
    )  # fmt: skip
