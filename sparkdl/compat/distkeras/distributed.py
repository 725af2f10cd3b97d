"""dist-keras' trainers of several workers that share one server."""

from __future__ import annotations

import warnings
from typing import Any

from sparkdl.call_arguments import lists_its_arguments
from sparkdl.compat.distkeras.single import Trainer
from sparkdl.errors import ConfigError
from sparkdl.rules import AEASGD as AEASGDRule
from sparkdl.rules import EAMSGD as EAMSGDRule
from sparkdl.rules import Experimental as ExperimentalRule


class DistributedTrainer(Trainer):
    """What the trainers with a parameter server have.

    Args:
        keras_model: See :class:`Trainer`.
        worker_optimizer: See :class:`Trainer`.
        loss: See :class:`Trainer`.
        metrics: See :class:`Trainer`.
        num_workers: Workers.
        batch_size: Rows per step and worker.
        features_col: See :class:`sparkdl.compat.distkeras.single.SingleTrainer`.
        label_col: See :class:`sparkdl.compat.distkeras.single.SingleTrainer`.
        num_epoch: Passes over the rows.
        master_port: The server's port; 0 for any free one.
        loss_weights: See :class:`Trainer`.
    """

    RULE = ""

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        num_workers: int = 2, batch_size: int = 32, features_col: Any = "features",
        label_col: Any = "label", num_epoch: int = 1, master_port: int = 0,
        loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, loss, worker_optimizer, metrics, loss_weights)
        self.num_workers, self.batch_size, self.num_epoch = num_workers, batch_size, num_epoch
        self.features_column, self.label_column = features_col, label_col
        self.master_port = master_port
        self.master_host: str | None = None
        self.learning_rate = 1.0

    def set_minibatch_size(self, size: int) -> None:
        """Sets the rows per step and worker."""
        self.batch_size = size

    def get_minibatch_size(self) -> int:
        """Rows per step and worker."""
        return self.batch_size

    def get_features_column(self) -> Any:
        """The column of the features."""
        return self.features_column

    def get_label_column(self) -> Any:
        """The column of the labels."""
        return self.label_column

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the rule's learning rate, for those that have one; not the optimizer's."""
        self.learning_rate = learning_rate

    def get_learning_rate(self) -> float:
        """The rule's learning rate."""
        return self.learning_rate

    def set_num_epoch(self, num_epoch: int) -> None:
        """Sets the passes over the rows."""
        self.num_epoch = num_epoch

    def get_num_epoch(self) -> int:
        """Passes over the rows."""
        return self.num_epoch

    def set_num_workers(self, num_workers: int) -> None:
        """Sets the number of workers."""
        self.num_workers = num_workers

    def get_num_workers(self) -> int:
        """The number of workers."""
        return self.num_workers

    def set_master(self, master: str | None) -> None:
        """Sets the address of this host that workers connect to; None: found by itself."""
        self.master_host = master

    def determine_new_master(self) -> None:
        """Leaves the address to be found by itself again."""
        self.master_host = None

    def num_updates(self) -> int:
        """Updates that the workers of the last ``train`` sent: a worker's steps per window."""
        return self._updates

    def _rule(self) -> Any:
        return self.RULE

    def _workers(self) -> int:
        return self.num_workers

    def _settings(self) -> dict[str, Any]:
        rule = self._rule()
        if not rule:
            raise ConfigError(
                f"{type(self).__name__} has no rule of its own",
                expected="a trainer with one: DOWNPOUR, ADAG, AEASGD, EAMSGD, DynSGD, Experimental",
                received=type(self).__name__,
                hint="a subclass of yours sets RULE",
            )
        return {
            "mode": "asynchronous", "rule": rule, "frequency": self.communication_window,
            "num_workers": self._workers(), "port": self.master_port,
            "server_address": self.master_host,
        }  # fmt: skip


class AsynchronousDistributedTrainer(DistributedTrainer):
    """Workers that do not wait for each other; more tasks than workers take turns on the slots."""

    parallelism_factor = 1

    def set_parallelism_factor(self, factor: int) -> None:
        """Sets how many tasks there are for each worker."""
        self.parallelism_factor = factor

    def get_parallelism_factor(self) -> int:
        """Tasks for each worker."""
        return self.parallelism_factor

    def _workers(self) -> int:
        return self.num_workers * self.parallelism_factor


class DOWNPOUR(AsynchronousDistributedTrainer):
    """Each window a worker's change is added to the center (rule ``'downpour'``)."""

    RULE = "downpour"
    WINDOW = 5

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        num_workers: int = 2, batch_size: int = 32, features_col: Any = "features",
        label_col: Any = "label", num_epoch: int = 1, communication_window: int | None = None,
        master_port: int = 0, loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, master_port, loss_weights)  # fmt: skip
        self.communication_window = communication_window or self.WINDOW


class ADAG(DOWNPOUR):
    """As DOWNPOUR, each change divided by the window (rule ``'adag'``)."""

    RULE = "adag"
    WINDOW = 12


class DynSGD(DOWNPOUR):
    """As DOWNPOUR, each change divided by its staleness (rule ``'dynsgd'``)."""

    RULE = "dynsgd"


class AEASGD(AsynchronousDistributedTrainer):
    """Worker and center pull each other closer, by ``rho · learning_rate`` (rule ``'aeasgd'``).

    That is stable only while it is at most ``1 / workers``; a larger one is replaced by the rule's
    own, with a warning.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        num_workers: int = 2, batch_size: int = 32, features_col: Any = "features",
        label_col: Any = "label", num_epoch: int = 1, communication_window: int = 32,
        rho: float = 5.0, learning_rate: float = 0.1, master_port: int = 0,
        loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, master_port, loss_weights)  # fmt: skip
        self.communication_window = communication_window
        self.rho, self.learning_rate = rho, learning_rate

    def _rule(self) -> Any:
        return AEASGDRule(**self._elasticity())

    def _elasticity(self) -> dict[str, float]:
        if self.rho * self.learning_rate * self._workers() <= 1:
            return {"rho": self.rho, "learning_rate": self.learning_rate}
        warnings.warn(
            f"rho · learning_rate = {self.rho * self.learning_rate:g} is not stable with "
            f"{self._workers()} workers; {type(self).__name__} takes 0.9 / workers",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


class EAMSGD(AEASGD):
    """AEASGD whose workers train by SGD with Nesterov momentum (rule ``'eamsgd'``)."""

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        num_workers: int = 2, batch_size: int = 32, features_col: Any = "features",
        label_col: Any = "label", num_epoch: int = 1, communication_window: int = 32,
        rho: float = 5.0, learning_rate: float = 0.1, momentum: float = 0.9, master_port: int = 0,
        loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, communication_window, rho,
                         learning_rate, master_port, loss_weights)  # fmt: skip
        self.momentum = momentum

    def _rule(self) -> Any:
        return EAMSGDRule(momentum=self.momentum, **self._elasticity())


class Experimental(DOWNPOUR):
    """As ADAG; a coordinate that moved since the pull counts less (rule ``'experimental'``)."""

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        num_workers: int = 2, batch_size: int = 32, features_col: Any = "features",
        label_col: Any = "label", num_epoch: int = 1, communication_window: int = 5,
        learning_rate: float = 1.0, master_port: int = 0, loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, communication_window, master_port,
                         loss_weights)  # fmt: skip
        self.learning_rate = learning_rate

    def _rule(self) -> Any:
        return ExperimentalRule(learning_rate=self.learning_rate)
