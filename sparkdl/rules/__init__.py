"""Update rules: how a commit changes the center, and what a worker takes back.

Every rule is a frozen object of pure functions on flat float32 vectors (see :class:`Rule`);
:func:`make_rule` makes one from a name. :mod:`sparkdl.rules.damping`: how much of a change counts
where those of several workers are added.
"""

from collections.abc import Mapping

from sparkdl.rules.bsp import BSP, SSP, Averaging, Ensemble, SingleWorker
from sparkdl.rules.compensated import DCASGD, DynSGD, Experimental, GapAware, StalenessAware
from sparkdl.rules.diloco import AsyncDiLoCo, DiLoCo
from sparkdl.rules.downpour import Adag, Downpour, DownpourAdagrad, GeoSGD, Hogwild
from sparkdl.rules.elastic import AEASGD, EAMSGD
from sparkdl.rules.optimizer import SGD, Adagrad, Adam, AdamW, RMSprop, from_keras_config
from sparkdl.rules.rule import Commit, Peer, Rule, State, adapt
from sparkdl.settings.registry import Registry

__all__ = [
    "AEASGD",
    "BSP",
    "DCASGD",
    "EAMSGD",
    "RULES",
    "SGD",
    "SSP",
    "Adag",
    "Adagrad",
    "Adam",
    "AdamW",
    "AsyncDiLoCo",
    "Averaging",
    "Commit",
    "DiLoCo",
    "Downpour",
    "DownpourAdagrad",
    "DynSGD",
    "Ensemble",
    "Experimental",
    "GapAware",
    "GeoSGD",
    "Hogwild",
    "Peer",
    "RMSprop",
    "Rule",
    "SingleWorker",
    "StalenessAware",
    "State",
    "make_rule",
    "register",
    "rule_names",
]


def _adapt(given: object) -> Rule | None:
    if isinstance(given, Mapping):
        return from_keras_config(given) if "class_name" in given else None
    return adapt(given) if callable(getattr(given, "update", None)) else None


RULES: Registry[Rule] = Registry(
    "rule",
    Rule,
    (
        *(Downpour, DownpourAdagrad, Adag, DynSGD, StalenessAware, Experimental, AEASGD, EAMSGD),
        *(SSP, BSP, DCASGD, GapAware, Hogwild, GeoSGD, DiLoCo, AsyncDiLoCo),
        *(Averaging, Ensemble, SingleWorker, SGD, Adagrad, RMSprop, Adam, AdamW),
    ),
    adapt=_adapt,
    accepted="an object with update(center, delta, state, commit, out), or a Keras optimizer as "
    "{'class_name': ..., 'config': {...}}",
)
"""Every rule. A new one is a new module here, imported above and named in this list."""

register = RULES.register
"""Gives a :class:`Rule` of one\'s own a name, as those of this list have."""


def rule_names() -> list[str]:
    """The names that ``rule=`` takes in the modes with a server, sorted."""
    return RULES.names()


def make_rule(rule: object, **options: object) -> Rule:
    """The rule that ``rule`` and ``options`` stand for.

    Args:
        rule: A name (``'dynsgd'``), a dict ``{'name': ..., **options}``, a :class:`Rule` (kept as
            it is) or a class of them, any class or object with an ``update`` method like
            ``Rule.update`` (all else is optional), or a Keras optimizer as ``{'class_name': ...,
            'config': {...}}`` (it then runs on the server).
        **options: Constructor arguments, for a name or a class.

    Raises:
        UnknownNameError: No rule has that name; lists those known.
        ConfigError: An option that the rule does not have, or a value it cannot take.

    Example:
        >>> make_rule('bsp', payload='delta')
        BSP(payload='delta')
    """
    return RULES.make(rule, options)
