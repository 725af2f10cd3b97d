"""A gradient in parts of any size has the bits of one in one part, and is that of one process.

``test_layers_backends.py`` runs this file on PyTorch, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, split

from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.errors import ModelError, TransportError
from sparkdl.learner import make_learner
from sparkdl.learner.state.model_weights import model_layout, read_model
from sparkdl.testing.inproc import connect_threads
from sparkdl.worker import train

BATCH = 8
TORCH = keras.backend.backend() == "torch"
WHOLE = 1 << 20
SIZES = [64, 43]
"""Rows of both ranks: the second has no batch in the last steps."""


class Tied(keras.Model):
    """A layer that is called twice, and one whose variables get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = keras.layers.Dense(12, "tanh"), keras.layers.Dense(3)
        self.idle = keras.layers.Dense(3)
        self.build((None, 12))

    def build(self, shape: Any) -> None:
        for layer in (self.twice, self.head, self.idle):
            layer.build((None, 12))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.head(self.twice(self.twice(x)))


class OwnStep(keras.Sequential):
    """A ``train_step`` of its own, with Keras' inside."""

    def train_step(self, *given: Any) -> Any:
        return super().train_step(*given)


def layered(kind: Any = keras.Sequential) -> Any:
    layers = keras.layers
    return kind(
        [
            keras.Input((12,)),
            layers.Dense(16),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.Dense(8, "tanh", kernel_regularizer="l2"),
            layers.Dense(3),
        ]
    )


class Again(keras.layers.Layer):
    """On PyTorch a segment that is computed again inside the backward pass, twice with one weight:
    its gradient comes in two pieces."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        def segment(value: Any) -> Any:
            return keras.ops.tanh(keras.ops.matmul(value, self.kernel))

        if not TORCH or not x.requires_grad:
            return segment(segment(x))
        from torch.utils.checkpoint import checkpoint

        again = checkpoint(segment, x, use_reentrant=True)
        return checkpoint(segment, again, use_reentrant=True)


def again() -> Any:
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((12,)), dense(6), Again(), dense(3)])


MODELS = {"layers": layered, "tied": Tied, "own step": lambda: layered(OwnStep), "again": again}


def make(name: str) -> Any:
    keras.utils.set_random_seed(3)
    model = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def data() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 12)).astype("float32")
    return split(x, (x[:, :3].argmax(1)).astype("int32"), SIZES)


class Noting(AllReduceGradientSynchronizer):
    """Counts the parts that leave while the learner computes.

    Args:
        learner: This rank's.
        fails_at: (step, part) at which this rank is gone.
    """

    def __init__(self, learner: Any, *given: Any, fails_at: Any = None, **more: Any) -> None:
        self.fails_at, self.early, self.steps, self._computes = fails_at, 0, 0, False
        for name in ("write_gradient", "write_weighed"):
            setattr(learner, name, self._noted(getattr(learner, name)))
        super().__init__(*given, **more)

    def _noted(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self._computes = True
            try:
                return compute(*arguments)
            finally:
                self._computes = False

        return noted

    def begin(self, part: int) -> None:
        self.steps += part == 0
        if (self.steps, part) == self.fails_at:
            self.communicator.close()
        self.early += self._computes
        super().begin(part)


def run(name: str, part_bytes: int, wire: str | None = None, fails_at: Any = None) -> Any:
    """(flat weights of both ranks, parts that left early on rank 0, number of parts, errors).

    Rank 0 trains in the main thread, where TensorFlow exchanges inside its compiled step.
    """
    parts = data()
    learners = [make_learner(make(name)) for _ in parts]
    layout = learners[0].layout
    settings = LoopSettings(epochs=2, batch_size=BATCH, window=1, shuffle=False)
    communicators = connect_threads(len(parts))
    errors: list[Any] = [None] * len(parts)
    made: list[Any] = [None] * len(parts)

    def work(rank: int) -> None:
        rows = rows_from_numpy(*parts[rank])
        try:
            with communicators[rank] as communicator:
                made[rank] = Noting(
                    learners[rank], communicator, layout, wire=wire, part_bytes=part_bytes,
                    fails_at=fails_at if rank == 1 else None,
                )  # fmt: skip
                train(
                    learners[rank],
                    AllReduceSynchronizer(communicator, layout, steps=made[rank]),
                    Batches(rows, BATCH, shuffle=False, rank=rank), settings,
                    num_rows=len(rows), num_workers=len(parts),
                )  # fmt: skip
        except Exception as error:
            errors[rank] = error

    other = threading.Thread(target=work, args=(1,))
    other.start()
    work(0)
    other.join(120)
    assert not other.is_alive(), "a rank hangs"
    flat = [np.empty(layout.size, np.float32) for _ in learners]
    for learner, out in zip(learners, flat, strict=True):
        learner.read_weights(out)
    return flat, made[0].early, len(made[0].parts), errors


def trained(name: str, part_bytes: int, wire: str | None = None) -> Any:
    flat, early, parts, errors = run(name, part_bytes, wire)
    for error in errors:
        if error is not None:
            raise error
    assert flat[0].tobytes() == flat[1].tobytes()
    return flat[0], early, parts


@pytest.mark.parametrize("name", list(MODELS) if TORCH else ["layers", "tied"])
def test_parts_of_any_size_are_one_process(name: str) -> None:
    """Of one element, smaller than a variable, of a few variables, and the whole."""
    alone = make(name)
    for _ in range(2):
        for x, y in global_batches(data(), BATCH):
            alone.train_on_batch(x, y)
    whole, early, parts = trained(name, WHOLE)
    assert (early, parts) == (0, 1)
    layout = model_layout(alone)
    expected = read_model(alone, layout)
    if name != "layers" and name != "own step":  # BatchNormalization sees the batch of its rank
        np.testing.assert_allclose(whole, expected, atol=1e-5)
    assert np.abs(whole - read_model(make(name), layout)).max() > 0.05
    for part_bytes in (4, 100, 400):
        flat, early, parts = trained(name, part_bytes)
        assert parts > (layout.trained_size if part_bytes == 4 else 2)
        np.testing.assert_array_equal(flat, whole)
        can = TORCH and name in ("layers", "tied")
        assert (early > 0) is can
        if name == "layers" and can:  # 16 steps without the first, or 2 x 6 of the shorter rank
            assert early == parts * 15


@pytest.mark.parametrize("part_bytes", [100, 400])
def test_halves_in_parts_have_the_bits_of_halves_in_one(part_bytes: int) -> None:
    whole = trained("layers", WHOLE, "float16")[0]
    np.testing.assert_array_equal(trained("layers", part_bytes, "float16")[0], whole)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("part", [0, 4])
def test_a_rank_that_is_gone_amid_the_parts_gives_the_step_up(step: int, part: int) -> None:
    """No part of the step is applied on the rank that is left."""
    (left, _), _, _, errors = run("tied", 100, fails_at=(step, part))
    assert isinstance(errors[0], TransportError), errors
    before = make("tied")
    learner = make_learner(before)
    batches = list(global_batches(data(), BATCH))
    for x, y in batches[: step - 1]:
        before.train_on_batch(x, y)
    learner.reload()
    np.testing.assert_allclose(left, read_model(before, learner.layout), atol=1e-6)


@pytest.mark.skipif(not TORCH, reason="only PyTorch sends parts during its backward pass")
def test_a_gradient_that_changes_behind_its_part_is_an_error() -> None:
    """A model that computes otherwise than in its first steps, which Keras' own step allows."""
    changed: list[str] = []

    class Twice(Again):
        def call(self, x: Any) -> Any:
            if x.requires_grad:
                changed.append(x.device.type)
            if changed.count("cpu") > 8:
                return super().call(x)
            return keras.ops.matmul(x, self.kernel)

    def other() -> Any:
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((12,)), dense(6), Twice(), dense(3)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "other", other)
        errors = run("other", 100)[-1]
    assert any(
        isinstance(e, ModelError) and "changed after they were sent" in str(e) for e in errors
    ), errors
