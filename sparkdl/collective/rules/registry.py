"""From what a user writes as ``rule=`` for ``mode='allreduce'`` to a rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from sparkdl.collective.rules.adasum import Adasum
from sparkdl.collective.rules.elastic import EASGD
from sparkdl.collective.rules.exchange_rule import ExchangeRule
from sparkdl.collective.rules.local import AdaptiveLocalSGD, DiLoCo, Downpour, LocalSGD
from sparkdl.collective.rules.mean import Mean, Sum
from sparkdl.collective.rules.onebit_adam import OneBitAdam
from sparkdl.collective.rules.power_sgd import PowerSGD
from sparkdl.collective.rules.sliced import Sliced
from sparkdl.collective.rules.straggler import StragglerDrop
from sparkdl.collective.rules.streaming import StreamingDiLoCo
from sparkdl.errors import ConfigError, UnknownNameError

_RULES: dict[str, type[ExchangeRule]] = {
    rule.name: rule
    for rule in (
        Mean,
        Sum,
        LocalSGD,
        AdaptiveLocalSGD,
        EASGD,
        Downpour,
        DiLoCo,
        StreamingDiLoCo,
        Adasum,
        PowerSGD,
        Sliced,
        StragglerDrop,
        OneBitAdam,
    )
}
ALIASES = {"zero1": "sliced"}
"""Other names in use: ZeRO stage 1 is the sliced all-reduce."""


def rule_names() -> list[str]:
    """The names that ``rule=`` takes with ``mode='allreduce'``, sorted."""
    return sorted(_RULES)


def make_rule(rule: Any = "mean", **options: Any) -> ExchangeRule:
    """The rule that ``rule`` and ``options`` stand for.

    Args:
        rule: A name (``'diloco'``), a dict ``{'name': ..., **options}``, an :class:`ExchangeRule`
            (kept as it is) or a class of them.
        **options: Constructor arguments, for a name or a class.

    Raises:
        UnknownNameError: No rule has that name; lists those known.
        ConfigError: An option that the rule does not have, or a value it cannot take.

    Example:
        >>> make_rule('diloco', momentum=0.5)
        DiLoCo(learning_rate=0.7, momentum=0.5)
    """
    if isinstance(rule, Mapping) and isinstance(rule.get("name"), str):
        rest = {key: value for key, value in rule.items() if key != "name"}
        return make_rule(rule["name"], **{**rest, **options})
    if isinstance(rule, str):
        name = rule.strip().lower().replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in _RULES:
            raise UnknownNameError("rule of mode 'allreduce'", rule, rule_names())
        return _construct(_RULES[name], options)
    if inspect.isclass(rule) and issubclass(rule, ExchangeRule):
        return _construct(rule, options)
    if isinstance(rule, ExchangeRule) and not options:
        return rule
    raise ConfigError(
        "cannot make a rule of mode 'allreduce'",
        expected="a name, a dict with a name, or an ExchangeRule, which takes no further options",
        received=f"{rule!r}" + (f" and {sorted(options)}" if options else ""),
        hint="rules of sparkdl.ps work in the modes with a server; known names: "
        + ", ".join(rule_names()),
    )


def _construct(make: type[ExchangeRule], options: Mapping[str, Any]) -> ExchangeRule:
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        known = list(inspect.signature(make).parameters)
        raise ConfigError(
            f"rule {make.name!r}: {error}",
            expected="options " + ", ".join(known) if known else "no options",
            received=", ".join(f"{k}={v!r}" for k, v in options.items()),
            hint="see the docstring of the rule",
        ) from error
    return make(**options)
