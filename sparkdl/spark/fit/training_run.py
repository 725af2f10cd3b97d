"""``Run``: the driver's end of a run while its workers train."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.files.run_state import RunState
from sparkdl.progress.events import RunProgress
from sparkdl.progress.monitor import Command
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.training.phases import ServerUsage
from sparkdl.training.syncing import Strategy


class Run(Protocol):
    """How the driver follows the workers: through a parameter server, a coordinator, or not."""

    strategy: Strategy
    """How the workers' updates travel; pickled for the executors."""

    @abstractmethod
    def progress(self, since_epoch: int = 0) -> RunProgress:
        """The workers' reports on the epochs from ``since_epoch`` on.

        Raises:
            TransportError: The server has ended.
        """

    def take_lines(self) -> list[tuple[int, str]]:
        """``(rank, line)`` of what the ranks said since the last call; none if nobody hears them.

        Raises:
            TransportError: The server has ended.
        """
        return []

    @abstractmethod
    def command(self, command: Command) -> None:
        """Tells the workers."""

    @abstractmethod
    def kept(self) -> RunState | None:
        """The state that a worker left with the driver after the last epoch; None if none has.

        Its weights are empty where a server holds them.
        """

    @abstractmethod
    def state(self) -> RunState:
        """The workers' present weights, with the optimizer's and the rule's state of :meth:`kept`.

        Raises:
            TransportError: The driver has no weights yet, or the server has ended.
        """

    def member(self, rank: int) -> RunState | None:
        """The model of its own that a rank has trained, where the models never meet; None if it
        has left none."""
        return None

    @abstractmethod
    def result(self, trained: Mapping[int, TrainedRank]) -> RunState:
        """The trained weights and all that goes with them, given what the ranks returned."""

    def servers(self) -> tuple[ServerUsage, ...]:
        """The work so far of servers that hold the weights together; else nothing."""
        return ()


class CoordinatedRun(Run):
    """The base of runs whose workers a coordinator follows."""

    @property
    @abstractmethod
    def _driver(self) -> DriverClient:
        """The driver's connection to the coordinator."""

    def take_lines(self) -> list[tuple[int, str]]:
        return self._driver.take_lines()

    def command(self, command: Command) -> None:
        self._driver.control(
            stop=command.stop, learning_rate=command.learning_rate, release=command.release,
            changes=command.changes,
        )  # fmt: skip

    def kept(self) -> RunState | None:
        kept = self._driver.kept()
        return RunState.from_bytes(kept) if kept else None

    def member(self, rank: int) -> RunState | None:
        kept = self._driver.kept(rank)
        return RunState.from_bytes(kept) if kept else None


def returned_state(trained: Mapping[int, TrainedRank]) -> RunState:
    """The state that a rank returned for the run; an empty one if none did."""
    states = [rank.state for _, rank in sorted(trained.items()) if rank.state is not None]
    whole = [state for state in states if state.optimizer]
    return [*whole, *states, RunState(0)][0]
