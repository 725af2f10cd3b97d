"""The parameter server's stores: what plugs into a coordinator so that ranks share weights.

``commit_store``, ``round_store``
    A store for each kind of rule: each commit changes the center, or the mean of a round does.
``parameter_store``
    The part of both: the center, pulls, replies that read the center, what each worker holds.
``rounds``, ``sliced_commits``, ``snapshot``
    Parts of a store of rounds.
``center``
    The weights and the rule.
"""

from sparkdl.codecs import Compression
from sparkdl.ps.store.commit_store import CommitStore
from sparkdl.ps.store.parameter_store import ParameterStore
from sparkdl.ps.store.round_store import RoundStore
from sparkdl.rules.rule import Rule
from sparkdl.weights import FloatArray, Layout

__all__ = ["CommitStore", "ParameterStore", "RoundStore", "make_store"]


def make_store(
    layout: Layout,
    center: FloatArray,
    rule: Rule,
    compression: Compression | None = None,
    *,
    together: bool = False,
) -> ParameterStore:
    """The store that fits ``rule``.

    Args:
        layout: Of the flat buffer.
        center: Initial weights; taken over, not copied.
        rule: How commits change the center.
        compression: What workers may send encoded; None refuses encoded commits.
        together: All ranks begin at the same moment, whatever the rule is.
    """
    if rule.blocking:
        return RoundStore(layout, center, rule, compression)
    return CommitStore(layout, center, rule, compression, together=together)
