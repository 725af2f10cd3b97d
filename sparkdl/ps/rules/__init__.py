"""Update rules: how a commit changes the center, and what a worker takes back.

Every rule is a frozen object of pure functions on flat float32 vectors (see :class:`Rule`);
:func:`make_rule` makes one from a name.
"""

from sparkdl.ps.rules.adag import Adag
from sparkdl.ps.rules.base import Commit, Peer, Rule, State
from sparkdl.ps.rules.bsp import BSP
from sparkdl.ps.rules.downpour import Downpour, DownpourAdagrad
from sparkdl.ps.rules.dynsgd import DynSGD, Experimental, StalenessAware
from sparkdl.ps.rules.hogwild import Hogwild
from sparkdl.ps.rules.registry import make_rule, rule_names

__all__ = [
    "BSP",
    "Adag",
    "Commit",
    "Downpour",
    "DownpourAdagrad",
    "DynSGD",
    "Experimental",
    "Hogwild",
    "Peer",
    "Rule",
    "StalenessAware",
    "State",
    "make_rule",
    "rule_names",
]
