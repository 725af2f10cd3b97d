"""Synchronous SGD: the mean, or the sum, of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.rules.exchange_rule import ExchangeRule, GradientExchange
from sparkdl.weights import Layout


@dataclass(frozen=True)
class Mean(ExchangeRule):
    """``g = Σ n_i g_i / Σ n_i`` with ``n_i`` rows on rank ``i``: the global batch's gradient.

    A window of k batches is gradient accumulation: one exchange and one optimizer step for k
    batches, equal to one batch of all their rows.

    References:
        Goyal et al., Accurate, large minibatch SGD, 2017; Sergeev and Del Balso, Horovod, 2018.
    """

    name: ClassVar[str] = "mean"
    exact: ClassVar[bool] = True
    takes_halves: ClassVar[bool] = True

    def open(self, communicator: Communicator, layout: Layout) -> MeanGradientExchange:
        return MeanGradientExchange(communicator, layout)


class MeanGradientExchange(GradientExchange):
    """See :class:`Mean`."""

    def reduce(self, rows: int) -> bool:
        return self.average(self.whole, rows)


@dataclass(frozen=True)
class Sum(ExchangeRule):
    """``g = Σ g_i``: the mean times the ranks that had rows; the learning rate grows with them.

    Where ranks have different numbers of rows each rank counts alike. Statistics are averaged.

    References:
        Sergeev and Del Balso, Horovod, 2018 (op=Sum).
    """

    name: ClassVar[str] = "sum"
    takes_halves: ClassVar[bool] = True

    def open(self, communicator: Communicator, layout: Layout) -> SumGradientExchange:
        return SumGradientExchange(communicator, layout)


class SumGradientExchange(GradientExchange):
    """See :class:`Sum`."""

    def reduce(self, rows: int) -> bool:
        return self.add(rows)
