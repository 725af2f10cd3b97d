"""``Registry``: the names that users write for one kind of object, and the classes behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from sparkdl.errors import ConfigError, UnknownNameError


class _Named(Protocol):
    """The classes that a registry keeps: those with a ``name`` attribute, the word that users
    write.
    """

    name: ClassVar[str]


T = TypeVar("T", bound=_Named)


class Registry(Generic[T]):
    """Makes objects of one kind from what a user writes.

    A user may write a name (``'dyn-sgd'`` and ``'DynSGD'`` are ``'dynsgd'``), a dict
    ``{'name': ..., **options}``, a class, or a finished object.

    Args:
        kind: What is made, for error messages: ``'rule'``.
        base: The class that all objects of the kind are of.
        classes: The classes that have names.
        aliases: Further names, each with the name that it stands for.
        adapt: Called with an object that is not of ``base``, such as a dict without a name;
            returns one that is, or None where it cannot.
        accepted: What is accepted beside a name and a ``base``, for error messages.
        hint: What else to tell who passed something that is not accepted.
    """

    def __init__(
        self,
        kind: str,
        base: type[T],
        classes: Iterable[type[T]],
        *,
        aliases: Mapping[str, str] | None = None,
        adapt: Callable[[object], T | None] | None = None,
        accepted: str = "",
        hint: str = "",
    ) -> None:
        self._kind, self._base, self._adapt = kind, base, adapt
        self._classes: dict[str, type[T]] = {cls.name: cls for cls in classes}
        self._by_plain_name = {_plain(name): cls for name, cls in self._classes.items()}
        for alias, name in (aliases or {}).items():
            self._by_plain_name[_plain(alias)] = self._classes[name]
        self._accepted, self._hint = accepted, hint

    def register(self, cls: type[T]) -> type[T]:
        """Gives a class the name in its attribute ``name``, in this process; may be a decorator.

        Raises:
            ConfigError: It is no class of the kind, or another class has the name.
        """
        known = self._by_plain_name.get(_plain(cls.name)) if hasattr(cls, "name") else None
        of_kind = inspect.isclass(cls) and issubclass(cls, self._base)
        if not of_kind or not (known is None or is_same_class(known, cls)):
            raise ConfigError(
                f"cannot register this {self._kind}",
                expected=f"a subclass of {self._base.__name__} with a name that no other one has",
                received=f"{cls!r}, name {getattr(cls, 'name', None)!r}",
            )
        self._classes[cls.name] = self._by_plain_name[_plain(cls.name)] = cls
        return cls

    def names(self) -> list[str]:
        """The names, sorted, without the aliases."""
        return sorted(self._classes)

    def classes(self) -> list[type[T]]:
        return list(self._classes.values())

    def __contains__(self, name: object) -> bool:
        """Whether ``name`` is a name or an alias, in any of its spellings."""
        return isinstance(name, str) and _plain(name) in self._by_plain_name

    def make(self, given: object, options: Mapping[str, Any]) -> T:
        """The object that ``given`` and ``options`` stand for.

        Args:
            given: A name, a dict with a name, a class, or a finished object.
            options: Constructor arguments, for a name or a class.

        Raises:
            UnknownNameError: Nothing has that name; lists the names.
            ConfigError: Something else is not accepted: ``given``, an option, or an option's value.
        """
        if isinstance(given, Mapping) and isinstance(given.get("name"), str):
            rest = {key: value for key, value in given.items() if key != "name"}
            given, options = given["name"], {**rest, **options}
        if isinstance(given, str):
            cls = self._by_plain_name.get(_plain(given))
            if cls is None:
                raise UnknownNameError(self._kind, given, self.names())
            made: T | None = self._construct(cls, cls.name, options)
        elif inspect.isclass(given) and (self._adapt or issubclass(given, self._base)):
            made = self._adapted(self._construct(given, given.__name__, options))
        else:
            made = None if options else self._adapted(given)
        if made is None:
            raise ConfigError(
                f"cannot make a {self._kind} of this",
                expected=f"a name, a dict with a 'name', or a {self._base.__name__}"
                + (f", or {self._accepted}" if self._accepted else "")
                + "; further options only with a name or a class",
                received=repr(given) + (f" and options {sorted(options)}" if options else ""),
                hint="known names: " + ", ".join(self.names()) + self._hint,
            )
        return made

    def _adapted(self, given: object) -> T | None:
        if isinstance(given, self._base):
            return given
        return None if self._adapt is None else self._adapt(given)

    def _construct(self, make: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
        signature = inspect.signature(make)
        try:
            signature.bind(**options)
        except TypeError as error:
            known = ", ".join(signature.parameters)
            raise ConfigError(
                f"{self._kind} {name!r}: {error}",
                expected=f"options {known}" if known else "no options",
                received=", ".join(f"{k}={v!r}" for k, v in options.items()) or "no options",
                hint=f"the docstring of {make.__name__} describes them",
            ) from error
        return make(**options)


def is_same_class(known: object, cls: object) -> bool:
    """Whether a class that was registered is this one, or this one before its cell ran again."""
    names = ("__module__", "__qualname__")
    return all(getattr(known, name, known) == getattr(cls, name, cls) for name in names)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")
