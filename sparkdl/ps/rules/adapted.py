"""A user's own class with ``init`` and ``update``, made into a rule without inheritance."""

from __future__ import annotations

from typing import Any

from sparkdl.ps.rules.base import Rule

_PARTS = (
    "name",
    "payload",
    "blocking",
    "lock_free",
    "default_window",
    "independent",
    "local_optimizer",
    "init",
    "pulled",
    "update",
    "may_continue",
    "exchange",
    "exchange_gradient",
    "config",
)


class AdaptedRule(Rule):
    """Takes from ``inner`` every part of :class:`Rule` it has, and the rest from the base.

    Args:
        inner: Any object with ``update(center, delta, state, commit, out)``; picklable if the
            rule is to travel to another process.
    """

    def __init__(self, inner: Any) -> None:
        # What inner has becomes an attribute of this instance and so wins over the class's own.
        self.inner = inner
        vars(self)["name"] = type(inner).__name__.lower()
        for part in _PARTS:
            if hasattr(inner, part):
                vars(self)[part] = getattr(inner, part)

    def bind(self, num_workers: int) -> Rule:
        """As the inner object's ``bind``, if it has one."""
        bound = self.inner.bind(num_workers) if hasattr(self.inner, "bind") else self.inner
        return self if bound is self.inner else AdaptedRule(bound)

    def config(self) -> dict[str, Any]:
        """The inner object's own attributes."""
        return dict(vars(self.inner)) if hasattr(self.inner, "__dict__") else {}

    def __repr__(self) -> str:
        return f"AdaptedRule({self.inner!r})"
