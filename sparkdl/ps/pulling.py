"""The driver reads the center of a parameter server."""

from __future__ import annotations

import numpy as np

from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.transport.frames import Kind, Message
from sparkdl.weights import FloatArray


def pull_center(driver: DriverClient, out: FloatArray | None = None) -> FloatArray:
    """A copy of the center (where the workers hold the weights: of the last snapshot).

    Args:
        driver: Connected with the limits of the store.
        out: Where to; None for a new array.
    """
    driver.request(Message(Kind.PULL))
    result = np.empty(driver.limits.dense_bytes // 4, np.float32) if out is None else out
    np.copyto(result, driver.limits.dense(driver.raw))
    return result
