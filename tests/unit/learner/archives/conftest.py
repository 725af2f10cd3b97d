"""What makes tests of archives quick that compare values, which no compiled step changes."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

_COMPARE_VALUES = ("test_orders_of_variables.py", "test_quantized_layers.py")


@pytest.fixture(autouse=True)
def nothing_is_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """TensorFlow traces no step, which takes longer than the few steps of a test."""
    if keras.backend.backend() != "tensorflow" or request.path.name not in _COMPARE_VALUES:
        yield
        return
    import tensorflow

    tensorflow.config.run_functions_eagerly(True)
    yield
    tensorflow.config.run_functions_eagerly(False)
