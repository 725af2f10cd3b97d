"""The rules of ``SparkModel(mode='allreduce', rule=...)``: what ranks do without a server.

A rule is frozen and picklable. The driver makes it (:func:`make_rule`) and completes it for the run
(``rule.bind(num_workers, optimizer_config)``). Each rank opens it:
``exchange = rule.open(communicator, layout)``. What to call then depends on ``rule.exchanges``:

``'gradient'``
    at each step ``exchange.take_step(parts, learner.apply_gradients)``, where ``parts`` are the
    rank's batches as pairs of a function and a number of rows. The gradients of several batches
    become one step; a rank that has no batch left passes an empty list::

        parts = [(lambda out: learner.gradients(batch, out), batch.num_rows)]

``'weights'``
    ``exchange.start(weights)`` once. The learner trains a window on its own, then
    ``exchange.after_window(weights, rows, loss, learning_rate)`` changes the weights in place and
    may return the next window's length. At the end ``exchange.finish(weights)`` gives the model.
    Between two exchanges ``exchange.center`` is equal on all ranks.

``'optimizer'``
    ``exchange.start(weights)`` once. At each step ``rows = exchange.fill(parts)``, then
    ``exchange.step(weights, rows, learning_rate)`` changes the weights in place: the rule takes the
    step itself, and the learner's own optimizer takes none.

All ranks call the same methods at the same time. Their weights are equal when a run starts. A rank
without rows passes no parts, or 0 rows; it contributes nothing. The averaged section of the layout
(BatchNorm statistics) is averaged by rows in every rule, never summed or compressed. At the end
each rank calls ``exchange.close()``, after a barrier. ``exchange.state()`` gives what a second run
needs to go on, ``load_state`` takes it; ``exchange.sent_bytes`` counts the bytes sent.

A rule of your own is a subclass of :class:`ExchangeRule` and a subclass of one of the exchanges.
What only moves a center by the mean change is a rule of :mod:`sparkdl.rules` instead, which works
with a server too; without one it is a class of both: ``class Mine(TheRule, RoundRule)``.
"""

from sparkdl.collective.rules.exchange_rule import (
    Exchange,
    ExchangeRule,
    GradientExchange,
    OptimizerExchange,
    Part,
    WeightsExchange,
)
from sparkdl.collective.rules.local import (
    EASGD,
    AdaptiveLocalSGD,
    DiLoCoExchangeRule,
    LocalSGD,
    RoundRule,
    StreamingDiLoCo,
)
from sparkdl.collective.rules.onebit_adam import OneBitAdam
from sparkdl.collective.rules.reductions import Adasum, Mean, PowerSGD, Sum
from sparkdl.collective.rules.sliced import Sliced
from sparkdl.collective.rules.straggler import StragglerDrop
from sparkdl.rules.diloco import DiLoCo
from sparkdl.settings.registry import Registry

__all__ = [
    "EASGD",
    "EXCHANGE_RULES",
    "AdaptiveLocalSGD",
    "Adasum",
    "DiLoCoExchangeRule",
    "Exchange",
    "ExchangeRule",
    "GradientExchange",
    "LocalSGD",
    "Mean",
    "OneBitAdam",
    "OptimizerExchange",
    "Part",
    "PowerSGD",
    "RoundRule",
    "Sliced",
    "StragglerDrop",
    "StreamingDiLoCo",
    "Sum",
    "WeightsExchange",
    "make_rule",
    "register",
    "rule_names",
]


def _adapt(given: object) -> ExchangeRule | None:
    """The rule that runs a server's rule without a server, where there is one."""
    return DiLoCoExchangeRule(**given.config()) if type(given) is DiLoCo else None


EXCHANGE_RULES: Registry[ExchangeRule] = Registry(
    "rule of mode 'allreduce'",
    ExchangeRule,
    (
        *(Mean, Sum, LocalSGD, AdaptiveLocalSGD, EASGD, DiLoCoExchangeRule, StreamingDiLoCo),
        *(Adasum, PowerSGD, Sliced, StragglerDrop, OneBitAdam),
    ),
    aliases={"zero1": "sliced"},  # ZeRO stage 1 is the sliced all-reduce
    adapt=_adapt,
    hint="; other rules of sparkdl.rules work in the modes with a server",
)
"""Every rule. A new one is a new module here, imported above and named in this list."""

register = EXCHANGE_RULES.register
"""Gives a :class:`ExchangeRule` of one\'s own a name, as those of this list have."""


def rule_names() -> list[str]:
    """The names that ``rule=`` takes with ``mode='allreduce'``, sorted."""
    return EXCHANGE_RULES.names()


def make_rule(rule: object = "mean", **options: object) -> ExchangeRule:
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
        DiLoCoExchangeRule(learning_rate=0.7, momentum=0.5)
    """
    return EXCHANGE_RULES.make(rule, options)
