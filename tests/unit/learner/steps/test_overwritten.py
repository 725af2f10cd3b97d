"""Float8 layers: the largest value of all workers' batches is that of one process."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import ModelError
from sparkdl.learner.state.model_weights import model_layout, require_joined_steps
from sparkdl.learner.steps.captured_gradients import captured_gradients, largest_of_all


class Adds:
    """Adds up the numbers of threads."""

    def __init__(self, count: int) -> None:
        self.num_workers, self._sum, self._lock = count, None, threading.Lock()
        self._all = threading.Barrier(count)

    def add_up(self, numbers: Any) -> Any:
        with self._lock:
            self._sum = numbers if self._sum is None else self._sum + numbers
        self._all.wait(10)
        return self._sum


def float8(**options: Any) -> Any:
    dense = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", dtype="float8_from_float32"
    )
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(keras.optimizers.SGD(0.0, **options), "mse")
    return model


def test_scales_and_largest_values_are_no_weights() -> None:
    assert [slot.shape for slot in model_layout(float8()).slots] == [(1, 1)]


def test_the_largest_of_workers_with_a_batch() -> None:
    reducer: Any = Adds(3)
    found: dict[int, Any] = {}

    def ask(rank: int, values: list[Any], row: int | None) -> None:
        found[rank] = largest_of_all(values, row, reducer)

    given = [[np.float32(2), np.array([1, -5], "f4")], [np.float32(2), np.array([3, -7], "f4")]]
    ranks = [(0, given[0], 0), (1, given[1], 1), (2, [np.float32(9), np.zeros(2, "f4")], None)]
    threads = [threading.Thread(target=ask, args=rank) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        assert float(found[rank][0]) == 2
        np.testing.assert_array_equal(found[rank][1], [3, -5])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="calls train_step eagerly")
def test_the_gradient_that_is_kept_is_that_of_the_mean_over_all_rows() -> None:
    """Labels 0, rows 3 and 3 of four: 2 * 3 / 4, while the gradient is of the worker's mean."""
    import tensorflow as tf

    model = float8()
    names: list[str] = []

    @tf.function  # Keras 3.15's float8 has no gradient outside of a graph
    def step() -> list[tf.Tensor]:
        with captured_gradients(model, np.float32(0.5)) as captured:
            model.train_step((tf.fill((2, 1), 3.0), tf.zeros((2, 1))))
        names.extend(variable.name for _, variable in captured)
        return [gradient for gradient, _ in captured]

    found = dict(zip(names, (np.asarray(value) for value in step()), strict=True))
    assert found["outputs_grad_amax_history"][0] == 1.5
    assert found["kernel"].item() == pytest.approx(18.0, rel=0.1)


def test_what_no_exchange_makes_as_one_process() -> None:
    require_joined_steps(float8(), True, "mean")
    with pytest.raises(ModelError, match=r"(?s)float8.*received: rule 'sliced'"):
        require_joined_steps(float8(), False, "sliced")
    with pytest.raises(ModelError, match="gradient_accumulation_steps=2"):
        require_joined_steps(float8(gradient_accumulation_steps=2), True, "mean")
