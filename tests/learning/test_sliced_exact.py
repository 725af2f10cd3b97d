"""The rule `sliced` takes the steps of the compiled optimizer, for each variable of the model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import whole_fit

from sparkdl.collective.choice import optimizer_config
from sparkdl.collective.rules import Sliced
from sparkdl.errors import ConfigError, UnknownNameError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)).astype("float32"), RNG.normal(size=(40, 1)).astype("float32")


def two_outputs() -> Any:
    keras.utils.set_random_seed(1)
    given = keras.Input((4,))
    model = keras.Model(given, {name: keras.layers.Dense(1, name=name)(given) for name in "ab"})
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.2), {"a": "mse"})
    return model


@pytest.mark.parametrize("sizes", [[23, 17], [40, 0], [0, 40]])
def test_weight_decay_leaves_variables_without_gradient_alone(sizes: list[int]) -> None:
    trained, plain = two_outputs(), two_outputs()
    edge = sizes[0]
    parts = [(X[:edge], {"a": Y[:edge]}), (X[edge:], {"a": Y[edge:]})]
    whole_fit.fit(trained, parts, "allreduce", rule="sliced")
    whole_fit.fit_plainly(plain, parts)
    for mine, of_keras in zip(trained.variables, plain.variables, strict=True):
        np.testing.assert_allclose(mine, of_keras, atol=1e-5, err_msg=mine.path)


def test_an_exclusion_from_weight_decay_is_refused() -> None:
    optimizer = keras.optimizers.AdamW(0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(ConfigError, match="'exclude_from_weight_decay' is not supported"):
        Sliced().bind(2, optimizer_config(optimizer))


def test_an_optimizer_of_the_users_own_is_none_of_keras() -> None:
    own = type("Adam", (keras.optimizers.Adam,), {"__module__": "mine"})
    with pytest.raises(UnknownNameError, match=r"mine\.Adam"):
        Sliced().bind(2, optimizer_config(own()))
