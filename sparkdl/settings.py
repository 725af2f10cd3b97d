"""Settings that a user gives, each declared once: name, kind, bounds, default and one sentence.

A field of a :class:`UserSettings` that :func:`setting` makes is a declaration. Its sentence is the
entry of that name under ``Args:`` in the class's docstring. The checks, the files of models, the
options of the command line and the Params of ``pyspark.ml`` are made from these declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sparkdl.errors import ConfigError
from sparkdl.values import (
    require_above_zero,
    require_flag,
    require_int,
    require_name,
    require_path,
    require_seconds,
    shown,
)

T = TypeVar("T")
S = TypeVar("S", bound="UserSettings")
_KIND = "kind"


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
    choices: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Declaration:
    """A declaration.

    Args:
        name: In snake_case.
        kind: The values that it takes.
        default: One of these.
        sentence: What it means.
    """

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
        given: The user's.
        call: The call, for the message.
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


def one_of(names: tuple[str, ...], hint: Callable[[Any], str] | None = None) -> ValueKind:
    """A few names; ``hint`` says what a wrong one may have been meant for."""

    def check(name: str, value: Any) -> str:
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


def require_instance(name: str, value: Any, cls: type[S]) -> S:
    """Returns settings that are an object of ``cls``; raises ConfigError."""
    if isinstance(value, cls):
        return value
    given = value.items() if isinstance(value, Mapping) else ()
    call = f"{cls.__name__}({', '.join(f'{key}={each!r}' for key, each in given)})"
    raise ConfigError(
        f"{name} must be a sparkdl.{cls.__name__}",
        expected=f"{name}={cls.__name__}(...) with any of {', '.join(declared(cls))}",
        received=shown(value),
        hint=f"from sparkdl import {cls.__name__}; {name}={call}",
    )
