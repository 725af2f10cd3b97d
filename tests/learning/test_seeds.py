"""Random numbers in training: each rank has a stream of its own, reproducibly; one has Keras'."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import whole_fit
from whole_fit import MODES, values

layers = keras.layers
UNITS = 2000


class Seen(layers.Layer):
    """Adds up what it sees, per unit: of a dropout's ones, which units stayed, and how often."""

    def build(self, shape: Any) -> None:
        self.total = self.add_weight(
            shape=(UNITS,), dtype="int32", initializer="zeros", trainable=False, name="total"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            kept = keras.ops.cast(keras.ops.sum(x, 0) > 0, "int32")
            self.total.assign(3 * self.total + kept)
        return x


def model(seed: int | None = 42, rate: float = 0.5) -> Any:
    stack = [layers.Dropout(rate, seed=seed), Seen(), layers.Dense(1, kernel_initializer="zeros")]
    made = keras.Sequential([keras.Input((UNITS,)), *stack])
    made.compile(keras.optimizers.SGD(0.001), "mse")
    return made


def rows(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.ones((n, UNITS), "float32"), np.ones((n, 1), "float32")) for n in sizes]


def masks(made: Any) -> np.ndarray:
    """What each unit of a rank has seen in all steps."""
    return np.asarray(made.layers[1].total.numpy())


def seed_of(made: Any) -> list[int]:
    return np.asarray(made.layers[0].seed_generator.state.numpy()).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [42, None])
def test_ranks_draw_different_masks_and_the_same_in_each_run(mode: str, seed: int | None) -> None:
    if seed is None and keras.backend.backend() == "torch":
        pytest.skip("draws from PyTorch's own generator, which ranks in threads share")
    first = model(seed)
    again = keras.models.clone_model(first)
    again.compile(keras.optimizers.SGD(0.001), "mse")
    again.layers[0].seed_generator.state.assign(first.layers[0].seed_generator.state)
    trained = whole_fit.fit(first, rows([3, 3, 3]), mode, batch_size=1, epochs=1)
    drawn = [masks(rank) for rank in trained]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        # Two units of three masks are equal with 1/8: of independent ranks 250 of 2000 are.
        assert 150 < (drawn[a] == drawn[b]).sum() < 350
    for expected, found in zip(
        drawn, whole_fit.fit(again, rows([3, 3, 3]), mode, batch_size=1, epochs=1), strict=True
    ):
        np.testing.assert_array_equal(masks(found), expected)


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_draws_what_keras_draws(mode: str) -> None:
    plain, mine = model(), model()
    for _ in range(2):  # a second fit goes on where the first has ended
        whole_fit.fit_plainly(plain, rows([20]))
        whole_fit.fit(mine, rows([20]), mode)
    np.testing.assert_array_equal(masks(mine), masks(plain))
    for expected, found in zip(values(plain), values(mine), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    assert seed_of(mine) == seed_of(plain) == [42, 12]


@pytest.mark.parametrize("sizes", [[20, 20], [20, 8], [3, 20], [20, 0]])
@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
def test_the_driver_gets_the_seed_and_the_draws_of_the_global_batches(
    mode: str, sizes: list[int]
) -> None:
    mine = model()
    whole_fit.fit(mine, rows(sizes), mode)
    assert seed_of(mine) == [42, 6]


def test_a_run_that_begins_again_draws_what_an_undisturbed_one_does() -> None:
    whole, parted = model(), model()
    sizes = [11, 20, 3]
    whole_fit.fit(whole, rows(sizes), "allreduce", epochs=3)
    whole_fit.fit(parted, rows(sizes), "allreduce", epochs=1)
    whole_fit.fit(parted, rows(sizes), "allreduce", epochs=3, first_epoch=1)
    for expected, found in zip(values(whole), values(parted), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_second_attempt_does_not_draw_the_same_again() -> None:
    from sparkdl.learner import make_learner

    learner = make_learner(model())
    learner.take_stream(1, 2)
    before = seed_of(learner.model)
    learner.draws.skip(7)
    after = seed_of(learner.model)
    assert after[0] == before[0] != 42
    assert after[1] - before[1] >= 7
