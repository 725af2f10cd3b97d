"""A user's own class with ``init`` and ``update``, made into a rule without inheritance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.rules.rule import Rule

_VALUES = ("payload", "blocking", "lock_free", "default_window", "independent", "elementwise")
_METHODS = (
    "local_optimizer",
    "init",
    "pulled",
    "update",
    "may_continue",
    "exchange",
    "config",
)


class AdaptedRule(Rule):
    """A rule that takes from ``inner`` every part of :class:`Rule` it has; made by :func:`adapt`.

    Args:
        inner: Any object with ``update(center, delta, state, commit, out)``.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def bind(self, num_workers: int) -> Rule:
        """As the inner object's ``bind``, if it has one."""
        bound = self.inner.bind(num_workers) if hasattr(self.inner, "bind") else self.inner
        return self if bound is self.inner else adapt(bound)

    def config(self) -> dict[str, Any]:
        """The inner object's own attributes."""
        return dict(vars(self.inner)) if hasattr(self.inner, "__dict__") else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self.inner,)

    def __repr__(self) -> str:
        return f"AdaptedRule({self.inner!r})"


def adapt(inner: Any) -> AdaptedRule:
    """A rule around ``inner``; picklable if ``inner`` is.

    Each gets a class of its own, so that a server can see from the class, as it does for every
    rule, which parts were overridden.
    """
    parts: dict[str, Any] = {"name": getattr(inner, "name", "") or type(inner).__name__.lower()}
    parts.update({part: getattr(inner, part) for part in _VALUES if hasattr(inner, part)})
    parts.update({part: _delegate(part) for part in _METHODS if hasattr(inner, part)})
    made: AdaptedRule = type("AdaptedRule", (AdaptedRule,), parts)(inner)
    return made


def _delegate(part: str) -> Callable[..., Any]:
    def call(self: AdaptedRule, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, part)(*args, **kwargs)

    return call
