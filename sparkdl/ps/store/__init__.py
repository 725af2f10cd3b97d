"""The parameter server's stores: what plugs into a coordinator so that ranks share weights.

``stores``
    A store for each kind of rule: each commit changes the center, or the mean of a round does.
``center``
    The part of both: the weights and the rule; how commits are read, and answered with the center
    or with the change of what a worker holds.
``rounds``
    Parts of a store of rounds.
"""

from sparkdl.codecs import Compression
from sparkdl.ps.store.center import ParameterStore
from sparkdl.ps.store.stores import CommitStore, RoundStore
from sparkdl.rules.rule import Rule
from sparkdl.weights import NO_VALUES, FloatArray, Layout

__all__ = ["CommitStore", "ParameterStore", "RoundStore", "make_store"]


def make_store(
    layout: Layout,
    center: FloatArray,
    rule: Rule,
    compression: Compression | None = None,
    *,
    together: bool = False,
    sharded: bool = False,
) -> ParameterStore:
    """The store that fits ``rule``.

    Args:
        together: All ranks begin at the same moment, whatever the rule is.
        sharded: The values lie on shards (:mod:`sparkdl.ps.shards`), and ``center`` is empty.
    """
    if sharded:
        if rule.blocking:
            return RoundStore(NO_VALUES, center, rule, decides_for=layout)
        layout = NO_VALUES
    if rule.blocking:
        return RoundStore(layout, center, rule, compression)
    return CommitStore(layout, center, rule, compression, together=together)
