"""Which rule ``mode='allreduce'`` gets, and which combinations make no sense."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from sparkdl.collective.rules import EXCHANGE_RULES, ExchangeRule
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.rules import rule_names as exchange_names
from sparkdl.config import EPOCH_WINDOW
from sparkdl.errors import ConfigError
from sparkdl.ps.rules import RULES, Rule, make_rule, rule_names

WIRES = {"fp16": "float16", "bf16": "bfloat16"}


def require_family(mode: str, rule: Any) -> None:
    """Refuses a rule of the other family: with a server, or without one.

    Raises:
        ConfigError: Names the mode in which ``rule`` works.
    """
    name = _name_of(rule)
    if mode == "allreduce":
        if _is_a(rule, Rule) or (name in RULES and name not in EXCHANGE_RULES):
            server_mode = _server_mode(rule)
            raise ConfigError(
                f"rule {name!r} works through a parameter server",
                expected="a rule of mode 'allreduce': " + ", ".join(exchange_names()),
                received=f"rule={name!r}, mode='allreduce'",
                hint=f"did you mean mode={server_mode!r}?",
            )
    elif _is_a(rule, ExchangeRule) or (name in EXCHANGE_RULES and name not in RULES):
        raise ConfigError(
            f"rule {name!r} works between workers, without a server",
            expected="a rule of the modes with a server: " + ", ".join(rule_names()),
            received=f"rule={name!r}, mode={mode!r}",
            hint="did you mean mode='allreduce'?",
        )


def choose_exchange(
    frequency: str | int, rule: Any, compression: Any, communicator: str, optimizer: Any
) -> tuple[ExchangeRule, int, str | None]:
    """The rule, its window (batches per exchange), and what values travel as (None: float32).

    Args:
        frequency: Parsed.
        rule: What the user said; None for the mean of the gradients.
        compression: None, ``'fp16'`` or ``'bf16'``.
        communicator: Its name.
        optimizer: Of the compiled model.

    Raises:
        ConfigError: A combination that makes no sense; says why.
        UnknownNameError: No such rule.
    """
    require_family("allreduce", rule)
    chosen = make_exchange_rule("mean" if rule is None else rule)
    chosen.bind(1, optimizer_config(optimizer))
    return chosen, _window(chosen, frequency), _wire(chosen, compression, communicator)


def optimizer_config(optimizer: Any) -> dict[str, Any]:
    """A Keras optimizer as ``ExchangeRule.bind`` takes it."""
    return {"class_name": type(optimizer).__name__, "config": optimizer.get_config()}


def _window(rule: ExchangeRule, frequency: str | int) -> int:
    if frequency == "auto":
        return rule.default_window
    if rule.own_window:
        raise ConfigError(
            f"rule {rule.name!r} chooses its window itself",
            expected="frequency='auto'",
            received=f"frequency={frequency!r}",
            hint="rule='local_sgd' takes a fixed one",
        )
    if frequency == "epoch":
        if rule.exchanges != "weights":
            raise ConfigError(
                f"rule {rule.name!r} would take one step in an epoch",
                expected="frequency='batch', or the number of batches to accumulate",
                received="frequency='epoch'",
                hint="rules on weights exchange once an epoch: rule='local_sgd', say",
            )
        return EPOCH_WINDOW
    return 1 if frequency == "batch" else int(frequency)


def _wire(rule: ExchangeRule, compression: Any, communicator: str) -> str | None:
    if compression is None:
        return None
    if compression not in WIRES:
        raise ConfigError(
            "mode 'allreduce' cannot reduce what this codec makes",
            expected="compression=None, 'fp16' or 'bf16'",
            received=repr(compression),
            hint="rule='powersgd' and rule='onebit_adam' compress in mode 'allreduce'; "
            "sparse and quantized codecs work in the modes with a server",
        )
    if not rule.takes_halves:
        raise ConfigError(
            f"compression does not go with rule {rule.name!r}",
            expected="compression=None",
            received=f"compression={compression!r}",
            hint="it does with rules that send plain sums or means: 'mean', 'sum', 'local_sgd', "
            "'adaptive_local_sgd', 'downpour', 'diloco'",
        )
    if compression == "bf16" and communicator == "horovod":
        raise ConfigError(
            "Horovod cannot reduce bfloat16",
            expected="compression=None or 'fp16' with Horovod",
            received="compression='bf16'",
            hint="communicator='builtin' can",
        )
    return WIRES[compression]


def _name_of(rule: Any) -> str:
    """The name that a rule goes by, whatever form it was given in."""
    if isinstance(rule, Mapping):
        rule = rule.get("name", rule.get("class_name", ""))
    if isinstance(rule, str):
        return rule.strip().lower().replace("-", "_")
    return str(getattr(rule, "name", "") or getattr(rule, "__name__", ""))


def _is_a(rule: Any, kind: type) -> bool:
    return isinstance(rule, kind) or (inspect.isclass(rule) and issubclass(rule, kind))


def _server_mode(rule: Any) -> str:
    made = make_rule(rule)
    if made.lock_free:
        return "hogwild"
    return "synchronous" if made.blocking else "asynchronous"
