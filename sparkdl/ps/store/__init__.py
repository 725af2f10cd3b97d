"""The parameter server's store: what plugs into a coordinator so that ranks share weights.

``parameter_store``
    :class:`ParameterStore`: pushes, pulls, rounds, snapshots and the state of a joiner.
``center``, ``rounds``, ``transfer``, ``holdings``, ``reading``,
``first_pulls``, ``sliced_commits``, ``snapshot``, ``sums``
    Its parts: the weights and the rule; one round of a rule that waits; a member's state on its
    way to a joiner; what each worker holds of the center; a reply that reads the center itself;
    workers that begin together; commits of slices; who sends the weights; sums of a round.
"""

from sparkdl.ps.store.parameter_store import ParameterStore

__all__ = ["ParameterStore"]
