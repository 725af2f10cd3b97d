"""Elastic averaging: a spring between every worker and the center (AEASGD, EAMSGD)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sparkdl.rules.rule import Peer, Rule, unbound
from sparkdl.settings.values import POSITIVE_OR_NONE, option, require, require_fraction
from sparkdl.weights import FloatArray


def pull_together(local: FloatArray, center: FloatArray, alpha: float, force: FloatArray) -> None:
    """``force = alpha · (local - center); local -= force``: the center has to gain the ``force``.

    ``force`` may be ``center``.
    """
    np.subtract(local, center, out=force)
    np.multiply(force, np.float32(alpha), out=force)
    np.subtract(local, force, out=local)


def require_stable(rule: str, alpha: float, num_workers: int) -> None:
    """Raises ConfigError where the center would move further than the workers are away."""
    require(
        alpha * num_workers <= 1 + 1e-9,
        rule,
        "alpha",
        f"alpha · workers <= 1, so at most {1 / num_workers:.4g} with {num_workers} workers, "
        "or the weights diverge",
        alpha,
        "leave alpha out to have it chosen",
    )


@dataclass(frozen=True)
class AEASGD(Rule):
    """Asynchronous elastic averaging SGD: worker and center pull each other closer.

    Every window a worker pulls the center, and the same elastic force moves both::

        E      = alpha · (local - center)
        local  -= E
        center += E

    so that ``local + center`` stays the same. The workers keep weights of their own, and the center
    follows their mean slowly. Stable only while ``alpha · workers <= 1``. The force is computed
    from the present center, so an exchange is a pull and then a push, not one ``push_pull``.

    Args:
        alpha: The elastic coefficient in (0, 1]. None gives ``0.9 / workers``, at most 0.5: the
            paper's setting ``beta = 0.9``.
        rho: With ``learning_rate``, the paper's other parametrization ``alpha = rho ·
            learning_rate`` (dist-keras: rho 5, learning rate 0.1).
        learning_rate: See ``rho``.

    Reference: Zhang, Choromanska and LeCun, 2015, "Deep learning with Elastic Averaging SGD",
    arXiv:1412.6651, algorithm 1.
    """

    alpha: float | None = option(None, POSITIVE_OR_NONE)
    rho: float | None = option(None, POSITIVE_OR_NONE)
    learning_rate: float | None = option(None, POSITIVE_OR_NONE)

    name: ClassVar[str] = "aeasgd"
    default_window: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.rho is None) == (self.learning_rate is None), self.name, "rho",
            "rho and learning_rate together, or neither", (self.rho, self.learning_rate),
        )  # fmt: skip
        require(
            self.alpha is None or self.rho is None, self.name, "alpha",
            "either alpha, or rho and learning_rate", (self.alpha, self.rho, self.learning_rate),
        )  # fmt: skip
        alpha = self._alpha()
        require(
            alpha is None or alpha <= 1, self.name, "alpha",
            "alpha (or rho · learning_rate) at most 1", alpha,
        )  # fmt: skip

    def _alpha(self) -> float | None:
        if self.rho is not None and self.learning_rate is not None:
            return self.rho * self.learning_rate
        return self.alpha

    def bind(self, num_workers: int) -> AEASGD:
        """The rule with a number for ``alpha``; refuses ``alpha · num_workers > 1``."""
        alpha = self._alpha()
        if alpha is None:
            alpha = min(0.5, 0.9 / num_workers)
        require_stable(self.name, alpha, num_workers)
        return replace(self, alpha=alpha, rho=None, learning_rate=None)

    def exchange(self, local: FloatArray, base: FloatArray, peer: Peer) -> None:
        """Pulls the center, moves ``local`` towards it, and pushes the opposite move."""
        alpha = self._alpha()
        if alpha is None:
            raise unbound(self.name)
        peer.pull()
        base[...] = peer.buffer
        pull_together(local, base, alpha, peer.buffer)
        peer.push()


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    """AEASGD whose workers train with Nesterov momentum.

    ::

        v = momentum · v - learning_rate · ∇f(x + momentum · v)
        x += v

    That is Keras' ``SGD(momentum, nesterov=True)``, whose variable is the look-ahead point ``y = x
    + momentum · v``: there the gradient is taken (``local_optimizer`` asks the worker for it). The
    elastic force acts on ``y``, which is where the worker's weights are.

    Args:
        alpha, rho, learning_rate: As for :class:`AEASGD`.
        momentum: The paper's delta, in [0, 1).

    Reference: Zhang, Choromanska and LeCun, 2015, arXiv:1412.6651, algorithm 2. (dist-keras takes
    the gradient at ``x`` and applies two learning rates.)
    """

    momentum: float = option(0.9, require_fraction)

    name: ClassVar[str] = "eamsgd"

    def local_optimizer(self) -> dict[str, Any]:
        """SGD with this Nesterov momentum; the learning rate stays the user's."""
        return {"class_name": "SGD", "config": {"momentum": self.momentum, "nesterov": True}}
