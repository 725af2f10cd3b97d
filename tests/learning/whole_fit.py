"""A whole fit without Spark: the model is archived, trained by threads, and comes back."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np

from sparkdl.collective.choice import optimizer_config
from sparkdl.collective.rule_synchronizer import RuleSynchronizer
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.files.run_state import RunState
from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP, make_rule
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.testing.inproc import InprocParameterServer, connect_threads
from sparkdl.worker import train

MODES = ("synchronous", "allreduce", "asynchronous")


def fit(
    model: Any,
    parts: list[tuple[Any, Any]],
    mode: str,
    *,
    epochs: int = 2,
    batch_size: int = 8,
    first_epoch: int = 0,
    custom_objects: dict[str, Any] | None = None,
    rule: str = "mean",
) -> list[Any]:
    """Trains ``model`` in place as ``SparkModel.fit`` does, with a thread for each part.

    Args:
        model: Compiled.
        parts: ``(x, y)`` of each worker: arrays, or dicts of arrays by name.
        mode: One of :data:`MODES`.
        epochs: Epoch to stop at.
        batch_size: Rows per step and worker.
        first_epoch: Epoch to begin with.
        custom_objects: As those of ``SparkModel``.
        rule: Of ``allreduce``.

    Returns:
        The workers' models after the last step.
    """
    layout = model_layout(model)
    center = read_model(model, layout)
    archive = encode_model(model, custom_objects)
    learners = [make_learner(decode_model(archive)) for _ in parts]
    settings = LoopSettings(
        epochs=epochs, first_epoch=first_epoch, batch_size=batch_size, window=1, shuffle=False
    )
    states: dict[int, RunState | None] = {}
    errors: list[BaseException] = []

    def work(rank: int, synchronizer: Any) -> None:
        learners[rank].take_stream(rank, len(parts))
        rows = rows_from_numpy(*parts[rank])
        batches = Batches(rows, batch_size, shuffle=False, rank=rank)
        train(
            learners[rank], synchronizer, batches, settings,
            num_rows=len(rows), num_workers=len(parts),
        )  # fmt: skip
        states[rank] = synchronizer.outcome(learners[rank], epochs).state

    def in_thread(function: Any) -> None:
        def guarded(rank: int) -> None:
            try:
                function(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(r,)) for r in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(t.is_alive() for t in threads), "a worker hangs"
        if errors:
            raise errors[0]

    if mode == "allreduce":
        communicators = connect_threads(len(parts))
        given = optimizer_config(model.optimizer) if rule == "sliced" else None
        chosen = make_exchange_rule(rule).bind(len(parts), given)

        def in_step(rank: int) -> None:
            try:
                communicator = communicators[rank]
                steps = None if rule == "mean" else RuleSynchronizer(communicator, layout, chosen)
                work(rank, AllReduceSynchronizer(communicator, layout, steps=steps))
            finally:
                communicators[rank].close()

        in_thread(in_step)
        weights = np.empty(0, np.float32)
    else:
        rule = BSP(payload="gradient") if mode == "synchronous" else make_rule("downpour")
        with InprocParameterServer(ServerConfig(layout, rule, len(parts)), center) as server:

            def through_server(rank: int) -> None:
                with server.client(rank) as client:
                    work(rank, ServerSynchronizer(rule, client, layout, False))

            in_thread(through_server)
            with server.driver() as driver:
                states[-1] = RunState.from_bytes(driver.kept())
            weights = server.center.copy()
    kept = next(state for state in states.values() if state is not None)
    TrainedModel(model).take(replace(kept, weights=weights) if weights.size else kept)
    for learner in learners:
        learner.sync_model()
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return [learner.model for learner in learners]


def fit_plainly(
    model: Any, parts: list[tuple[Any, Any]], *, epochs: int = 2, batch_size: int = 8
) -> None:
    """The same by Keras alone: each step has the batches of all parts."""
    rows = [rows_from_numpy(*part) for part in parts]
    steps = max(-(-len(r) // batch_size) for r in rows)
    for _ in range(epochs):
        for step in range(steps):
            cut = slice(step * batch_size, (step + 1) * batch_size)
            pieces = [(_cut(x, cut), _cut(y, cut)) for x, y in parts]
            x = _joined([piece[0] for piece in pieces])
            y = _joined([piece[1] for piece in pieces])
            model.train_on_batch(x, y)
    model.optimizer.finalize_variable_values(model.trainable_variables)


def _cut(arrays: Any, cut: slice) -> Any:
    return {n: a[cut] for n, a in arrays.items()} if isinstance(arrays, dict) else arrays[cut]


def _joined(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], dict):
        return {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}
    return np.concatenate(pieces)


def values(model: Any) -> list[np.ndarray]:
    """All variables of the model, whatever their dtype, and then those of its optimizer."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return [np.asarray(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]
