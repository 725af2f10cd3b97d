"""A learner of a few numbers, and clients of a server in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from plain_learner import PlainLearner

from sparkdl.coordinator.settings import Settings
from sparkdl.ps.client import Client
from sparkdl.ps.server import ServerConfig
from sparkdl.rules import Rule
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.training.learning import BatchStack
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("w", (6,), "float32")], [("m", (2,), "float32")])


class Learner(PlainLearner):
    """Weights that are pulled towards each batch: loss = mean((w - x)**2) / 2, plain SGD."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__(LAYOUT)
        self.rate = rate
        self.loaded = 0

    def gradients(self, batch: Any, out: FloatArray) -> None:
        out[...] = (self.weights - np.asarray(batch, np.float32)[:, None]).mean(axis=0)
        out[LAYOUT.trained_size :] = np.mean(batch)

    def apply_gradients(self, flat: FloatArray) -> None:
        trained = slice(0, LAYOUT.trained_size)
        self.weights[trained] -= self.rate * flat[trained]
        self.weights[LAYOUT.trained_size :] = flat[LAYOUT.trained_size :]

    def optimizer_state(self) -> bytes:
        return np.float32(self.rate).tobytes()

    def load_optimizer_state(self, state: bytes) -> None:
        self.loaded += 1
        self.rate = float(np.frombuffer(state, np.float32)[0])


def stack_of(*batches: list[float]) -> BatchStack:
    """A stack for the learner above; its batches need not be equally long."""
    return BatchStack({}, {"label": list(batches)}, None, len(batches), sum(map(len, batches)))  # type: ignore[dict-item]


@contextmanager
def clients(
    rule: Rule, count: int, layout: Layout = LAYOUT
) -> Iterator[tuple[list[Client], InprocParameterServer]]:
    config = ServerConfig(layout, rule, count, settings=Settings(count, grace_s=0.2))
    with InprocParameterServer(config, np.zeros(layout.size, np.float32)) as server:
        made = [server.client(rank) for rank in range(count)]
        try:
            yield made, server
        finally:
            for client in made:
                client.close()


def together(*actions: Any) -> None:
    errors: list[BaseException] = []

    def body(action: Any) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
