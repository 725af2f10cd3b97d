"""NaN on one worker: an error that names the batch and the cause, or an update left out."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import keras
import numpy as np
import pytest
from harness import split

from sparkdl.collective.choice import optimizer_config
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.rule_synchronizer import RuleSynchronizer
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import EPOCH_WINDOW, LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.errors import DataError, ModelError, SparkDLError, TransportError
from sparkdl.failures import Failure
from sparkdl.learner import make_learner
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP, make_rule
from sparkdl.testing.inproc import InprocParameterServer, connect_threads
from sparkdl.training.finite import FiniteCheck
from sparkdl.weights import NotFiniteError
from sparkdl.worker import train

SIZES = [64, 48]
RULES = {
    "asynchronous": make_rule("adag").bind(2),
    "hogwild": make_rule("hogwild").bind(2),
    "elastic": make_rule("aeasgd").bind(2),
    "synchronous": BSP(),
    "local sgd": BSP(payload="delta"),
}
WAYS = [*RULES, "allreduce"]
EXCHANGE_RULES = {"local_sgd": 5, "diloco": EPOCH_WINDOW, "adasum": 1, "sliced": 4}
"""Rule -> window, in steps: longer than a stack of the loop, or no part of it."""


def make_model(rate: float = 0.05) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def run(way: str, on_nan: str, *, poison: bool = True, overflow: bool = False) -> dict[str, Any]:
    """Two workers; the second one's 20th row of 8 a batch is NaN, or its labels overflow."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 5)).astype("float32")
    y = x.sum(1, keepdims=True)
    parts = split(x, y, SIZES)
    if poison:
        parts[1][0][19, 2] = np.nan
    if overflow:
        parts[1][1][16:24] = 3e38
    models = [make_model() for _ in parts]
    learners = [make_learner(model) for model in models]
    layout = model_layout(models[0])
    checks = [FiniteCheck(on_nan, layout.trained_size) for _ in parts]
    settings = LoopSettings(3, batch_size=8, window=1, shuffle=False)
    errors: dict[int, BaseException] = {}
    losses: list[np.ndarray] = []

    def loop(rank: int, synchronizer: Any) -> None:
        ended = synchronizer.end_epoch

        def note(learner: Any, epoch: int, metrics: Any, *others: Any) -> None:
            losses.append(metrics)
            ended(learner, epoch, metrics, *others)

        synchronizer.end_epoch = note
        rows = rows_from_numpy(*parts[rank])
        batches = Batches(rows, 8, shuffle=False, rank=rank)
        train(learners[rank], synchronizer, batches, settings, num_rows=len(rows), num_workers=2)

    def together(work: Any) -> None:
        def body(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(t.is_alive() for t in threads), "a worker hangs"

    if way == "allreduce" or way in EXCHANGE_RULES:
        communicators = connect_threads(2)

        def steps_of(rank: int) -> Any:
            if way == "allreduce":
                return AllReduceGradientSynchronizer(
                    communicators[rank], layout, check=checks[rank]
                )
            rule = make_exchange_rule(way).bind(2, optimizer_config(models[rank].optimizer))
            return RuleSynchronizer(
                communicators[rank], layout, rule, EXCHANGE_RULES[way], check=checks[rank]
            )

        def in_step(rank: int) -> None:
            check = checks[rank]
            try:
                steps = steps_of(rank)
                loop(
                    rank,
                    AllReduceSynchronizer(communicators[rank], layout, steps=steps, check=check),
                )
            finally:
                communicators[rank].close()

        together(in_step)
        center = None
    else:
        rule = RULES[way]
        server_config = ServerConfig(layout, rule, 2)
        with InprocParameterServer(server_config, read_model(models[0], layout)) as server:

            def through_server(rank: int) -> None:
                try:
                    with server.client(rank) as client:
                        loop(rank, ServerSynchronizer(rule, client, layout, False, checks[rank]))
                except SparkDLError as error:  # as a rank's task does: no other attempt comes
                    with contextlib.closing(server.session(rank)) as session:
                        session.fail(Failure(session.rank, str(error)))
                    raise

            together(through_server)
            center = server.center.copy()
    weights = [read_model(model, layout) for model in models]
    states = [
        np.concatenate([np.ravel(v) for v in map(np.asarray, model.optimizer.variables)])
        for model in models
    ]
    return {
        "errors": errors, "weights": weights, "center": center, "states": states,
        "refused": [check.refused for check in checks], "losses": losses,
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_an_error_names_epoch_batch_and_data_and_nobody_else_has_nan(way: str) -> None:
    result = run(way, "raise")
    error = result["errors"][1]
    assert isinstance(error, DataError)
    assert "epoch 1 of 3, batch 3:" in str(error)
    assert "input 'x'" in str(error) or "input" in str(error)
    assert not isinstance(result["errors"].get(0), (DataError, ModelError))
    assert isinstance(result["errors"].get(0, TransportError("none")), Exception)
    assert np.isfinite(result["weights"][0]).all()
    if result["center"] is not None:
        assert np.isfinite(result["center"]).all()


@pytest.mark.parametrize("way", EXCHANGE_RULES)
def test_rules_of_all_reduce_name_a_batch_of_any_stack_since_the_last_exchange(way: str) -> None:
    """With a window of an epoch the shorter rank learns of it in a step without a batch."""
    result = run(way, "raise")
    error = result["errors"][1]
    assert isinstance(error, DataError), error
    assert "epoch 1 of 3, batch 3: the data" in str(error)
    assert np.isfinite(result["weights"][0]).all()


def test_a_window_whose_steps_overflow_is_named_as_a_whole() -> None:
    error = run("diloco", "raise", poison=False, overflow=True)["errors"][1]
    assert isinstance(error, ModelError)
    assert "epoch 1 of 3, batches 1 to 6: the training step" in str(error)


@pytest.mark.parametrize("way", ["asynchronous", "synchronous", "allreduce"])
def test_a_step_that_overflows_is_not_the_data_s_fault(way: str) -> None:
    error = run(way, "raise", poison=False, overflow=True)["errors"][1]
    assert isinstance(error, ModelError)
    assert "epoch 1 of 3, batch 3: the training step" in str(error)
    assert "clipnorm" in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_skip_refuses_the_update_and_counts_it(way: str) -> None:
    result = run(way, "skip")
    assert result["errors"] == {}
    assert result["refused"] == [0, 3]  # one batch in each of three epochs
    for weights, state in zip(result["weights"], result["states"], strict=True):
        assert np.isfinite(weights).all()
        assert np.isfinite(state).all()
    assert np.isfinite(np.concatenate(result["losses"])).all()
    # Of each epoch all rows count in the loss but those of the batch that was refused.
    assert sorted(metrics[1] for metrics in result["losses"]) == [40] * 3 + [64] * 3


@pytest.mark.parametrize("way", ["asynchronous", "synchronous", "allreduce"])
def test_ignore_sends_what_there_is(way: str) -> None:
    result = run(way, "ignore")
    assert result["errors"] == {}
    assert result["refused"] == [0, 0]
    # without waiting the other worker may have ended before it could get them
    reached = [not np.isfinite(weights).all() for weights in result["weights"]]
    assert any(reached) if way == "asynchronous" else all(reached)


def test_all_is_well_without_nan() -> None:
    for way in ("asynchronous", "synchronous", "allreduce"):
        kept = [run(way, on_nan, poison=False)["refused"] for on_nan in ("raise", "skip")]
        assert kept == [[0, 0], [0, 0]]


def test_a_sum_that_overflows_is_no_nan_and_infinite_statistics_may_be_meant() -> None:
    check = FiniteCheck("raise", 4)
    assert check.admits(np.full(6, 3e38, np.float32))
    assert check.admits(np.array([1, 1, 1, 1, -np.inf, 0], np.float32))
    for values in ([1, np.inf, 1, 1, 0, 0], [1, 1, 1, 1, np.nan, 0]):
        with pytest.raises(NotFiniteError):
            check.admits(np.array(values, np.float32))


def test_infinite_gradients_of_a_scaled_loss_are_its_optimizers_affair() -> None:
    class Scaled:
        scales_loss = True

    check = FiniteCheck("raise", 2)
    assert check.admits(np.array([np.inf, 1], np.float32), Scaled())
    assert check.notes(np.array([np.inf, 1], np.float32), 0, Scaled())
    check.settle()
