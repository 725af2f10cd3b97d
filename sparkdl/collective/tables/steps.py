"""Steps of a model with tables: those of its dense variables, and a row step for each of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.tables.exchange import TableExchange
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.tables.store import RowStore
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, SharedLearner


class TableSteps:
    """The :class:`~sparkdl.collective.synchronizer.StepSynchronizer` of a model with tables.

    Args:
        dense: The steps of the model's variables.
        communicator: That of ``dense``; the tables use a group of their own.
        checkpoints: Where the rows are kept from epoch to epoch.
        state: What :meth:`save_state` returned in an earlier run; empty for none.
        ignores_nan: Gradients of rows that are not finite are taken; else they are an error.
    """

    def __init__(
        self,
        dense: AllReduceGradientSynchronizer,
        communicator: Communicator,
        checkpoints: TableCheckpoints,
        state: bytes = b"",
        *,
        ignores_nan: bool = False,
    ) -> None:
        self._ignores_nan = ignores_nan
        self._dense, self._checkpoints, self._state = dense, checkpoints, state
        self._communicator = communicator.group(range(communicator.size))
        self._exchange = TableExchange(self._communicator, ())
        self._steps = self._saved_at = 0

    @property
    def stores(self) -> Mapping[str, RowStore]:
        """Table name -> the rows that this rank owns."""
        return self._exchange.stores

    @property
    def stop_wanted(self) -> bool:
        """See :class:`~sparkdl.collective.synchronizer.StepSynchronizer`."""
        return self._dense.stop_wanted

    @stop_wanted.setter
    def stop_wanted(self, value: bool) -> None:
        self._dense.stop_wanted = value

    @property
    def stop_agreed(self) -> bool:
        """See :class:`~sparkdl.collective.synchronizer.StepSynchronizer`."""
        return self._dense.stop_agreed

    @stop_agreed.setter
    def stop_agreed(self, value: bool) -> None:
        self._dense.stop_agreed = value

    def start(
        self, learner: SharedLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Makes or loads the rows that this rank owns, and gives all ranks the root's variables."""
        self._exchange = TableExchange(self._communicator, learner.tables.specs)
        stores = self._exchange.stores
        for store in stores.values():
            store.on_nan = "ignore" if self._ignores_nan else "raise"
        rank, ranks = self._communicator.rank, self._communicator.size
        if self._state:
            reference = TableReference.from_bytes(self._state)
            self._steps = self._saved_at = reference.step
            for name, store in stores.items():
                reference.load(name, store, rank, ranks)
        else:
            learner.tables.give_rows(stores, rank, ranks)
        learner.tables.serve_from(self._exchange)
        self._dense.start(learner, root, scale, steps)

    def train(self, learner: SharedLearner, stack: BatchStack) -> None:
        """Takes a step for each batch of ``stack``."""
        for batch in stack.single_batches():
            rate, scale = learner.learning_rate, learner.tables.loss_scale
            before = 0 if scale is None else learner.step
            self._exchange.begin_step(batch.num_rows, rate)
            with self._explained():
                self._dense.train(learner, batch)
                taken = scale is None or learner.step > before  # all ranks know the same
                self._exchange.end_step(batch.num_rows if taken else 0, rate, scale or 1.0)
            self._steps += 1

    def skip(self, learner: SharedLearner) -> None:
        """Takes part in one step of the other ranks, and serves their pulls meanwhile."""
        rate = learner.learning_rate
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                self._exchange.serve_step(rate)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=serve, name="sparkdl-tables", daemon=True)
        thread.start()
        try:
            self._dense.skip(learner)
        except BaseException:
            self._communicator.close()  # ends the wait of the thread
            raise
        finally:
            thread.join()
        if failures:
            raise failures[0]
        self._steps += 1

    ranks_are_equal = True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, the learner evaluates; leaving, it serves the ranks that are not done yet."""
        with self._explained():
            yield
            self._exchange.serve_until_done()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = self._communicator.explain(error)
            if cause is error:
                raise
            raise cause from error

    def end_epoch(self, learner: SharedLearner) -> None:
        """See :class:`~sparkdl.collective.synchronizer.StepSynchronizer`."""
        self._dense.end_epoch(learner)

    def save_state(self, learner: SharedLearner) -> bytes:
        """Writes the rows of all ranks, each its own; returns where they are."""
        if not self._state or self._saved_at != self._steps:
            rank, ranks = self._communicator.rank, self._communicator.size
            names = tuple(sorted(self.stores))
            mine = b""
            if rank == 0:
                mine = self._checkpoints.after(self._state, self._steps, names).to_bytes()
            state = self._communicator.all_gather(np.frombuffer(mine, np.uint8))[0].tobytes()
            reference = TableReference.from_bytes(state)
            self._checkpoints.write(reference, self.stores, rank, ranks)
            self._communicator.barrier()
            if rank == 0:
                self._checkpoints.finish(reference, ranks, self._state)
            self._communicator.barrier()  # no rank tells of tables that are not whole
            self._state, self._saved_at = state, self._steps
        return self._state

    def take_changes(self, learner: SharedLearner, changes: VariableChanges) -> None:
        """See :class:`~sparkdl.collective.synchronizer.StepSynchronizer`."""
        self._dense.take_changes(learner, changes)

    def end_run(self, learner: SharedLearner) -> bool:
        """See :class:`~sparkdl.collective.synchronizer.StepSynchronizer`."""
        return self._dense.end_run(learner)

    def close(self) -> None:
        """Ends the tables' communicator."""
        self._dense.close()
        self._communicator.close()
