"""Fits with sparkdl on the backend of ``KERAS_BACKEND``; started by torch_peers.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import peer_session
import workload


def fit(frame: Any, mode: str, epochs: int, seed: int, callbacks: list[Any]) -> Any:
    import keras

    from sparkdl import SparkModel

    model = workload.make_model(seed=seed)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    spark_model = SparkModel(model, mode, num_workers=2, batch_size=workload.BATCH)
    spark_model.fit(frame, epochs=epochs, verbose=0, callbacks=callbacks)
    return spark_model, spark_model.summary.seconds


class Peer(peer_session.Peer):
    def fit(self, epochs: int, seed: int, marker: str) -> tuple[Any, float]:
        import keras

        def after(epoch: int, logs: Any) -> None:
            with Path(marker).with_suffix(".epochs").open("a") as file:
                file.write(f"{epoch}\n")
            if marker.endswith(".kill") and epoch == epochs // 2 - 1:
                os.kill(peer_session.training_workers()[-1], signal.SIGKILL)

        watched = [keras.callbacks.LambdaCallback(on_epoch_end=after)]
        callbacks = watched if marker.endswith((".kill", ".even")) else []
        return fit(self.frame, self.case, epochs, seed, callbacks)

    def loss(self, trained: Any) -> float:
        told = trained.model.evaluate(self.x, self.y, batch_size=1024, verbose=0)
        return float(told[0] if isinstance(told, list) else told)


if __name__ == "__main__":
    peer_session.main(Peer, sys.argv[1:])
