"""Which of Keras' callbacks act in a fit; what would do nothing is refused before it begins."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.fit.arguments import check_callbacks

pytestmark = pytest.mark.keras


class OwnCheckpoint(keras.callbacks.ModelCheckpoint):
    pass


class EveryFiveEpochs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.save_freq = 5


@pytest.mark.parametrize(
    ("make", "expected", "hint"),
    [
        (lambda f: keras.callbacks.BackupAndRestore(f), "checkpoints", "resume=True"),
        (
            lambda f: keras.callbacks.BackupAndRestore(f, save_freq=3),
            "checkpoints",
            "checkpoint_dir='a folder'",
        ),
        (
            lambda f: keras.callbacks.ModelCheckpoint(f"{f}/m.keras", save_freq=3),
            "save_freq='epoch'",
            "steps_per_epoch",
        ),
        (lambda f: OwnCheckpoint(f"{f}/m.keras", save_freq=3), "save_freq='epoch'", "steps_per"),
        (
            lambda f: keras.callbacks.TensorBoard(f, update_freq="batch"),
            "update_freq='epoch'",
            "steps_per_epoch",
        ),
        (lambda f: keras.callbacks.TensorBoard(f, profile_batch=2), "profile_batch=0", "Timeline"),
        (lambda f: keras.callbacks.SwapEMAWeights(), "swap_on_epoch=True", "use_ema=True"),
    ],
)
def test_keras_callbacks_that_would_do_nothing_are_refused(
    make: Any, expected: str, hint: str, tmp_path: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_callbacks([None, make(str(tmp_path))])
    assert expected in caught.value.expected
    assert hint in caught.value.hint


def test_averages_swapped_in_for_validation_are_refused() -> None:
    """Keras evaluates the averages, with ``swap_on_epoch`` too; workers evaluate the weights."""
    swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    assert check_callbacks(swaps) == [swaps]
    with pytest.raises(ConfigError, match="cannot swap the weights for validation"):
        check_callbacks(swaps, validates=True)


def test_keras_callbacks_that_act_at_an_epoch_s_end_are_taken(tmp_path: Any) -> None:
    every = keras.callbacks
    check_callbacks(
        [
            every.ModelCheckpoint(f"{tmp_path}/m.keras"), every.TensorBoard(str(tmp_path)),
            every.SwapEMAWeights(swap_on_epoch=True), every.CSVLogger(f"{tmp_path}/log"),
            every.EarlyStopping(), every.ReduceLROnPlateau(), every.TerminateOnNaN(),
            every.ProgbarLogger(), every.RemoteMonitor(), every.LambdaCallback(),
            every.LearningRateScheduler(lambda epoch: 0.1), EveryFiveEpochs(),
        ]
    )  # fmt: skip
