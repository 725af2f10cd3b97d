"""Embeddings in the exact modes are plain Keras on the global batch, whatever the optimizer.

Keras on TensorFlow gives its optimizer one row for each id of a batch. For an id that comes twice
most optimizers do something else with two rows than with their sum.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
from harness import Again, global_batches, learners_again, split

from sparkdl.codecs import make_codec
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.coordinator.settings import Settings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner import make_learner
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.learner.steps import tensorflow
from sparkdl.ps.round_synchronizer import RoundSynchronizer
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP
from sparkdl.testing.inproc import InprocParameterServer, connect_threads
from sparkdl.training.finite import FiniteCheck
from sparkdl.transport.frames import FrameLimits
from sparkdl.worker import train

BATCH = 8
SIZES = {
    "1 worker": [100],
    "2 workers": [100, 61],
    "3 workers, one empty": [61, 0, 100],
}
o = keras.optimizers
OPTIMIZERS = {
    "Adam": lambda: o.Adam(0.05),
    "AdamW": lambda: o.AdamW(0.05, weight_decay=0.05),
    "Adagrad": lambda: o.Adagrad(0.2),
    "RMSprop": lambda: o.RMSprop(0.02),
    "momentum": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "clipnorm": lambda: o.Adam(0.05, clipnorm=0.02),
    "global clipnorm": lambda: o.SGD(2.0, global_clipnorm=0.05),
    "accumulated": lambda: o.Adam(0.05, gradient_accumulation_steps=2),
    "averaged": lambda: o.RMSprop(0.02, use_ema=True, ema_overwrite_frequency=3),
}


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Two small ids that come many times in a batch, and one that comes seldom."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, (rows, 3))
    x[:, 2] = rng.integers(6, 300, rows)
    return x.astype("int32"), (x.sum(1) % 3).astype("int32")


@functools.cache
def maker(optimizer: Any, *, scaled: bool = False) -> Any:
    """A table smaller than the rows of a batch and one that is larger, with a layer between."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        x = keras.Input((3,), dtype="int32")
        few = keras.layers.Embedding(6, 4)(x[:, :2])
        middle = keras.layers.Dense(5, "tanh")(keras.layers.Flatten()(few))
        many = keras.layers.Flatten()(keras.layers.Embedding(300, 3)(x[:, 2:]))
        normal = keras.layers.BatchNormalization(momentum=1.0, trainable=False)
        both = normal(keras.layers.Concatenate()([middle, many]))
        model = keras.Model(x, keras.layers.Dense(3, "softmax")(both))
        made = optimizer()
        if scaled:
            made = o.LossScaleOptimizer(made, initial_scale=256.0)
        model.compile(made, "sparse_categorical_crossentropy")
        return model

    return make


Weights = list[np.ndarray]
_models_again = Again(lambda model: model)


def alone(make: Any, parts: Any, epochs: int) -> Weights:
    with _models_again.of(make) as (model,):
        for _ in range(epochs):
            for x, y in global_batches(parts, BATCH):
                model.train_on_batch(x, y)
        return model.get_weights()


def run(
    way: str,
    make: Any,
    parts: Any,
    *,
    epochs: int = 2,
    codec: Any = None,
    wire: str | None = None,
    on_nan: str = "ignore",
    main: bool = False,
    part_bytes: int = 1 << 24,
) -> list[Weights]:
    """The weights of the models after training.

    With ``main`` the first worker trains in the main thread, where the exchange is inside the
    compiled step, as in a process of its own.
    """
    with learners_again.of(make, len(parts)) as learners:
        _train(way, learners, parts, epochs, codec, wire, on_nan, main, part_bytes)
        return [learner.model.get_weights() for learner in learners]


def _train(
    way: str,
    learners: list[Any],
    parts: Any,
    epochs: int,
    codec: Any,
    wire: str | None,
    on_nan: str,
    main: bool,
    part_bytes: int,
) -> None:
    model, layout = learners[0].model, learners[0].layout
    settings = LoopSettings(epochs=epochs, batch_size=BATCH, window=1, shuffle=False)
    errors: list[BaseException] = []

    def loop(rank: int, synchronizer: Any) -> None:
        rows = rows_from_numpy(*parts[rank])
        batches = Batches(rows, BATCH, shuffle=False, rank=rank)
        train(
            learners[rank], synchronizer, batches, settings, num_rows=len(rows),
            num_workers=len(parts),
        )  # fmt: skip

    def together(work: Any) -> None:
        def body(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(r,)) for r in range(main, len(parts))]
        for thread in threads:
            thread.start()
        if main:
            body(0)
        for thread in threads:
            thread.join(120)
        assert not any(t.is_alive() for t in threads), "a worker hangs"
        if errors:
            raise errors[0]

    def check() -> FiniteCheck:
        return FiniteCheck(on_nan, layout.trained_size)

    if way == "allreduce":
        communicators = connect_threads(len(parts))

        def in_step(rank: int) -> None:
            found = check()
            with communicators[rank] as communicator:
                steps = AllReduceGradientSynchronizer(
                    communicator, layout, wire=wire, check=found, part_bytes=part_bytes
                )
                synchronizer = AllReduceSynchronizer(communicator, layout, steps=steps, check=found)
                loop(rank, synchronizer)

        together(in_step)
    else:
        config = ServerConfig(layout, BSP(), len(parts), codec=codec)
        with InprocParameterServer(config, read_model(model, layout)) as server:

            def through_server(rank: int) -> None:
                with server.client(rank) as client:
                    loop(rank, ServerSynchronizer(BSP(), client, layout, False, check()))

            together(through_server)
            np.testing.assert_array_equal(server.center, read_model(model, layout))


def compare(found: list[Weights], expected: Weights, atol: float = 2e-5) -> None:
    for weights in found:
        for value, wanted in zip(weights, expected, strict=True):
            np.testing.assert_allclose(value, wanted, atol=atol, rtol=0)


def moved(weights: Weights, make: Any) -> float:
    pairs = zip(weights, make().get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


WHOLE_BATCHES = [96, 64]
"""Of two workers, for one graph less; Adam has smaller last batches."""
CASES = [
    pytest.param(
        way, sizes if name == "Adam" or number != "2 workers" else WHOLE_BATCHES, make,
        id=f"{way}, {number}, {name}",
        marks=[pytest.mark.slow] * (number != "2 workers" and name != "Adam"),
    )
    for way in ("synchronous", "allreduce")
    for number, sizes in SIZES.items()
    for name, make in OPTIMIZERS.items()
]  # fmt: skip


@pytest.mark.parametrize(("way", "sizes", "optimizer"), CASES)
def test_weights_are_those_of_plain_keras(way: str, sizes: list[int], optimizer: Any) -> None:
    make = maker(optimizer)
    parts = split(*data(sum(sizes)), sizes)
    compare(run(way, make, parts, main=len(parts) > 1), by_keras(optimizer, *sizes))


@functools.cache
def by_keras(optimizer: Any, *sizes: int) -> Weights:
    """What both ways are to reach."""
    make = maker(optimizer)
    expected = alone(make, split(*data(sum(sizes)), list(sizes)), 2)
    assert moved(expected, make) > 0.1
    return expected


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "clipnorm", "accumulated", "averaged"])
def test_an_optimizer_step_that_xla_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for large tables: the rows of slices are filled up by rows of zeros."""
    monkeypatch.setattr(tensorflow, "LEAST_FUSED", 0)
    make = maker(OPTIMIZERS[name])
    sizes = [40, 21] if name == "Adam" else [24, 21]  # of two numbers of rows, or of one
    parts = split(*data(sum(sizes)), sizes)
    compiled = maker.__wrapped__(OPTIMIZERS[name])  # not what others have compiled otherwise
    compare(run("allreduce", compiled, parts, main=True), alone(make, parts, 2))


@pytest.mark.parametrize("way", ["synchronous", "allreduce"])
@pytest.mark.parametrize(
    ("sizes", "on_nan"), [([40], "ignore"), ([40, 21], "skip"), ([21, 0, 40], "raise")]
)
def test_an_exchange_inside_the_compiled_step(way: str, sizes: list[int], on_nan: str) -> None:
    make = maker(OPTIMIZERS["Adam"])
    parts = split(*data(sum(sizes)), sizes)
    found = run(way, make, parts, epochs=1, on_nan=on_nan, main=True)
    compare(found, alone(make, parts, 1))


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("way", ["synchronous", "allreduce"])
def test_a_model_of_one_table_has_nothing_dense(way: str, main: bool) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(3)
        x = keras.Input((3,), dtype="int32")
        model = keras.Model(x, keras.layers.Embedding(300, 3)(x)[:, :, 0])
        model.compile(o.Adam(0.05), "mse")
        return model

    x, _ = data(61)
    parts = split(x, x.astype("float32"), [40, 21])
    expected = alone(make, parts, 2)
    assert moved(expected, make) > 0.1
    compare(run(way, make, parts, main=main), expected)


def test_gradients_in_several_parts() -> None:
    make = maker(OPTIMIZERS["Adam"])
    parts = split(*data(61), [40, 21])
    for main in (False, True):
        found = run("allreduce", make, parts, epochs=1, part_bytes=64, main=main)
        compare(found, alone(make, parts, 1))


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("way", ["synchronous", "allreduce"])
def test_half_precision_on_the_way(way: str, main: bool) -> None:
    make = maker(OPTIMIZERS["RMSprop"])
    parts = split(*data(222), [161, 0, 61])
    codec = make_codec("fp16") if way == "synchronous" else None
    wire = "float16" if way == "allreduce" else None
    found = run(way, make, parts, codec=codec, wire=wire, main=main)
    expected = alone(make, parts, 2)
    compare(found, expected, atol=2e-2)
    compare(found[1:], found[0], atol=0)
    with pytest.raises(AssertionError):
        compare(found, expected, atol=1e-7)  # it did travel in half precision


@pytest.mark.parametrize("way", ["synchronous", "allreduce"])
def test_a_scaled_loss(way: str) -> None:
    make = maker(OPTIMIZERS["Adam"], scaled=True)
    parts = split(*data(161), [100, 61])
    compare(run(way, make, parts), alone(make, parts, 2))


class Killed(BaseException):
    """What ends a rank's attempt as a signal would."""


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_rank_that_is_killed_goes_on_with_the_state_of_one_that_holds_slices(
    main: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid the second epoch: its next attempt asks the other for its state, which waits in the
    open round with its slices sent; with ``main`` inside its compiled step."""
    make = maker(OPTIMIZERS["Adagrad"])
    parts = split(*data(112), [56, 56])
    layout = model_layout(make())
    if chunked:
        monkeypatch.setattr(FrameLimits, "buffer_bytes", property(lambda self: self.dense_bytes))
        monkeypatch.setattr(FrameLimits, "chunk_bytes", property(lambda self: 1000))
    config = ServerConfig(layout, BSP(), 2, settings=Settings(2, grace_s=0.2, round_timeout_s=60))
    errors: list[BaseException] = []

    def attempt(client: Any, learner: Any, rank: int, dies_at: int = 0) -> None:
        synchronizer = ServerSynchronizer(BSP(), client, layout, False)
        rounds = synchronizer._way
        assert isinstance(rounds, RoundSynchronizer)
        begin, steps = rounds.begin, []

        def counted(part: int) -> None:
            steps.append(part)
            if len(steps) == dies_at:
                raise Killed
            begin(part)

        rounds.begin = counted  # type: ignore[method-assign]
        rows = rows_from_numpy(*parts[rank])
        train(
            learner, synchronizer,
            Batches(rows, BATCH, shuffle=False, rank=rank),
            LoopSettings(epochs=2, batch_size=BATCH, window=1, shuffle=False, keep_state=True),
            num_rows=len(rows), num_workers=2,
        )  # fmt: skip

    def lost_and_found(server: InprocParameterServer) -> None:
        try:
            client = server.client(1)
            with pytest.raises(Killed):
                attempt(client, make_learner(make()), 1, dies_at=10)
            client.session._ended.set()
            channel = client.session._connection.channel
            assert channel is not None
            channel.close()
            time.sleep(0.5)  # longer than the grace
            with server.client(1, attempt=1) as again:
                attempt(again, learners[1], 1)
        except BaseException as error:
            errors.append(error)

    def survivor(server: InprocParameterServer) -> None:
        try:
            with server.client(0) as client:
                attempt(client, learners[0], 0)
        except BaseException as error:
            errors.append(error)

    with (
        learners_again.of(make, 2) as learners,
        InprocParameterServer(config, read_model(make(), layout)) as server,
    ):
        works = [lost_and_found] if main else [lost_and_found, survivor]
        threads = [threading.Thread(target=work, args=(server,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        if main:
            survivor(server)
        for thread in threads:
            thread.join(120)
        assert not any(t.is_alive() for t in threads), "a worker hangs"
        if errors:
            raise errors[0]
        found = [learner.model.get_weights() for learner in learners]
    compare(found, alone(make, parts, 2))


def test_slices_larger_than_a_frame_travel_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make = maker(OPTIMIZERS["Adam"])
    parts = split(*data(161), [100, 61])
    layout = model_layout(make())
    # Room for a bit more than the dense part, and less than the slices of one batch.
    monkeypatch.setattr(FrameLimits, "buffer_bytes", property(lambda self: self.dense_bytes))
    monkeypatch.setattr(FrameLimits, "chunk_bytes", property(lambda self: 100))
    small = FrameLimits(dense_bytes=layout.size_bytes)
    assert small.buffer_bytes == layout.size_bytes
    compare(run("synchronous", make, parts, epochs=1), alone(make, parts, 1))


def test_a_batch_that_is_left_out_has_no_slices() -> None:
    """A gradient that is not finite, of the second worker: the others' rows alone count."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        x = keras.Input((2,), dtype="int32")
        few = keras.layers.Flatten()(keras.layers.Embedding(6, 4)(x))
        model = keras.Model(x, keras.layers.Dense(1)(few))
        model.compile(o.Adam(0.05), "mse")
        return model

    x, _ = data(2 * BATCH)
    y = x.sum(1).astype("float32")
    y[BATCH + 1] = np.inf
    parts = split(x[:, :2], y, [BATCH, BATCH])
    for main in (False, True):
        for way in ("synchronous", "allreduce"):
            found = run(way, make, parts, epochs=1, on_nan="skip", main=main)
            compare(found, alone(make, parts[:1], 1))


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("way", ["synchronous", "allreduce"])
def test_slices_of_a_loss_that_is_divided_by_the_words(way: str, main: bool) -> None:
    """A label for each position of a masked text: short texts on the first worker, long ones on
    the second."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        x = keras.Input((6,), dtype="int32")
        h = keras.layers.Embedding(20, 4, mask_zero=True)(x)
        model = keras.Model(x, keras.layers.Dense(3, "softmax")(h))
        model.compile(o.Adam(0.05), "sparse_categorical_crossentropy")
        return model

    rng = np.random.default_rng(1)
    sizes = [29, 21]
    lengths = np.concatenate([rng.integers(1, 3, sizes[0]), rng.integers(4, 7, sizes[1])])
    x = rng.integers(1, 20, (sum(sizes), 6)) * (np.arange(6) < lengths[:, None])
    y = rng.integers(0, 3, x.shape)
    parts = split(x.astype("int32"), y.astype("int32"), sizes)
    expected = alone(make, parts, 1)
    for on_nan in ("ignore", "skip"):
        compare(run(way, make, parts, epochs=1, on_nan=on_nan, main=main), expected)
