"""A few rows, and fits on them that are compared with those of plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import whole_fit
from whole_fit import values

RNG = np.random.default_rng(0)


X = RNG.normal(size=(32, 6)).astype("float32")


CLASSES = RNG.integers(0, 3, 32)


def parts(y: Any, count: int) -> list[tuple[Any, Any]]:
    size = len(X) // count
    cuts = [slice(i * size, (i + 1) * size) for i in range(count)]

    def cut(arrays: Any, where: slice) -> Any:
        return (
            {n: a[where] for n, a in arrays.items()} if isinstance(arrays, dict) else arrays[where]
        )

    return [(cut(X, where), cut(y, where)) for where in cuts]


def as_keras(make: Callable[[], Any], y: Any, mode: str, most: float = 1e-5) -> None:
    """Trains one model by Keras, an equal one as a fit, and compares all of their variables."""
    rows = parts(y, 1 if mode == "asynchronous" else 2)
    plain, model = make(), make()
    before = values(model)
    whole_fit.fit_plainly(plain, rows)
    whole_fit.fit(model, rows, mode)
    assert max(np.abs(b - a).max() for a, b in zip(before, values(plain), strict=True)) > 0.01
    for expected, found in zip(values(plain), values(model), strict=True):
        np.testing.assert_allclose(found, expected, atol=most, rtol=0)
