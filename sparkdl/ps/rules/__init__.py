"""Update rules: how a commit changes the center, and what a worker takes back.

Every rule is a frozen object of pure functions on flat float32 vectors (see :class:`Rule`);
:func:`make_rule` makes one from a name.
"""

from sparkdl.ps.rules.adag import Adag
from sparkdl.ps.rules.averaging import Averaging, Ensemble, Single
from sparkdl.ps.rules.bsp import BSP
from sparkdl.ps.rules.compensated import DCASGD, GapAware
from sparkdl.ps.rules.diloco import AsyncDiLoCo, DiLoCo
from sparkdl.ps.rules.downpour import Downpour, DownpourAdagrad
from sparkdl.ps.rules.dynsgd import DynSGD, Experimental, StalenessAware
from sparkdl.ps.rules.elastic import AEASGD, EAMSGD
from sparkdl.ps.rules.geo import GeoSGD
from sparkdl.ps.rules.hogwild import Hogwild
from sparkdl.ps.rules.optimizer import SGD, Adagrad, Adam, AdamW, RMSprop
from sparkdl.ps.rules.registry import make_rule, rule_names
from sparkdl.ps.rules.rule import Commit, Peer, Rule, State
from sparkdl.ps.rules.ssp import SSP

__all__ = [
    "AEASGD",
    "BSP",
    "DCASGD",
    "EAMSGD",
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
    "Single",
    "StalenessAware",
    "State",
    "make_rule",
    "rule_names",
]
