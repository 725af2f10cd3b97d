"""The draws of a rank amid an epoch, as another rank that enters there needs them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkdl.learner.state.seed_streams import SeedStreams


def streams_of(model: Any) -> tuple[SeedStreams, Any]:
    def write(pairs: Any) -> None:
        for variable, value in pairs:
            variable.assign(value)

    streams = SeedStreams(model, lambda found: [np.array(v.numpy()) for v in found], write)
    [seed] = [v for v in model.variables if "seed" in v.path]
    return streams, seed


def test_draws_are_counted_to_the_wanted_step() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5, seed=7)])
    streams, seed = streams_of(model)
    streams.take(1, 2)
    keyed = int(seed.numpy()[0])
    seed.assign([keyed, 10])
    streams.mark()
    seed.assign([keyed, 16])  # three steps of two draws each, the last of which is not done
    for steps, wanted, draws in ((3, 2, 14), (3, 3, 16), (3, 5, 20), (0, 2, 16)):
        value = streams.at(seed, np.array(seed.numpy()), steps, wanted)
        assert value.tolist() == [keyed, draws]
    other = np.array([1, 2, 3])
    assert streams.at(object(), other, 3, 2) is other
