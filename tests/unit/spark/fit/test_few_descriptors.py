"""Few free file descriptors: one error that says so, before anything is begun."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ResourceError

pytestmark = pytest.mark.keras

Free = Callable[[int], None]


@pytest.fixture
def free() -> Iterator[Free]:
    """Leaves this process so many free descriptors, within the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []

    def leave(count: int) -> None:
        there = {int(name) for name in os.listdir("/proc/self/fd")}
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(there) + 40, limits[1]))
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(count):
                os.close(held.pop())

    yield leave
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
@pytest.mark.parametrize("count", [0, 5])
def test_one_error_says_descriptors_how_many_and_the_limit(
    free: Free, tmp_path: Path, count: int
) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    spark_model = SparkModel(model, num_workers=2)
    x: Any = np.zeros((4, 2), np.float32)
    calls = {
        "fit": lambda: spark_model.fit((x, x[:, :1])),
        "predict": lambda: spark_model.predict(x),
        "evaluate": lambda: spark_model.evaluate((x, x[:, :1])),
        "save": lambda: spark_model.save(f"file:{tmp_path}/model.keras"),
    }
    free(count)
    for name, call in calls.items():
        with pytest.raises(ResourceError) as found:
            call()
        assert found.value.what.startswith(f"{name} cannot begin: this process has too few")
        assert found.value.expected in ("64 free ones", "16 free ones")
        assert found.value.received.startswith(f"{count}, at a limit of ")
