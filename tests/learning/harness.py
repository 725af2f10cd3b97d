"""Workers as threads of this process, with a parameter server in it: the loop without Spark."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.collective.table_exchange import TableSteps
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner import make_learner
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.tables.checkpoints import TableCheckpoints
from sparkdl.testing.inproc import InprocParameterServer, connect_threads
from sparkdl.worker import train


class Again:
    """Equal models, each with what trains it: those that were trained before begin anew.

    What they have compiled stays, as in a worker's next fit, and is the slow part of a test. Models
    of an exception are not used again.

    Args:
        start: Makes what trains a model, such as a learner.
    """

    def __init__(self, start: Callable[[Any], Any]) -> None:
        self._start = start
        self._kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def of(self, make: Any, count: int = 1) -> Iterator[list[Any]]:
        """What trains ``count`` models of ``make``, which are as ``make`` makes them."""
        kept = self._kept.setdefault(make, [])
        taken, kept[:] = kept[:count], kept[count:]
        for trained, first in taken:
            for variable, value in first:
                variable.assign(value)
            model = getattr(trained, "model", trained)
            model.reset_metrics()
            if trained is not model:
                trained.reload()
        while len(taken) < count:
            model = make()
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            first = [(v, np.array(v)) for v in (*model.variables, *model.optimizer.variables)]
            taken.append((self._start(model), first))
        yield [trained for trained, _ in taken]
        kept[:0] = taken


learners_again = Again(make_learner)


def run_workers(
    make_model: Any,
    parts: list[tuple[np.ndarray, np.ndarray]],
    rule: Any,
    *,
    epochs: int = 1,
    batch_size: int = 8,
    window: int = 1,
    shuffle: bool = False,
    validation: tuple[np.ndarray, np.ndarray] | None = None,
    codec: Any = None,
    class_weight: Any = None,
    rows_of: Any = rows_from_numpy,
) -> SimpleNamespace:
    """Trains one model per part; returns the final weights, learners, models, layout and center.

    ``rows_of`` makes a worker's rows of its ``x`` and ``y``.
    """
    models = [make_model() for _ in parts]
    layout = model_layout(models[0])
    center = read_model(models[0], layout)
    config = ServerConfig(layout, rule, len(parts), codec=codec)
    settings = LoopSettings(epochs=epochs, batch_size=batch_size, window=window, shuffle=shuffle)
    errors: list[BaseException] = []
    learners = [make_learner(model) for model in models]

    with InprocParameterServer(config, center) as server:

        def work(rank: int) -> None:
            try:
                rows = rows_of(*parts[rank])
                held_out = None
                if validation is not None:
                    held_out = Batches(rows_from_numpy(*validation), batch_size, shuffle=False)
                with server.client(rank) as client:
                    train(
                        learners[rank], ServerSynchronizer(rule, client, layout, False),
                        Batches(
                            rows, batch_size, shuffle=shuffle, rank=rank, class_weight=class_weight
                        ), settings,
                        validation=held_out, num_rows=len(rows), num_workers=len(parts),
                    )  # fmt: skip
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(r,)) for r in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(t.is_alive() for t in threads), "a worker hangs"
        if errors:
            raise errors[0]
        weights = []
        for learner in learners:
            flat = np.empty(layout.size, np.float32)
            learner.read_weights(flat)
            weights.append(flat)
    return SimpleNamespace(
        weights=weights, learners=learners, models=models, layout=layout, center=server.center
    )


def split(x: np.ndarray, y: np.ndarray, sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Consecutive parts of the given sizes."""
    edges = np.cumsum([0, *sizes])
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]


def global_batches(
    parts: list[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches that one process would train: step t has every worker's t-th batch."""
    steps = max(-(-len(x) // batch_size) for x, _ in parts)
    result = []
    for t in range(steps):
        cut = slice(t * batch_size, (t + 1) * batch_size)
        result.append(
            (np.concatenate([x[cut] for x, _ in parts]), np.concatenate([y[cut] for _, y in parts]))
        )
    return result


def spread_over_ranks(
    models: list[Any],
    parts: Any,
    folder: str,
    *,
    batch_size: int = 8,
    epochs: int = 2,
    first_epoch: int = 0,
    state: bytes = b"",
    validation: Any = None,
) -> tuple[list[Any], bytes]:
    """Trains a model with tables on each of ranks that are threads of this process.

    Returns:
        Their synchronizers after training, and the state that they kept.
    """
    learners = [make_learner(model) for model in models]
    layout = model_layout(models[0])
    settings = LoopSettings(
        epochs=epochs, first_epoch=first_epoch, batch_size=batch_size, window=1, shuffle=False
    )
    communicators = connect_threads(len(parts))
    errors: list[BaseException] = []
    found: list[Any] = [None] * len(parts)

    def work(rank: int) -> None:
        try:
            with communicators[rank] as communicator:
                dense = AllReduceGradientSynchronizer(communicator, layout)
                steps = TableSteps(dense, communicator, TableCheckpoints(folder), state)
                synchronizer = AllReduceSynchronizer(communicator, layout, steps=steps)
                rows = rows_from_numpy(*parts[rank])
                held_out = None
                if validation is not None:
                    own = validation[0][rank :: len(parts)], validation[1][rank :: len(parts)]
                    held_out = Batches(rows_from_numpy(*own), batch_size, shuffle=False)
                batches = Batches(rows, batch_size, shuffle=False, rank=rank)
                train(
                    learners[rank], synchronizer, batches, settings,
                    validation=held_out, num_rows=len(rows), num_workers=len(parts),
                )  # fmt: skip
                found[rank] = steps, synchronizer.rule_state
                if hasattr(learners[rank], "sync_model"):
                    learners[rank].sync_model()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(t.is_alive() for t in threads), "a worker hangs"
    if errors:
        raise errors[0]
    return [steps for steps, _ in found], found[0][1]
